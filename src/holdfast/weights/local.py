"""Real files: every call runs in a thread, so that a slow disk never stops the event loop.

A folder is a directory descriptor and everything below it is reached through that, so a
folder keeps its meaning when its name changes. Two pools of threads serve all disks of a
process: one for calls that are short unless the disk hangs (a heartbeat must not wait
behind a write), one for what keeps a core or the disk busy.

A view of a file is a private mapping: nothing is copied, and nothing that is written to it
reaches the file. A file that somebody truncates while it is mapped kills the reader
(SIGBUS); Holdfast never truncates, it writes new files and renames.
"""

import asyncio
import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Never, TypeVar, cast

import xxhash

from holdfast.errors import Corrupt, Mistake
from holdfast.weights.disk import Buffer, Disk, Folder, Item, OpenFile, Written, check_name

__all__ = ["LocalDisk"]

T = TypeVar("T")

_CALLERS = 4
# Without it Linux refuses to map a file that is larger than the memory, because each page
# of a private mapping might be written to. Python has no name for it before 3.13.
_NORESERVE = 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0


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


@functools.lru_cache(maxsize=1)
def _pools(pid: int) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:  # noqa: ARG001
    """The threads for calls and for work. A forked child needs its own: threads stay behind."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(_CALLERS, "disk-call"), ThreadPoolExecutor(cores, "disk-work")


async def _run(
    act: Callable[[], T], stop: Stop | None = None, drop: Callable[[T], object] | None = None
) -> T:
    """Run `act` in a thread and wait until it has ended, also when we are cancelled.

    Otherwise a rename could happen after its caller has given up and cleaned up. What takes long
    has a `stop`; a result that nobody takes any more is given to `drop`.
    """
    job = _pools(os.getpid())[stop is not None].submit(act)
    answer = asyncio.wrap_future(job)
    try:
        await asyncio.wait([answer])
    except asyncio.CancelledError:
        if stop is not None:
            stop.asked = True
        if not job.cancel():
            while not answer.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([answer])
            if answer.exception() is None and drop is not None:
                drop(answer.result())
        raise
    return answer.result()


class LocalFile(OpenFile):
    """A descriptor and, for as long as anybody uses it, a mapping."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        try:
            status = os.fstat(descriptor)
            self.bytes = status.st_size
            self.inode = status.st_ino
            self._mtime_ns = status.st_mtime_ns
            if self.bytes:  # nothing cannot be mapped
                self._map = mmap.mmap(
                    descriptor,
                    self.bytes,
                    flags=mmap.MAP_PRIVATE | _NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        except BaseException:
            self.close()
            raise

    def view(self) -> memoryview:
        """See `OpenFile.view`."""
        if self.descriptor < 0:
            raise ValueError("the file is closed")
        return memoryview(bytearray() if self._map is None else self._map)

    def is_changed(self) -> bool:
        """See `OpenFile.is_changed`."""
        status = os.fstat(self.descriptor)
        return (status.st_size, status.st_mtime_ns) != (self.bytes, self._mtime_ns)

    def close(self) -> None:
        """See `OpenFile.close`. The mapping goes when the last view of it goes."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class LocalFolder(Folder):
    """A directory descriptor. Closing waits for calls that are on their way."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._calls = 0
        self._closed = False

    async def _run(
        self,
        act: Callable[[int], T],
        *names: str,
        stop: Stop | None = None,
        drop: Callable[[T], object] | None = None,
    ) -> T:
        """Do something in the folder, with these names in it."""
        for name in names:
            check_name(name)
        if self._closed:
            raise ValueError("the folder is closed")
        self._calls += 1
        try:
            return await _run(lambda: act(self._descriptor), stop, drop)
        finally:
            self._calls -= 1
            self._let_go()

    def close(self) -> None:
        """See `Folder.close`."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        # The number may mean another file as soon as it is closed: not under a call.
        if self._closed and not self._calls and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def items(self) -> list[Item]:
        """See `Folder.items`."""
        return await self._run(_items)

    async def open(self, name: str) -> LocalFile:
        """See `Folder.open`."""
        return await self._run(
            lambda at: LocalFile(_open_regular(at, name)), name, drop=LocalFile.close
        )

    async def read(self, name: str, limit: int) -> bytes:
        """See `Folder.read`."""
        return await self._run(lambda at: _read(at, name, limit), name)

    async def write(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """See `Folder.write`."""
        stop = Stop()
        return await self._run(lambda at: _write(at, name, chunks, stop), name, stop=stop)

    async def put(self, name: str, data: bytes) -> None:
        """See `Folder.put`."""
        await self._run(lambda at: _put(at, name, data), name)

    async def touch(self, name: str) -> float:
        """See `Folder.touch`."""
        return await self._run(lambda at: _stamp(os.open(name, _TOUCH, _MODE, dir_fd=at)), name)

    async def clock(self) -> float:
        """See `Folder.clock`."""
        return await self._run(_clock)

    async def link(self, name: str, source: OpenFile) -> bool:
        """See `Folder.link`."""
        if not isinstance(source, LocalFile):
            raise Mistake(f"{name}: only a file of the same disk can be linked")
        own = os.dup(source.descriptor)  # the caller may close its own meanwhile
        try:
            return await self._run(lambda at: _link(at, name, own), name)
        finally:
            os.close(own)

    async def rename(self, old: str, new: str) -> None:
        """See `Folder.rename`."""
        await self._run(lambda at: _rename(old, new, at), old, new)

    async def unlink(self, name: str) -> None:
        """See `Folder.unlink`."""
        await self._run(lambda at: _unlink(at, name), name)

    async def sync(self) -> None:
        """See `Folder.sync`."""
        await self._run(_sync)


class LocalDisk(Disk):
    """The file systems of this machine. It holds nothing: make as many as you like."""

    async def make(self, path: str) -> None:
        """See `Disk.make`."""
        await _run(lambda: os.makedirs(path, exist_ok=True))  # noqa: PTH103 -- text in, text out

    async def folder(self, path: str) -> LocalFolder:
        """See `Disk.folder`. The path itself may lead through symbolic links."""
        return LocalFolder(await _run(lambda: os.open(path, _FOLDER), drop=os.close))

    async def rename(self, old: str, new: str) -> None:
        """See `Disk.rename`."""
        await _run(lambda: _rename(old, new))

    async def remove(self, path: str) -> None:
        """See `Disk.remove`. Of a symbolic link only the link is deleted."""
        stop = Stop()
        await _run(lambda: _remove(path, None, 0, stop), stop)

    async def remove_empty(self, path: str) -> bool:
        """See `Disk.remove_empty`."""
        return await _run(lambda: _remove_empty(path))

    async def work(self, act: Callable[..., T], *args: Any) -> T:
        """See `Disk.work`."""
        return await _run(lambda: act(*args), Stop())

    async def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """See `Disk.gather`."""
        runs = [_run(act, Stop()) for act in acts]
        results = await asyncio.gather(*runs, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return cast(list[T], results)


# ---- system calls: `at` is the descriptor of a folder --------------------------------------
# Nothing here follows a symbolic link inside a folder, or waits for anybody but the disk.


def _items(at: int) -> list[Item]:
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


def _open_regular(at: int, name: str) -> int:
    """Open an ordinary file for reading."""
    descriptor = os.open(name, _READ, dir_fd=at)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        _refuse(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, name)
    return descriptor


def _refuse(code: int, name: str) -> Never:
    raise OSError(code, os.strerror(code), name)


def _read(at: int, name: str, limit: int) -> bytes:
    """Read a small file whole."""
    with open(_open_regular(at, name), "rb", buffering=0) as file:
        parts: list[bytes] = []
        left = limit + 1
        while left and (part := file.read(min(left, _READ_BYTES))):
            parts.append(part)
            left -= len(part)
    if not left:
        raise Corrupt(f"{name} is larger than {limit} bytes: it is not what it is taken for")
    return b"".join(parts)


def _write(at: int, name: str, chunks: Iterable[Buffer], stop: Stop) -> Written:
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


def _put(at: int, name: str, data: bytes) -> None:
    """Replace a small file in one moment."""
    temporary = f".put-{secrets.token_hex(8)}"
    _write(at, temporary, [data], Stop())
    try:
        os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=at)
        raise
    _sync(at)


def _stamp(descriptor: int) -> float:
    """Set the time to "now" without saying when that is: then a server's own clock decides."""
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _clock(at: int) -> float:
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
        _unlink(at, name)


def _link(at: int, name: str, source: int) -> bool:
    """Give an open file a name here; False where links do not work."""
    try:
        os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=at, follow_symlinks=True)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def _unlink(at: int | None, name: str) -> None:
    """Delete a name, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)


def _sync(at: int) -> None:
    """Make the names in a folder durable."""
    try:
        os.fsync(at)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without a need to sync folders
            raise


def _rename(old: str, new: str, at: int | None = None) -> None:
    """Move a file or a folder."""
    try:
        os.rename(old, new, src_dir_fd=at, dst_dir_fd=at)
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:  # which of the two it is depends on the file system
            _refuse(errno.EEXIST, new)
        raise


def _remove_empty(name: str, at: int | None = None) -> bool:
    """Delete a folder if it is empty; tells whether it is gone."""
    try:
        os.rmdir(name, dir_fd=at)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in _NOT_EMPTY:
            return False
        raise
    return True


def _remove(name: str, at: int | None, depth: int, stop: Stop) -> None:
    """Delete what is called `name`, a path or a name in the folder `at`."""
    if depth > _DEPTH_MAX:
        _refuse(errno.ELOOP, name)
    try:
        own = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        _unlink(at, name)
        return
    try:
        for _ in range(_PASSES_MAX):  # others may still be putting things into it
            with _listing(own) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for inner, is_folder in sorted(found):
                stop.check()
                if is_folder:
                    _remove(inner, own, depth + 1, stop)
                else:
                    _unlink(own, inner)
            if _remove_empty(name, at) or not _is_named(name, at, own):
                return
        _refuse(errno.ENOTEMPTY, name)
    finally:
        os.close(own)


def _is_named(name: str, at: int | None, own: int) -> bool:
    """Whether the folder that we have open still has this name."""
    try:
        now = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(now, os.fstat(own))
