"""One process of a concurrent history: works on a shared ledger and records what it did.

    history_worker.py URL ROOT NAME SEED COUNT FILE single|transfers [killed]

One that is to be `killed` does not end by itself: the test decides when it dies, however quick
it was.

Each operation is recorded before it is sent, as one with an unknown outcome, and again
when its answer is there; so the record is right wherever the process is killed. `merge`
puts the records of all processes together.
"""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from holdfast import ledger as ledgers
from holdfast.errors import Retriable, UnknownOutcome
from holdfast.ledger import Compare, Delete, Entry, Get, Ledger, Put, absent, value_is
from holdfast.sim.history import Answer, Call, Cas, Multi, Operation, Read, Remove, Write

KEYS = ("k0", "k1", "k2", "k3", "k4")
ACCOUNTS = ("a0", "a1", "a2", "a3")
START = 100

Outcome = tuple[Answer, int]


class Recorder:
    """Writes each operation twice: when it is invoked and when it has returned."""

    def __init__(self, path: Path, process: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._process = process

    async def record(self, call: Call, act: Awaitable[Outcome]) -> None:
        invoked = time.monotonic_ns()
        self._write(Operation(self._process, invoked, None, call))
        try:
            answer, revision = await act
        except UnknownOutcome:
            return
        except Retriable:  # it took no effect, like a read that says nothing
            self._write(Operation(self._process, invoked, None, Read("")))
            return
        returned = time.monotonic_ns()
        self._write(Operation(self._process, invoked, returned, call, answer, revision))

    def _write(self, operation: Operation) -> None:
        os.write(self._file, msgspec.json.encode(operation) + b"\n")


def merge(paths: Iterable[Path]) -> list[Operation]:
    """All operations, each as it was last heard of."""
    found: dict[tuple[str, int], Operation] = {}
    for path in paths:
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                one = msgspec.json.decode(line, type=Operation)
                found[one.process, one.invoked] = one
    return [one for one in found.values() if one.call != Read("")]


def _number(entry: Entry | None) -> int | None:
    return None if entry is None else int(entry.value)


def _is(key: str, value: int | None) -> Compare:
    return absent(key) if value is None else value_is(key, b"%d" % value)


def single(
    ledger: Ledger, root: str, rng: random.Random, seen: dict[str, int | None]
) -> tuple[Call, Callable[[], Awaitable[Outcome]]]:
    """One random call on one key. `seen` is what this process last read there."""
    name, value = rng.choice(KEYS), rng.randrange(1_000_000)
    key = root + name

    async def get() -> Outcome:
        seen[name] = _number(await ledger.get(key))
        return seen[name], 0

    async def get_in_txn() -> Outcome:
        answer = await ledger.txn(then=[Get(key)])
        seen[name] = _number(answer.results[0])
        return seen[name], answer.revision

    async def put() -> Outcome:
        return None, (await ledger.txn(then=[Put(key, b"%d" % value)])).revision

    async def swap(expected: int | None) -> Outcome:
        answer = await ledger.txn([_is(key, expected)], [Put(key, b"%d" % value)], [Get(key)])
        seen[name] = value if answer.succeeded else _number(answer.results[0])
        return answer.succeeded, answer.revision

    async def remove() -> Outcome:
        answer = await ledger.txn(then=[Delete(key)])
        return answer.results[0] is not None, answer.revision

    dice = rng.random()
    if dice < 0.25:
        return Read(name), get
    if dice < 0.45:
        return Read(name), get_in_txn
    if dice < 0.6:
        return Write(name, value), put
    if dice < 0.9:
        expected = seen.get(name)
        return Cas(name, expected, value), lambda: swap(expected)
    return Remove(name), remove


def transfer(
    ledger: Ledger, root: str, rng: random.Random, seen: dict[str, int | None]
) -> tuple[Call, Callable[[], Awaitable[Outcome]]]:
    """Read all accounts at one moment, or move money between two of them."""

    async def read() -> Outcome:
        found = await ledger.range(root + "a")
        seen.update({one.key.removeprefix(root): int(one.value) for one in found.entries})
        return tuple(seen[name] for name in ACCOUNTS), found.revision

    source, target = rng.sample(ACCOUNTS, 2)
    old = {name: seen.get(name) or 0 for name in (source, target)}
    amount = rng.randint(0, old[source])
    new = {source: old[source] - amount, target: old[target] + amount}

    async def move() -> Outcome:
        conditions = [_is(root + name, value) for name, value in old.items()]
        puts = [Put(root + name, b"%d" % value) for name, value in new.items()]
        answer = await ledger.txn(conditions, puts)
        if answer.succeeded:
            seen.update(new)
        else:
            seen.clear()
        return () if answer.succeeded else False, answer.revision

    if not seen or rng.random() < 0.3:
        return Multi(reads=ACCOUNTS), read
    return Multi(writes=dict(new), expect=dict(old)), move


async def work(
    url: str, root: str, name: str, seed: int, count: int, path: Path, kind: str
) -> None:
    """Say that we are ready, wait for the start, then do `count` operations."""
    rng, seen = random.Random(seed), dict[str, int | None]()
    recorder, choose = Recorder(path, name), {"single": single, "transfers": transfer}[kind]
    async with ledgers.open(url) as ledger:
        now = await ledger.txn(then=[Put(f"{root}ready/{name}", b"")])
        async with ledger.watch(f"{root}go", start=now.revision) as watch:
            await anext(watch)
        for _ in range(count):
            call, act = choose(ledger, root, rng, seen)
            await recorder.record(call, act())


if __name__ == "__main__":
    url, root, name, seed, count, path, kind = sys.argv[1:8]
    asyncio.run(work(url, root, name, int(seed), int(count), Path(path), kind))
    if sys.argv[8:] == ["killed"]:
        signal.pause()
