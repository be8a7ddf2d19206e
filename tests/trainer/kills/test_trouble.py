"""No room on the disk, no way to the ledger: the client only waits, and the end is the same."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from holdfast.proc import spawn
from holdfast.servers import EtcdServer
from patience import HANG_S, until
from trainer.disks import full, small
from trainer.house import JOB, House
from trainer.kills.conftest import Reference, survive
from trainer.kills.story import STEPS, Audit

DISK_BYTES = 10 << 20
AWAY_S = 5.0
STILL_S = 2.0
LOCKER = """
import sqlite3, sys, time
ledger = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=30)
ledger.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
print("soon", flush=True)
time.sleep(1)
ledger.execute("ROLLBACK")
"""


def _stands_still(audit: Audit) -> int:
    """Wait until nothing has come to a result for a while."""
    deadline = time.monotonic() + 60
    count, since = audit.wait(0), time.monotonic()
    while time.monotonic() - since < STILL_S:
        assert time.monotonic() < deadline, "it goes on although there is no room"
        time.sleep(0.05)
        if audit.wait(0) != count:
            count, since = audit.wait(0), time.monotonic()
    return count


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [False, True], ids=["lives", "dies"])
def test_the_disk_is_full_for_a_while(tmp_path: Path, reference: Reference, killed: bool) -> None:
    """Everything waits until there is room again, also a trainer that is started meanwhile."""

    def meanwhile(there: House, audit: Audit) -> None:
        def runs_again() -> bool:
            return there.epoch() == 2 and there.service.state(JOB) == "RUNNING"

        audit.wait(8)
        with full(disk):
            count = _stands_still(audit)
            if killed:
                there.kill_trainer()
                until(runs_again, "another trainer runs", 60)
                count = max(count, _stands_still(audit))
        assert count < _all(reference)

    with small(tmp_path / "trainers", DISK_BYTES) as disk:
        _, epochs = survive(reference, tmp_path, meanwhile=meanwhile)
    assert epochs == 1 + killed


def _all(reference: Reference) -> int:
    """How many results there would be, but for the last few."""
    return len(reference(STEPS).told.kinds) - 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_ledger_is_locked_for_a_while(tmp_path: Path, reference: Reference) -> None:
    """Another process holds the file: whatever is to be recorded waits."""

    def meanwhile(_: House, audit: Audit) -> None:
        audit.wait(8)
        argv = [sys.executable, "-c", LOCKER, str(tmp_path / "ledger.db"), str(AWAY_S)]
        with spawn(argv, stdout=subprocess.PIPE) as locker:
            assert locker.process.stdout is not None
            assert locker.process.stdout.readline() == b"locked\n"
            time.sleep(AWAY_S / 2)  # what was recorded before has been seen
            before = audit.wait(0)
            assert locker.process.stdout.readline() == b"soon\n"
            assert audit.wait(0) == before, "nothing could be recorded meanwhile"
            assert locker.wait(HANG_S) == 0

    survive(reference, tmp_path, meanwhile=meanwhile)


@pytest.mark.long
@pytest.mark.etcd
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["pause", "kill"])
def test_etcd_is_away_for_a_while(tmp_path: Path, reference: Reference, how: str) -> None:
    """The only server of the ledger is stopped, or dies and comes back with its data."""
    with EtcdServer(tmp_path / "etcd") as etcd:

        def meanwhile(_: House, audit: Audit) -> None:
            audit.wait(8)
            (etcd.pause if how == "pause" else etcd.kill)()
            time.sleep(AWAY_S)
            (etcd.resume if how == "pause" else etcd.restart)()

        url = "etcd://{}:{}?timeout=2".format(*etcd.endpoint)
        survive(reference, tmp_path / "house", meanwhile=meanwhile, url=url)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_ledgers_disk_is_full_for_a_while(tmp_path: Path, reference: Reference) -> None:
    """There is no room for a record: the trainer waits, lives on, and ends with the same bits."""
    with small(tmp_path / "ledger", DISK_BYTES) as disk:

        def meanwhile(_: House, audit: Audit) -> None:
            audit.wait(8)
            with full(disk):
                assert _stands_still(audit) < _all(reference)

        url = f"sqlite:///{disk}/ledger.db"
        found = survive(reference, tmp_path / "house", meanwhile=meanwhile, url=url)
    assert found == (1, 1), "it lives on"
