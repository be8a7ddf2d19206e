"""Schedules and inputs that were found by trying to break the queue and the store."""

import asyncio
import contextlib
import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast import ledger as ledgers
from holdfast import transfer
from holdfast.errors import Fenced, Gone, Mistake, TimedOut, UnknownOutcome
from holdfast.ledger import Ledger, unchanged
from holdfast.ledger.records import put as write
from holdfast.timeouts import Timeouts
from holdfast.transfer import Store
from holdfast.transfer.commands import queue as queue_command
from holdfast.transfer.memory import MemoryBackend
from holdfast.transfer.queue import Item, Queue, balanced
from holdfast.transfer.queue.desk import Change
from holdfast.transfer.queue.records import Config, Keys, Member, State
from holdfast.transfer.queue.steps import Steps
from patience import HANG_S, auntil
from transfer.members import Opener, Runtime, cut_off, end_of, gate, hang, items, lost


@pytest.fixture
def store() -> Store:
    return transfer.connect("memory:")


# ---- what is put -----------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        Item("bad", {"x": 1}, group=None),  # type: ignore[arg-type]
        Item("bad", {"x": 1}, group=7),  # type: ignore[arg-type]
        Item("bad", {"x": 1}, group="\ud800"),
        Item("bad", {"x": 1}, tags={"a": [1]}),  # type: ignore[dict-item]
        Item("bad", {"x": 1}, tags={"a": float("nan")}),
        Item("bad", {"x": 1}, tags={"a": object()}),  # type: ignore[dict-item]
        Item("bad", {"x": 1}, tags={1: "a"}),  # type: ignore[dict-item]
        Item("bad", {1: 1}),  # type: ignore[dict-item]
        Item("bad", {"": 1}),
        Item("bad", {"x\n": 1}),
        Item("bad", {"x": 1}, version=1 << 70),
    ],
)
async def test_a_bad_sample_is_refused_and_harms_nobody(
    opener: Opener, store: Store, bad: Item
) -> None:
    """A record that nobody could read would end the queue for every member, for ever."""
    queue = await opener()
    with pytest.raises(Mistake, match="bad"):
        await queue.put([*items(1), bad])
    assert store.stat().keys == 0
    await queue.put(items(1))
    late = await opener()
    assert (await late.claim("train", 1, timeout_s=2)).keys == ["s0"]


async def test_samples_and_fields_with_slashes_do_not_meet(opener: Opener) -> None:
    """`a` + `b/c` and `a/b` + `c` are two payloads, put together or one after the other."""
    queue = await opener()
    await queue.put([Item("a", {"b/c": 1}), Item("a/b", {"c": 2})])
    await queue.put([Item("d", {"e/f": 3})])
    await queue.put([Item("d/e", {"f": 4})])
    batch = await queue.claim("train", 4)
    assert await batch.fetch() == [{"b/c": 1}, {"c": 2}, {"e/f": 3}, {"f": 4}]


async def test_two_puts_of_one_sample_in_one_process(opener: Opener, store: Store) -> None:
    """One of them wins with its payload; the other does not take it away."""
    queue = await opener()
    first, second = await asyncio.gather(
        *(queue.put([Item("s", {"x": value})]) for value in (1, 2))
    )
    assert sorted((first["s"], second["s"])) == [False, True]
    batch = await queue.claim("train", 1)
    assert await batch.fetch() == [{"x": 1 if first["s"] else 2}]
    assert store.stat().keys == 1


async def test_a_put_that_was_cancelled_and_is_repeated_keeps_its_payload(
    opener: Opener,
) -> None:
    """The first put came true unseen; the second must not replace what it recorded."""
    queue = await opener()
    await queue._desk.seat()
    gate(queue).after.append(hang)
    seen, queue._desk.view.unknown = queue._desk.view.unknown, list  # type: ignore[method-assign, assignment]
    await cut_off(queue.put([Item("s", {"x": 1})]))

    async def look(_: Any = None) -> None:
        queue._desk.view.unknown = seen  # type: ignore[method-assign]

    gate(queue).before_txn.append(look)  # the view lagged until the payload was sent
    await queue.put([Item("s", {"x": 1})])
    batch = await queue.claim("train", 1)
    assert await batch.fetch() == [{"x": 1}]


# ---- acknowledging ---------------------------------------------------------------


@pytest.mark.parametrize("others", [0, 40])
async def test_an_acknowledgement_whose_answer_was_lost_can_be_repeated(
    opener: Opener, others: int
) -> None:
    """It took effect; saying "somebody else has them" would make the caller undo its work."""
    queue, other = await opener(), await opener()
    await queue.put(items(50))
    batch = await queue.claim("train", 3)
    gate(queue).after.append(hang)
    await cut_off(batch.acknowledge(["s0"]))
    for _ in range(others):  # so many that the names of old acknowledgements are forgotten
        await (await other.claim("train", 1)).acknowledge()
    await batch.acknowledge()
    assert queue.behind()["train"] == 47 - others


async def test_an_error_after_an_unknown_outcome_is_not_called_retriable(
    opener: Opener, ledger: Ledger
) -> None:
    """`Retriable` means that nothing happened. This acknowledgement has."""
    queue = await opener()
    await queue.put(items(1))
    batch = await queue.claim("train", 1)
    runtime = queue.runtime
    assert isinstance(runtime, Runtime)

    async def too_late(answer: Any) -> None:
        runtime.ahead_s += 1000.0
        await lost(answer)

    gate(queue).after.append(too_late)
    with contextlib.suppress(UnknownOutcome):
        await batch.acknowledge()


async def test_a_late_acknowledgement_is_fenced_even_when_the_block_is_gone(
    opener: Opener, ledger: Ledger
) -> None:
    """It was never sent: there is nothing unknown about it."""
    queue, other = await opener(), await opener()
    queue._desk.block_samples = other._desk.block_samples = 2
    await queue.put(items(4))
    batch = await queue.claim("train", 4)
    await end_of(ledger, queue)
    await (await other.claim("train", 2)).acknowledge()
    await auntil(lambda: 0 not in queue._desk.view.blocks)
    with pytest.raises(Fenced):
        await batch.acknowledge()
    assert other.behind()["train"] == 2


# ---- claiming --------------------------------------------------------------------


async def test_a_claim_that_is_cancelled_after_it_was_written_is_free_again(
    opener: Opener,
) -> None:
    queue = await opener()
    await queue.put(items(1, version=0) + items(1, first=1, version=9))
    queue._tidying.free = hang  # type: ignore[method-assign, assignment]
    await cut_off(queue.claim("train", 1, max_lag=1))
    del queue._tidying.free
    await queue.tidy()
    assert (await queue.claim("train", 1, timeout_s=1)).keys == ["s1"]


async def test_a_batch_that_nobody_has_any_more_is_free_again(opener: Opener) -> None:
    """As when Ctrl-C comes between the claim and whoever waits for it."""
    queue = await opener()
    await queue.put(items(1))
    batch = await queue.claim("train", 1)
    await queue.tidy()
    with pytest.raises(TimedOut):
        await queue.claim("train", 1, timeout_s=0.05)
    del batch
    gc.collect()
    await queue.tidy()
    assert len(await queue.claim("train", 1, timeout_s=1)) == 1


@pytest.mark.parametrize("bad", [{"max_lag": -1}, {"version": -1, "max_lag": 1}, {"keys": "s0"}])
async def test_nonsense_in_a_claim_is_a_mistake(opener: Opener, bad: dict[str, Any]) -> None:
    """A negative lag would drop everything that there is."""
    queue = await opener()
    await queue.put(items(2, version=3))
    with pytest.raises(Mistake):
        await queue.claim("train", None if "keys" in bad else 1, timeout_s=0.1, **bad)
    assert queue.behind()["train"] == 2


async def test_everything_that_a_claim_dropped_is_told(opener: Opener) -> None:
    """Also what it dropped while it still waited for enough."""
    queue = await opener()
    await queue.put(items(2, version=0) + items(1, first=2, version=9))
    waiting = asyncio.create_task(queue.claim("train", 2, max_lag=1))
    await auntil(lambda: queue.behind()["train"] == 1)
    await queue.put(items(1, first=3, version=9))
    batch = await waiting
    assert (batch.keys, batch.dropped) == (["s2", "s3"], ["s0", "s1"])


async def test_a_claim_whose_answer_was_lost_keeps_the_order_of_its_sampler(
    opener: Opener,
) -> None:
    queue = await opener()
    await queue.put([Item(f"s{at}", {"x": at}, tags={"n": at}) for at in range(4)])

    await queue._desk.seat()
    gate(queue).after.append(lost)
    batch = await queue.claim("train", 4, sampler=balanced("n", 2))
    assert batch.keys == ["s3", "s0", "s2", "s1"]


@pytest.mark.parametrize("gone", [False, True])
async def test_a_view_that_is_ahead_of_an_answer_does_not_wait_for_it(
    opener: Opener, ledger: Ledger, gone: bool
) -> None:
    """What an answer says may be history by the time it is looked at."""
    queue, other = await opener(), await opener()
    queue._desk.block_samples = other._desk.block_samples = 2
    await queue.put(items(5))
    if gone:
        held = await other.claim("train", 2)

    async def meddle() -> None:  # the answer will be: others have changed something
        if gone:
            await held.acknowledge(["s0"])
        else:
            await end_of(ledger, queue)

    async def overtake(_: Any) -> None:  # before the answer is looked at, there is more
        if gone:
            await held.acknowledge()
            await auntil(lambda: 0 not in queue._desk.view.blocks)
        else:
            await other.claim("train", 2)
            await auntil(lambda: queue._desk.view.blocks[0].task("train").entry is not None)

    desk = queue._desk
    await desk.seat()
    gate(queue).before_txn.append(meddle)
    gate(queue).after.append(overtake)
    async with asyncio.timeout(HANG_S / 2):
        if gone:

            def decide() -> Any:
                block = desk.view.blocks.get(0)
                if block is None:
                    return "gone"
                entry = block.task("train").entry
                assert entry is not None
                return Change([unchanged(entry)], [write(entry.key, State(), over=entry)], "done")

            assert await desk.commit(decide, desk.deadline()) == "gone"
        else:
            assert len(await queue.claim("train", 2)) == 2


# ---- ends and leaks --------------------------------------------------------------


async def test_a_finished_block_goes_however_many_fields_came_later(
    opener: Opener, ledger: Ledger, store: Store
) -> None:
    """One record per late field, 150 of them: they must not stay in the ledger for ever."""
    queue = await opener({"train": ["x", "r"]})
    await queue.put(items(150))
    await asyncio.gather(*(queue.put_fields({f"s{at}": {"r": at}}) for at in range(150)))
    await (await queue.claim("train", 150)).acknowledge()
    queue._desk.block_samples = 150
    await queue.put(items(1, first=200))
    await queue.tidy()
    left = (await ledger.range(queue.keys.prefix + "fields/")).entries
    assert (len(left), len(queue._desk.view.blocks)) == (0, 1)
    assert store.stat().keys == 1


async def test_a_field_that_comes_too_late_leaves_nothing_in_the_store(
    opener: Opener, store: Store
) -> None:
    """The sample was finished while the field was on its way."""
    queue, other = await opener(), await opener()
    queue._desk.block_samples = other._desk.block_samples = 2
    await queue.put(items(5))
    await queue._desk.seat()

    async def meddle() -> None:
        await (await other.claim("train", 3)).acknowledge()
        await auntil(lambda: 0 not in queue._desk.view.blocks)

    gate(queue).before_txn.append(meddle)
    await queue.put_fields({"s0": {"late": 1}, "s2": {"late": 1}, "s3": {"late": 3}})
    await (await queue.claim("train", 2)).acknowledge()
    await queue.tidy()
    assert store.stat().keys == 0


async def test_a_queue_that_is_closed_gives_nothing_and_holds_nobody(
    opener: Opener, ledger: Ledger, store: Store
) -> None:
    """Whoever waits is told; whoever asks afterwards does not become a member again."""
    async with Queue(store, ledger, "q", ["train"], lease_s=5.0) as queue:
        waiting = asyncio.create_task(queue.claim("train", 1))
        await auntil(lambda: bool(queue._desk.view.members))
    with pytest.raises(Mistake, match="closed"):
        async with asyncio.timeout(2.0):
            await waiting
    with pytest.raises(Mistake, match="closed"):
        await queue.claim("train", 1, timeout_s=0.1)
    assert not (await ledger.range(queue.keys.prefix + "member/")).entries


# ---- the store and the commands -------------------------------------------------


async def test_the_times_of_the_table_are_kept() -> None:
    """A store has its own; a queue has those of its ledger, unless it is told."""
    times = Timeouts(store_deadline_s=7.0, member_lease_s=4.0, queue_call_s=0.2)
    store = transfer.connect("memory:", timeouts=times)
    assert store.policy.deadline_s == 7.0
    with pytest.raises(Mistake, match="store_call_s < store_deadline_s"):
        transfer.connect("memory:", timeouts=Timeouts(store_deadline_s=1.0))
    async with ledgers.open("memory:", timeouts=times) as ledger:
        queue = Queue(store, ledger, "q", ["train"])
        assert (queue._lease_s, Queue(store, ledger, "q", lease_s=9.0)._lease_s) == (4.0, 9.0)
        async with queue:
            with pytest.raises(TimedOut):
                await queue.claim("train", 1)


class Parts(MemoryBackend):
    """A back end that takes one key at a time, several side by side."""

    most_keys = 1
    parallel = 2


def test_a_store_works_in_a_forked_child(tmp_path: Path) -> None:
    """Its parent's threads are not there: waiting for them would last for ever."""
    with Store(Parts()) as store:
        store.put({f"k{at}": at for at in range(4)})
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (tmp_path / "got").write_text(str(store.get(["k0", "k1", "k2"])))
        )
        child.start()
        child.join(HANG_S)
        ended = not child.is_alive()
        child.kill()
        child.join()
        assert ended
        assert (tmp_path / "got").read_text() == str({"k0": 0, "k1": 1, "k2": 2})


async def test_what_is_shown_of_a_queue_cannot_move_the_cursor(sqlite_url: str) -> None:
    """Names of hosts and of fields were written by others."""
    evil = "x\x1b[2Jy"
    async with ledgers.open(sqlite_url) as ledger:
        config = Config(tasks={"train": (evil,)}, max_samples=1, max_bytes=1)
        keys = Keys("default", "q")
        await ledger.txn([], [write(keys.config, config)], [])
        await ledger.txn([], [write(keys.member("m", 1), Member(host=evil))], [])
        with pytest.raises(Mistake, match="field"):
            Queue(transfer.connect("memory:"), ledger, "q2", {"train": [evil]})
    shown = await asyncio.to_thread(CliRunner().invoke, queue_command, ["show", sqlite_url, "q"])
    assert shown.exit_code == 0
    assert "x [2Jy" in shown.output
    assert "\x1b" not in shown.output


# ---- steps -----------------------------------------------------------------------


async def test_a_leader_that_lost_its_lease_does_not_give_the_same_samples_twice(
    opener: Opener, ledger: Ledger
) -> None:
    """Its claim on step 1 is gone, but step 1 is written: step 2 has other samples."""
    queue = await opener()
    await queue.put(items(6, version=1))
    steps = Steps(queue, "train")
    first = await steps.lead(1, 2)
    await end_of(ledger, queue)
    await queue.put(items(2, first=6, version=9))
    second = await steps.lead(2, 2, max_lag=1)
    assert not set(first.keys) & set(second.keys)
    again = await steps.lead(1, 2, timeout_s=1)
    assert again.keys == first.keys, "nor was it dropped for its age"


async def test_a_leader_whose_lease_ended_before_it_wrote_its_step(
    opener: Opener, ledger: Ledger
) -> None:
    """Its samples are another leader's by now: it must not write them."""
    queue, other = await opener(), await opener()
    await queue.put(items(4))
    slow, quick = Steps(queue, "train"), Steps(other, "train")
    await queue._desk.seat()

    async def pause(_: Any = None) -> None:
        await end_of(ledger, queue)
        await quick.lead(2, 2)

    gate(queue).after.append(pause)
    with contextlib.suppress(Mistake):
        await slow.lead(1, 2, timeout_s=1)
    written = await quick.written()
    assert len({key for keys in written.values() for key in keys}) == 2 * len(written)


async def test_a_step_whose_samples_are_acknowledged_is_refused(opener: Opener) -> None:
    """Killed between acknowledging and saying so: an older checkpoint gets no empty step."""
    queue = await opener()
    await queue.put(items(4))
    steps = Steps(queue, "train")
    batch = await steps.lead(1, 2)
    await batch.acknowledge()
    with pytest.raises(Gone, match="step 1"):
        await steps.lead(1, 2, timeout_s=1)
    await steps.finish(1)
    assert await steps.written() == {}


async def test_a_step_is_finished_by_whoever_has_its_record(
    opener: Opener, ledger: Ledger
) -> None:
    """Its checkpoint is durable: a lease that ended meanwhile changes nothing about that."""
    queue = await opener()
    await queue.put(items(4))
    steps = Steps(queue, "train")
    batch = await steps.lead(1, 2)
    await end_of(ledger, queue)
    await steps.finish(1, batch)
    assert (queue.behind()["train"], await steps.written()) == (2, {})
