"""Holes that other rendezvous have, each by its name; none may exist here.

The same are in the simulation (`holdfast sim rendezvous`), and those about processes in
tests/launch.
"""

import asyncio
from pathlib import Path

import pytest

from holdfast.errors import LeaseLost
from holdfast.ledger.records import Stored, put
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Compare, unchanged
from holdfast.rendezvous.closer import Duty
from holdfast.rendezvous.decide import restart
from holdfast.rendezvous.records import Cause, Cycle, Node, Rules
from holdfast.rendezvous.rendezvous import Rendezvous
from patience import HANG_S

from .meeting import KEYS, RUN, meeting

RULES = Rules(minimum=2, maximum=3, spares=1, last_call_s=0.2, settle_s=0.2, join_s=20.0)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


async def test_spare_waiting_at_open_leaves_when_the_run_is_closed(url: str) -> None:
    """The seed's first case: a spare that waits for the next cycle hears that there is none."""
    async with meeting(url, RULES) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        head = here["n2"].rendezvous
        assert head is not None
        here.end("n0", "n1")
        ended = await here["n2"].result()
        assert ended is not None
        assert ended.state == "succeeded"


async def test_spare_that_turns_standby_after_success_leaves(url: str) -> None:
    """The seed's second case: it joins in the moment of success, and does not stay for ever."""
    async with meeting(url, RULES) as here:
        here.join("n0", "n1")
        await here.ranks("n0", "n1")
        here.end("n0", "n1")
        here.join("n2")
        ended = await here["n2"].result()
        assert ended is not None
        assert ended.state == "succeeded"


async def test_closed_for_good_before_anybody_leaves(url: str) -> None:
    """The seed's third case: whoever sees a node leave finds the run's end already recorded."""
    async with meeting(url, RULES) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        seen: list[str] = []
        async with here.ledger.watch(KEYS.root, start=(await here.look()).revision + 1) as watch:
            here.end("n0", "n1")
            await asyncio.gather(*(here[name].result() for name in ("n0", "n1", "n2")))
            while "left" not in seen:
                for event in (await watch.__anext__()).events:
                    if event.key == KEYS.cycle:
                        assert event.entry is not None
                        seen.append("closed")
                    elif event.key.startswith(KEYS.nodes) and event.entry is None:
                        seen.append("left")
        assert seen == ["closed", "left"]


async def test_a_paused_node_does_not_reopen_a_closed_round(url: str) -> None:
    """It looked at cycle 1, slept, and now says that cycle 1 has failed: nothing happens."""
    async with meeting(url, RULES) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        paused = here["n0"].rendezvous
        assert paused is not None
        old = paused.head
        here["n1"].crew.end(Cause(kind="failed"))
        await here.until("cycle 2", lambda: len(here["n0"].crew.places) == 2)
        await paused.restart(old, Cause(kind="failed", detail="long ago"))
        here.end("n0", "n1")
        ended = await here["n2"].result()
        assert ended is not None
        fresh = restart(old.record, Cause(kind="failed", detail="longer ago"))
        late = await here.ledger.txn([unchanged(old.entry)], [put(KEYS.cycle, fresh)])
        assert not late.succeeded
        view = await here.look()
        assert (view.cycle.number, view.cycle.state) == (2, "succeeded")


async def test_no_ghost_holds_a_rank_while_a_spare_waits(url: str) -> None:
    """A node that joined and died before the cycle was closed gets no rank."""
    rules = Rules(minimum=2, maximum=3, last_call_s=3.0)
    async with meeting(url, rules, lease_s=1.0) as here:
        here.join("n0")
        await here.until("n0", lambda: here["n0"].rendezvous is not None)
        await here["n0"].kill()
        here.join("n1", "n2")
        await here.ranks("n1", "n2")


async def test_the_dead_get_no_rank_from_a_watch_that_lags(url: str) -> None:
    """What the closer sees is old; it looks again before it closes."""
    async with meeting(url, RULES) as here:
        here.join("n0")
        await here.until("n0", lambda: here["n0"].rendezvous is not None)
        ghost = {
            f"n{i}": (999, Node(cycle=1, address="g", port=1, slots=1, infra_rank=i))
            for i in (1, 2)
        }
        entry = await here.ledger.get(KEYS.cycle)
        assert entry is not None
        async with Rendezvous(
            LiveRuntime(here.ledger), RUN, "n8", Node(cycle=0, address="", port=1, slots=1), RULES
        ) as watcher:
            head = watcher.head
            duty = Duty(LiveRuntime(here.ledger), KEYS, unchanged(head.entry), lambda: 0.0)
            duty._board.cycle = head
            duty._board.nodes.update(ghost)
            await duty._look(head)
            assert (await here.look()).cycle.state == "open"


async def test_unhealthy_nodes_that_recover_are_not_held_against_the_run(url: str) -> None:
    """Nodes leave and come back many times; only who is there now counts."""
    async with meeting(url, RULES, lease_s=20.0) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        for turn in range(4):
            here["n1"].crew.leave()
            assert await here["n1"].result() is None
            await here.ranks("n0", "n2")
            here.join("n1")
            await here.until("n1", lambda: here["n1"].rendezvous is not None)
            here["n2"].crew.leave()
            await here["n2"].result()
            await here.ranks("n0", "n1")
            here.join("n2")
            await here.until("n2", lambda: here["n2"].rendezvous is not None)
            assert (await here.look()).cycle.restarts == (), turn
        here.end("n0", "n1")
        ended = await here["n0"].result()
        assert ended is not None
        assert ended.state == "succeeded"


async def test_the_death_of_whoever_looks_after_the_cycle_costs_one_cycle(url: str) -> None:
    """There is no host: the closer dies, again and again, and somebody else closes."""
    async with meeting(url, RULES, lease_s=1.0) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        for turn in range(3):
            async with asyncio.timeout(HANG_S):
                while (entry := await here.ledger.get(KEYS.closer)) is None:
                    await asyncio.sleep(0.01)
            name = next(n for n in here.nodes if f'"{n}"'.encode() in entry.value)
            await here[name].kill()
            here.join(name)
            await here.until(
                f"turn {turn}", lambda: sum(n.crew.working for n in here.nodes.values()) == 2
            )


async def test_a_closer_that_died_is_stood_in_for(url: str) -> None:
    """Its lease lasts for long; the others, whose workers fail because of it, do not wait."""
    async with meeting(url, RULES, lease_s=60.0) as here:
        here.join("n0")
        await here.until("a closer", lambda: here["n0"].rendezvous is not None)
        async with asyncio.timeout(HANG_S):
            while await here.ledger.get(KEYS.closer) is None:
                await asyncio.sleep(0.01)
        here.join("n1", "n2")
        await here.ranks("n0", "n1")
        await here["n0"].kill()
        here["n1"].crew.end(Cause(kind="failed", detail="connection reset by peer"))
        await here.ranks("n2", "n1")


async def test_five_alive_with_a_maximum_of_four(url: str) -> None:
    """The fifth is a spare; nothing is closed because of it."""
    rules = Rules(minimum=4, maximum=4, last_call_s=0.2)
    async with meeting(url, rules) as here:
        here.join("n0", "n1", "n2", "n3")
        await here.ranks("n0", "n1", "n2", "n3")
        here.join("n4")
        await here.until("n4", lambda: here["n4"].rendezvous is not None)
        await asyncio.sleep(0.3)
        await here.ranks("n0", "n1", "n2", "n3")
        assert (await here.look()).cycle.number == 1
        here.end("n0", "n1", "n2", "n3")
        ended = await here["n4"].result()
        assert ended is not None
        assert ended.state == "succeeded"


async def test_a_local_error_of_one_node_closes_nothing(url: str) -> None:
    """A node whose own code raises is gone; the others go on with the spare."""

    class Clumsy(Exception):
        pass

    async def broken(_: object) -> None:
        raise Clumsy

    async with meeting(url, RULES) as here:
        here.join("n0", "n1", "n2")
        here["n0"].crew.start = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(Clumsy):
            await here["n0"].result()
        clumsy = here.nodes.pop("n0")
        await here.ranks("n2", "n1")
        here.end("n1", "n2")
        ended = await here["n1"].result()
        assert ended is not None
        assert ended.state == "succeeded"
        assert clumsy.task.done()


async def test_teardown_is_not_reported_as_success(url: str) -> None:
    """Nodes that are told to stop leave without a verdict, and the run has not succeeded."""
    async with meeting(url, RULES, lease_s=20.0) as here:
        here.join("n0", "n1", "n2")
        await here.ranks("n0", "n1")
        for name in ("n2", "n0", "n1"):
            here[name].crew.leave()
            assert await here[name].result() is None
        assert (await here.look()).cycle.state == "open"


async def test_a_late_message_of_a_node_does_not_undo_a_later_one(url: str) -> None:
    """`ready(2)` that arrives after `ready(3)`: the record still says 3."""
    async with meeting(url, RULES) as here:
        node = Node(cycle=0, address="x", port=1, slots=1)
        async with Rendezvous(LiveRuntime(here.ledger), RUN, "n5", node, RULES) as one:
            sent: list[tuple[list[Compare], object]] = []
            before = one._insist

            async def listen(compare: list[Compare], then: list[object], *rest: object) -> object:
                sent.append((list(compare), list(then)))
                return await before(compare, then, *rest)  # type: ignore[arg-type]

            one._insist = listen  # type: ignore[method-assign,assignment]
            head = one.head
            for number in (2, 3):
                cycle = Cycle(number=number, state="open", rules=RULES)
                await one.ready(Stored(head.entry, cycle))
            compare, then = sent[0]
            late = await here.ledger.txn(compare, then)  # type: ignore[arg-type]
            assert not late.succeeded
            entry = await here.ledger.get(KEYS.node("n5"))
            assert entry is not None
            assert b'"cycle":3' in entry.value


async def test_a_lost_lease_is_heard_of_and_nothing_is_changed_after_it(url: str) -> None:
    """The node's record is gone; whatever it still says raises `LeaseLost`."""
    async with meeting(url, RULES) as here:
        here.join("n0", "n1")
        await here.ranks("n0", "n1")
        one = here["n0"].rendezvous
        assert one is not None
        await here.ledger.revoke(one._keeper.id)
        with pytest.raises(LeaseLost):
            await one.ready(
                Stored(one.head.entry, Cycle(number=9, state="open", rules=RULES)), port=7
            )
        await here.until("n0 back", lambda: len(here["n0"].crew.places) > 1)
