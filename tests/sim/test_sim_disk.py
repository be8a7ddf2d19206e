"""The simulated disk: what befalls processes there, and that all of it does."""

import abc
import asyncio
import contextlib
import errno
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest

from holdfast.errors import NoRoom
from holdfast.ledger import Batch, Keeper, Put, Runtime, absent
from holdfast.sim.faults import DISK, PAIRS, Fault, Swarm, Table, pairs
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols import find
from holdfast.sim.runner import play, search, shortest
from holdfast.sim.world import Node, World

DATA = bytes(range(1, 41))

# ---- processes ---------------------------------------------------------------------------


class _Script(Protocol):
    """A few processes; what they note is kept."""

    nodes = 1
    disk = True

    def __init__(self) -> None:
        self.notes: list[object] = []
        self.lives: Counter[str] = Counter()
        self.done = False

    async def run(self, runtime: Runtime, name: str) -> None:
        self.lives[name] += 1
        assert isinstance(runtime, Node)
        await self.work(runtime, name)

    @abc.abstractmethod
    async def work(self, node: Node, name: str) -> None:
        """What each process does."""

    def observe(self, batch: Batch) -> None:
        """Nothing is looked at."""

    def settled(self) -> bool:
        return self.done


def _play(script: _Script, *faults: Fault) -> World:
    world = World(script, seed=5, faults=list(faults), trace=True)
    violation = world.play()
    assert violation is None, violation
    return world


class _WriteOnce(_Script):
    """Writes one file; its next life only looks."""

    async def work(self, node: Node, name: str) -> None:
        async with await node.disk.folder("/") as root:
            if self.lives[name] == 1:
                await root.write("f", [DATA])
                await root.sync()
                self.notes.append("written")
        self.done = True


def test_a_kill_in_the_middle_of_a_write_leaves_a_part_of_it() -> None:
    """At every step of the write: nothing, a part, or everything; never other bytes."""
    left: list[bytes | None] = []
    # Steps: start, folder (2), write (5), sync (2).
    for step in range(4, 11):
        script = _WriteOnce()
        world = _play(script, Fault("n0", step, "crash", 1.0))
        assert script.notes == []
        left.append(world.files.content("f"))
    assert left[:2] == [None, b""]
    assert left[2] is not None
    assert 0 < len(left[2]) < len(DATA)
    assert left[2] == DATA[: len(left[2])]
    assert left[3:] == [DATA] * 4


def test_power_lost_in_the_middle_of_a_write_may_take_it_all() -> None:
    """The same steps with the power lost: only after the folder's sync is the file certain."""
    for step in range(4, 11):
        seen = set()
        for seed in range(40):
            world = World(_WriteOnce(), seed, faults=[Fault("n0", step, "power", 1.0)])
            assert world.play() is None
            seen.add(world.files.content("f"))
        if step == 10:
            assert seen == {DATA}, "the folder was synced"
        elif step in (8, 9):
            assert seen == {DATA, None}, "the content was synced, the name was not"
        else:
            assert None in seen


def test_others_see_a_file_that_is_being_written() -> None:
    class Script(_Script):
        nodes = 2

        async def work(self, node: Node, name: str) -> None:
            async with await node.disk.folder("/") as root:
                if name == "n0":
                    await root.write("f", [DATA])
                    self.done = True
                while not self.done:
                    for item in await root.items():
                        self.notes.append(item.bytes)
                    await node.sleep(0.0001)

    sizes = set()
    for seed in range(20):
        script = Script()
        assert World(script, seed, faults=[]).play() is None
        sizes.update(script.notes)
    assert {0, len(DATA)} <= sizes
    assert len(sizes) > 2, "a part of it was seen"


def test_a_full_disk_refuses_the_write_and_keeps_nothing_of_it() -> None:
    class Script(_Script):
        async def work(self, node: Node, name: str) -> None:
            async with await node.disk.folder("/") as root:
                for _ in range(2):
                    try:
                        await root.write("f", [DATA])
                        self.notes.append("written")
                    except OSError as error:
                        self.notes += [error.errno, [i.name for i in await root.items()]]
                        with pytest.raises(OSError, match="No space"):
                            await root.put("g", DATA)
                        with pytest.raises(OSError, match="No space"):
                            await node.disk.make("/folder")
                        assert await root.items() == []
                        await root.touch("still possible")
                        await node.sleep(31.0)
            self.done = True

    script = Script()
    world = _play(script, Fault("n0", 4, "full", 30.0))
    assert script.notes == [errno.ENOSPC, [], "written"]
    assert sorted(world.files.tree()) == ["f", "still possible"]


def test_the_room_of_a_protocol_is_bounded() -> None:
    class Script(_Script):
        disk_bytes = 100

        async def work(self, node: Node, name: str) -> None:
            async with await node.disk.folder("/") as root:
                await root.write("f", [bytes(60)])
                file = await root.open("f")
                await root.unlink("f")
                for _ in range(2):
                    try:
                        await root.write("g", [bytes(60)])
                        self.notes.append("written")
                    except OSError as error:
                        self.notes.append(error.errno)
                    file.close()
            self.done = True

    script = Script()
    _play(script)
    assert script.notes == [errno.ENOSPC, "written"]


def test_a_file_stays_readable_after_another_process_deleted_it() -> None:
    class Script(_Script):
        nodes = 2

        async def work(self, node: Node, name: str) -> None:
            async with await node.disk.folder("/") as root:
                if name == "n0":
                    await root.write("f", [DATA])
                    await node.sleep(5)
                    await node.disk.remove("/f")
                    return
                await node.sleep(3)
                file = await root.open("f")
                await node.sleep(10)
                self.notes += [await root.items(), bytes(file.view())]
                file.close()
            self.done = True

    script = Script()
    _play(script)
    assert script.notes == [[], DATA]


def test_a_process_hangs_between_looking_and_renaming() -> None:
    """What it saw is no longer so when it acts."""

    class Script(_Script):
        nodes = 2

        async def work(self, node: Node, name: str) -> None:
            if name == "n1":
                await node.sleep(10)
                await node.disk.rename("/d", "/elsewhere")
                return
            await node.disk.make("/d")
            async with await node.disk.folder("/") as root:
                self.notes.append([item.name for item in await root.items()])
                try:
                    await node.disk.rename("/d", "/mine")
                except FileNotFoundError:
                    self.notes.append("gone")
            self.done = True

    script = Script()
    # Steps: start, make (2), folder (2), items (2), then the rename's first one.
    _play(script, Fault("n0", 8, "pause", 70.0))
    assert script.notes == [["d"], "gone"]


def test_a_tree_is_removed_name_by_name() -> None:
    """Killed in the middle of it, a part of the tree is left."""

    class Script(_Script):
        async def work(self, node: Node, name: str) -> None:
            if self.lives[name] == 1:
                await node.disk.make("/d")
                async with await node.disk.folder("/d") as folder:
                    for number in range(3):
                        await folder.touch(f"f{number}")
                await node.disk.remove("/d")
            self.done = True

    # Steps: start, make (2), folder (2), touch (6), remove.
    left = []
    for step in range(12, 17):
        world = _play(Script(), Fault("n0", step, "crash", 1.0))
        left.append([world.files.names("/"), len(world.files.names("/d"))])
    assert left == [[["d"], 3], [["d"], 2], [["d"], 1], [["d"], 0], [[], 0]]


def test_power_takes_everybody_at_once_and_the_ledger_goes_on() -> None:
    """All processes die in one moment and come back; leases tick on; the dead do nothing."""

    class Script(_Script):
        nodes = 3

        def __init__(self) -> None:
            super().__init__()
            self.starts: list[tuple[str, float]] = []

        async def work(self, node: Node, name: str) -> None:
            loop = asyncio.get_running_loop()
            self.starts.append((name, loop.time()))
            if name == "n2" or self.lives[name] > 1:
                self.done = self.lives["n0"] > 1 and self.lives["n1"] > 1
                return
            async with Keeper(node, 10.0) as keeper:
                await node.ledger.txn([], [Put(f"/{name}", b"", keeper.id)])
                await node.sleep(5.0)
                self.notes.append(name)

    script = Script()
    # n0: start, grant (2), txn (2), then the timer.
    world = _play(script, Fault("n0", 6, "power", 20.0), Fault("n1", 5, "crash", 8.0))
    (dark,) = [at for at, who, what in world.story if "the power goes" in what]
    again = {name: at for name, at in script.starts if at > dark}
    assert set(again) == {"n0", "n1"}, "n2 had done its work"
    assert all(at >= dark + 20 for at in again.values()), "nobody runs without power"
    assert script.notes == []
    assert world.files.losses == 1
    ended = [at for at, who, what in world.story if who == "ledger" and "deleted" in what]
    assert ended, "their leases have ended by themselves"


def test_power_takes_twins_too() -> None:
    """Both lives of a process that was started twice, the forgotten one as well."""

    class Script(_Script):
        nodes = 2

        async def work(self, node: Node, name: str) -> None:
            life = self.lives[name]
            if life > 2 or (name == "n1" and life > 1):
                self.done = self.lives["n0"] == 3
                return
            await node.sleep(5.0 if name == "n1" else 20.0)
            self.notes.append((name, life))

    script = Script()
    _play(script, Fault("n0", 1, "twin", 0.0), Fault("n1", 2, "power", 1.0))
    assert script.notes == []
    assert script.lives == {"n0": 3, "n1": 2}


def test_a_cancelled_call_takes_effect_or_not_and_never_later() -> None:
    class Script(_Script):
        async def work(self, node: Node, name: str) -> None:
            await node.disk.make("/old")
            task = node.spawn(node.disk.rename("/old", "/new"), name="rename")
            await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            before = self.files.names("/")
            await node.sleep(10)
            assert self.files.names("/") == before
            self.notes.extend(before)
            self.done = True

    seen: set[object] = set()
    for seed in range(20):
        script = Script()
        assert World(script, seed, faults=[]).play() is None
        seen.update(script.notes)
    assert seen == {"old", "new"}


# ---- faults in turn ------------------------------------------------------------------------


class _Publish(_Script):
    """Each process writes folders, renames them into view and records them in the ledger.

    What is recorded is there, whole, for ever: the smallest protocol that needs every sync.
    """

    nodes = 3
    steps = 600
    sync_inner = True
    sync_outer = True
    share = 3

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[str, str] = {}
        self._looked = -1

    async def work(self, node: Node, name: str) -> None:
        try:
            async with Keeper(node, 10.0):
                for number in range(self.share):
                    await self.publish(node, f"/v/{name}/{number}")
        except OSError as error:
            raise NoRoom(str(error)) from error

    async def publish(self, node: Node, key: str) -> None:
        disk = node.disk
        if await node.ledger.get(key) is not None:
            return
        word = f"{node.random.getrandbits(64):x}"
        await disk.make("/w")
        async with await disk.folder("/") as root:
            await root.sync()
        await disk.make(f"/w/.{word}")
        async with await disk.folder(f"/w/.{word}") as folder:
            await folder.write("data", [DATA])
            if self.sync_inner:
                await folder.sync()
        await disk.rename(f"/w/.{word}", f"/w/{word}")
        async with await disk.folder("/w") as outer:
            if self.sync_outer:
                await outer.sync()
            await outer.put("LAST", word.encode())
        await node.ledger.txn([absent(key)], [Put(key, word.encode())])
        await node.sleep(node.random.random() * 3)

    def observe(self, batch: Batch) -> None:
        for event in batch.events:
            if event.entry is not None:
                self.recorded[event.key] = event.entry.value.decode()
                self._looked = -1

    def check(self) -> None:
        if self._looked == self.files.changes:
            return
        self._looked = self.files.changes
        for key, word in self.recorded.items():
            if self.files.content(f"/w/{word}/data") != DATA:
                raise Violation(f"{key} is recorded, but not there")

    def settled(self) -> bool:
        return len(self.recorded) == self.nodes * self.share


class _NoInnerSync(_Publish):
    sync_inner = False


class _NoOuterSync(_Publish):
    """`put` would sync the folder by the way: without it."""

    sync_outer = False

    async def publish(self, node: Node, key: str) -> None:
        word = f"{node.random.getrandbits(64):x}"
        if await node.ledger.get(key) is None:
            await node.disk.make(f"/w/{word}")
            async with await node.disk.folder(f"/w/{word}") as folder:
                await folder.write("data", [DATA])
                await folder.sync()
            await node.ledger.txn([absent(key)], [Put(key, word.encode())])


class _InPlace(_Publish):
    """A life that was killed is taken for one that has finished: no rename at the end."""

    async def publish(self, node: Node, key: str) -> None:
        word = key.replace("/", "_")
        if await node.ledger.get(key) is None:
            await node.disk.make(f"/w/{word}")
            async with await node.disk.folder(f"/w/{word}") as folder:
                with contextlib.suppress(FileExistsError):
                    await folder.write("data", [DATA])
                await folder.sync()
            await node.ledger.txn([absent(key)], [Put(key, word.encode())])


@pytest.mark.long
def test_a_protocol_that_syncs_holds_and_every_fault_meets_every_step() -> None:
    """300 schedules are enough for each fault to meet each kind of step, the disk's too."""
    for summary in search(_Publish, range(300)):
        assert summary.failure is None, summary.failure
    assert summary.table.never_fired() == []
    for step in DISK:
        assert summary.table.steps[step] > 1000
        assert summary.table.fired["power", step]
    assert summary.table.fired["full", "disk.write"]


@pytest.mark.parametrize("make", [_NoInnerSync, _NoOuterSync, _InPlace])
def test_a_missing_sync_is_found(make: type[_Publish]) -> None:
    """Within 1,000 schedules, and its shortest story has the one fault that it takes."""
    (failure,) = [
        summary.failure for summary in search(make, range(1000)) if summary.failure is not None
    ]
    again, _ = play(make, failure.seed)
    assert again is not None
    assert again.violation == failure.violation
    short = shortest(make, failure)
    kinds = {fault.kind for fault in short.faults}
    assert kinds & ({"crash", "twin", "power"} if make is _InPlace else {"power"}), short.faults


TELL = """
import sys
sys.path.insert(0, sys.argv[1])
from test_sim_disk import _Publish
from holdfast.sim.world import World
world = World(_Publish(), 27, trace=True)
print(world.play())
for line in world.story:
    print(line)
print(sorted(world.files.tree().items()))
"""


@pytest.mark.long
def test_a_seed_with_a_disk_is_the_same_story_in_every_process() -> None:
    """Nothing but the seed decides, neither the hash seed nor the memory layout."""
    here = __file__.rpartition("/")[0]
    told = {
        subprocess.run(
            [sys.executable, "-c", TELL, here],
            env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "4242")
    }
    assert len(told) == 1
    assert len(told.pop().splitlines()) > 50


def _drawn(possible: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    steps = {step for _, step in PAIRS}
    return {
        (fault.kind, step)
        for seed in range(300)
        for swarm in [Swarm(seed, possible)]
        for number in range(20)
        for step in sorted(steps)
        if (fault := swarm.draw("n0", number, step)) is not None
    }


def test_a_protocol_without_a_disk_has_none_of_its_faults() -> None:
    """Each fault that can meet a step is drawn, and no other, with a disk and without."""
    without = pairs(disk=False, store=True, net=True)
    assert not any(kind in ("full", "power") or step in DISK for kind, step in without)
    elsewhere = ("store.", "net.")
    assert set(pairs(disk=True)) == {one for one in PAIRS if not one[1].startswith(elsewhere)}
    assert set(PAIRS) - set(without) == {
        (kind, step)
        for kind, step in PAIRS
        if kind in ("full", "power") or step.startswith("disk.")
    }
    (heading, *_) = World(find("election")(), 1).table.rows()
    assert set(heading) == {"step", "count", *(kind for kind, _ in pairs(disk=False))}
    assert _drawn(without) == set(without)
    assert _drawn(PAIRS) == set(PAIRS)


def test_pairs_that_cannot_meet_are_left_out() -> None:
    never = frozenset({("expire", "disk.sync")})
    possible = pairs(disk=True, store=True, net=True, never=never)
    assert set(PAIRS) - set(possible) == never
    table = Table(possible)
    table.steps["disk.sync"] = 1
    assert ("expire", "disk.sync") not in table.never_fired()
    assert ("power", "disk.sync") in table.never_fired()
    (row,) = [row for row in table.rows() if row[0] == "disk.sync"]
    assert "-" in row
