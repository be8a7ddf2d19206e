"""What the processes of a run have told in its folder, as far as chaos has to know it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast import rotation

__all__ = ["Log", "Told"]


class Told(msgspec.Struct):
    """An event of any kind: those of its fields that matter here."""

    type: str
    at: float = 0.0
    step: int = 0
    point: str = ""
    hit: int = 1
    pid: int = 0
    part: str = ""
    child: int = 0


class Log:
    """A log of events that is read on from time to time, while it grows and is rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, int] = {}
        """By inode: how far a file has been read, also when it gets a number meanwhile."""

    def new(self) -> Iterator[Told]:
        """What has been told since; not a last line that is being written."""
        for _, fd in rotation.in_order(self._path):
            inode = os.fstat(fd).st_ino
            with open(fd, "rb", closefd=False) as file:
                file.seek(self._places.setdefault(inode, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._places[inode] += len(line)
                    with contextlib.suppress(msgspec.MsgspecError):
                        yield msgspec.json.decode(line, type=Told)
