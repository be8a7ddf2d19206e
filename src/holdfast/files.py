"""Files and folders for their owner alone: what Holdfast keeps beside what it publishes.

Ledgers, events, logs, keys and backups may hold secrets, and their folders lead to them. So files
are 0600 and folders 0700 whatever the umask is, no log is written through a link, and no folder
is used that another user could have put in its place.

Not for weights: other users may read versions and checkpoints as far as the umask allows, because
inference servers run under accounts of their own. A folder that the user has made keeps the mode
that the user gave it. Root's files and folders count as ours: root can do everything anyway.
"""

import contextlib
import ctypes
import errno
import os
import stat
from pathlib import Path

from holdfast.errors import Denied, HoldfastError, Mistake, NoRoom, NotFound

__all__ = ["append_to", "owned_by_us", "private_folder", "trim", "write_private"]

_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_BLOCK = 1 << 16
_fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
_APPEND = os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def owned_by_us(about: os.stat_result) -> bool:
    """Whether nobody but this user and root could have put it there."""
    return about.st_uid in (os.geteuid(), 0)


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, or find one that no other user owns."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        about = (path.lstat(), path.stat())
    except FileExistsError:
        raise Mistake(f"{path} is not a folder: remove it, or name another place") from None
    except OSError as error:
        raise _translated(error, path, "the folder") from error
    for one in about:  # a link, and what it leads to
        if not owned_by_us(one):
            raise Denied(
                f"the folder {path} belongs to user {one.st_uid}, not to user {os.geteuid()}: "
                f"another user could read and change what is in it. Use a folder of your own"
            )
    return path


def append_to(path: Path, *, also_read: bool = False) -> int:
    """Open a plain file for appending, making it if need be; 0600 from then on.

    Whose it is, is not asked: the folder says that, and a network file system may call every file
    another user's.
    """
    flags = _APPEND | (os.O_RDWR if also_read else os.O_WRONLY)
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        raise _translated(error, path, "the file") from error
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise Mistake(f"{path} is not a plain file: remove it")
        if about.st_mode & 0o077:
            with contextlib.suppress(PermissionError):  # not our own: then it stays as it is
                os.fchmod(fd, 0o600)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def trim(path: Path, most: int) -> None:
    """Give back the older half of a log that takes more than `most` bytes of the disk.

    Its writer holds it open, so it stays the same file: what goes becomes a hole, and positions
    of readers stay right. Where the file system has no holes, all of it goes.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # it was removed, or is not ours: there is nothing to bound
    try:
        about = os.fstat(fd)
        if about.st_blocks * 512 <= most or not stat.S_ISREG(about.st_mode):
            return
        end = (about.st_size - most // 2) // _BLOCK * _BLOCK
        if end <= 0:
            return
        where = (ctypes.c_int64(0), ctypes.c_int64(end))
        if _fallocate is None or _fallocate(fd, _PUNCH_HOLE, *where):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        draft.unlink()
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    draft.replace(path)


def _translated(error: OSError, path: Path, what: str) -> HoldfastError:
    match error.errno:
        case errno.ELOOP:
            return Denied(
                f"{path} is a link, and links are not followed here: another user may have put "
                "it there. Look at where it leads, and remove it"
            )
        case errno.ENXIO:
            return Mistake(f"{path} is not a plain file: remove it")
        case errno.ENOENT:
            return NotFound(f"{path.parent} does not exist: create the folder first")
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return Denied(f"{what} {path} may not be written: check the folder's permissions")
        case errno.ENOSPC | errno.EDQUOT:
            return NoRoom(f"no room for {what} {path}")
    return Mistake(f"{what} {path} cannot be opened: {error.strerror}")
