"""What trainers have written, read piece by piece."""

import os
from pathlib import Path

from holdfast.errors import NotFound
from holdfast.jobs.local import log_file

__all__ = ["read_log"]

PIECE_BYTES = 64 << 10


def read_log(
    folder: Path, account: str, job: str, epoch: int, offset: int, newest: int
) -> tuple[int, str, int]:
    """A piece of one epoch's log (0: the newest there is), and where the next one begins.

    Of a trainer that was started on this machine, below this folder.
    """
    for one in [epoch] if epoch else range(newest, 0, -1):
        path = log_file(folder, account, job, one)
        if path.is_file():
            with path.open("rb") as file:
                offset = _begin(file.fileno(), offset)
                piece = os.pread(file.fileno(), PIECE_BYTES, offset)
            return one, piece.decode(errors="replace"), offset + len(piece)
    which = f"epoch {epoch}" if epoch else "any epoch"
    raise NotFound(f"{job} has no log of {which} on this machine: it has not been started here")


def _begin(fd: int, offset: int) -> int:
    """Where there is something to read at or behind a position: the beginning may be gone."""
    size = os.fstat(fd).st_size
    if offset > size:
        return 0  # all of it is gone, and it has begun anew
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError:
        return size if offset == size else offset
