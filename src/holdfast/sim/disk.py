"""The disk as a simulated process reaches it: slow, and never all at once.

Every call is a contact with the world, a short time, its effect, and another contact; what
takes several effects (a write, a put, the removal of a tree) has such a contact between
each two of them. So a process can be killed, hang or lose the power before, after and in
the middle of everything, and others can be quicker.

There are four kinds of contact: `disk.read`, `disk.write`, `disk.name` (renaming, linking,
deleting, making folders) and `disk.sync`.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from holdfast.errors import Corrupt, Mistake
from holdfast.sim.files import SimFiles, SimHandle, SimInode, refuse
from holdfast.weights.disk import Buffer, Disk, Folder, Item, OpenFile, Written, check_name

if TYPE_CHECKING:
    from holdfast.sim.world import Node

__all__ = ["SimDisk"]

T = TypeVar("T")

READ, WRITE, NAME, SYNC = "disk.read", "disk.write", "disk.name", "disk.sync"

_DEPTH_MAX = 32
_PASSES_MAX = 10


class SimFile(OpenFile):
    """An open file of a simulated process."""

    def __init__(self, files: SimFiles, handle: SimHandle) -> None:
        self._files = files
        self.handle = handle
        self.bytes = len(handle.inode.data)
        self.inode = handle.inode.number
        self._mtime_s = handle.inode.mtime_s
        self._private: bytearray | None = None
        self._closed = False

    def view(self) -> memoryview:
        """See `OpenFile.view`."""
        if self._closed:
            raise ValueError("the file is closed")
        if self._private is None:
            self._private = bytearray(self.handle.inode.data[: self.bytes])
        return memoryview(self._private)

    def is_changed(self) -> bool:
        """See `OpenFile.is_changed`."""
        inode = self.handle.inode
        return (len(inode.data), inode.mtime_s) != (self.bytes, self._mtime_s)

    def close(self) -> None:
        """See `OpenFile.close`."""
        self._closed = True
        self._files.close(self.handle)


class SimFolder(Folder):
    """A folder that a simulated process has open."""

    def __init__(self, disk: "SimDisk", folder: SimInode, path: str) -> None:
        self._disk = disk
        self._files = disk.files
        self._folder = folder
        self._path = path.rstrip("/")
        self._closed = False

    def _at(self, name: str) -> str:
        """What a name is called in the story: the folder may be called otherwise by now."""
        if self._closed:
            raise ValueError("the folder is closed")
        return f"{self._path}/{check_name(name)}"

    def close(self) -> None:
        """See `Folder.close`."""
        self._closed = True

    async def _do(self, kind: str, verb: str, act: Callable[..., T], name: str, *more: Any) -> T:
        """One effect on one name in the folder."""
        words = f"{verb} {self._at(name)}"
        return await self._disk.step(kind, lambda: act(self._folder, name, *more), words)

    async def items(self) -> list[Item]:
        """See `Folder.items`."""
        return await self._disk.step(READ, self._items, f"lists {self._at('*')}")

    def _items(self) -> list[Item]:
        assert self._folder.names is not None
        return [
            Item(name, inode.names is not None, inode.number, len(inode.data), inode.mtime_s)
            for name, inode in sorted(self._folder.names.items())
        ]

    async def open(self, name: str) -> SimFile:
        """See `Folder.open`."""
        return await self._do(READ, "opens", self._open, name)

    def _open(self, folder: SimInode, name: str) -> SimFile:
        inode = self._files.file(folder, name)
        return SimFile(self._files, self._files.open(inode, self._disk.node))

    async def read(self, name: str, limit: int) -> bytes:
        """See `Folder.read`."""
        data = (await self._do(READ, "reads", self._files.file, name)).data
        if len(data) > limit:
            raise Corrupt(f"{name} is larger than {limit} bytes: it is not what it is taken for")
        return data

    async def write(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """See `Folder.write`."""
        words = self._at(name)
        await self._disk.contact(WRITE)
        return await self._write(name, chunks, words, SYNC)

    async def _write(self, name: str, chunks: Iterable[Buffer], words: str, after: str) -> Written:
        """Write in two parts, with contacts in between; the last one is of the kind `after`."""
        disk, files = self._disk, self._files
        made: list[SimInode] = []
        try:
            await disk.phase(
                lambda: made.append(files.create(self._folder, name)), WRITE, f"begins {words}"
            )
            (inode,) = made
            data = b"".join(chunks)
            part = data[: disk.node.random.randrange(len(data) + 1)]
            await disk.phase(lambda: files.fill(inode, part, name), WRITE, "")
            await disk.phase(lambda: files.fill(inode, data, name), SYNC, "")
            await disk.phase(lambda: files.sync_file(inode), after, f"has written {words}")
        except asyncio.CancelledError:
            self._take_back(name, made)
            raise
        except Exception:  # the disk's, or that of the caller's chunks; death is none of these
            if made:
                await disk.step(NAME, lambda: self._take_back(name, made), f"takes back {words}")
            raise
        return Written(len(data), xxhash.xxh3_128_hexdigest(data))

    def _take_back(self, name: str, made: Sequence[SimInode]) -> None:
        assert self._folder.names is not None
        if made and not made[0].synced and self._folder.names.get(name) is made[0]:
            self._files.unlink(self._folder, name)

    async def put(self, name: str, data: bytes) -> None:
        """See `Folder.put`."""
        words = f"puts {self._at(name)}"
        disk, files, folder = self._disk, self._files, self._folder
        temporary = files.temporary()
        await disk.contact(WRITE)
        try:
            await self._write(temporary, [data], f"{self._path}/{temporary}", NAME)
            await disk.phase(lambda: files.move(folder, temporary, folder, name), SYNC, words)
        except (OSError, asyncio.CancelledError):
            files.unlink(folder, temporary)
            raise
        await disk.phase(lambda: files.sync(folder), SYNC, "")

    async def touch(self, name: str) -> float:
        """See `Folder.touch`."""
        return await self._do(WRITE, "touches", self._files.touch, name)

    async def clock(self) -> float:
        """See `Folder.clock`."""
        self._at("*")
        return await self._disk.step(READ, self._clock, "")

    def _clock(self) -> float:
        if not self._folder.links:
            refuse(errno.ENOENT, "clock")
        return self._files.now()

    async def link(self, name: str, source: OpenFile) -> bool:
        """See `Folder.link`."""
        if not isinstance(source, SimFile):
            raise Mistake(f"{name}: only a file of the same disk can be linked")
        await self._do(NAME, "links", self._files.link, name, source.handle.inode)
        return True

    async def rename(self, old: str, new: str) -> None:
        """See `Folder.rename`."""
        words = f"renames {self._at(old)} to {check_name(new)}"
        folder = self._folder
        await self._disk.step(NAME, lambda: self._files.move(folder, old, folder, new), words)

    async def unlink(self, name: str) -> None:
        """See `Folder.unlink`."""
        await self._do(NAME, "deletes", self._files.unlink, name)

    async def sync(self) -> None:
        """See `Folder.sync`."""
        folder = self._folder
        await self._disk.step(SYNC, lambda: self._files.sync(folder), f"syncs {self._at('*')}")


class SimDisk(Disk):
    """One process's way to the files of its world."""

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.files = node.world.files

    async def contact(self, kind: str) -> None:
        """Meet the world."""
        await self.node.world.contact(self.node, kind)

    async def step(self, kind: str, act: Callable[[], T], words: str) -> T:
        """A call with one effect."""
        await self.node.world.contact(self.node, kind)
        return await self.phase(act, kind, words)

    async def phase(self, act: Callable[[], T], after: str, words: str) -> T:
        """Take some time, take effect, and meet the world again.

        Whoever is cancelled does not know whether it took effect.
        """
        node, world = self.node, self.node.world
        luck = node.random.random()
        try:
            await asyncio.sleep(luck * 0.002 if luck < 0.9 else (luck - 0.9) * 5.0)
        except asyncio.CancelledError:
            if luck < 0.5:
                with contextlib.suppress(OSError):
                    _drop(act())
            raise
        try:
            result = act()
        except Exception as error:
            if world.tracing and words:
                world.note(node.name, f"{words}: {error}")
            await world.contact(node, after)
            raise
        if world.tracing and words:
            world.note(node.name, words)
        try:
            await world.contact(node, after)
        except asyncio.CancelledError:
            _drop(result)
            raise
        return result

    async def make(self, path: str) -> None:
        """See `Disk.make`."""
        await self.contact(NAME)
        while missing := self.files.missing(path):
            above, name = missing
            await self.phase(
                lambda above=above, name=name: self.files.make(above, name),  # type: ignore[misc]
                NAME,
                f"makes {name} of {path}",
            )

    async def folder(self, path: str) -> SimFolder:
        """See `Disk.folder`."""
        return await self.step(
            READ, lambda: SimFolder(self, self.files.folder(path), path), f"opens {path}"
        )

    async def rename(self, old: str, new: str) -> None:
        """See `Disk.rename`."""
        words = f"renames {old} to {new}"
        await self.step(NAME, lambda: self.files.rename(old, new), words)

    async def remove(self, path: str) -> None:
        """See `Disk.remove`."""
        await self.contact(NAME)
        try:
            parent, name = self.files.place(path)
        except FileNotFoundError:
            return
        await self._remove(parent, name, path.rstrip("/"), 0)

    async def _remove(self, parent: SimInode, name: str, path: str, depth: int) -> None:
        """Delete what is called `name`, and go on doing so wherever it is moved meanwhile."""
        if depth > _DEPTH_MAX:
            refuse(errno.ELOOP, name)
        files = self.files
        assert parent.names is not None
        own = parent.names.get(name)
        if own is None:
            return
        if own.names is None:
            await self.phase(lambda: files.unlink(parent, name), NAME, f"deletes {path}")
            return
        for _ in range(_PASSES_MAX):
            found = sorted((inner, inode.names is not None) for inner, inode in own.names.items())
            for inner, is_folder in found:
                below = f"{path}/{inner}"
                if is_folder:
                    await self._remove(own, inner, below, depth + 1)
                else:
                    await self.phase(
                        lambda inner=inner: files.unlink(own, inner),  # type: ignore[misc]
                        NAME,
                        f"deletes {below}",
                    )
            gone = await self.phase(
                lambda: files.remove_empty(parent, name), NAME, f"deletes {path}"
            )
            if gone or parent.names.get(name) is not own:
                return
        refuse(errno.ENOTEMPTY, path)

    async def remove_empty(self, path: str) -> bool:
        """See `Disk.remove_empty`."""
        return await self.step(NAME, lambda: self._remove_empty(path), f"deletes {path}, if empty")

    def _remove_empty(self, path: str) -> bool:
        try:
            parent, name = self.files.place(path)
        except FileNotFoundError:
            return True
        return self.files.remove_empty(parent, name)

    async def work(self, act: Callable[..., T], *args: Any) -> T:
        """See `Disk.work`."""
        return await self.step(READ, lambda: act(*args), "")

    async def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """See `Disk.gather`."""
        return await self.step(READ, lambda: _all(acts), "")


def _all(acts: Sequence[Callable[[], T]]) -> list[T]:
    results: list[T] = []
    first: Exception | None = None
    for act in acts:
        try:
            results.append(act())
        except Exception as error:  # noqa: BLE001 -- all are run, then the first is raised
            first = first or error
    if first is not None:
        raise first
    return results


def _drop(result: object) -> None:
    """Close what nobody will get."""
    if isinstance(result, SimFile | SimFolder):
        result.close()
