"""System calls on folders, for `local.py` to run in its threads.

`at` is the descriptor of a folder. Nothing here follows a symbolic link inside a folder, or
waits for anybody but the disk.
"""

import contextlib
import ctypes
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from typing import Never

import xxhash

from holdfast.errors import Corrupt
from holdfast.weights.disk import Buffer, Item, Written

__all__ = [
    "Stop",
    "clock",
    "items",
    "link",
    "open_folder",
    "open_regular",
    "put",
    "read",
    "remove",
    "remove_empty",
    "rename",
    "sync",
    "touch",
    "unlink",
    "write",
]

_READ_BYTES = 1 << 20
_PIECE_BYTES = 4 * 2**20
"""A piece is hashed, then written while it is still in the cache, and the disk begins with it
while the next is hashed; between pieces a cancelled write stops."""
_DEPTH_MAX = 32
_PASSES_MAX = 10
_MODE = 0o644

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Without O_NONBLOCK opening a named pipe would wait for somebody who writes to it."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_TOUCH = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NAMELESS = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP}
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


class _Stopped(Exception):
    """Ends a long call in its thread: its caller was cancelled."""


class Stop:
    """A caller's wish that its call in the thread may end."""

    asked = False

    def check(self) -> None:
        """End the call here if the caller wishes it."""
        if self.asked:
            raise _Stopped


def open_folder(path: str) -> int:
    """Open a folder by its path, which may lead through symbolic links."""
    return os.open(path, _FOLDER)


def items(at: int) -> list[Item]:
    """What is in the folder, in the order of the names."""
    return sorted(_statuses(at), key=lambda item: item.name)


def _statuses(at: int) -> Iterator[Item]:
    with _listing(at) as entries:
        for entry in entries:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # it went between being listed and being looked at
            is_folder = stat.S_ISDIR(status.st_mode)
            yield Item(
                entry.name,
                is_folder,
                status.st_ino,
                0 if is_folder else status.st_size,
                status.st_mtime,
            )


@contextlib.contextmanager
def _listing(at: int) -> Iterator[Iterator["os.DirEntry[str]"]]:
    # A new opening has a position of its own: two listings at once do not disturb each other.
    own = os.open(".", _FOLDER, dir_fd=at)
    try:
        with os.scandir(own) as entries:
            yield entries
    finally:
        os.close(own)


def open_regular(at: int, name: str) -> int:
    """Open an ordinary file for reading."""
    descriptor = os.open(name, _READ, dir_fd=at)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        _refuse(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, name)
    return descriptor


def _refuse(code: int, name: str) -> Never:
    raise OSError(code, os.strerror(code), name)


def read(at: int, name: str, limit: int) -> bytes:
    """Read a small file whole."""
    with open(open_regular(at, name), "rb", buffering=0) as file:
        parts: list[bytes] = []
        left = limit + 1
        while left and (part := file.read(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise Corrupt(f"{name} is larger than {limit} bytes: it is not what it is taken for")
    return b"".join(parts)


def write(at: int, name: str, chunks: Iterable[Buffer], stop: Stop) -> Written:
    """Make a new file of these bytes, sync it, and hash it on the way."""
    descriptor = os.open(name, _NEW, _MODE, dir_fd=at)
    try:
        try:
            digest = xxhash.xxh3_128()
            size = started = 0
            for piece in _pieces(chunks):
                stop.check()
                digest.update(piece)
                _write_all(descriptor, piece)
                size += len(piece)
                if size - started >= _PIECE_BYTES:
                    _start_writing(descriptor, started, size - started)
                    started = size
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=at)
        raise
    return Written(size, digest.hexdigest())


def _pieces(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    for chunk in chunks:
        whole = memoryview(chunk)
        if whole.nbytes:  # what is empty cannot be cast
            flat = whole.cast("B")
            for start in range(0, len(flat), _PIECE_BYTES):
                yield flat[start : start + _PIECE_BYTES]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
_RANGE_WRITE = 2


def _start_writing(descriptor: int, begin: int, length: int) -> None:
    """Let the disk begin now with what it has to write anyway.

    Nothing is waited for and no error is taken notice of: fsync does both.
    """
    if _sync_file_range is not None:
        _sync_file_range(
            descriptor, ctypes.c_int64(begin), ctypes.c_int64(length), ctypes.c_uint(_RANGE_WRITE)
        )


def put(at: int, name: str, data: bytes) -> None:
    """Replace a small file in one moment."""
    temporary = f".put-{secrets.token_hex(8)}"
    write(at, temporary, [data], Stop())
    try:
        os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise
    sync(at)


def touch(at: int, name: str) -> float:
    """Set a file's time to now; make it if it is not there."""
    return _stamp(os.open(name, _TOUCH, _MODE, dir_fd=at))


def _stamp(descriptor: int) -> float:
    """Set the time to "now" without saying when that is: then a server's own clock decides."""
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def clock(at: int) -> float:
    """The file system's now."""
    try:
        nameless = os.open(".", _NAMELESS, _MODE, dir_fd=at)
    except OSError:  # not every file system has files without a name, NFS has not
        return _named_clock(at)
    return _stamp(nameless)


def _named_clock(at: int) -> float:
    name = f".clock-{secrets.token_hex(8)}"
    try:
        return _stamp(os.open(name, _NEW, _MODE, dir_fd=at))
    finally:
        unlink(at, name)


def link(at: int, name: str, source: int) -> bool:
    """Give an open file a name here; False where links do not work."""
    try:
        os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=at, follow_symlinks=True)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def unlink(at: int | None, name: str) -> None:
    """Delete a name, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def sync(at: int) -> None:
    """Make the names in a folder durable."""
    try:
        os.fsync(at)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without a need to sync folders
            raise


def rename(old: str, new: str, at: int | None = None) -> None:
    """Move a file or a folder."""
    try:
        os.rename(old, new, src_dir_fd=at, dst_dir_fd=at)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # which of the two it is depends on the file system
            _refuse(errno.EEXIST, new)
        raise


def remove_empty(path: str) -> bool:
    """Delete a folder if it is empty; tells whether it is gone."""
    try:
        os.rmdir(path)  # noqa: PTH106 -- text in, text out
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _NOT_EMPTY:
            return False
        raise
    return True


def remove(name: str, at: int | None, depth: int, stop: Stop) -> None:
    """Delete what is called `name`, a path or a name in the folder `at`."""
    if depth > _DEPTH_MAX:
        _refuse(errno.ELOOP, name)
    try:
        own = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        unlink(at, name)
        return
    try:
        for _ in range(_PASSES_MAX):  # others may still be putting things into it
            with _listing(own) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for inner, is_folder in sorted(found):
                stop.check()
                if is_folder:
                    remove(inner, own, depth + 1, stop)
                else:
                    unlink(own, inner)
            if _remove_if_empty(name, at, own):
                return
        _refuse(errno.ENOTEMPTY, name)
    finally:
        os.close(own)


def _remove_if_empty(name: str, at: int | None, own: int) -> bool:
    """Delete the folder that we have emptied; True when it has this name no longer."""
    try:
        os.rmdir(name, dir_fd=at)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in _NOT_EMPTY:
            raise
        return not _is_named(name, at, own)
    return True


def _is_named(name: str, at: int | None, own: int) -> bool:
    try:
        now = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(own))
