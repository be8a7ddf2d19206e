"""Many tasks and many processes on one ledger: sums are right, histories are possible."""

import asyncio
import random
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.ledger import Entry, Ledger, Put, absent, unchanged
from holdfast.proc import Child, spawn
from holdfast.sim.linearizability import Multi, Operation, check, check_revisions, save

from .conformance import LIMIT_S, take, within
from .conftest import Opener
from .history_worker import ACCOUNTS, START, merge

WORKER = Path(__file__).with_name("history_worker.py")
PROCESSES = 6
SEED = 20_260_101


async def test_many_tasks_count_together(open_ledger: Opener, root: str) -> None:
    """Compare-and-set counters lose no step, whoever collides with whom."""
    clients = [await open_ledger() for _ in range(3)]
    key, steps = root + "counter", 15

    async def count(ledger: Ledger) -> None:
        for _ in range(steps):
            while True:
                old = await ledger.get(key)
                value = int(old.value) if old else 0
                same = unchanged(old) if old else absent(key)
                if (await ledger.txn([same], [Put(key, b"%d" % (value + 1))])).succeeded:
                    break

    await within(asyncio.gather(*[count(clients[n % 3]) for n in range(9)]), 60)
    entry = await clients[0].get(key)
    assert entry is not None
    assert (int(entry.value), entry.version) == (9 * steps, 9 * steps)


async def test_many_tasks_move_money(open_ledger: Opener, root: str) -> None:
    """Every range shows the same sum: no transaction is ever seen half."""
    clients = [await open_ledger() for _ in range(3)]
    await clients[0].txn(then=[Put(f"{root}{n}", b"100") for n in range(5)])
    rng, moved = random.Random(SEED), list[bool]()

    async def move(ledger: Ledger) -> None:
        for _ in range(20):
            found = (await ledger.range(root)).entries
            assert sum(int(one.value) for one in found) == 500
            source, target = rng.sample(found, 2)
            amount = rng.randint(0, int(source.value))
            answer = await ledger.txn(
                [unchanged(source), unchanged(target)],
                [_changed(source, -amount), _changed(target, amount)],
            )
            moved.append(answer.succeeded)

    await within(asyncio.gather(*[move(clients[n % 3]) for n in range(6)]), 60)
    assert sum(int(one.value) for one in (await clients[0].range(root)).entries) == 500
    assert any(moved)


def _changed(entry: Entry, by: int) -> Put:
    return Put(entry.key, b"%d" % (int(entry.value) + by))


class Workers:
    """Processes on one ledger, each of which records what it does."""

    def __init__(self, ledger: Ledger, url: str, root: str, folder: Path) -> None:
        self.ledger, self.url, self.root, self.folder = ledger, url, root, folder
        self.paths = [folder / f"p{number}.jsonl" for number in range(PROCESSES)]
        self.children: list[Child] = []

    async def run(self, count: int, kind: str, *, killed: int = 0) -> None:
        """Start them all, and let them go at the same moment."""
        start = (await self.ledger.range(self.root)).revision + 1
        for number, path in enumerate(self.paths):
            argv = [sys.executable, str(WORKER), self.url, self.root, f"p{number}"]
            argv += [str(SEED + number), str(count), str(path), kind]
            argv += ["killed"] * (number < killed)
            self.children.append(spawn(argv, log=self.folder / f"p{number}.log"))
        async with self.ledger.watch(self.root + "ready/", start=start) as watch:
            await take(watch, PROCESSES)
        await self.ledger.txn(then=[Put(self.root + "go", b"")])

    async def join(self, *, killed: int = 0) -> list[Operation]:
        """Wait for them all; returns what they did."""
        for number, child in enumerate(self.children):
            code = await within(asyncio.to_thread(child.process.wait), 60)
            expected = -signal.SIGKILL if number < killed else 0
            assert code == expected, child.log and child.log.read_text()
        return merge(self.paths)

    def judge(self, history: list[Operation]) -> None:
        """A history that is refused stays, to be looked at and checked again."""
        kept = self.folder / "history.jsonl"
        save(kept, history)
        for verdict in (check(history), check_revisions(history)):
            assert verdict.ok, f"seed {SEED}, history in {kept}\n{verdict}"


@pytest.fixture
def workers(ledger: Ledger, ledger_url: str, root: str, tmp_path: Path) -> Iterator[Workers]:
    """Workers that end with the test."""
    workers = Workers(ledger, ledger_url, root, tmp_path)
    yield workers
    for child in workers.children:
        child.kill_group()


def _has_begun(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 8000


def _overlaps(history: list[Operation]) -> int:
    """How many operations began while another process was in the middle of one."""
    busy_until: dict[str, int] = {}
    overlapping = 0
    for one in sorted(history, key=lambda one: one.invoked):
        others = (until for process, until in busy_until.items() if process != one.process)
        overlapping += one.invoked < max(others, default=0)
        busy_until[one.process] = one.returned or 0
    return overlapping


across_processes = pytest.mark.parametrize(
    "ledger_url", ["sqlite", pytest.param("etcd", marks=pytest.mark.etcd)], indirect=True
)


@across_processes
async def test_the_history_of_many_processes_is_linearizable(workers: Workers) -> None:
    """Six processes, five keys: reads, writes, compare-and-set, deletes, revisions."""
    await workers.run(300, "single")
    history = await workers.join()
    assert len(history) == PROCESSES * 300
    assert all(one.returned for one in history)
    assert _overlaps(history) > 100
    assert {type(one.call).__name__ for one in history} == {"Read", "Write", "Cas", "Remove"}
    workers.judge(history)


@across_processes
async def test_the_history_of_killed_processes_is_linearizable(workers: Workers) -> None:
    """What a killed process was doing happened whole, or not at all; the others go on."""
    await workers.run(200, "single", killed=2)
    for child, path in list(zip(workers.children, workers.paths, strict=True))[:2]:
        await asyncio.to_thread(child.wait_until, partial(_has_begun, path), LIMIT_S)
        child.kill_group()
    history = await workers.join(killed=2)
    assert {one.process for one in history if one.returned is None} <= {"p0", "p1"}
    workers.judge(history)


@across_processes
async def test_transfers_between_processes_are_linearizable(workers: Workers) -> None:
    """Money moves between two keys in one moment, and the sum stays at every moment."""
    ledger, root = workers.ledger, workers.root
    seeded = Multi(writes=dict.fromkeys(ACCOUNTS, START))
    await ledger.txn(then=[Put(root + name, b"%d" % START) for name in ACCOUNTS])
    await workers.run(150, "transfers")
    history = [Operation("seed", 0, 1, seeded, ()), *await workers.join()]
    for one in history:
        if isinstance(one.call, Multi) and one.call.reads:
            assert isinstance(one.answer, tuple)
            assert sum(value or 0 for value in one.answer if not isinstance(value, str)) == 400
    moved = [one for one in history if one.answer == ()]
    assert len(moved) > 50
    assert sum(int(one.value) for one in (await ledger.range(root + "a")).entries) == 400
    workers.judge(history)
