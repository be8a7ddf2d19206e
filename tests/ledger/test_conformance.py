"""Keys, transactions, ranges and pages: what every back end must do, sentence by sentence."""

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest

from holdfast import ledger as ledgers
from holdfast.errors import Mistake, TooLarge
from holdfast.ledger import (
    MAX_KEY_BYTES,
    MAX_TXN_BYTES,
    MAX_TXN_OPS,
    Compare,
    Delete,
    Entry,
    Get,
    Ledger,
    Op,
    Page,
    Put,
    absent,
    present,
    same_life,
    unchanged,
    value_is,
)
from holdfast.ledger.base import PAGE_ENTRIES
from holdfast.ledger.types import Target

from .conformance import FIELDS, RELATIONS
from .conftest import Granter, Opener


async def put(ledger: Ledger, key: str, value: bytes = b"", lease: int = 0) -> Entry:
    """Write one key and return its entry."""
    answer = await ledger.txn(then=[Put(key, value, lease), Get(key)])
    entry = answer.results[1]
    assert entry is not None
    return entry


async def value(ledger: Ledger, key: str) -> bytes | None:
    """What a key holds; None when there is no such key."""
    entry = await ledger.get(key)
    return None if entry is None else entry.value


async def revision(ledger: Ledger, root: str) -> int:
    return (await ledger.range(root)).revision


# ---- entries and revisions ---------------------------------------------------------------


async def test_an_entry_remembers_its_revisions(ledger: Ledger, root: str) -> None:
    """create stays for one life of the key, mod moves, version counts from 1; writing the same
    value again is a change like any other."""
    key = root + "a"
    one = await ledger.txn(then=[Put(key, b"same")])
    two = await ledger.txn(then=[Put(key, b"same")])
    entry = await ledger.get(key)
    assert two.revision == one.revision + 1
    assert entry == Entry(key, b"same", one.revision, two.revision, 2)
    gone = await ledger.txn(then=[Delete(key)])
    three = await ledger.txn(then=[Put(key, b"3")])
    assert gone.results == (entry,)
    assert await ledger.get(key) == Entry(key, b"3", three.revision, three.revision, 1)


async def test_a_changing_transaction_makes_exactly_one_revision(
    ledger: Ledger, root: str
) -> None:
    """Revisions grow by one per transaction, however many keys it changes."""
    await put(ledger, root + "old")
    before = await revision(ledger, root)
    answer = await ledger.txn(
        then=[Put(root + "a", b""), Put(root + "b", b""), Delete(root + "old")]
    )
    assert answer.revision == before + 1
    assert [one.mod_revision for one in (await ledger.range(root)).entries] == [before + 1] * 2
    assert (await ledger.txn(then=[Put(root + "a", b"")])).revision == before + 2


async def test_a_transaction_that_changes_nothing_makes_no_revision(
    ledger: Ledger, root: str
) -> None:
    """It answers with the revision it read."""
    key = root + "a"
    before = (await put(ledger, key)).mod_revision
    for answer in (
        await ledger.txn(),
        await ledger.txn([absent(key)], [Put(key, b"x")]),
        await ledger.txn(then=[Delete(root + "missing")]),
        await ledger.txn(then=[Get(key), Get(root + "missing")]),
        await ledger.txn([absent(key)], [Put(key, b"x")], [Delete(root + "missing"), Get(key)]),
    ):
        assert answer.revision == before
    assert (await put(ledger, key)).mod_revision == before + 1


async def test_any_bytes_are_a_value(ledger: Ledger, root: str) -> None:
    """Values come back bit for bit; an empty one is not the same as no key."""
    assert await ledger.get(root + "0") is None
    values = [b"", b"\0", bytes(range(256)), b"\xff" * 1000, "é€😀".encode()]
    for number, value in enumerate(values):
        await put(ledger, f"{root}{number}", value)
    assert [one.value for one in (await ledger.range(root)).entries] == values


# ---- transactions ------------------------------------------------------------------------


async def test_results_are_one_per_operation(ledger: Ledger, root: str) -> None:
    """None for a put, what it was for a delete, the entry for a get; None where nothing is."""
    a = await put(ledger, root + "a", b"a")
    b = await put(ledger, root + "b", b"b")
    answer = await ledger.txn(
        then=[Get(a.key), Put(a.key, b"x"), Delete(b.key), Get(b.key), Delete(root + "c")]
    )
    assert answer.succeeded
    assert answer.results == (a, None, b, None, None)
    assert (await ledger.txn()).results == ()


async def test_a_get_sees_the_operations_before_it(ledger: Ledger, root: str) -> None:
    """Inside one transaction a get reads the transaction's own writes, not later ones."""
    a = await put(ledger, root + "a", b"old")
    answer = await ledger.txn(
        then=[Get(a.key), Put(a.key, b"new"), Get(a.key), Put(root + "b", b"b"), Get(root + "b")]
    )
    new = Entry(a.key, b"new", a.create_revision, answer.revision, 2)
    made = Entry(root + "b", b"b", answer.revision, answer.revision, 1)
    assert answer.results == (a, None, new, None, made)
    gone = await ledger.txn(then=[Delete(a.key), Get(a.key)])
    assert gone.results == (new, None)


async def test_compares_see_the_state_before_the_transaction(ledger: Ledger, root: str) -> None:
    """All conditions are decided first; then exactly one branch runs."""
    key = root + "a"
    answer = await ledger.txn([absent(key)], [Put(key, b"then")], [Put(key, b"otherwise")])
    assert answer.succeeded
    answer = await ledger.txn([absent(key)], [Put(key, b"then")], [Put(key, b"otherwise")])
    assert not answer.succeeded
    assert await value(ledger, key) == b"otherwise"


async def test_one_false_condition_is_enough(ledger: Ledger, root: str) -> None:
    """`then` runs only if every condition holds; no conditions always hold."""
    key = root + "a"
    await put(ledger, key, b"1")
    good, bad = value_is(key, b"1"), value_is(key, b"2")
    for conditions in itertools.product([good, bad], repeat=3):
        answer = await ledger.txn(conditions, [Get(key)], [])
        assert answer.succeeded == (bad not in conditions)
    assert (await ledger.txn([], [])).succeeded


@pytest.mark.parametrize("target", ["create", "mod", "version", "lease"])
async def test_numbers_are_compared(
    ledger: Ledger, root: str, grant: Granter, target: Target
) -> None:
    """Every relation on every number, below, at and above it; a missing key has 0."""
    lease = await grant(600)
    await put(ledger, root + "a", b"", lease.id)
    await put(ledger, root + "other")
    entry = await put(ledger, root + "a", b"", lease.id)
    for key, actual in ((entry.key, getattr(entry, FIELDS[target])), (root + "missing", 0)):
        for relation, delta in itertools.product(RELATIONS, (-1, 0, 1)):
            one = Compare(key, target, relation, actual + delta)
            expected = RELATIONS[relation](actual, actual + delta)
            assert (await ledger.txn([one])).succeeded == expected, one


async def test_values_are_compared_byte_by_byte(ledger: Ledger, root: str) -> None:
    """In the order of their bytes; the value of a missing key compares false, even with !=."""
    operands = [b"", b"a", b"ab", b"b", b"\x7f", b"\x80", b"\xff", b"a\0"]
    for number, value in enumerate(operands):
        key = f"{root}{number}"
        await put(ledger, key, value)
        for relation, operand in itertools.product(RELATIONS, operands):
            one = Compare(key, "value", relation, operand)
            assert (await ledger.txn([one])).succeeded == RELATIONS[relation](value, operand), one
    for relation in RELATIONS:
        one = Compare(root + "missing", "value", relation, b"")
        assert not (await ledger.txn([one])).succeeded


async def test_the_named_conditions(ledger: Ledger, root: str) -> None:
    """absent, present, unchanged, same_life and value_is mean what they say."""

    async def true(one: Compare) -> bool:
        return (await ledger.txn([one])).succeeded

    key = root + "a"
    assert await true(absent(key))
    assert not await true(present(key))
    assert not await true(value_is(key, b""))
    first = await put(ledger, key, b"1")
    assert not await true(absent(key))
    assert await true(present(key))
    assert await true(unchanged(first))
    assert await true(value_is(key, b"1"))
    await put(ledger, key, b"1")
    assert not await true(unchanged(first))
    assert await true(same_life(first))
    await ledger.txn(then=[Delete(key)])
    assert not await true(same_life(first))
    await put(ledger, key, b"1")
    assert not await true(same_life(first))
    assert not await true(unchanged(first))


# ---- limits and mistakes -----------------------------------------------------------------


async def test_a_transaction_takes_128_of_each(ledger: Ledger, root: str) -> None:
    """128 conditions and 128 operations in each branch are fine, one more is too many."""
    keys = [f"{root}{number:03}" for number in range(MAX_TXN_OPS + 1)]
    conditions, puts = [absent(key) for key in keys], [Put(key, b"") for key in keys]
    gets = [Get(key) for key in keys]
    for too_many in ((conditions,), ((), puts), ((), (), gets)):
        with pytest.raises(TooLarge):
            await ledger.txn(*too_many)
    assert (await ledger.range(root)).entries == ()
    answer = await ledger.txn(conditions[:-1], puts[:-1], gets[:-1])
    assert answer.succeeded
    assert len((await ledger.range(root)).entries) == MAX_TXN_OPS
    answer = await ledger.txn(conditions[:-1], puts[:-1], gets[:-1])
    assert not answer.succeeded
    assert all(answer.results)


async def test_a_transaction_takes_one_mebibyte(ledger: Ledger, root: str) -> None:
    """Keys and values of both branches together; one byte more is too many."""
    key = root + "a"
    full = b"\xa5" * (MAX_TXN_BYTES - len(key))
    with pytest.raises(TooLarge):
        await ledger.txn(then=[Put(key, full + b"x")])
    with pytest.raises(TooLarge):
        await ledger.txn([absent(key)], [Put(key, full)], [Get(key)])
    assert await ledger.get(key) is None
    await ledger.txn(then=[Put(key, full)])
    assert await value(ledger, key) == full


BAD_KEYS: list[Any] = ["", "a", "a/b", " /a", "/\n", "/a\0b", "/\x7f", "/\ud800", b"/a", None]


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
async def test_what_is_not_a_key_is_refused(ledger: Ledger, root: str, key: Any) -> None:
    """By every call that takes one, and nothing is done."""
    before = await revision(ledger, root)
    wrong: list[list[Op]] = [[Put(root + "a", b""), Put(key, b"")], [Get(key)], [Delete(key)]]
    calls: list[Awaitable[object]] = []
    calls += [ledger.get(key), ledger.range(key), anext(ledger.pages(key))]
    calls += [ledger.txn([absent(key)]), *(ledger.txn(then=ops) for ops in wrong)]
    for call in (*calls, *(ledger.txn(otherwise=ops) for ops in wrong)):
        with pytest.raises(Mistake):
            await call
    with pytest.raises(Mistake):
        ledger.watch(key, start=1)
    assert await revision(ledger, root) == before


async def test_a_key_has_at_most_1024_bytes(ledger: Ledger, root: str) -> None:
    """Bytes are counted, not letters."""
    longest = root + "é" * ((MAX_KEY_BYTES - len(root)) // 2)
    longest += "a" * (MAX_KEY_BYTES - len(longest.encode()))
    assert (await put(ledger, longest, b"x")).key == longest
    assert await ledger.get(longest) is not None
    for call in (ledger.get(longest + "a"), put(ledger, longest + "a")):
        with pytest.raises(TooLarge):
            await call


async def test_a_transaction_writes_a_key_once(ledger: Ledger, root: str) -> None:
    """Twice in one branch is a mistake, once in each branch and reading it often is not."""
    key = root + "a"
    before = await revision(ledger, root)
    writes: tuple[Op, ...] = (Put(key, b""), Delete(key))
    for first, second in itertools.product(writes, repeat=2):
        with pytest.raises(Mistake):
            await ledger.txn(then=[first, Get(key), second])
        with pytest.raises(Mistake):
            await ledger.txn(otherwise=[first, second])
    assert await revision(ledger, root) == before
    answer = await ledger.txn(
        [present(key), absent(key)], [Delete(key)], [Get(key), Put(key, b"x"), Get(key), Get(key)]
    )
    assert [one and one.value for one in answer.results] == [None, None, b"x", b"x"]


async def test_wrong_types_are_refused(ledger: Ledger, root: str) -> None:
    """Values are bytes; numbers are compared with numbers and values with bytes."""
    wrong: Any = "text"
    for call in (
        ledger.txn(then=[Put(root + "a", wrong)]),
        ledger.txn([Compare(root + "a", "value", "==", 1)]),
        ledger.txn([Compare(root + "a", "mod", "==", b"1")]),
    ):
        with pytest.raises(Mistake):
            await call


# ---- ranges and pages --------------------------------------------------------------------


async def test_keys_come_in_the_order_of_their_bytes(ledger: Ledger, root: str) -> None:
    """That is the order of code points, in every script."""
    names = ["~", "é", "z", "Z", "0", "ß", "€", "😀", "a b", "a", "a/", "a0", "\uffee", "日本"]
    await ledger.txn(then=[Put(root + name, b"") for name in names])
    found = [one.key for one in (await ledger.range(root)).entries]
    assert found == sorted((root + name for name in names), key=str.encode)


async def test_a_prefix_is_compared_letter_by_letter(ledger: Ledger, root: str) -> None:
    """It is not a folder unless it ends with a slash, and it finds the key itself."""
    for name in ("a", "a/1", "a/2", "ab", "b", "é", "éa", "ê"):
        await put(ledger, root + name)

    async def below(prefix: str) -> list[str]:
        found = await ledger.range(root + prefix)
        return [one.key.removeprefix(root) for one in found.entries]

    assert await below("a") == ["a", "a/1", "a/2", "ab"]
    assert await below("a/") == ["a/1", "a/2"]
    assert await below("é") == ["é", "éa"]
    assert await below("nothing") == []


async def test_wildcards_are_letters(ledger: Ledger, root: str) -> None:
    """Nothing in a key has a meaning to the back end."""
    for name in ("%", "_", "*", "[a]", "a'b", 'a"b', "a\\b", "?", "ab"):
        await put(ledger, root + name)
        found = await ledger.range(root + name)
        assert [one.key for one in found.entries] == [root + name]


async def test_a_range_of_the_past(ledger: Ledger, root: str) -> None:
    """At an old revision everything is as it was then; the future is a mistake."""
    start = await revision(ledger, root)
    moments = {start: await ledger.range(root)}
    steps: list[list[Op]] = [
        [Put(root + "a", b"1"), Put(root + "b", b"1")],
        [Put(root + "a", b"2"), Delete(root + "b")],
        [Put(root + "b", b"3"), Put(root + "c", b"3")],
        [Delete(root + "a"), Delete(root + "b"), Delete(root + "c")],
    ]
    for ops in steps:
        answer = await ledger.txn(then=ops)
        moments[answer.revision] = await ledger.range(root)
    assert sorted(moments) == list(range(start, start + 5))
    for at, moment in moments.items():
        if at:
            assert await ledger.range(root, revision=at) == moment
        assert moment.revision == at
    with pytest.raises(Mistake):
        await ledger.range(root, revision=start + 100)


async def test_pages_are_one_moment_while_others_write(
    ledger: Ledger, open_ledger: Opener, root: str
) -> None:
    """Keys that come, go and change between two pages do not show."""
    other = await open_ledger()
    await ledger.txn(then=[Put(f"{root}{number:02}", b"old") for number in range(0, 20, 2)])
    moment = await ledger.range(root)
    found: list[Page] = []
    async for page in ledger.pages(root, limit=3):
        found.append(page)
        last = int(page.entries[-1].key[-2:])
        await other.txn(
            then=[
                Put(f"{root}{last + 1:02}", b"new"),
                Put(f"{root}{last + 2:02}", b"new"),
                Delete(f"{root}{last + 4:02}"),
                Delete(f"{root}00"),
            ]
        )
    assert tuple(entry for page in found for entry in page.entries) == moment.entries
    assert {page.revision for page in found} == {moment.revision}
    assert [len(page.entries) for page in found] == [3, 3, 3, 1]
    assert [page.more for page in found] == [True, True, True, False]


async def test_a_page_that_is_just_full_is_the_last(ledger: Ledger, root: str) -> None:
    """`more` is exact, also for an empty range."""
    assert [page.more async for page in ledger.pages(root, limit=1)] == [False]
    await ledger.txn(then=[Put(f"{root}{number}", b"") for number in range(4)])
    assert [page.more async for page in ledger.pages(root, limit=2)] == [True, False]
    assert [page.more async for page in ledger.pages(root, limit=4)] == [False]


async def test_pages_want_sensible_numbers(ledger: Ledger, root: str) -> None:
    """A limit of at least 1, a revision of at least 0."""
    for wrong in ({"limit": 0}, {"limit": -1}, {"revision": -1}):
        with pytest.raises(Mistake):
            await anext(ledger.pages(root, **wrong))


async def test_a_long_range_is_whole(ledger: Ledger, root: str) -> None:
    """More entries than fit a page come in order, each once, at one revision."""
    names = [f"{root}{number:05}" for number in range(2 * PAGE_ENTRIES + 100)]
    for at in range(0, len(names), MAX_TXN_OPS):
        chunk = names[at : at + MAX_TXN_OPS]
        answer = await ledger.txn(then=[Put(name, b"") for name in chunk])
    found = await ledger.range(root)
    assert [one.key for one in found.entries] == names
    assert found.revision == answer.revision


# ---- several clients ---------------------------------------------------------------------


async def test_what_was_committed_is_seen_by_everybody(open_ledger: Opener, root: str) -> None:
    """A read that begins after a commit sees it, through any client."""
    clients = [await open_ledger() for _ in range(3)]
    for number in range(30):
        writer, reader = clients[number % 3], clients[(number + 1) % 3]
        answer = await writer.txn(then=[Put(root + "a", b"%d" % number)])
        entry = await reader.get(root + "a")
        assert entry is not None
        assert entry.value == b"%d" % number
        found = await clients[(number + 2) % 3].range(root)
        assert (found.entries, found.revision) == ((entry,), answer.revision)


async def test_only_one_of_many_wins(open_ledger: Opener, root: str) -> None:
    """Of many transactions that want the key to be absent exactly one succeeds."""
    clients = [await open_ledger() for _ in range(4)]
    for number in range(10):
        key = f"{root}{number}"
        calls = [clients[n % 4].txn([absent(key)], [Put(key, b"%d" % n)]) for n in range(12)]
        answers = await asyncio.gather(*calls)
        winners = [n for n, answer in enumerate(answers) if answer.succeeded]
        assert len(winners) == 1
        assert await value(clients[0], key) == b"%d" % winners[0]


async def test_starting_twice_does_no_harm(ledger_url: str, root: str) -> None:
    """Both ways of opening work, and what was written outlives the object."""
    ledger = await ledgers.open(ledger_url)
    await ledger.start()
    entry = await put(ledger, root + "a", b"kept")
    await ledger.close()
    async with ledgers.open(ledger_url) as again:
        assert await again.get(root + "a") == entry
