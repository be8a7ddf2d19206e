"""Schedules that once broke a promise of the sqlite ledger; each must stay mended."""

import asyncio
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import ledger
from holdfast.errors import LeaseLost, Mistake
from holdfast.ledger import Keeper, LiveRuntime, Put, open_sync
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.ledger.sqlite.bells import bell_folder
from holdfast.ledger.sqlite.engine import Engine
from holdfast.ledger.sync import SyncLedger
from holdfast.timeouts import Timeouts
from ledger.conformance import take, within

ONLY_BELLS = Timeouts(watch_backstop_s=100.0, watch_silence_s=200.0, ledger_lease_s=200.0)
"""A watch that is not woken does not look by itself before the test is over."""
_fork = multiprocessing.get_context("fork")


def _in_child(act: object) -> int:
    """Run something in a forked child; its exit code says how it went."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = act()  # type: ignore[operator]
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_child_of_a_process_that_has_it_open_may_not_open_it(tmp_path: Path) -> None:
    """SQLite's locks lie after a fork: what the child commits would be lost."""
    url = f"sqlite:///{tmp_path}/x.db"

    def child() -> int:
        try:
            open_sync(url)
        except Mistake as error:
            return 7 if "forked" in str(error) else 2
        return 3

    with open_sync(url) as led:
        led.txn([], [Put("/a", b"")])
        assert _in_child(child) == 7

    def later_child() -> int:
        open_sync(url).close()
        return 9

    assert _in_child(later_child) == 9, "after the close it may"


def test_a_forked_child_must_open_its_own(tmp_path: Path) -> None:
    """SQLite connections do not survive a fork: a clear error instead of a corrupt file."""
    with open_sync(f"sqlite:///{tmp_path}/x.db") as led:

        def child() -> int:
            with pytest.raises(Mistake, match="before a fork"):
                led.twin._opened()  # type: ignore[attr-defined]
            return 7

        assert _in_child(child) == 7


async def test_closing_the_inherited_object_leaves_the_parent_alone(tmp_path: Path) -> None:
    """A forked child that cleans up must not silence its parent's watches."""
    async with (
        SqliteLedger(tmp_path / "x.db", timeouts=ONLY_BELLS) as led,
        led.watch("/", start=1) as watch,
    ):
        bells = list(bell_folder(tmp_path / "x.db").iterdir())

        def child() -> int:
            led.close().send(None)
            return 0

        try:
            _in_child(child)
        finally:
            assert list(bell_folder(tmp_path / "x.db").iterdir()) == bells
        await led.txn([], [Put("/a", b"")])
        await take(watch)


@pytest.mark.parametrize("sync", ["normal", "full"])
async def test_an_impossible_lease_harms_nobody_else(tmp_path: Path, sync: str) -> None:
    """A number that SQLite cannot hold is a lease that was never given; others go on."""
    async with ledger.open(f"sqlite:///{tmp_path}/x.db?sync={sync}") as led:
        for lease in (2**64, -1, 2**63):
            with pytest.raises(LeaseLost):
                await led.keep_alive(lease)
            with pytest.raises(LeaseLost):
                await led.txn([], [Put("/a", b"", lease)])
            await led.revoke(lease)
        await within(led.txn([], [Put("/b", b"")]))
        assert await led.get("/a") is None
        with pytest.raises(Mistake):
            await led.txn([], [Put("/a", b"", None)])  # type: ignore[arg-type]


async def test_a_foreign_file_among_the_bells_is_no_bell(led: SqliteLedger) -> None:
    """Nobody's notes keep a watch from being woken."""
    (bell_folder(led.path) / "notes.txt").write_text("hello")
    (bell_folder(led.path) / "notes.é").write_text("hello")
    async with led.watch("/", start=1) as watch:
        await led.txn([], [Put("/a", b"")])
        await take(watch)


def _open_at_once(path: Path, gate: object, answers: object) -> None:
    gate.wait()  # type: ignore[attr-defined]
    try:
        open_sync(f"sqlite:///{path}").close()
        answers.put("")  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 -- reported to the test
        answers.put(repr(error))  # type: ignore[attr-defined]


@pytest.mark.long
def test_many_processes_may_make_the_same_new_file(tmp_path: Path) -> None:
    """Nobody takes the half-made file of another for something else."""
    for round_ in range(15):
        gate, answers = _fork.Barrier(4), _fork.SimpleQueue()
        path = tmp_path / f"{round_}.db"
        children = [
            _fork.Process(target=_open_at_once, args=(path, gate, answers)) for _ in range(4)
        ]
        for child in children:
            child.start()
        assert [answers.get() for _ in children] == [""] * 4
        for child in children:
            child.join()


async def test_a_busy_task_does_not_starve_a_keeper(led: SqliteLedger) -> None:
    """Calls that need not wait still let the others run: the lease is kept."""
    async with Keeper(LiveRuntime(led), 0.4) as keeper:
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            await led.get("/a")
        assert keeper.believes()
        assert await led.keep_alive(keeper.id) == 0.4


async def test_the_log_is_bounded_whoever_writes_it(tmp_path: Path) -> None:
    """Large values, and writers that leave early: the log is folded all the same."""
    path = tmp_path / "x.db"
    async with ledger.open(f"sqlite:///{path}") as led:
        await led.txn([], [Put("/quiet", b"")])
        for _ in range(8):
            async with ledger.open(f"sqlite:///{path}") as other:
                for number in range(20):
                    await other.txn([], [Put("/big", bytes([number]) * 900_000)])
        assert path.with_name("x.db-wal").stat().st_size < 100 << 20


async def test_dead_bells_are_removed(tmp_path: Path) -> None:
    """What a killed watcher leaves behind is gone after the next start, whatever its prefix."""
    path = tmp_path / "x.db"
    async with ledger.open(f"sqlite:///{path}"):
        os.mkfifo(bell_folder(path) / "0123456789abcdef.L25vYm9keS8=")
    async with ledger.open(f"sqlite:///{path}"):
        assert list(bell_folder(path).iterdir()) == []


async def test_a_change_of_folder_does_not_deafen_watches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with SqliteLedger(Path("x.db"), timeouts=ONLY_BELLS) as led:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        async with led.watch("/", start=1) as watch:
            waiting = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
            await led.txn([], [Put("/a", b"")])
            await within(waiting)
        assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.long
def test_more_keys_than_a_revision_holds_under_one_lease(tmp_path: Path) -> None:
    """A million and more keys end with their lease; the ledger works on."""
    with open_sync(f"sqlite:///{tmp_path}/x.db") as led:
        lease = led.grant(600)
        count = (1 << 20) + 100
        for first in range(0, count, 128):
            keys = range(first, min(first + 128, count))
            led.txn([], [Put(f"/k/{number}", b"", lease.id) for number in keys])
        led.revoke(lease.id)
        led.txn([], [Put("/after", b"")])
        assert [entry.key for entry in led.range("/").entries] == ["/after"]


def test_two_openers_of_a_new_file_do_not_end_each_others_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second saw a file of no boot, was held up, and meanwhile the first took a lease."""
    url = f"sqlite:///{tmp_path}/x.db"
    write = Engine.write
    first: list[SyncLedger] = []

    def held_up(self: Engine, *args: Any, **options: Any) -> Any:
        monkeypatch.setattr(Engine, "write", write)
        led = open_sync(url)
        led.txn([], [Put("/mine", b"", led.grant(60).id)])
        first.append(led)
        return write(self, *args, **options)

    monkeypatch.setattr(Engine, "write", held_up)
    with open_sync(url) as second:
        assert first, "the second did not look"
        assert second.get("/mine") is not None
        assert len(second.leases()) == 1
    first[0].close()
