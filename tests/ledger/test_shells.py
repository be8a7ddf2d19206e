"""Keeper, follow, election and the synchronous facade, on real back ends."""

import asyncio
import contextlib
import signal
import sys
import time
from pathlib import Path

import pytest

from holdfast import proc
from holdfast.errors import Fenced, LeaseLost, Mistake
from holdfast.ledger import (
    Delete,
    Keeper,
    Ledger,
    LiveRuntime,
    Put,
    Record,
    follow,
    open,
    open_sync,
    update,
)
from holdfast.ledger.election import Acquire, Election, Held, Leader, Token, Wait, decide
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.records import Stored, decode, encode, load
from holdfast.ledger.types import Entry
from holdfast.timeouts import Timeouts
from patience import HANG_S

from .conformance import within


async def test_a_keeper_keeps_its_lease_beyond_its_time(led: Ledger) -> None:
    """Renewed for as long as it is held, ended when it is left."""
    async with Keeper(LiveRuntime(led), 0.3) as keeper:
        await led.txn([], [Put("/mine", b"", keeper.id)])
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            assert await led.get("/mine") is not None
            assert keeper.believes()
            await asyncio.sleep(0.02)
    assert await led.get("/mine") is None


@pytest.mark.parametrize(("ttl_s", "lease_s", "pause_s"), [(None, 0.9, 0.1), (18.0, 18.0, 2.0)])
async def test_a_keeper_takes_its_times_from_the_ledger(
    ttl_s: float | None, lease_s: float, pause_s: float
) -> None:
    """A lease of another length is renewed in proportion."""
    waits: list[float] = []

    class Waiting(LiveRuntime):
        async def sleep(self, seconds: float) -> None:
            waits.append(seconds)
            await asyncio.Event().wait()

    async with MemoryLedger() as led:
        led.timeouts = Timeouts(ledger_lease_s=0.9, lease_keepalive_s=0.1)
        async with Keeper(Waiting(led), ttl_s) as keeper:
            assert keeper.lease.ttl_s == lease_s
            await asyncio.sleep(0)
    assert waits == pytest.approx([pause_s])


async def test_a_keeper_notices_that_its_lease_was_broken(led: Ledger) -> None:
    """Whoever waits for `lost` hears of it; the lease does not come back."""
    async with Keeper(LiveRuntime(led), 0.3) as keeper:
        await led.revoke(keeper.id)
        await within(keeper.lost.wait())
        assert not keeper.believes()
        with pytest.raises(LeaseLost):
            await led.keep_alive(keeper.id)


async def test_follow_shows_everything_then_every_change(led: Ledger) -> None:
    """Also across a compaction: then the whole range comes again."""
    await led.txn([], [Put("/f/a", b"1"), Put("/other", b"")])
    async with contextlib.aclosing(follow(LiveRuntime(led), "/f/")) as steps:
        first = await anext(steps)
        assert (set(first.entries), first.change) == ({"/f/a"}, None)
        await led.txn([], [Put("/f/b", b"2")])
        second = await anext(steps)
        assert second.change is not None
        assert set(second.entries) == {"/f/a", "/f/b"}
        await led.txn([], [Put("/f/c", b"3")])
        txn = await led.txn([], [Delete("/f/a")])
        await led.compact(txn.revision)
        third = await anext(steps)
        assert (set(third.entries), third.change) == ({"/f/b", "/f/c"}, None)


def _leader(lease: int) -> Stored[Leader]:
    record = Leader(holder="other", token=4)
    return Stored(Entry("/e/leader", encode(record), 9, 9, 1, lease), record)


def _token(last: int) -> Stored[Token]:
    record = Token(last=last)
    return Stored(Entry("/e/token", encode(record), 3, 9, 4), record)


def test_election_decides() -> None:
    """The table of the pure function."""
    assert decide(_leader(7), _token(4), "/e", "me", lease=8) == Wait("other")
    held = decide(_leader(8), _token(4), "/e", "me", lease=8)
    assert isinstance(held, Held), "recognised by the lease, whatever the name says"
    assert held.token == 4
    first = decide(None, None, "/e", "me", lease=8)
    assert isinstance(first, Acquire)
    assert [op.key for op in first.then] == ["/e/leader", "/e/token"]
    assert b'"token":1' in first.then[0].value  # type: ignore[union-attr]
    later = decide(None, _token(4), "/e", "me", lease=8)
    assert isinstance(later, Acquire)
    assert b'"token":5' in later.then[0].value  # type: ignore[union-attr]
    assert [one.key for one in later.compare] == ["/e/leader", "/e/token"]


class Count(Record, frozen=True, kw_only=True):
    token: int = 0
    total: int = 0


async def test_a_deposed_leader_changes_nothing(led: Ledger) -> None:
    """Its lease is broken behind its back: its next effect is fenced off."""
    runtime = LiveRuntime(led)
    async with Election(runtime, "/e", "a", ttl_s=5).lead() as old:
        await led.revoke(old.entry.lease)
        async with Election(runtime, "/e", "b", ttl_s=5).lead() as new:
            assert new.token == old.token + 1
            with pytest.raises(Fenced):
                await update(runtime, "/c", Count, lambda _: Count(total=1), guards=[old.guard])
            await update(runtime, "/c", Count, lambda _: Count(total=2), guards=[new.guard])
    stored = await load(led, "/c", Count)
    assert stored is not None
    assert stored.record.total == 2


WORKER = """
import asyncio, sys
from holdfast.errors import Fenced
from holdfast.ledger import LiveRuntime, open, update
from holdfast.ledger.election import Election
sys.path.insert(0, sys.argv[3])
from ledger.test_shells import Count

async def main():
    async with open(sys.argv[1]) as led:
        runtime = LiveRuntime(led)
        while True:
            async with Election(runtime, "/e", sys.argv[2], ttl_s=0.5).lead() as leadership:
                print("leading", leadership.token, flush=True)
                def add(count):
                    return Count(token=leadership.token, total=(count.total if count else 0) + 1)
                try:
                    while not leadership.lost.is_set():
                        await update(runtime, "/c", Count, add, guards=[leadership.guard])
                        await asyncio.sleep(0.001)
                except Fenced:
                    print("fenced", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_real_leaders_killed_or_stopped_are_replaced(tmp_path: Path, how: int) -> None:
    """Three processes; the leader is killed or stopped four times. Tokens only grow, and no
    effect of an old leader follows one of a new leader."""
    url = f"sqlite:///{tmp_path}/x.db"
    here = str(Path(__file__).parents[1])
    with contextlib.ExitStack() as stack:
        names = iter(f"w{number}" for number in range(100))

        def start() -> proc.Child:
            name = next(names)
            argv = [sys.executable, "-c", WORKER, url, name, here]
            return stack.enter_context(proc.spawn(argv, name=name, log=tmp_path / name))

        async with open(url) as led:
            children = {child.name: child for child in (start(), start(), start())}
            victims = 0
            stopped: list[proc.Child] = []
            seen: list[int] = []
            async with asyncio.timeout(4 * HANG_S), led.watch("/", start=1) as watch:
                async for batch in watch:
                    for event in batch.events:
                        if event.key == "/c" and event.entry is not None:
                            seen.append(decode(Count, event.entry).token)
                    ripe = len(seen) >= 20 and seen[-1] == seen[-20]
                    leader = await load(led, "/e/leader", Leader)
                    if not ripe or leader is None or leader.record.holder not in children:
                        continue
                    if leader.record.token != seen[-1]:
                        continue  # what is seen lags behind: this leader has done nothing yet
                    if victims == 4:
                        break
                    victim = children[leader.record.holder]
                    victim.signal(how)
                    if not await _can_write(led):
                        # Stopped in the middle of a commit it holds everybody up (ASSUMPTIONS.md).
                        victim.signal(signal.SIGCONT)
                        continue
                    stopped.append(children.pop(victim.name))
                    if how == signal.SIGSTOP and victims % 2:
                        # It wakes up long after it was replaced, and must change nothing.
                        woken = stopped.pop(0)
                        woken.signal(signal.SIGCONT)
                        children[woken.name] = woken
                    else:
                        child = start()
                        children[child.name] = child
                    victims += 1
                    seen.append(-1)
    tokens = [token for token in seen if token > 0]
    assert tokens == sorted(tokens)
    assert max(tokens) >= 5, "four leaders were removed, so a fifth must have led"


async def _can_write(led: Ledger) -> bool:
    """Whether no process keeps the file locked for long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5.0):
            await led.txn(then=[Put("/probe", b"")])
        return True
    return False


def test_sync_facade_and_its_watch(tmp_path: Path) -> None:
    """The same calls without an event loop; a time-out loses nothing."""
    with open_sync(f"sqlite:///{tmp_path}/x.db") as led:
        lease = led.grant(30)
        led.txn([], [Put("/a", b"1", lease.id)])
        assert led.lease_info(lease.id).keys == ("/a",)
        assert led.keep_alive(lease.id) == 30
        assert led.leases() == (lease.id,)
        with led.watch("/", start=1) as watch:
            batch = watch.next(5)
            assert batch is not None
            assert watch.next(0.01) is None
            led.revoke(lease.id)
            batch = next(iter(watch))
            assert batch.events[0].entry is None
        assert led.range("/").entries == ()
        led.compact(2)
        with pytest.raises(Mistake):
            led.get("no slash")
    led.close()
