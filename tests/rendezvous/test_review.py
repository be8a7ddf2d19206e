"""Schedules that break careless rendezvous: silent tasks, flapping, lost answers, odd records."""

import asyncio
import contextlib
import json
import os
from typing import Any, cast

import msgspec
import pytest

from holdfast import cycle, ledger
from holdfast.errors import (
    Fenced,
    LeaseLost,
    Retriable,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger.records import Stored, encode
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.sync import SyncLedger
from holdfast.ledger.types import Op, Put
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.decide import begin, restart
from holdfast.rendezvous.records import Cause, Cycle
from holdfast.rendezvous.rendezvous import Rendezvous
from patience import HANG_S
from through import Through

from .cycles import node, running
from .meeting import KEYS, RULES, RUN, meeting, working

# ---- liveness ------------------------------------------------------------------------


async def test_a_newcomer_that_is_slow_to_answer_does_not_stop_the_work(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ready for each cycle just after it was closed: that is no reason for yet another."""
    ready = Rendezvous.ready

    async def slowly(self: Rendezvous, head: Stored[Cycle], *, port: int | None = None) -> None:
        if self._name == "n2":
            await asyncio.sleep(0.5)
        await ready(self, head, port=port)

    monkeypatch.setattr(Rendezvous, "ready", slowly)
    rules = msgspec.structs.replace(RULES, spares=0)
    async with working(url, rules, ("n0", "n1")) as here:
        here.join("n2")
        await asyncio.sleep(3.5)  # with a cycle for each late answer there would be seven
        assert (await here.look()).cycle.number <= 3
        await here.until("work", lambda: here["n0"].crew.working)


@pytest.mark.parametrize("trips", ["_look", "_pump"])
async def test_a_closer_that_trips_over_a_bug_is_replaced(url: str, trips: str) -> None:
    """Neither its task nor its watch dies in silence while its lease, and so its office, lives on:
    also when the watch dies while there is nothing to do."""
    terms: list[Duty] = []

    def trip(duty: Duty, at: str) -> None:
        if trips == at:
            terms.append(duty)
            if terms[0] is duty:
                raise ZeroDivisionError

    class Clumsy(Duty):
        async def _look(self, stored: Stored[Cycle] | None) -> float | None:
            trip(self, "_look")
            return await super()._look(stored)

        async def _pump(self) -> None:
            await asyncio.sleep(0.1)
            trip(self, "_pump")
            await super()._pump()

    async with meeting(url, duty=Clumsy) as here:
        here.join("n0", "n1", "n2")
        tasks = {node.task: name for name, node in here.nodes.items()}
        done, _ = await asyncio.wait(tasks, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        assert [type(task.exception()) for task in done] == [ZeroDivisionError]
        here.nodes.pop(tasks[done.pop()])
        await here.until("work", here.two_work)


async def test_a_record_that_nests_too_deep_counts_for_nothing(url: str) -> None:
    """Like any other that cannot be read; nobody's task dies of it."""
    deep = b'{"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    async with meeting(url) as here:
        await here.ledger.txn([], [Put(KEYS.node("n9"), deep)])
        here.join("n0", "n1")
        async with asyncio.timeout(HANG_S):
            await here.ranks("n0", "n1")


async def test_entering_gives_up_when_the_ledger_goes_away_on_the_way(url: str) -> None:
    """Whoever waits for it can try again, or leave: the wait is bounded by the lease."""
    left = 0

    async def away(name: str, _: object) -> None:
        nonlocal left
        left -= name == "txn"
        if name != "grant" and (name != "txn" or left < 0):
            raise Unavailable("away")

    async with ledger.open(url) as opened:
        for txns in (0, 1, 2):
            left = txns
            through: Any = Through(opened, before=away)
            one = Rendezvous(LiveRuntime(through), RUN, "n0", node(0), RULES, lease_s=0.5)
            with pytest.raises((LeaseLost, Retriable)):
                async with asyncio.timeout(HANG_S), one:
                    await one.changed(one.head)


# ---- ends ----------------------------------------------------------------------------


async def test_a_node_that_is_told_to_leave_as_it_succeeds_has_succeeded(url: str) -> None:
    """Both in one moment: the others do not begin again."""
    async with working(url, names=("n0", "n1"), lease_s=20.0) as here:
        here.end("n1")
        here.end("n0")
        here["n0"].crew.leave()
        assert await here["n0"].result() is None
        assert (await here.ended("n1")).number == 1


async def test_stopping_begins_when_the_work_has_let_go(url: str) -> None:
    """A crew's `outcome` that was cancelled is through before `stop` looks at what is left."""
    order: list[str] = []
    async with working(url, names=("n0", "n1")) as here:
        crew = here["n0"].crew
        stop = crew.stop

        async def outcome() -> Cause | None:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.05)
                order.append("let go")
            return None

        async def stopping(cause: Cause | None) -> None:
            order.append("stop")
            await stop(cause)

        crew.outcome = outcome  # type: ignore[method-assign]
        crew.stop = stopping  # type: ignore[method-assign]
        here["n1"].crew.end(Cause(kind="failed"))
        await here.cycles(2)
        here["n1"].crew.end(Cause(kind="failed"))
        await here.cycles(3)
        assert order[-2:] == ["let go", "stop"]


# ---- records of others ---------------------------------------------------------------


def test_a_newer_cause_is_read_by_an_older_node() -> None:
    """What ended a cycle is for people: a new word for it stops nobody."""
    raw = json.loads(encode(restart(running("n0"), Cause(kind="lost"))))
    raw["cause"]["kind"] = raw["history"][0]["kind"] = "melted"
    read = msgspec.json.decode(json.dumps(raw), type=Cycle)
    assert str(read.cause) == "melted"


async def test_rules_of_a_newer_version_survive_an_older_closer(url: str) -> None:
    """Else its own kind would be refused when it comes back."""
    async with meeting(url) as here:
        raw = json.loads(encode(begin(RULES)))
        raw["rules"]["colour"] = "blue"
        await here.ledger.txn([], [Put(KEYS.cycle, json.dumps(raw).encode())])
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        here["n0"].crew.end(Cause(kind="failed"))
        await here.cycles(2, "n1")
        entry = await here.ledger.get(KEYS.cycle)
        assert entry is not None
        found = json.loads(entry.value)
        assert (found["number"], found["rules"]["colour"]) == (2, "blue")


async def test_a_reason_that_is_not_text_or_far_too_long_is_still_one(url: str) -> None:
    """Error files are the user's: half of a surrogate pair, or a megabyte, ends no node."""
    async with working(url) as here:
        here["n0"].crew.end(Cause(kind="failed", detail="\ud800" + "x" * (1 << 20)))
        await here.cycles(2, "n1")
        told = (await here.look()).cycle.cause
        assert told is not None
        assert 1000 < len(told.detail) < 10_000


# ---- commit --------------------------------------------------------------------------


class _Unsure:
    """Loses the first transaction; then somebody else takes over, and commits the same."""

    def __init__(self, under: SyncLedger, meanwhile: list[Op]) -> None:
        self._under, self._meanwhile = under, meanwhile

    def txn(self, *args: Any) -> object:
        if self._meanwhile:
            self._under.txn([], self._meanwhile)
            self._meanwhile = []
            raise UnknownOutcome("no answer")
        return self._under.txn(*args)


def test_a_commit_that_was_lost_is_not_taken_for_that_of_a_successor(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cycle is over, and the successor has committed the same value: still `Fenced`."""
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(ledger.open_sync(url))
        revision = opened.txn([], [Put(KEYS.cycle, b"one")]).revision
        monkeypatch.setenv("HOLDFAST_RUN", RUN)
        monkeypatch.setenv("HOLDFAST_LEDGER", url)
        monkeypatch.setenv("HOLDFAST_CYCLE", "1")
        monkeypatch.setenv("HOLDFAST_CYCLE_REVISION", str(revision))
        taken_over: list[Op] = [Put(KEYS.cycle, b"two"), Put(f"/runs/{RUN}/commits/step", b"40")]
        unsure = _Unsure(opened, taken_over)
        monkeypatch.setitem(cycle._open, (os.getpid(), url), cast(SyncLedger, unsure))
        with pytest.raises(Fenced):
            cycle.commit({"step": 40})
