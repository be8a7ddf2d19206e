"""The simulated disk: what befalls processes there. (`weights/test_disks.py`: what it does.)"""

import asyncio
import contextlib
import errno

import pytest

from holdfast.ledger import Keeper, Put
from holdfast.sim.faults import DISK, PAIRS, Fault, Swarm, Table, pairs
from holdfast.sim.world import Node

from .scripts import Script, play

DATA = bytes(range(1, 41))


async def _write_once(script: Script, node: Node, name: str) -> None:
    """Write one file; the next life only looks. Steps: start, folder (2), write (5), sync (2)."""
    async with await node.disk.folder("/") as root:
        if script.lives[name] == 1:
            await root.write("f", [DATA])
            await root.sync()
            script.notes.append("written")


def test_a_kill_in_the_middle_of_a_write_leaves_a_part_of_it() -> None:
    """At every step of the write: nothing, a part, or everything; never other bytes."""
    left: list[bytes | None] = []
    for step in range(4, 11):
        script = play(_write_once, Fault("n0", step, "crash", 1.0))
        assert script.notes == []
        left.append(script.files.content("f"))
    assert left[:2] == [None, b""]
    assert left[2] is not None
    assert 0 < len(left[2]) < len(DATA)
    assert left[2] == DATA[: len(left[2])]
    assert left[3:] == [DATA] * 4


def test_power_lost_in_the_middle_of_a_write_may_take_it_all() -> None:
    """The same steps with the power lost: only after the folder's sync is the file certain."""
    for step in range(4, 11):
        fault = Fault("n0", step, "power", 1.0)
        seen = {play(_write_once, fault, seed=seed).files.content("f") for seed in range(40)}
        if step == 10:
            assert seen == {DATA}, "the folder was synced"
        elif step in (8, 9):
            assert seen == {DATA, None}, "the content was synced, the name was not"
        else:
            assert None in seen


def test_others_see_a_file_that_is_being_written() -> None:
    """Empty, in part, and whole."""

    async def work(script: Script, node: Node, name: str) -> None:
        async with await node.disk.folder("/") as root:
            if name == "n0":
                await root.write("f", [DATA])
                return
            while "n0" not in script.finished:
                script.notes += [item.bytes for item in await root.items()]
                await node.sleep(0.0001)

    sizes = {size for seed in range(20) for size in play(work, nodes=2, seed=seed).notes}
    assert {0, len(DATA)} <= sizes
    assert len(sizes) > 2, "a part of it was seen"


def test_a_full_disk_refuses_the_write_and_keeps_nothing_of_it() -> None:
    """Until there is room again; what takes none is possible meanwhile."""

    async def work(script: Script, node: Node, _: str) -> None:
        async with await node.disk.folder("/") as root:
            for act in (root.write("f", [DATA]), root.put("g", DATA), node.disk.make("/folder")):
                with pytest.raises(OSError, match="No space") as refused:
                    await act
                assert refused.value.errno == errno.ENOSPC
            assert await root.items() == []
            await root.touch("still possible")
            await node.sleep(31.0)
            await root.write("f", [DATA])

    script = play(work, Fault("n0", 4, "full", 30.0))
    assert sorted(script.files.tree()) == ["f", "still possible"]


def test_a_process_hangs_between_looking_and_renaming() -> None:
    """What it saw is no longer so when it acts."""

    async def work(script: Script, node: Node, name: str) -> None:
        if name == "n1":
            await node.sleep(10)
            await node.disk.rename("/d", "/elsewhere")
            return
        await node.disk.make("/d")
        async with await node.disk.folder("/") as root:
            script.notes.append([item.name for item in await root.items()])
            with pytest.raises(FileNotFoundError):
                await node.disk.rename("/d", "/mine")

    # Steps: start, make (2), folder (2), items (2), then the rename's first one.
    assert play(work, Fault("n0", 8, "pause", 70.0), nodes=2).notes == [["d"]]


def test_a_tree_is_removed_name_by_name() -> None:
    """Killed in the middle of it, a part of the tree is left."""

    async def work(script: Script, node: Node, name: str) -> None:
        if script.lives[name] == 1:
            await node.disk.make("/d")
            async with await node.disk.folder("/d") as folder:
                for number in range(3):
                    await folder.touch(f"f{number}")
            await node.disk.remove("/d")

    # Steps: start, make (2), folder (2), touch (6), remove.
    left = []
    for step in range(12, 17):
        files = play(work, Fault("n0", step, "crash", 1.0)).files
        left.append([files.names("/"), len(files.names("/d"))])
    assert left == [[["d"], 3], [["d"], 2], [["d"], 1], [["d"], 0], [[], 0]]


def test_power_takes_everybody_at_once_and_the_ledger_goes_on() -> None:
    """All processes die in one moment and come back; leases tick on; the dead do nothing."""
    starts: list[tuple[str, float]] = []

    async def work(script: Script, node: Node, name: str) -> None:
        starts.append((name, asyncio.get_running_loop().time()))
        if name == "n2" or script.lives[name] > 1:
            return
        async with Keeper(node, 10.0) as keeper:
            await node.ledger.txn([], [Put(f"/{name}", b"", keeper.id)])
            await node.sleep(5.0)
            script.notes.append(name)

    # n0: start, grant (2), txn (2), then the timer.
    faults = Fault("n0", 6, "power", 20.0), Fault("n1", 5, "crash", 8.0)
    script = play(work, *faults, nodes=3)
    story = script.world.story
    (dark,) = [at for at, who, what in story if "the power goes" in what]
    again = {name: at for name, at in starts if at > dark}
    assert set(again) == {"n0", "n1"}, "n2 had done its work"
    assert all(at >= dark + 20 for at in again.values()), "nobody runs without power"
    assert script.notes == []
    assert script.files.losses == 1
    ended = [at for at, who, what in story if who == "ledger" and "deleted" in what]
    assert ended, "their leases have ended by themselves"


def test_power_takes_twins_too() -> None:
    """Both lives of a process that was started twice, the forgotten one as well."""

    async def work(script: Script, node: Node, name: str) -> None:
        life = script.lives[name]
        if life <= (1 if name == "n1" else 2):
            await node.sleep(5.0 if name == "n1" else 20.0)
            script.notes.append((name, life))

    script = play(work, Fault("n0", 1, "twin", 0.0), Fault("n1", 2, "power", 1.0), nodes=2)
    assert script.notes == []
    assert script.lives == {"n0": 3, "n1": 2}


def test_a_cancelled_call_takes_effect_or_not_and_never_later() -> None:
    """Both happen, for whoever is cancelled does not know."""

    async def work(script: Script, node: Node, _: str) -> None:
        await node.disk.make("/old")
        task = node.spawn(node.disk.rename("/old", "/new"), name="rename")
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        script.notes += script.files.names("/")
        await node.sleep(10)
        assert script.files.names("/") == script.notes

    seen = {name for seed in range(20) for name in play(work, seed=seed).notes}
    assert seen == {"old", "new"}


# ---- which faults meet which steps ---------------------------------------------------------


def test_each_fault_that_can_meet_a_step_is_drawn_and_no_other() -> None:
    """With a disk and without; and what a protocol says can never meet is left out."""
    without = pairs(disk=False, store=True, net=True)
    of_the_disk = {pair for pair in PAIRS if pair[0] in ("full", "power") or pair[1] in DISK}
    assert set(PAIRS) - set(without) == of_the_disk
    never = frozenset({("expire", "disk.sync")})
    for possible in (without, PAIRS, pairs(disk=True, store=True, net=True, never=never)):
        swarms = [Swarm(seed, possible) for seed in range(300)]
        drawn = {
            (fault.kind, step)
            for swarm in swarms
            for number in range(20)
            for step in sorted({step for _, step in PAIRS})
            if (fault := swarm.draw("n0", number, step)) is not None
        }
        assert drawn == set(possible)
    assert set(PAIRS) - set(possible) == never
    table = Table(possible)
    table.steps["disk.sync"] = 1
    assert ("expire", "disk.sync") not in table.never_fired()
    assert ("power", "disk.sync") in table.never_fired()
