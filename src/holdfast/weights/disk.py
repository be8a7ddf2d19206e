"""The file system as the weights protocol uses it: a few calls, each all or nothing.

Shells take a `Disk`, so the same code runs on real files (`local.py`) and on a simulated
disk that loses power. What every disk keeps:

- `rename` of a folder is atomic and fails (`FileExistsError`) when the target is a folder
  that is not empty; an *empty* folder is replaced.
- A `Folder` is the folder itself, not its name: after it was renamed or replaced, calls go
  on reaching the same files. So a writer that was stopped and wakes up writes into its own
  folder, or nowhere.
- An `OpenFile` outlives the deletion of its name.
- Nothing is certain to survive a loss of power before `sync`: neither a name (new, moved
  or deleted) before its folder was synced, nor, after a rename between two folders, its
  being in one or the other. It is in one of them.
- A call that was cancelled has ended when the cancellation comes out of it. It took effect
  or it did not; nothing of it happens later. (`remove` may be half done.)
- Names in a folder are never followed: a symbolic link is a file that cannot be opened.

Paths are text, relative to nothing: the caller joins them. Errors are `OSError`, as the
system raises them; whoever knows what was being done translates them. In a folder that was
deleted nothing can be made (`FileNotFoundError`), and nothing is there.

Names that begin with '.' are the disk's own: `put` and `clock` use some for a moment, and a
process that dies leaves them behind. `items` lists them like all others.
"""

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import msgspec

from holdfast.errors import Mistake

__all__ = ["Buffer", "Disk", "Folder", "Item", "OpenFile", "Written", "check_name"]

T = TypeVar("T")

Buffer = bytes | memoryview


class Item(msgspec.Struct, frozen=True):
    """One name in a folder. Two names of one file have the same inode."""

    name: str
    is_folder: bool
    inode: int
    bytes: int
    """How large a file is; 0 for a folder."""
    mtime_s: float
    """When it was last written or touched, by the file system's clock: see `Folder.clock`."""


class Written(msgspec.Struct, frozen=True):
    """What a write put into a file."""

    bytes: int
    hash: str
    """xxh3-128 of the whole file, in hexadecimal."""


class OpenFile(abc.ABC):
    """A file that was opened for reading. It stays readable when its name is deleted."""

    bytes: int
    inode: int

    @abc.abstractmethod
    def view(self) -> memoryview:
        """The whole file, without a copy where the disk can do that.

        It may be written to; that changes neither the file nor what others see of it.
        """

    @abc.abstractmethod
    def is_changed(self) -> bool:
        """Whether the file was written to in place since it was opened."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it. Views that are still in use stay valid."""


class Folder(abc.ABC):
    """A folder by itself, whatever its name is now. Close it, or use `async with`."""

    @abc.abstractmethod
    async def items(self) -> list[Item]:
        """What is in it, in the order of the names."""

    @abc.abstractmethod
    async def open(self, name: str) -> OpenFile:
        """Open one file for reading."""

    @abc.abstractmethod
    async def read(self, name: str, limit: int) -> bytes:
        """Read a small file whole. Raises `Corrupt` when it is larger than `limit`."""

    @abc.abstractmethod
    async def write(self, name: str, chunks: Iterable[Buffer]) -> Written:
        """Make a new file of these bytes and sync it. The name must be free.

        While it goes on, others see a part of it. When it fails the file is deleted again;
        when the process dies, the part stays. `chunks` may be asked for in another thread.
        """

    @abc.abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Make or replace a small file in one moment, and sync it and its name.

        Whatever happens, the name means either what it meant before or the new file, whole.
        """

    @abc.abstractmethod
    async def touch(self, name: str) -> float:
        """Set a file's `mtime_s` to the file system's now and return it.

        The file is made, empty, if it is not there. Nothing is synced.
        """

    @abc.abstractmethod
    async def clock(self) -> float:
        """What time it is for the file system: what `touch` would return.

        The clocks of two hosts may differ by seconds; ages are only ever differences of two
        times of the same file system.
        """

    @abc.abstractmethod
    async def link(self, name: str, source: OpenFile) -> bool:
        """Give an open file another name in this folder; False where links do not work.

        Raises `FileNotFoundError` when the last name of the file is already deleted.
        """

    @abc.abstractmethod
    async def rename(self, old: str, new: str) -> None:
        """Give a file of this folder another name, in one moment; the new name may be taken.

        Raises `FileNotFoundError` when the old name is not there.
        """

    @abc.abstractmethod
    async def unlink(self, name: str) -> None:
        """Delete the name of a file. Nothing happens if it is not there."""

    @abc.abstractmethod
    async def sync(self) -> None:
        """Make the names in it durable."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of it."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Disk(abc.ABC):
    """A file system."""

    @abc.abstractmethod
    async def make(self, path: str) -> None:
        """Make a folder and those above it. It may be there already."""

    @abc.abstractmethod
    async def folder(self, path: str) -> Folder:
        """Open a folder. Raises `FileNotFoundError` or `NotADirectoryError`."""

    @abc.abstractmethod
    async def rename(self, old: str, new: str) -> None:
        """Move a folder or a file; a file replaces a file, a folder only an empty folder."""

    @abc.abstractmethod
    async def remove(self, path: str) -> None:
        """Delete a folder with everything in it, one name after the other. It may be gone.

        It deletes what is in the folder it found, also when that is renamed meanwhile.
        """

    @abc.abstractmethod
    async def remove_empty(self, path: str) -> bool:
        """Delete a folder if there is nothing in it; tells whether it is gone now."""

    @abc.abstractmethod
    async def work(self, act: Callable[..., T], *args: Any) -> T:
        """Run something that takes long, without holding up anybody else."""

    @abc.abstractmethod
    async def gather(self, acts: Sequence[Callable[[], T]]) -> list[T]:
        """Run several things that take long, at once where there are cores for it.

        All of them have ended when it returns or raises the error of the first that failed.
        """


def check_name(name: str) -> str:
    """Refuse what is not the name of one thing in a folder; returns the name."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise Mistake(f"{name!r} is not the name of a file: use one name, without a path")
    return name
