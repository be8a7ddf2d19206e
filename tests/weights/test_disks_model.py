"""The simulated disk against the real one: every call has the same result on both."""

import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from descriptors import held_below
from holdfast.errors import Corrupt, Mistake
from holdfast.weights.disk import Disk, Folder, OpenFile

from .benches import Bench, LocalBench, SimBench

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
DATA = st.binary(max_size=20)


class TwoDisks(RuleBasedStateMachine):
    """Every call has the same result, or the same error, on both disks."""

    make_local: Callable[[], LocalBench]

    folders = Bundle("folders")
    files = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.benches: tuple[Bench, Bench] = (self.make_local(), SimBench())
        self.opened: list[Folder | OpenFile] = []

    def teardown(self) -> None:
        for thing in self.opened:
            thing.close()
        for bench in self.benches:
            bench.close()

    def both(self, call: Callable[[Bench, int], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run it on both; the results, or nothing if both failed in the same way."""
        outcomes: list[Any] = []
        errors: list[tuple[type[BaseException], int | None] | None] = []
        for number, bench in enumerate(self.benches):
            try:
                outcomes.append(bench.run(call(bench, number)))
                errors.append(None)
            except (OSError, Mistake, Corrupt) as error:
                errors.append((type(error), getattr(error, "errno", None)))
        assert errors[0] == errors[1]
        return outcomes

    def agree(self, call: Callable[[Bench, int], Coroutine[Any, Any, Any]]) -> None:
        outcomes = self.both(call)
        assert not outcomes or outcomes[0] == outcomes[1]

    @rule(path=PATHS)
    def make(self, path: str) -> None:
        self.agree(lambda bench, _: bench.disk.make(bench.path(path)))

    @rule(old=PATHS, new=PATHS)
    def rename(self, old: str, new: str) -> None:
        self.agree(lambda bench, _: bench.disk.rename(bench.path(old), bench.path(new)))

    @rule(path=PATHS)
    def remove(self, path: str) -> None:
        self.agree(lambda bench, _: bench.disk.remove(bench.path(path)))

    @rule(path=PATHS)
    def remove_empty(self, path: str) -> None:
        self.agree(lambda bench, _: bench.disk.remove_empty(bench.path(path)))

    @rule(path=st.one_of(st.just(""), PATHS), target=folders)
    def folder(self, path: str) -> Any:
        opened = self.both(lambda bench, _: bench.disk.folder(bench.path(path)))
        self.opened += opened
        return tuple(opened) if opened else multiple()

    @rule(folder=folders, name=NAMES, target=files)
    def open(self, folder: tuple[Folder, Folder], name: str) -> Any:
        opened = self.both(lambda _, n: folder[n].open(name))
        self.opened += opened
        if not opened:
            return multiple()
        assert opened[0].bytes == opened[1].bytes
        return tuple(opened)

    @rule(file=files)
    def view(self, file: tuple[OpenFile, OpenFile]) -> None:
        assert bytes(file[0].view()) == bytes(file[1].view())

    @rule(file=consumes(files))
    def close(self, file: tuple[OpenFile, OpenFile]) -> None:
        for each in file:
            each.close()

    @rule(folder=folders, name=NAMES, file=files)
    def link(
        self, folder: tuple[Folder, Folder], name: str, file: tuple[OpenFile, OpenFile]
    ) -> None:
        self.agree(lambda _, n: folder[n].link(name, file[n]))

    @rule(folder=folders, name=NAMES, chunks=st.lists(DATA, max_size=3))
    def write(self, folder: tuple[Folder, Folder], name: str, chunks: list[bytes]) -> None:
        self.agree(lambda _, n: folder[n].write(name, chunks))

    @rule(folder=folders, name=NAMES, data=DATA)
    def put(self, folder: tuple[Folder, Folder], name: str, data: bytes) -> None:
        self.agree(lambda _, n: folder[n].put(name, data))

    @rule(folder=folders, name=NAMES)
    def touch(self, folder: tuple[Folder, Folder], name: str) -> None:
        self.both(lambda _, n: folder[n].touch(name))

    @rule(folder=folders, name=NAMES, limit=st.integers(0, 20))
    def read(self, folder: tuple[Folder, Folder], name: str, limit: int) -> None:
        self.agree(lambda _, n: folder[n].read(name, limit))

    @rule(folder=folders, name=NAMES)
    def unlink(self, folder: tuple[Folder, Folder], name: str) -> None:
        self.agree(lambda _, n: folder[n].unlink(name))

    @rule(folder=folders)
    def sync(self, folder: tuple[Folder, Folder]) -> None:
        self.agree(lambda _, n: folder[n].sync())

    @rule(folder=folders)
    def items(self, folder: tuple[Folder, Folder]) -> None:
        listed = self.both(lambda _, n: folder[n].items())
        left, right = ([(i.name, i.is_folder, i.bytes) for i in items] for items in listed)
        assert left == right

    @invariant()
    def the_same_is_there(self) -> None:
        self.agree(lambda bench, _: _everything(bench.disk, bench.root, {}))


async def _everything(
    disk: Disk, path: str, inodes: dict[int, int]
) -> list[tuple[str, int, bytes | None]]:
    """Every name, which file it means, and what is in that; files are numbered as they come."""
    found: list[tuple[str, int, bytes | None]] = []
    async with await disk.folder(path) as folder:
        for item in await folder.items():
            number = inodes.setdefault(item.inode, len(inodes))
            data = None if item.is_folder else await folder.read(item.name, 1 << 20)
            found.append((item.name, number, data))
            if item.is_folder:
                found += await _everything(disk, f"{path}/{item.name}", inodes)
    return found


def test_both_disks_do_the_same(tmp_path: Path) -> None:
    """A hypothesis state machine runs every call on both and compares everything."""

    class Machine(TwoDisks):
        make_local = staticmethod(lambda: LocalBench(Path(tempfile.mkdtemp(dir=tmp_path))))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=50, stateful_step_count=40, deadline=None, derandomize=True
        ),
    )
    assert held_below(tmp_path) == []
