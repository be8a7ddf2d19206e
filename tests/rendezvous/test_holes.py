"""Holes that other rendezvous have, each by its name; none may exist here.

The same are in the simulation (`holdfast sim rendezvous`), and those about processes in
tests/launch.
"""

import pytest

from holdfast.errors import LeaseLost
from holdfast.ledger.records import Stored, put
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Compare, unchanged
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.decide import restart
from holdfast.rendezvous.records import Cause, Cycle, Rules

from .cycles import there
from .meeting import KEYS, RULES, Meeting, meeting, working


def _open(number: int) -> Cycle:
    return Cycle(number=number, state="open", rules=RULES)


async def test_spare_waiting_at_open_leaves_after_the_run_was_closed_for_good(url: str) -> None:
    """The seed's first and third case: a spare hears that there is no next cycle, and whoever
    sees a node leave finds the run's end already recorded."""
    async with working(url) as here:
        seen: list[str] = []
        async with here.ledger.watch(KEYS.root, start=(await here.look()).revision + 1) as watch:
            here.end("n0", "n1")
            await here.ended()
            while "left" not in seen:
                for event in (await watch.__anext__()).events:
                    if event.key == KEYS.cycle:
                        assert event.entry is not None
                        seen.append("closed")
                    elif event.key.startswith(KEYS.nodes) and event.entry is None:
                        seen.append("left")
        assert seen == ["closed", "left"]


async def test_spare_that_turns_standby_after_success_leaves(url: str) -> None:
    """The seed's second case: it joins in the moment of success, and does not stay for ever.

    Nor does one that comes when all is over.
    """
    async with working(url, names=("n0", "n1")) as here:
        here.end("n0", "n1")
        here.join("n2")
        await here.ended()
        here.join("n7")
        await here.ended("n7")


async def test_a_paused_node_does_not_reopen_a_closed_round(url: str) -> None:
    """It looked at cycle 1, slept, and now says that cycle 1 has failed: nothing happens."""
    async with working(url) as here:
        paused = here["n0"].rendezvous
        assert paused is not None
        old = paused.head
        here["n1"].crew.end(Cause(kind="failed"))
        await here.cycles(2)
        await paused.restart(old, Cause(kind="failed", detail="long ago"))
        here.end("n0", "n1")
        await here.ended("n2")
        fresh = restart(old.record, Cause(kind="failed", detail="longer ago"))
        late = await here.ledger.txn([unchanged(old.entry)], [put(KEYS.cycle, fresh)])
        assert not late.succeeded
        view = await here.look()
        assert (view.cycle.number, view.cycle.state) == (2, "succeeded")


async def test_no_ghost_holds_a_rank_while_a_spare_waits(url: str) -> None:
    """A node that joined, and whose lease ended before the cycle was closed, gets no rank."""
    # One more than there are: with all of them the cycle would be closed at once, unless the dead
    # node still is the closer.
    async with meeting(url, Rules(minimum=2, maximum=4, last_call_s=3.0), lease_s=1.0) as here:
        await here.arrive("n0")
        await here["n0"].kill()
        here.join("n1", "n2")
        await here.ranks("n1", "n2")


async def test_the_dead_get_no_rank_from_a_watch_that_lags(url: str) -> None:
    """What the closer sees is old; it looks again before it closes."""
    async with meeting(url) as here:
        await here.arrive("n0")
        async with here.enter("n8") as watcher:
            head = watcher.head
            duty = Duty(LiveRuntime(here.ledger), KEYS, unchanged(head.entry), lambda: 0.0)
            duty._board.cycle = head
            duty._board.nodes.update(there(1, "n0", "n1", "n2"))
            await duty._look(head)
            assert (await here.look()).cycle.state == "open"


async def _replaced(here: Meeting, name: str, other: str) -> None:
    """A node that has a rank leaves and comes back; the other one has its rank meanwhile."""
    here[name].crew.leave()
    assert await here[name].result() is None
    await here.ranks("n0", other)
    await here.arrive(name)


async def test_unhealthy_nodes_that_recover_are_not_held_against_the_run(url: str) -> None:
    """Nodes leave and come back many times; only who is there now counts."""
    async with working(url, lease_s=20.0) as here:
        for turn in range(4):
            await _replaced(here, "n1", "n2")
            await _replaced(here, "n2", "n1")
            assert (await here.look()).cycle.restarts == (), turn
        here.end("n0", "n1")
        await here.ended("n0")


async def test_the_death_of_whoever_looks_after_the_cycle_costs_one_cycle(url: str) -> None:
    """There is no host: the closer dies, again and again, and somebody else closes."""
    async with working(url, lease_s=1.0) as here:
        for turn in range(3):
            name = await here.closer()
            await here[name].kill()
            here.join(name)
            await here.until(f"turn {turn}", here.two_work)


async def test_a_closer_that_died_is_stood_in_for(url: str) -> None:
    """Its lease lasts for long; the others, whose workers fail because of it, do not wait."""
    async with meeting(url, lease_s=60.0) as here:
        here.join("n0")
        assert await here.closer() == "n0"
        here.join("n1", "n2")
        await here.ranks("n0", "n1")
        await here["n0"].kill()
        here["n1"].crew.end(Cause(kind="failed", detail="connection reset by peer"))
        await here.ranks("n2", "n1")


async def test_a_local_error_of_one_node_closes_nothing(url: str) -> None:
    """A node whose own code raises is gone; the others go on with the spare."""

    async def broken(_: object) -> None:
        raise ZeroDivisionError

    async with meeting(url) as here:
        here.join("n0", "n1", "n2")
        here["n0"].crew.start = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(ZeroDivisionError):
            await here["n0"].result()
        here.nodes.pop("n0")
        await here.ranks("n2", "n1")
        here.end("n1", "n2")
        await here.ended("n1")


async def test_teardown_is_not_reported_as_success(url: str) -> None:
    """Nodes that are told to stop leave without a verdict, and the run has not succeeded."""
    async with working(url, lease_s=20.0) as here:
        for name in ("n2", "n0", "n1"):
            here[name].crew.leave()
            assert await here[name].result() is None
        assert (await here.look()).cycle.state == "open"


async def test_a_late_message_of_a_node_does_not_undo_a_later_one(url: str) -> None:
    """`ready(2)` that arrives after `ready(3)`: the record still says 3."""
    async with meeting(url) as here, here.enter("n5") as one:
        sent: list[tuple[list[Compare], object]] = []
        before = one._insist

        async def listen(compare: list[Compare], then: list[object], *rest: object) -> object:
            sent.append((list(compare), list(then)))
            return await before(compare, then, *rest)  # type: ignore[arg-type]

        one._insist = listen  # type: ignore[method-assign,assignment]
        head = one.head
        for number in (2, 3):
            await one.ready(Stored(head.entry, _open(number)))
        compare, then = sent[0]
        late = await here.ledger.txn(compare, then)  # type: ignore[arg-type]
        assert not late.succeeded
        entry = await here.ledger.get(KEYS.node("n5"))
        assert entry is not None
        assert b'"cycle":3' in entry.value


async def test_a_lost_lease_is_heard_of_and_nothing_is_changed_after_it(url: str) -> None:
    """The node's record is gone; whatever it still says raises `LeaseLost`."""
    async with working(url, names=("n0", "n1")) as here:
        one = here["n0"].rendezvous
        assert one is not None
        await here.ledger.revoke(one._keeper.id)
        with pytest.raises(LeaseLost):
            await one.ready(Stored(one.head.entry, _open(9)), port=7)
        await here.until("n0 back", lambda: len(here["n0"].crew.places) > 1)
