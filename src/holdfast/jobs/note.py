"""Word of a service, left for the same user's own commands."""

from pathlib import Path

import msgspec

from holdfast.errors import Mistake
from holdfast.files import write_private

__all__ = ["Note", "find_service", "leave_note", "read_note"]

_NOTE = "serve.json"


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Where the service of this user is, for the commands of the same user."""

    url: str
    account: str
    key: str
    pid: int = 0


def leave_note(folder: Path, note: Note) -> Path:
    """Leave word of this service for the user's own commands. Only the user can read it."""
    path = folder / _NOTE
    write_private(path, msgspec.json.encode(note))
    return path


def find_service(folder: Path, url: str | None, key: str | None) -> tuple[str, str]:
    """The service to talk to, and the key for it: as told, or from the note."""
    if url and key:
        return url, key
    note = read_note(folder)
    if note is None:
        raise Mistake(
            "which service? Start `holdfast serve` here, or give --url and --api-key "
            "(HOLDFAST_URL, HOLDFAST_API_KEY)"
        )
    if url and url.rstrip("/") != note.url:
        raise Mistake(f"the key of {note.url} is not sent to {url}: give its own --api-key")
    return note.url, key or note.key


def read_note(folder: Path) -> Note | None:
    """What the last service left here, if there was one."""
    try:
        return msgspec.json.decode((folder / _NOTE).read_bytes(), type=Note)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
