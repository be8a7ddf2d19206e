"""The simulated world: what each fault does to a process, seen from inside."""

import asyncio
import math

import pytest

from holdfast.errors import Corrupt, LeaseLost, Unavailable, UnknownOutcome
from holdfast.ledger import Batch, Keeper, Put, absent
from holdfast.sim.faults import Fault
from holdfast.sim.world import Node, World

from .scripts import Script, Work, play


def _written_at(script: Script) -> list[float]:
    """When the ledger was changed."""
    return [at for at, who, _ in script.world.story if who == "ledger"]


async def _write(script: Script, node: Node, _: str) -> None:
    try:
        txn = await node.ledger.txn([absent("/a")], [Put("/a", b"1")])
        script.notes.append(txn.succeeded)
    except (UnknownOutcome, Unavailable) as error:
        script.notes.append(type(error).__name__)


@pytest.mark.parametrize(
    ("fault", "heard", "changes"),
    [
        (Fault("n0", 2, "lose_call", 0), "UnknownOutcome", 0),
        (Fault("n0", 2, "lose_answer", 0), "UnknownOutcome", 1),
        (Fault("n0", 2, "late", 15.0), "UnknownOutcome", 1),
        (Fault("n0", 2, "repeat", 0), False, 1),  # the second delivery found the key there
        (Fault("n0", 1, "cut", 60.0), "Unavailable", 0),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_what_a_caller_hears_and_what_has_happened(
    fault: Fault, heard: object, changes: int
) -> None:
    """Who hears nothing does not know; who is cut off knows that nothing was sent."""
    script = play(_write, fault)
    assert script.notes == [heard]
    assert len(script.changes) == changes
    if fault.kind == "late":
        assert _written_at(script)[0] >= fault.amount, "its caller has long given up"


def test_a_killed_process_does_not_clean_up() -> None:
    """Neither `finally` nor `async with` of a dead process has any effect."""

    async def work(script: Script, node: Node, name: str) -> None:
        if script.lives[name] == 2:
            return
        try:
            async with Keeper(node, 10.0) as keeper:
                await node.ledger.txn([], [Put("/mine", b"", keeper.id)])
                await node.sleep(5.0)
        finally:
            await node.ledger.txn([], [Put("/ghost", b"")])

    # Steps: start, grant sent and answered, txn sent; then it is killed at the answer.
    script = play(work, Fault("n0", 5, "crash", 2.0))
    keys = [event.key for batch in script.changes for event in batch.events]
    assert keys[0] == "/mine"
    assert "/ghost" not in keys


def test_a_pause_ends_the_lease_of_one_who_still_believes() -> None:
    """The process hangs for 70 s; its clock and its belief come back, its lease does not."""

    async def work(script: Script, node: Node, _: str) -> None:
        async with Keeper(node, 10.0) as keeper:
            await node.ledger.txn([], [Put("/mine", b"", keeper.id)])
            before = node.now()
            await node.sleep(0.5)
            script.notes.append(node.now() - before > 60)
            try:
                await node.ledger.txn([], [Put("/mine", b"again", keeper.id)])
            except LeaseLost:
                script.notes.append("lost")

    assert play(work, Fault("n0", 6, "pause", 70.0)).notes == [True, "lost"]


def test_a_pause_falls_between_deciding_and_sending() -> None:
    """Look, hang for 70 s, write: the write is sent after the pause, not before it."""
    (at,) = _written_at(play(_write, Fault("n0", 2, "pause", 70.0)))
    assert at > 70


def test_clocks_run_at_their_own_speed() -> None:
    """Ten seconds by a clock that is a quarter too fast are eight."""

    async def work(script: Script, node: Node, _: str) -> None:
        loop = asyncio.get_running_loop()
        began, mine = loop.time(), node.now()
        await node.sleep(10.0)
        script.notes += [round(loop.time() - began, 2), round(node.now() - mine, 2)]

    assert play(work, Fault("n0", 1, "skew", 1.25)).notes == [8.0, 10.0]


def test_the_shortest_wait_ends() -> None:
    """Adding less to the time than its number can show would leave it where it is."""

    async def work(_: Script, node: Node, name: str) -> None:
        await node.sleep(416.0)
        until = math.nextafter(node.now(), math.inf)
        while node.now() < until:
            await node.sleep(until - node.now())

    assert play(work, Fault("n0", 1, "skew", 0.8)).finished


def test_a_watch_delivers_everything_in_order_through_a_cut() -> None:
    """Events that come late are not lost, and do not overtake each other."""

    async def work(script: Script, node: Node, name: str) -> None:
        if name == "n0":
            for number in range(20):
                await node.ledger.txn([], [Put("/k", str(number).encode())])
            return
        async with node.ledger.watch("/k", start=1) as watch:
            async for batch in watch:
                entry = batch.events[0].entry
                assert entry is not None
                script.notes.append(int(entry.value))
                if len(script.notes) == 20:
                    return

    script = play(work, Fault("n1", 3, "cut", 30.0), Fault("n1", 6, "lag", 12.0), nodes=2)
    assert script.notes == list(range(20))


async def _fails(script: Script, node: Node, name: str) -> None:
    raise ZeroDivisionError("a bug")


async def _fails_in_a_task(script: Script, node: Node, name: str) -> None:
    node.spawn(_fails(script, node, name), name="nobody awaits it")
    await node.sleep(1)


async def _ends_oddly(script: Script, node: Node, name: str) -> None:
    raise Corrupt("this is no ordinary end")


async def _spins(script: Script, node: Node, name: str) -> None:
    while True:
        await asyncio.sleep(0)


async def _waits(script: Script, node: Node, name: str) -> None:
    await asyncio.Event().wait()


class _BadInvariant(Script):
    def observe(self, batch: Batch) -> None:
        raise KeyError("in an invariant")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (_fails, f"ZeroDivisionError: a bug ({__file__}:"),
        (_fails_in_a_task, f"ZeroDivisionError: a bug ({__file__}:"),
        (_ends_oddly, "no ordinary end"),
        (_spins, "runs in circles"),
        (_waits, "waits for ever"),
        (_write, "in an invariant"),
    ],
)
def test_nothing_that_goes_wrong_is_swallowed(work: Work, words: str) -> None:
    """Whatever fails is told, with the place it came from, whoever waits for it or not."""
    script = (_BadInvariant if work is _write else Script)(work)
    assert words in str(World(script, seed=1, faults=[]).play())
