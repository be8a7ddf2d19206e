"""The queue on every ledger: each sample once per task, whatever its members do."""

import asyncio
import contextlib
import re
import uuid
from typing import Any

import pytest

from holdfast import ledger as ledgers
from holdfast import transfer
from holdfast.errors import Fenced, Mistake, NoRoom, NotFound, TimedOut
from holdfast.ledger import Ledger
from holdfast.transfer import Store
from holdfast.transfer.queue import Item, Queue, balanced, weighted, whole_groups
from transfer.members import Opener, end_of, items

TASKS = {"train": ["x"], "log": []}


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def ledger_url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory:{uuid.uuid4().hex}"
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def store() -> Store:
    return transfer.connect("memory:")


@pytest.fixture
async def queue(opener: Opener) -> Queue:
    return await opener(TASKS)


async def test_each_task_gets_every_sample_once_and_payloads_go_with_the_last(
    queue: Queue, opener: Opener, store: Store
) -> None:
    other = await opener(TASKS)
    assert set((await queue.put(items(10))).values()) == {True}
    assert store.stat().keys == 10
    for task, members in (("train", (queue, other)), ("log", (other, queue))):
        seen: list[str] = []
        for member, n in zip(members, (6, 4), strict=True):
            batch = await member.claim(task, n)
            values = await batch.fetch()
            assert [one["x"] for one in values] == [int(key[1:]) for key in batch.keys]
            await batch.acknowledge()
            seen += batch.keys
        assert seen == [f"s{at}" for at in range(10)]
        assert store.stat().keys == (10 if task == "train" else 0)
    with pytest.raises(TimedOut, match="no 1 samples"):
        await queue.claim("train", 1, timeout_s=0.1)


async def test_a_sample_waits_for_the_fields_that_its_task_needs(opener: Opener) -> None:
    queue = await opener({"train": ["x", "reward"], "log": ["x"]})
    await queue.put(items(3))
    assert len(await queue.claim("log", 3)) == 3
    with pytest.raises(TimedOut):
        await queue.claim("train", 1, timeout_s=0.1)
    await queue.put_fields({"s1": {"reward": 1.5}})
    await queue.put_fields({"s1": {"reward": 9.9}})
    batch = await queue.claim("train", 1)
    (values,) = await batch.fetch()
    assert (batch.keys, values["reward"]) == (["s1"], 1.5), "a field that is there stays"
    with pytest.raises(NotFound, match="'s9'"):
        await queue.put_fields({"s9": {"reward": 0.0}})


async def test_putting_a_sample_again_does_nothing_even_after_it_was_consumed(
    opener: Opener, store: Store
) -> None:
    queue = await opener(["train"])
    queue._desk.block_samples = 2
    await queue.put(items(2))
    assert await queue.put(items(3)) == {"s0": False, "s1": False, "s2": True}
    async with await queue.claim("train", 3) as batch:
        await batch.acknowledge()
    await queue.put(items(1, first=3))
    assert await queue.put(items(3)) == dict.fromkeys(("s0", "s1", "s2"), False)
    later = await opener(["train"])
    assert (await later.put(items(3)))["s0"] is False
    await later.put_fields({"s0": {"late": 1}})
    assert store.stat().keys == 1, "a field for what is finished is not stored"
    assert (await later.claim("train", 1)).keys == ["s3"]
    assert store.stat().keys == 1


async def test_what_is_released_or_left_unacknowledged_is_given_again(queue: Queue) -> None:
    """It cannot be acknowledged any more: saying nothing would mean that it is done with."""
    await queue.put(items(4))
    async with await queue.claim("train", 3) as batch:
        await batch.acknowledge(["s1"])
    await batch.acknowledge(["s1"])
    for keys in (None, ["s0"]):
        with pytest.raises(Fenced, match="released"):
            await batch.acknowledge(keys)
    assert (await queue.claim("train", 3)).keys == ["s0", "s2", "s3"]
    with pytest.raises(Mistake, match="not in this batch"):
        await batch.acknowledge(["s3"])


async def test_a_member_that_lost_its_lease_cannot_acknowledge(
    queue: Queue, opener: Opener, ledger: Ledger, store: Store
) -> None:
    """Neither before its samples went to another, nor after; the other one can."""
    other = await opener(TASKS)
    await queue.put(items(4))
    early, late = await queue.claim("train", 2), await queue.claim("train", 2)
    await end_of(ledger, queue, seen=False)
    with pytest.raises(Fenced, match="lease"):
        await early.acknowledge()
    again = await other.claim("train", 4)
    assert sorted(again.keys) == ["s0", "s1", "s2", "s3"]
    with pytest.raises(Fenced):
        await late.acknowledge()
    await again.acknowledge()
    await again.acknowledge()
    assert queue.behind()["log"] == 4
    assert (await queue.claim("log", 4)).keys == again.keys
    assert store.stat().keys == 4


async def test_a_dead_members_samples_go_to_another(
    queue: Queue, opener: Opener, ledger: Ledger
) -> None:
    await queue.put(items(2))
    await queue.claim("train", 2)
    other = await opener(TASKS)
    waiting = asyncio.ensure_future(other.claim("train", keys=["s1", "s0"], timeout_s=20))
    with pytest.raises(TimedOut, match="somebody else's"):
        await other.claim("train", keys=["s1"], timeout_s=0.1)
    await end_of(ledger, queue, seen=False)
    batch = await waiting
    assert batch.keys == ["s1", "s0"]
    await batch.acknowledge(["s1"])
    successor = await opener(TASKS)
    async with batch:
        pass
    back = await successor.claim("train", keys=["s0", "s1"])
    assert (back.keys, back.already) == (["s0"], ["s1"])
    with pytest.raises(NotFound, match="'nobody'"):
        await successor.claim("train", keys=["nobody"])


async def test_a_full_queue_holds_producers_and_says_which_task_is_behind(
    opener: Opener,
) -> None:
    queue = await opener(TASKS, max_samples=4)
    await queue.put(items(3))
    with pytest.raises(NoRoom, match=r"train: 3, log: 3"):
        await queue.put(items(2, first=3), timeout_s=0.3)
    waiting = asyncio.ensure_future(queue.put(items(2, first=3)))
    for task in TASKS:
        async with await queue.claim(task, 1) as batch:
            assert not waiting.done()
            await batch.acknowledge()
    assert await waiting == {"s3": True, "s4": True}
    with pytest.raises(Mistake, match="never fit"):
        await queue.put(items(5, first=9))


async def test_bytes_are_a_limit_too(opener: Opener, store: Store) -> None:
    """And a put that finds no room leaves nothing in the store."""
    queue = await opener(["train"], max_bytes=3000)
    big = [Item(f"b{at}", {"x": bytes(1000)}) for at in range(3)]
    await queue.put(big[:2])
    with pytest.raises(NoRoom, match="bytes"):
        await queue.put(big[2:], timeout_s=0.3)
    assert store.stat().keys == 2
    async with await queue.claim("train", 1) as batch:
        await batch.acknowledge()
    assert await queue.put(big[2:]) == {"b2": True}


async def test_samples_that_are_too_old_are_dropped_once_and_count_as_done(
    queue: Queue, opener: Opener, store: Store
) -> None:
    for version in range(4):
        await queue.put(items(2, first=2 * version, version=version))
    batch = await queue.claim("train", 4, max_lag=1)
    assert batch.keys == ["s4", "s5", "s6", "s7"]
    assert batch.dropped == ["s0", "s1", "s2", "s3"]
    await batch.acknowledge()
    other = await opener(TASKS)
    assert (await other.claim("log", 8, max_lag=1, version=0)).dropped == []
    with pytest.raises(TimedOut):
        await other.claim("train", 1, timeout_s=0.1)
    assert store.stat().keys == 8


async def test_old_samples_in_more_blocks_than_a_transaction_has_room_for(
    opener: Opener,
) -> None:
    """They are dropped first, some at a time; what is claimed then is really claimed."""
    queue = await opener(["t"])
    queue._desk.block_samples = 1
    for at in range(60):
        await queue.put([Item(f"s{at}", version=at // 45)])
    batch = await queue.claim("t", 15, max_lag=0)
    assert batch.keys == [f"s{at}" for at in range(45, 60)]
    other = await opener(["t"])
    assert other.behind() == {"t": 15}
    with pytest.raises(TimedOut):
        await other.claim("t", 1, timeout_s=0.1)
    await batch.acknowledge()
    assert other.behind() in ({"t": 15}, {"t": 0})
    with pytest.raises(Mistake, match="spread over 41 blocks"):
        await queue.put([Item(f"more{at}", version=9) for at in range(41)])
        await queue.claim("t", 41)


async def test_samplers(opener: Opener) -> None:
    queue = await opener(["a", "b", "c"])
    lengths = [5, 1, 4, 2, 9, 3]
    await queue.put(
        [
            Item(f"s{at}", group="ABABAB"[at], tags={"length": length})
            for at, length in enumerate(lengths)
        ]
    )
    groups = await queue.claim("a", 3, sampler=whole_groups(3))
    assert groups.keys == ["s0", "s2", "s4"]
    with pytest.raises(Mistake, match="whole number of groups"):
        await queue.claim("a", 2, sampler=whole_groups(3))
    assert (await queue.claim("b", 2, sampler=weighted("length"))).keys == ["s4", "s0"]
    even = (await queue.claim("c", 6, sampler=balanced("length", 2))).samples
    sums = [sum(one.tags["length"] for one in part) for part in (even[:3], even[3:])]  # type: ignore[misc]
    assert sums == [13, 11], "in order it would have been 10 and 14"
    with pytest.raises(Mistake, match="not offered"):
        await queue.claim("a", 1, sampler=lambda samples, n: groups.samples[:1])


async def test_least_is_enough_when_the_time_is_over(queue: Queue) -> None:
    await queue.put(items(3))
    assert len(await queue.claim("train", 5, least=2, timeout_s=0.2)) == 3


async def test_everything_survives_the_end_of_all_members(ledger_url: str, store: Store) -> None:
    name = uuid.uuid4().hex
    async with ledgers.open(ledger_url) as ledger, Queue(store, ledger, name, TASKS) as queue:
        await queue.put(items(5))
        await (await queue.claim("train", 2)).acknowledge()
    async with ledgers.open(ledger_url) as ledger, Queue(store, ledger, name) as queue:
        assert queue.behind() == {"train": 3, "log": 5}
        assert (await queue.claim("train", 3)).keys == ["s2", "s3", "s4"]


async def test_payloads_that_a_dead_producer_could_not_record_are_deleted(
    queue: Queue, opener: Opener, store: Store
) -> None:
    """And only those: not what is recorded, not what a living producer is at work on."""
    await queue.put(items(2))
    place = queue.keys.place
    seat = await queue._desk.seat()
    await store.aput({f"{place}/{seat.id}/mine/x": b"at work", f"{place}/gone-1/s/x": b"lost"})
    await (await opener(TASKS)).tidy()
    left = {one.key for one in store.scan()}
    assert f"{place}/{seat.id}/mine/x" in left
    assert f"{place}/gone-1/s/x" not in left
    assert len(left) == 3


async def test_many_members_share_the_work_without_a_gap(opener: Opener) -> None:
    """Four producers and four consumers at once: everything exactly once."""
    members = [await opener(["t"]) for _ in range(4)]
    seen: list[str] = []

    async def produce(at: int) -> None:
        for part in range(5):
            await members[at].put([Item(f"p{at}-{part}-{n}") for n in range(20)])

    async def consume(at: int) -> None:
        with contextlib.suppress(TimedOut):
            while True:
                batch = await members[at].claim("t", 16, least=1, timeout_s=2.0)
                await batch.acknowledge()
                seen.extend(batch.keys)

    await asyncio.gather(*(work(at) for at in range(4) for work in (produce, consume)))
    assert len(seen) == 400
    assert len(set(seen)) == 400


async def test_large_puts_and_claims_stay_within_the_ledgers_limits(opener: Opener) -> None:
    """2,500 samples with long keys and tags: several blocks, one claim over all of them."""
    queue = await opener(["t"])
    many = [Item(f"{'k' * 80}-{at}", tags={"prompt": "p" * 100, "n": at}) for at in range(2500)]
    assert sum((await queue.put(many)).values()) == 2500
    batch = await queue.claim("t", 2500)
    assert [one.tags["n"] for one in batch.samples] == list(range(2500))
    await batch.acknowledge()
    assert queue.behind() == {"t": 0}


async def test_fetch_tells_what_does_not_arrive(queue: Queue, store: Store) -> None:
    await queue.put(items(3))
    batch = await queue.claim("train", 3)
    gone = batch.samples[1].fields["x"]
    store.delete([gone])
    with pytest.raises(Exception, match=re.escape(gone.key)) as caught:
        await batch.fetch()
    assert transfer.status(caught.value.failures[gone.key]) == "stale"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"tasks": []}, "at least one task"),
        ({"tasks": "train"}, "a list of tasks"),
        ({"tasks": ["a/b"]}, "plain name"),
        ({"tasks": {"train": "tokens"}}, "tokens"),
        ({"tasks": ["t"], "max_samples": 0}, "1 or more"),
        ({"tasks": ["t"], "member": "a/b"}, "plain name"),
        ({"tasks": ["t"], "run": "a/b"}, "without '/'"),
    ],
)
def test_mistakes_are_told(store: Store, how: dict[str, Any], match: str) -> None:
    with pytest.raises(Mistake, match=match):
        Queue(store, ledgers.open("memory:"), "q", **how)


async def test_more_mistakes_are_told(queue: Queue, opener: Opener) -> None:
    with pytest.raises(Mistake, match="has the tasks"):
        await opener(["other"])
    with pytest.raises(Mistake, match="no task 'nothing'"):
        await queue.claim("nothing", 1)
    with pytest.raises(Mistake, match="either"):
        await queue.claim("train")
    with pytest.raises(Mistake, match="given twice"):
        await queue.put([Item("a"), Item("a")])
    with pytest.raises(Mistake, match="cannot be carried"):
        await queue.put([Item("a", {"x": object()})])
    assert (await opener(None)).config.tasks == {"train": ("x",), "log": ()}
