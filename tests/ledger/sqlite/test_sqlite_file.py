"""Bad files, bad places, full disks: one clear line each, and nothing damaged."""

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from holdfast import ledger
from holdfast.errors import (
    Compacted,
    Corrupt,
    Denied,
    HoldfastError,
    LeaseLost,
    Mistake,
    NoRoom,
    NotALedger,
    TooNew,
)
from holdfast.ledger import Put, open_sync
from holdfast.ledger.check import check
from holdfast.ledger.sqlite import SqliteLedger
from holdfast.ledger.sqlite import file as ledger_file
from holdfast.ledger.sqlite import write as ledger_write
from patience import HANG_S
from trainer.disks import full, small


def _refused(path: Path) -> HoldfastError:
    """Open what must be refused; the error is one line that names the path."""
    with pytest.raises(HoldfastError) as caught:
        open_sync(f"sqlite:///{path}")
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return caught.value


def _notes(path: Path) -> None:
    path.write_bytes(b"shopping list\n" * 100)


def _database(path: Path) -> None:
    with contextlib.closing(apsw.Connection(str(path))) as theirs:
        theirs.execute("CREATE TABLE t (x)")


def _newer(path: Path) -> None:
    open_sync(f"sqlite:///{path}").close()
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        connection.pragma("user_version", ledger_file.SCHEMA + 1)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (_notes, NotALedger, "nor any SQLite file"),
        (_database, NotALedger, "of another program"),
        (_newer, TooNew, "upgrade"),
        (Path.mkdir, Mistake, "is a folder"),
    ],
)
def test_what_is_no_ledger_of_ours_is_refused_and_left_alone(
    tmp_path: Path, make: Callable[[Path], None], kind: type[HoldfastError], words: str
) -> None:
    """Somebody's notes, another program's database, a newer Holdfast's ledger, a folder: one line
    says what it is, and not a byte of it changes."""
    path = tmp_path / "x.db"
    make(path)
    before = {one: one.is_file() and one.read_bytes() for one in tmp_path.iterdir()}
    error = _refused(path)
    assert isinstance(error, kind)
    assert words in str(error)
    assert {one: one.is_file() and one.read_bytes() for one in tmp_path.iterdir()} == before


def test_a_missing_folder_is_not_made(tmp_path: Path) -> None:
    """The message says what to do."""
    with pytest.raises(Mistake, match="create it first"):
        open_sync(f"sqlite:///{tmp_path}/no/such/x.db")


def test_a_folder_without_rights(tmp_path: Path) -> None:
    """No right to write: said in one line. Root needs to give its powers up to see it."""
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    code = f"from holdfast.ledger import open_sync; open_sync('sqlite:///{folder}/x.db')"
    argv = [sys.executable, "-c", code]
    if os.geteuid() == 0:
        argv = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *argv]
    result = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "holdfast.errors.Denied: no right to write in" in result.stderr
    assert list(folder.iterdir()) == []


def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's locks do not hold there. (The kernel's answer is the only thing made up.)"""
    monkeypatch.setattr(ledger_file, "file_system_of", lambda _: ("nfs4", "/mnt"))
    with pytest.raises(Mistake, match="network file system"):
        open_sync(f"sqlite:///{tmp_path}/x.db")


def test_flipped_bytes_are_found(tmp_path: Path) -> None:
    """Damage inside the file shows as Corrupt or in the check, never as other data."""
    path = tmp_path / "x.db"
    with open_sync(f"sqlite:///{path}") as led:
        for number in range(500):
            led.txn([], [Put(f"/k/{number}", b"v" * 200)])
    raw = bytearray(path.read_bytes())
    for at in range(8192, len(raw), 4096):
        raw[at : at + 16] = os.urandom(16)
    path.write_bytes(raw)
    with pytest.raises(Corrupt):  # noqa: SIM117 -- opening may already find it
        with open_sync(f"sqlite:///{path}") as led:
            for number in range(500):
                led.get(f"/k/{number}")
            problems, _ = led.run(check(led.twin))
            if problems:
                raise Corrupt(problems[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    with small(tmp_path / "small", 1 << 20) as folder:
        yield folder


async def test_a_full_disk_loses_nothing_and_heals(small_disk: Path) -> None:
    """NoRoom while it is full, everything acknowledged still there, and on it goes after."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 400_000)
    async with ledger.open(f"sqlite:///{small_disk}/x.db") as led:
        written = 0
        with pytest.raises(NoRoom, match="no room"):
            for written in range(10_000):
                await led.txn([], [Put(f"/k/{written:05}", b"v" * 500)])
        assert written > 10
        for number in range(written):
            entry = await led.get(f"/k/{number:05}")
            assert entry is not None
            assert entry.value == b"v" * 500
        with pytest.raises(NoRoom):
            await led.txn([], [Put("/big", b"v" * 200_000)])
        ballast.unlink()
        await led.txn([], [Put("/after", b"")])
        assert (await check(led))[0] == []
        assert len((await led.range("/k/")).entries) == written
        assert await led.get("/big") is None


async def test_a_full_disk_is_told_as_what_it_is_when_opening(small_disk: Path) -> None:
    """Where not even the file that its users share can be made: `NoRoom`, and it heals."""
    url = f"sqlite:///{small_disk}/x.db"
    async with ledger.open(url) as led:
        await led.txn([], [Put("/a", b"1")])
    with full(small_disk), pytest.raises(NoRoom, match="no room left on the disk"):
        await ledger.open(url)
    async with ledger.open(url) as led:
        assert await led.get("/a") is not None


async def test_a_read_only_disk_is_a_clear_error(small_disk: Path) -> None:
    """A file system that turned read-only (as ext4 does on errors) is said so."""
    async with ledger.open(f"sqlite:///{small_disk}/x.db"):
        pass
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(HoldfastError) as caught:
        await ledger.open(f"sqlite:///{small_disk}/x.db")
    assert "x.db" in str(caught.value) or "small" in str(caught.value)


async def test_leases_of_an_earlier_boot_have_ended(tmp_path: Path) -> None:
    """After a reboot the clock begins anew: nobody's lease from before counts."""
    path = tmp_path / "x.db"
    async with ledger.open(f"sqlite:///{path}") as led:
        lease = await led.grant(3600)
        await led.txn([], [Put("/mine", b"", lease.id), Put("/plain", b"")])
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE meta SET boot = 'another'")
    connection.close()
    async with ledger.open(f"sqlite:///{path}") as led:
        assert [entry.key for entry in (await led.range("/")).entries] == ["/plain"]
        with pytest.raises(LeaseLost):
            await led.keep_alive(lease.id)
        assert (await led.grant(10)).id > lease.id


async def test_history_is_bounded_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old history goes by itself; a watch that lags behind hears of it; the file stays small."""
    monkeypatch.setattr(ledger_write, "HISTORY_BYTES", 1 << 20)
    path = tmp_path / "x.db"
    async with ledger.open(f"sqlite:///{path}") as led:
        for number in range(3000):
            await led.txn([], [Put("/same", str(number).encode() * 500)])
        async with led.watch("/", start=2) as watch:
            with pytest.raises(Compacted):
                await anext(watch)
        newest = (await led.range("/")).revision
        async with led.watch("/", start=newest - 90) as watch:
            assert (await anext(watch)).revision == newest - 90
        assert (await check(led))[0] == []
    assert path.stat().st_size < 12 << 20


@pytest.mark.long
async def test_the_log_is_folded_while_others_read(tmp_path: Path) -> None:
    """The write-ahead log does not grow for ever although the ledger is never closed."""
    path = tmp_path / "x.db"
    async with (
        ledger.open(f"sqlite:///{path}") as led,
        ledger.open(f"sqlite:///{path}") as other,
        other.watch("/", start=1) as watch,
    ):
        seen = 0
        for number in range(6000):
            await led.txn([], [Put(f"/k/{number % 10}", b"v" * 300)])
            if number % 100 == 0:
                seen = (await anext(watch)).revision
        async with asyncio.timeout(HANG_S):
            async for batch in watch:
                assert batch.revision == seen + 1
                seen = batch.revision
                if seen == 6001:
                    break
        # 6000 transactions write about 80 MB of log.
        assert path.with_name("x.db-wal").stat().st_size < 30 << 20


async def test_full_sync_commits_in_groups(tmp_path: Path) -> None:
    """With sync=full many concurrent transactions share one wait for the disk."""
    async with ledger.open(f"sqlite:///{tmp_path}/x.db?sync=full") as led:
        await asyncio.gather(*(led.txn([], [Put(f"/k/{n}", b"")]) for n in range(300)))
        entries = (await led.range("/k/")).entries
        assert len({entry.mod_revision for entry in entries}) == 300


async def test_closed_objects_say_so(led: SqliteLedger) -> None:
    """Using a ledger after close is a mistake with a clear message."""
    await led.close()
    with pytest.raises(Mistake, match="not open"):
        await led.get("/a")


def modes(path: Path) -> dict[str, int]:
    """The rights of a ledger's file and of everything beside it that belongs to it."""
    there = sorted(path.parent.glob(f"{path.name}*"))
    return {one.name.removeprefix(path.name): stat.S_IMODE(one.stat().st_mode) for one in there}


def test_a_ledger_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask: file, log and index 0600, the folder of bells 0700."""
    path = tmp_path / "ledger.db"
    before = os.umask(0)
    try:
        with open_sync(f"sqlite:///{path}") as opened:
            opened.txn([], [Put("/a", b"1")])
            found = modes(path)
    finally:
        os.umask(before)
    assert found == {"": 0o600, "-wal": 0o600, "-shm": 0o600, "-bells": 0o700}


def test_a_ledger_of_an_older_version_is_tightened(tmp_path: Path) -> None:
    """What SQLite gave to everybody is taken back at once, also from its log while that is used;
    a group that was let in stays in."""
    path = tmp_path / "ledger.db"
    for given, kept in (((0o644, 0o755), (0o600, 0o700)), ((0o664, 0o775), (0o660, 0o770))):
        with open_sync(f"sqlite:///{path}") as first:
            first.txn([], [Put("/a", b"1")])
            for end in ("", "-wal", "-shm"):
                path.with_name(path.name + end).chmod(given[0])
            path.with_name(path.name + "-bells").chmod(given[1])
            with open_sync(f"sqlite:///{path}") as second:
                second.txn([], [Put("/a", b"2")])
                assert first.get("/a").value == b"2"  # type: ignore[union-attr]
                found = modes(path)
        assert found == {"": kept[0], "-wal": kept[0], "-shm": kept[0], "-bells": kept[1]}


def test_a_ledger_that_another_user_may_have_planted_is_refused(tmp_path: Path) -> None:
    """A link of another user, a folder of bells that is a link, a file that every user writes."""
    path, elsewhere = tmp_path / "ledger.db", tmp_path / "elsewhere"
    elsewhere.mkdir()
    bells = path.with_name(path.name + "-bells")
    bells.symlink_to(elsewhere)
    assert isinstance(_refused(path), Mistake)
    bells.unlink()
    if os.geteuid() != 0:
        pytest.xfail("only root can make a link of another user: run this test as root")
    path.unlink()
    path.symlink_to(elsewhere / "theirs.db")
    os.chown(path, 54_321, 54_321, follow_symlinks=False)
    assert isinstance(_refused(path), Denied)
    assert not list(elsewhere.iterdir())
