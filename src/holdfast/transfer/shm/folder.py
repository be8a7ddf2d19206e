"""The folder of a store, below /dev/shm/holdfast-UID: opened, listed, removed.

    store.json      segment size and budget, written once
    users           everybody who has the store open holds a shared lock on it
    board, w0, w1…  what is committed (`tables.py`); an owner holds the lock of its table
    s0-0, s0-1, …   segments
    *.lock          held for a moment each

Names come from outside: they are checked before they become part of a path. Folders belong to
one user and nobody else may enter them.
"""

import contextlib
import os
import re
import shutil
import stat
import time
from pathlib import Path

import msgspec

from holdfast.errors import Corrupt, Denied, Mistake, NotFound, TooNew, Unavailable
from holdfast.text import parse_bytes
from holdfast.transfer.shm.layout import PAGE
from holdfast.transfer.shm.locks import Locks

__all__ = ["Config", "Listed", "is_segment", "open_folder", "parse_size", "remove", "stores"]

SHARED = Path("/dev/shm")  # noqa: S108 -- its folders are checked below
MOST_SEGMENTS = 512
DEFAULT_SEGMENT = 64 << 20
LEAST_SEGMENT = 64 << 10
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_GONE = ".gone-"
_ATTEMPTS = 100


class Config(msgspec.Struct, frozen=True):
    """What a store was made with."""

    segment: int
    budget: int
    format: int = _FORMAT


class Listed(msgspec.Struct, frozen=True):
    """A store as `stores` sees it."""

    name: str
    taken: int
    """Bytes of memory."""
    budget: int
    used: bool
    """Whether any process has it open."""
    pids: tuple[int, ...]
    """Which, as far as this process can see them."""


def parse_size(text: str, what: str) -> int:
    """Bytes, from text such as 4G or 64M."""
    try:
        found = parse_bytes(text)
    except Mistake:
        found = 0
    if not found:
        raise Mistake(f"{what} is a size like 64M or 4G, not {text!r}")
    return found


def is_segment(name: str) -> bool:
    """Whether a file of a store is a segment."""
    return name[0] == "s" and "-" in name


def check_name(name: str) -> str:
    """Refuse what is not the name of a store."""
    if not _NAME.fullmatch(name):
        raise Mistake(
            f"{name[:80]!r} is not the name of a store: up to 64 letters, digits, '.', '_' and "
            "'-', the first not a '.'"
        )
    return name


def _base() -> Path:
    return SHARED / f"holdfast-{os.geteuid()}"


def _make(path: Path) -> None:
    """A folder that is ours alone."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise Denied(
            f"{path} is not a folder that belongs to user {os.geteuid()} alone: look at who made "
            "it, and remove it"
        )


def open_folder(
    name: str, segment: int | None, budget: int | None, limit_s: float
) -> tuple[Path, Locks, Config]:
    """Open a store, or make it. The locks hold the user's part in it until they are dropped."""
    folder = _base() / check_name(name)
    if not SHARED.is_dir():
        raise Unavailable(f"there is no {SHARED}: shm:// needs shared memory as Linux has it")
    for _ in range(_ATTEMPTS):
        locks = Locks(folder, limit_s)
        try:
            _make(folder.parent)
            _make(folder)
            fd = locks.wait("users", exclusive=False, create=True)
            if _is_current(folder, fd):
                return folder, locks, _config(folder, segment, budget)
        except FileNotFoundError:
            pass  # removed while we were about it
        except BaseException:
            locks.abandon()
            raise
        locks.abandon()
    raise Unavailable(f"{folder} is removed again and again while it is opened")


def _is_current(folder: Path, fd: int) -> bool:
    """Whether what we have locked still is the store's, not that of a folder since removed.

    While it is, and locked, nobody can remove the folder.
    """
    return os.fstat(fd).st_ino == (folder / "users").stat().st_ino


def _config(folder: Path, segment: int | None, budget: int | None) -> Config:
    path = folder / "store.json"
    if not path.exists():
        made = _choose(segment, budget)
        ours = folder / f"new-{os.getpid()}-{time.monotonic_ns()}"
        ours.write_bytes(msgspec.json.encode(made))
        with contextlib.suppress(FileExistsError):
            os.link(ours, path)
        ours.unlink()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=Config)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if config.format > _FORMAT:
        raise TooNew(f"{path} was written by a newer Holdfast")
    for what, asked, given in (
        ("segment", segment, config.segment),
        ("budget", budget, config.budget),
    ):
        if asked not in (None, given):
            raise Mistake(f"{folder.name} was made with {what}={given}, not {asked}")
    return config


def _choose(segment: int | None, budget: int | None) -> Config:
    """Half of what is free now, in segments of 64M; smaller or larger ones if need be."""
    if budget is None:
        free = os.statvfs(SHARED)
        budget = free.f_bavail * free.f_frsize // 2 // PAGE * PAGE
    if segment is None:
        segment = max(DEFAULT_SEGMENT, budget // MOST_SEGMENTS)
        segment = max(LEAST_SEGMENT, min(segment, budget // 8)) // PAGE * PAGE
    if not LEAST_SEGMENT <= segment <= budget:
        raise Mistake(
            f"segment={segment} is not between {LEAST_SEGMENT} bytes and budget={budget}"
        )
    if budget // segment > 8 * MOST_SEGMENTS:
        raise Mistake(
            f"budget={budget} would be {budget // segment} segments of {segment} bytes; "
            f"the limit is {8 * MOST_SEGMENTS}: use larger ones"
        )
    return Config(segment, budget)


def stores() -> list[Listed]:
    """Every store of this user on this machine."""
    with contextlib.suppress(FileNotFoundError):
        return [_list(one) for one in sorted(_base().iterdir()) if _NAME.fullmatch(one.name)]
    return []


def _list(folder: Path) -> Listed:
    taken = budget = 0
    with contextlib.suppress(OSError, msgspec.DecodeError):
        budget = msgspec.json.decode((folder / "store.json").read_bytes(), type=Config).budget
    with contextlib.suppress(FileNotFoundError):  # it goes while we look
        for one in folder.iterdir():
            taken += one.stat().st_blocks * 512
    locks = Locks(folder)
    try:
        free = locks.take("users", exclusive=True) is not None
    except FileNotFoundError:
        free = True
    finally:
        locks.abandon()
    return Listed(folder.name, taken, budget, not free, () if free else _users(folder))


def _users(folder: Path) -> tuple[int, ...]:
    try:
        inode = (folder / "users").stat().st_ino
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return ()
    found = set()
    for line in lines:
        words = line.split()
        if "FLOCK" in words and words[-3].rpartition(":")[2] == str(inode):
            found.add(int(words[-4]))
    return tuple(sorted(pid for pid in found if pid > 0))


def remove(name: str, *, force: bool = False) -> bool:
    """Remove a store that nobody has open. False if somebody has, unless it is forced."""
    folder = _base() / check_name(name)
    for _ in range(_ATTEMPTS):
        locks = Locks(folder)
        try:
            # Made if it is missing: without its lock, somebody may be opening the store now.
            fd = locks.take("users", exclusive=True, create=True)
            if fd is None and not force:
                return False
            if fd is None or _is_current(folder, fd):
                # A new name first: whoever opens the old one from now on makes a new store.
                folder.rename(folder.with_name(f"{_GONE}{os.getpid()}-{time.monotonic_ns()}"))
                break
        except FileNotFoundError:
            if not folder.exists():
                raise NotFound(f"there is no store {name}", key=name) from None
        finally:
            locks.abandon()
    else:
        raise Unavailable(f"{folder} is made again and again while it is removed")
    for one in _base().glob(f"{_GONE}*"):  # also what somebody was killed over
        shutil.rmtree(one, ignore_errors=True)
    return True
