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
import functools
import mmap
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from holdfast.errors import Mistake
from holdfast.weights import local_calls as calls
from holdfast.weights.disk import Buffer, Disk, Folder, Item, OpenFile, Written, check_name

__all__ = ["LocalDisk"]

T = TypeVar("T")

_CALLERS = 4
# Without it Linux refuses to map a file that is larger than the memory, because each page
# of a private mapping might be written to. Python has no name for it before 3.13.
_NORESERVE = 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0


@functools.lru_cache(maxsize=1)
def _pools(pid: int) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:  # noqa: ARG001
    """The threads for calls and for work. A forked child needs its own: threads stay behind."""
    cores = len(os.sched_getaffinity(0))
    return ThreadPoolExecutor(_CALLERS, "disk-call"), ThreadPoolExecutor(cores, "disk-work")


async def _run(
    act: Callable[[], T],
    *,
    long: bool = False,
    stop: calls.Stop | None = None,
    drop: Callable[[T], object] | None = None,
) -> T:
    """Run `act` in a thread and wait until it has ended, also when we are cancelled.

    Otherwise a rename could happen after its caller has given up and cleaned up.
    """
    job = _pools(os.getpid())[long].submit(act)
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
        *,
        long: bool = False,
        stop: calls.Stop | None = None,
        drop: Callable[[T], object] | None = None,
    ) -> T:
        if self._closed:
            raise ValueError("the folder is closed")
        self._calls += 1
        try:
            return await _run(lambda: act(self._descriptor), long=long, stop=stop, drop=drop)
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
        return await self._run(calls.items)

    async def open(self, name: str) -> LocalFile:
        """See `Folder.open`."""
        check_name(name)
        return await self._run(
            lambda at: LocalFile(calls.open_regular(at, name)), drop=LocalFile.close
        )

    async def read(self, name: str, limit: int) -> bytes:
        """See `Folder.read`."""
        check_name(name)
        return await self._run(lambda at: calls.read(at, name, limit))

    async def write(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """See `Folder.write`."""
        check_name(name)
        stop = calls.Stop()
        return await self._run(
            lambda at: calls.write(at, name, chunks, stop), long=True, stop=stop
        )

    async def put(self, name: str, data: bytes) -> None:
        """See `Folder.put`."""
        check_name(name)
        await self._run(lambda at: calls.put(at, name, data))

    async def touch(self, name: str) -> float:
        """See `Folder.touch`."""
        check_name(name)
        return await self._run(lambda at: calls.touch(at, name))

    async def clock(self) -> float:
        """See `Folder.clock`."""
        return await self._run(calls.clock)

    async def link(self, name: str, source: OpenFile) -> bool:
        """See `Folder.link`."""
        check_name(name)
        if not isinstance(source, LocalFile):
            raise Mistake(f"{name}: only a file of the same disk can be linked")
        own = os.dup(source.descriptor)  # the caller may close its own meanwhile
        try:
            return await self._run(lambda at: calls.link(at, name, own))
        finally:
            os.close(own)

    async def rename(self, old: str, new: str) -> None:
        """See `Folder.rename`."""
        check_name(old)
        check_name(new)
        await self._run(lambda at: calls.rename(old, new, at))

    async def unlink(self, name: str) -> None:
        """See `Folder.unlink`."""
        check_name(name)
        await self._run(lambda at: calls.unlink(at, name))

    async def sync(self) -> None:
        """See `Folder.sync`."""
        await self._run(calls.sync)


class LocalDisk(Disk):
    """The file systems of this machine. It holds nothing: make as many as you like."""

    async def make(self, path: str) -> None:
        """See `Disk.make`."""
        await _run(lambda: os.makedirs(path, exist_ok=True))  # noqa: PTH103 -- text in, text out

    async def folder(self, path: str) -> LocalFolder:
        """See `Disk.folder`. The path itself may lead through symbolic links."""
        return LocalFolder(await _run(lambda: calls.open_folder(path), drop=os.close))

    async def rename(self, old: str, new: str) -> None:
        """See `Disk.rename`."""
        await _run(lambda: calls.rename(old, new))

    async def remove(self, path: str) -> None:
        """See `Disk.remove`. Of a symbolic link only the link is deleted."""
        stop = calls.Stop()
        await _run(lambda: calls.remove(path, None, 0, stop), long=True, stop=stop)

    async def remove_empty(self, path: str) -> bool:
        """See `Disk.remove_empty`."""
        return await _run(lambda: calls.remove_empty(path))

    async def work(self, act: Callable[..., T], *args: Any) -> T:
        """See `Disk.work`."""
        return await _run(lambda: act(*args), long=True)

    async def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """See `Disk.gather`."""
        results = await asyncio.gather(
            *(_run(act, long=True) for act in acts), return_exceptions=True
        )
        return [_value(result) for result in results]


def _value(result: T | BaseException) -> T:
    if isinstance(result, BaseException):
        raise result
    return result
