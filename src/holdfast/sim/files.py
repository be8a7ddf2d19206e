"""The files of a simulated world as they really are, and what a loss of power leaves of them.

Pure state: every method takes effect in one moment. `disk.py` makes steps of a simulation
out of them. Errors are those that Linux raises on a local file system.

What a loss of power may take:

- of a file whose content was not synced: everything, the end, or the bytes but not the
  length (zeros where they were);
- of the names in a folder: each change since the folder was last synced may have happened
  or not, each for itself. Only changes of one and the same name keep their order, and a
  rename is one change, of two names: the file is at its old place or at the new one.

Numbers of inodes are used again, as they are on real file systems.
"""

import errno
import functools
import heapq
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Never

from holdfast.errors import Mistake
from holdfast.sim.loop import Owner

__all__ = ["SimFiles", "SimHandle", "SimInode", "refuse"]

_EPOCH_S = 1_700_000_000.0
"""The file system's clock has nothing to do with that of any process."""


@dataclass(slots=True, eq=False)
class SimInode:
    """A file or a folder, whatever it is called. A folder has `names`."""

    number: int
    mtime_s: float
    names: "dict[str, SimInode] | None" = None
    links: int = 0
    opened: int = 0
    data: bytes = b""
    synced: bool = False
    durable: "dict[str, SimInode]" = field(default_factory=dict)
    parent: "SimInode | None" = None


@dataclass(slots=True, eq=False)
class SimHandle:
    """A file that a process has open. It keeps its bytes, unless the process is dead."""

    inode: SimInode
    owner: Owner


_Slot = tuple[SimInode, str, SimInode | None]
"""A folder, a name in it, and what the name now means."""


class SimFiles:
    """All files of one world. `capacity` bytes fit in, or any number (None)."""

    def __init__(self, now: Callable[[], float], capacity: int | None = None) -> None:
        self._now = now
        self.capacity = capacity
        self.full_until = 0.0
        self.changes = 0
        """Grows whenever anything changes, so that an invariant can tell whether to look."""
        self.losses = 0
        """How often the power was lost."""
        self._handles: set[SimHandle] = set()
        self._pending: list[tuple[_Slot, ...]] = []
        self._numbers = 1
        self._free: list[int] = []
        self._temporary = 0
        self.root = SimInode(1, self.now(), {}, links=1)

    # ---- for invariants ------------------------------------------------------

    def now(self) -> float:
        """The file system's clock."""
        return _EPOCH_S + self._now()

    def names(self, path: str) -> list[str]:
        """The names in a folder, in order; none if there is no such folder."""
        try:
            return sorted(self.folder(path).names or ())
        except OSError:
            return []

    def content(self, path: str) -> bytes | None:
        """What is in a file; None if there is no such file."""
        try:
            inode = self.find(path)
        except OSError:
            return None
        return inode.data if inode.names is None else None

    def tree(self) -> dict[str, bytes]:
        """Every file, by its path from the root, without a '/' in front."""
        return {path: inode.data for path, inode in self._walk() if inode.names is None}

    def _walk(self) -> Iterator[tuple[str, SimInode]]:
        stack = [("", self.root)]
        while stack:
            above, folder = stack.pop()
            for name, inode in (folder.names or {}).items():
                yield above + name, inode
                if inode.names is not None:
                    stack.append((f"{above}{name}/", inode))

    # ---- finding -------------------------------------------------------------

    def find(self, path: str) -> SimInode:
        """What a path leads to."""
        inode = self.root
        for part in _parts(path):
            if inode.names is None:
                refuse(errno.ENOTDIR, path)
            found = inode.names.get(part)
            if found is None:
                refuse(errno.ENOENT, path)
            inode = found
        return inode

    def folder(self, path: str) -> SimInode:
        """The folder that a path leads to."""
        inode = self.find(path)
        if inode.names is None:
            refuse(errno.ENOTDIR, path)
        return inode

    def place(self, path: str) -> tuple[SimInode, str]:
        """The folder that a path's last name is or would be in, and that name."""
        *above, name = _parts(path) or refuse(errno.EBUSY, path)
        return self.folder("/".join(above)), name

    def missing(self, path: str) -> tuple[SimInode, str] | None:
        """The first name on a path to a folder that is not there, and the folder above it."""
        at = self.root
        for part in _parts(path):
            names = at.names
            if names is None:
                refuse(errno.ENOTDIR, path)
            if part not in names:
                return at, part
            at = names[part]
        if at.names is None:
            refuse(errno.EEXIST, path)
        return None

    def file(self, folder: SimInode, name: str) -> SimInode:
        """A file in a folder."""
        inode = _names(folder).get(name) or refuse(errno.ENOENT, name)
        if inode.names is not None:
            refuse(errno.EISDIR, name)
        return inode

    def used(self) -> int:
        """How many bytes are taken: by files with a name, and by files that are open."""
        files = {inode for _, inode in self._walk()}
        files.update(handle.inode for handle in self._handles if not handle.owner.dead)
        return sum(len(inode.data) for inode in files)

    def need(self, wanted: int, name: str) -> None:
        """Raise ENOSPC if so many more bytes do not fit."""
        if self._now() < self.full_until or (
            self.capacity is not None and self.used() + wanted > self.capacity
        ):
            refuse(errno.ENOSPC, name)

    # ---- changing names ------------------------------------------------------

    def _change(self, *slots: _Slot) -> None:
        now = self.now()
        for folder, name, inode in slots:
            names = _names(folder)
            replaced = names.get(name)
            if inode is None:
                del names[name]
            else:
                names[name] = inode
                inode.links += 1
                if inode.names is not None:
                    inode.parent = folder
            folder.mtime_s = now
            if replaced is not None:
                replaced.links -= 1
                self._release(replaced)
        self._pending.append(slots)
        self.changes += 1

    def open(self, inode: SimInode, owner: Owner) -> SimHandle:
        """A process opens a file."""
        handle = SimHandle(inode, owner)
        inode.opened += 1
        self._handles.add(handle)
        return handle

    def close(self, handle: SimHandle) -> None:
        """A process lets go of a file. Doing it twice does no harm."""
        if handle in self._handles:
            self._handles.remove(handle)
            handle.inode.opened -= 1
            self._release(handle.inode)

    def _release(self, inode: SimInode) -> None:
        """Its number is free once nobody has the file open and it has no name."""
        if not inode.links and not inode.opened and inode.names is None:
            heapq.heappush(self._free, inode.number)

    def _new(self, folder: SimInode, name: str, *, is_folder: bool) -> SimInode:
        if not folder.links:
            refuse(errno.ENOENT, name)
        if self._free:
            number = heapq.heappop(self._free)
        else:
            self._numbers += 1
            number = self._numbers
        inode = SimInode(number, self.now(), {} if is_folder else None)
        self._change((folder, name, inode))
        return inode

    def create(self, folder: SimInode, name: str) -> SimInode:
        """A new, empty file."""
        if name in _names(folder):
            refuse(errno.EEXIST, name)
        return self._new(folder, name, is_folder=False)

    def fill(self, inode: SimInode, data: bytes, name: str) -> None:
        """More of a file's content has been written."""
        if len(data) > len(inode.data):
            self.need(len(data) - len(inode.data), name)
        inode.data = data
        inode.mtime_s = self.now()
        self.changes += 1

    def touch(self, folder: SimInode, name: str) -> float:
        """Set a file's time; make it if it is not there."""
        if name in _names(folder):
            inode = self.file(folder, name)
        else:
            inode = self._new(folder, name, is_folder=False)
            inode.synced = True  # it is empty, and nothing can be taken from that
        inode.mtime_s = self.now()
        self.changes += 1
        return inode.mtime_s

    def make(self, folder: SimInode, name: str) -> None:
        """A new, empty folder, if there is none."""
        inode = _names(folder).get(name)
        if inode is None:
            self.need(0, name)
            self._new(folder, name, is_folder=True)
        elif inode.names is None:
            refuse(errno.EEXIST, name)

    def link(self, folder: SimInode, name: str, inode: SimInode) -> None:
        """Another name for a file."""
        if name in _names(folder):
            refuse(errno.EEXIST, name)
        if not inode.links or not folder.links:
            refuse(errno.ENOENT, name)
        self._change((folder, name, inode))

    def unlink(self, folder: SimInode, name: str) -> None:
        """Delete the name of a file, if it is there."""
        inode = _names(folder).get(name)
        if inode is None:
            return
        if inode.names is not None:
            refuse(errno.EISDIR, name)
        self._change((folder, name, None))

    def remove_empty(self, folder: SimInode, name: str) -> bool:
        """Delete a folder; False if it is not empty."""
        inode = _names(folder).get(name)
        if inode is None:
            return True
        if inode.names is None:
            refuse(errno.ENOTDIR, name)
        if inode.names:
            return False
        self._change((folder, name, None))
        return True

    def rename(self, old: str, new: str) -> None:
        """Move a file or a folder."""
        source, name = self.place(old)
        target, new_name = self.place(new)
        inode = _names(source).get(name) or refuse(errno.ENOENT, old)
        if inode in _above(target):
            refuse(errno.EINVAL, new)
        there = _names(target).get(new_name)
        if there is not None and there in _above(source):
            refuse(errno.EEXIST, new)
        self.move(source, name, target, new_name)

    def move(self, source: SimInode, name: str, target: SimInode, new_name: str) -> None:
        """Rename from one folder to another, or within one."""
        inode = _names(source).get(name) or refuse(errno.ENOENT, name)
        there = _names(target).get(new_name)
        if there is inode:
            return
        if there is not None:
            if inode.names is None and there.names is not None:
                refuse(errno.EISDIR, new_name)
            if inode.names is not None and there.names is None:
                refuse(errno.ENOTDIR, new_name)
            if there.names:
                refuse(errno.EEXIST, new_name)
        if not target.links:
            refuse(errno.ENOENT, new_name)
        inode.links += 1  # it must not be let go between its two names
        self._change((source, name, None), (target, new_name, inode))
        inode.links -= 1

    def temporary(self) -> str:
        """A name that nobody uses."""
        self._temporary += 1
        return f".put-{self._temporary}"

    # ---- what lasts ----------------------------------------------------------

    def sync_file(self, inode: SimInode) -> None:
        """Make the content of a file durable."""
        inode.synced = True

    def sync(self, folder: SimInode) -> None:
        """Make the names in a folder durable, with all that these changes rest on."""
        wanted: set[tuple[SimInode, str]] = set()
        taken: list[tuple[_Slot, ...]] = []
        kept: list[tuple[_Slot, ...]] = []
        for change in reversed(self._pending):
            if any(at is folder or (at, name) in wanted for at, name, _ in change):
                wanted.update((at, name) for at, name, _ in change)
                taken.append(change)
            else:
                kept.append(change)
        self._pending = kept[::-1]
        for change in reversed(taken):
            _keep(change)

    def lose_power(self, luck: random.Random) -> list[str]:
        """Forget what was not synced, as luck has it; returns what was lost, in words."""
        lost: list[str] = []
        undone: set[tuple[SimInode, str]] = set()
        for change in self._pending:
            names = {(at, name) for at, name, _ in change}
            if luck.random() < 0.5 or not undone.isdisjoint(names):
                undone |= names
                lost.append("power loss undoes: " + _in_words(change))
            else:
                _keep(change)
        self._pending.clear()
        self._handles.clear()
        self._settle(self.root)
        used = {self.root.number}
        for path, inode in self._walk():
            used.add(inode.number)
            if inode.names is None and not inode.synced:
                if inode.data:
                    inode.data = _torn(inode.data, luck)
                    lost.append(f"power loss leaves {len(inode.data)} bytes in {path}")
                inode.synced = True
        self._free = [number for number in range(1, self._numbers + 1) if number not in used]
        self.full_until = 0.0
        self.changes += 1
        self.losses += 1
        return lost

    def _settle(self, root: SimInode) -> None:
        """Let every folder be what it durably is, and count the names anew."""
        reached = {root}
        stack = [root]
        root.links = 1
        while stack:
            folder = stack.pop()
            folder.names = dict(folder.durable)
            for inode in folder.names.values():
                if inode not in reached:
                    reached.add(inode)
                    inode.links = inode.opened = 0
                    if inode.names is not None:
                        inode.parent = folder
                        stack.append(inode)
                inode.links += 1


def refuse(code: int, name: str) -> Never:
    """Raise what Linux would raise."""
    raise OSError(code, os.strerror(code), name)


@functools.lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts:
        raise Mistake(f"{path}: a simulated path has no '..'")
    return parts


def _names(folder: SimInode) -> dict[str, SimInode]:
    assert folder.names is not None
    return folder.names


def _above(folder: SimInode) -> Iterator[SimInode]:
    """A folder and those that it is in."""
    at: SimInode | None = folder
    while at is not None:
        yield at
        at = at.parent


def _keep(change: tuple[_Slot, ...]) -> None:
    for folder, name, inode in change:
        if inode is None:
            folder.durable.pop(name, None)
        else:
            folder.durable[name] = inode


def _torn(data: bytes, luck: random.Random) -> bytes:
    """What is left of bytes that were written but not synced."""
    kept = luck.randrange(len(data) + 1)
    match luck.randrange(4):
        case 0:
            return data
        case 1:
            return b""
        case 2:
            return data[:kept]
        case _:
            return data[:kept] + bytes(len(data) - kept)


def _in_words(change: tuple[_Slot, ...]) -> str:
    return ", ".join(
        f"{_path(folder)}{name} {'deleted' if inode is None else f'= inode {inode.number}'}"
        for folder, name, inode in change
    )


def _path(folder: SimInode) -> str:
    parts = ["/"]
    while folder.parent is not None:
        above = folder.parent
        named = [name for name, inode in _names(above).items() if inode is folder]
        parts.append(f"/{named[0]}" if named else "/(deleted)")
        folder = above
    return "".join(reversed(parts))
