"""The simulated world: what each fault does to a process, seen from inside."""

import asyncio
import math

from holdfast.errors import Corrupt, LeaseLost, Unavailable, UnknownOutcome
from holdfast.ledger import Batch, Keeper, Put, Runtime, absent
from holdfast.sim.faults import Fault
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.world import World


class _Script(Protocol):
    """One process that runs a given coroutine; what it notes is kept."""

    nodes = 1

    def __init__(self) -> None:
        self.notes: list[object] = []
        self.done = False
        self.changes: list[Batch] = []

    def observe(self, batch: Batch) -> None:
        self.changes.append(batch)

    def settled(self) -> bool:
        return self.done


def _play(script: _Script, *faults: Fault) -> World:
    world = World(script, seed=5, faults=list(faults), trace=True)
    violation = world.play()
    assert violation is None, violation
    return world


class _Write(_Script):
    async def run(self, runtime: Runtime, name: str) -> None:
        try:
            txn = await runtime.ledger.txn([absent("/a")], [Put("/a", b"1")])
            self.notes.append(txn.succeeded)
        except (UnknownOutcome, Unavailable) as error:
            self.notes.append(type(error).__name__)
        self.done = True


def test_a_lost_call_took_no_effect_but_nobody_knows() -> None:
    script = _Write()
    _play(script, Fault("n0", 2, "lose_call", 0))
    assert script.notes == ["UnknownOutcome"]
    assert script.changes == []


def test_a_lost_answer_took_effect_but_nobody_knows() -> None:
    script = _Write()
    _play(script, Fault("n0", 2, "lose_answer", 0))
    assert script.notes == ["UnknownOutcome"]
    assert len(script.changes) == 1


def test_a_repeated_call_is_answered_by_its_second_delivery() -> None:
    script = _Write()
    _play(script, Fault("n0", 2, "repeat", 0))
    assert script.notes == [False], "the second delivery found the key there"
    assert len(script.changes) == 1


def test_a_cut_process_is_told_that_nothing_was_sent() -> None:
    script = _Write()
    _play(script, Fault("n0", 1, "cut", 60.0))
    assert script.notes == ["Unavailable"]
    assert script.changes == []


def test_a_killed_process_does_not_clean_up() -> None:
    """Neither `finally` nor `async with` of a dead process has any effect."""

    class Script(_Script):
        lives = 0

        async def run(self, runtime: Runtime, name: str) -> None:
            self.lives += 1
            if self.lives == 2:
                self.done = True
                return
            try:
                async with Keeper(runtime, 10.0) as keeper:
                    await runtime.ledger.txn([], [Put("/mine", b"", keeper.id)])
                    await runtime.sleep(5.0)
            finally:
                self.notes.append("cleaned up")
                await runtime.ledger.txn([], [Put("/ghost", b"")])

    script = Script()
    # Steps: start, grant sent and answered, txn sent; then it is killed at the answer.
    world = _play(script, Fault("n0", 5, "crash", 2.0))
    keys = [event.key for batch in script.changes for event in batch.events]
    assert "/ghost" not in keys
    assert keys[0] == "/mine"
    assert world.store.get("/ghost") is None


def test_a_pause_ends_the_lease_of_one_who_still_believes() -> None:
    """The process hangs for 70 s; its clock and its belief come back, its lease does not."""

    class Script(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            async with Keeper(runtime, 10.0) as keeper:
                await runtime.ledger.txn([], [Put("/mine", b"", keeper.id)])
                before = runtime.now()
                await runtime.sleep(0.5)
                self.notes.append(runtime.now() - before > 60)
                try:
                    await runtime.ledger.txn([], [Put("/mine", b"again", keeper.id)])
                except LeaseLost:
                    self.notes.append("lost")
            self.done = True

    script = Script()
    _play(script, Fault("n0", 6, "pause", 70.0))
    assert script.notes == [True, "lost"]


def test_clocks_run_at_their_own_speed() -> None:
    class Script(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            loop = asyncio.get_running_loop()
            began, mine = loop.time(), runtime.now()
            await runtime.sleep(10.0)
            self.notes += [round(loop.time() - began, 2), round(runtime.now() - mine, 2)]
            self.done = True

    script = Script()
    _play(script, Fault("n0", 1, "skew", 1.25))
    assert script.notes == [8.0, 10.0]


class _Moment(_Script):
    async def run(self, runtime: Runtime, name: str) -> None:
        await runtime.sleep(416.0)
        until = math.nextafter(runtime.now(), math.inf)
        while runtime.now() < until:
            await runtime.sleep(until - runtime.now())
        self.done = True


def test_the_shortest_wait_ends() -> None:
    """Adding less to the time than its number can show would leave it where it is."""
    script = _Moment()
    _play(script, Fault("n0", 1, "skew", 0.8))
    assert script.done


def test_a_watch_delivers_everything_in_order_through_a_cut() -> None:
    class Script(_Script):
        nodes = 2

        async def run(self, runtime: Runtime, name: str) -> None:
            if name == "n0":
                for number in range(20):
                    await runtime.ledger.txn([], [Put("/k", str(number).encode())])
                return
            async with runtime.ledger.watch("/k", start=1) as watch:
                async for batch in watch:
                    entry = batch.events[0].entry
                    assert entry is not None
                    self.notes.append(int(entry.value))
                    if len(self.notes) == 20:
                        self.done = True
                        return

    script = Script()
    _play(script, Fault("n1", 3, "cut", 30.0), Fault("n1", 6, "lag", 12.0))
    assert script.notes == list(range(20))


def test_a_process_that_fails_is_a_violation() -> None:
    """An unexpected exception is reported with the place it came from."""

    class Script(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            raise ZeroDivisionError("a bug")

    violation = World(Script(), seed=1, faults=[]).play()
    assert isinstance(violation, Violation)
    assert "ZeroDivisionError" in str(violation)
    assert "test_world.py" in str(violation)


def test_a_pause_falls_between_deciding_and_sending() -> None:
    """Look, hang for 70 s, write: the write is sent after the pause, not before it."""

    class Script(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            self.notes.append(asyncio.get_running_loop().time() < 60)
            await runtime.ledger.txn([], [Put("/a", b"")])
            self.done = True

    script = Script()
    world = _play(script, Fault("n0", 2, "pause", 70.0))
    (at,) = [at for at, who, _ in world.story if who == "ledger"]
    assert at > 70


def test_nothing_that_goes_wrong_is_swallowed() -> None:
    """A failing task that nobody awaits, a failing invariant, a corrupt exit, a spin."""

    class Task(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            async def fail() -> None:
                raise KeyError("in a task")

            runtime.spawn(fail(), name="background")
            await runtime.sleep(1)
            self.done = True

    class Invariant(_Write):
        def observe(self, batch: Batch) -> None:
            raise KeyError("in an invariant")

    class Exit(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            raise Corrupt("this is no ordinary end")

    class Spin(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            while True:
                await asyncio.sleep(0)

    for script, words in [
        (Task(), "in a task"),
        (Invariant(), "in an invariant"),
        (Exit(), "no ordinary end"),
        (Spin(), "runs in circles"),
    ]:
        assert words in str(World(script, seed=1, faults=[]).play())


def test_a_late_call_takes_effect_after_its_caller_has_given_up() -> None:
    script = _Write()
    world = _play(script, Fault("n0", 2, "late", 15.0))
    assert script.notes == ["UnknownOutcome"]
    assert len(script.changes) == 1
    (at,) = [at for at, who, _ in world.story if who == "ledger"]
    assert at >= 15


def test_waiting_for_ever_is_a_violation() -> None:
    class Script(_Script):
        async def run(self, runtime: Runtime, name: str) -> None:
            await asyncio.Event().wait()

    assert "waits for ever" in str(World(Script(), seed=1, faults=[]).play())
