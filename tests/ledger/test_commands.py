"""`holdfast ledger`: what people see and do, through the real command."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import proc
from holdfast.ledger import Put, open_sync
from patience import HANG_S

HOLDFAST = [sys.executable, "-m", "holdfast"]


def _run(*args: str | bytes, code: int = 0, plan: str = "", answer: str = "") -> str:
    """Run the command, under a plan of faults if there is one; a complaint of ours is one line."""
    result = subprocess.run(
        [*HOLDFAST, *args],
        capture_output=True,
        text=True,
        timeout=60,
        input=answer,
        env={"HOLDFAST_FAULTS": plan, "PATH": ""} if plan else None,
    )
    assert result.returncode == code, result.stderr
    if 2 <= code <= 7:
        assert result.stderr.startswith(("holdfast: ", "Usage"))
        assert "Traceback" not in result.stderr
        return result.stderr
    return result.stdout


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger with a few entries, one of them leased."""
    url = f"sqlite:///{tmp_path}/x.db"
    with open_sync(url) as led:
        lease = led.grant(3600)
        led.txn([], [Put("/runs/a/1", b'{"n":1}'), Put("/runs/a/2", b"\xff\xfe")])
        led.txn([], [Put("/runs/b", b"mine", lease.id)])
    return url


def test_ls_and_get(url: str) -> None:
    assert _run("ledger", "ls", url).splitlines() == ["/runs/a/1", "/runs/a/2", "/runs/b"]
    assert _run("ledger", "ls", url, "/runs/a/").splitlines() == ["/runs/a/1", "/runs/a/2"]
    assert "lease 1" in _run("ledger", "ls", "-l", url)
    rows = [json.loads(line) for line in _run("ledger", "ls", "--json", url).splitlines()]
    assert rows[0]["value"] == '{"n":1}'
    assert base64.b64decode(rows[1]["value_base64"]) == b"\xff\xfe"
    assert _run("ledger", "get", url, "/runs/a/1") == '{"n":1}\n'
    assert json.loads(_run("ledger", "get", "--json", url, "/runs/b"))["lease"] == 1


def test_complaints_are_one_line_with_a_meaningful_code(url: str, tmp_path: Path) -> None:
    assert "there is no key /nope" in _run("ledger", "get", url, "/nope", code=4)
    assert "there is no ledger" in _run("ledger", "ls", f"sqlite:///{tmp_path}/y.db", code=4)
    assert not (tmp_path / "y.db").exists(), "looking does not create"
    assert "is not a ledger URL" in _run("ledger", "ls", "nonsense", code=2)
    (tmp_path / "junk").write_bytes(b"junk" * 1000)
    assert "not a Holdfast ledger" in _run("ledger", "ls", f"sqlite:///{tmp_path}/junk", code=6)
    with proc.HeldPort() as nobody:
        away = f"etcd://127.0.0.1:{nobody}?timeout=1"
        assert str(nobody) in _run("ledger", "ls", away, code=3)


def test_watch_follows_another_process(url: str, tmp_path: Path) -> None:
    """One shell watches, another writes: the audit record and then the write itself."""
    log = tmp_path / "watch.log"
    watch = [*HOLDFAST, "ledger", "watch", url, "--json", "--count", "2"]
    with proc.spawn(watch, log=log) as child:
        child.wait_until(lambda: "watching" in log.read_text())
        _run("ledger", "put", url, "/runs/c", "hello", "--reason", "a test")
        assert child.process.wait(HANG_S) == 0
    heading, audit, write = log.read_text().splitlines()
    assert heading.startswith("watching / of sqlite:///")
    assert json.loads(audit)["key"].startswith("/holdfast/audit/")
    assert json.loads(write)["key"] == "/runs/c"
    assert json.loads(write)["entry"]["value"] == "hello"


def test_break_lease_is_recorded_before_it_happens(url: str) -> None:
    """Who, when, why and which keys are in the ledger; the keys are gone."""
    out = _run("ledger", "break-lease", url, "1", "--reason", "node is on fire", "--yes")
    where = out.split()[-1]
    record = json.loads(_run("ledger", "get", url, where))
    assert record["reason"] == "node is on fire"
    assert record["keys"] == ["/runs/b"]
    assert record["action"] == "break-lease"
    assert record["user"]
    assert "there is no key" in _run("ledger", "get", url, "/runs/b", code=4)
    assert _run("ledger", "leases", url) == ""
    assert "no living" in _run("ledger", "break-lease", url, "1", "--reason", "x", code=4)


def test_break_lease_asks_and_needs_a_reason(url: str) -> None:
    assert "--reason" in _run("ledger", "break-lease", url, "1", code=2)
    _run("ledger", "break-lease", url, "1", "--reason", "x", answer="n\n", code=130)
    assert json.loads(_run("ledger", "leases", "--json", url))["keys"] == ["/runs/b"]


def test_backup_and_restore(url: str, tmp_path: Path) -> None:
    """Everything but what was leased comes back; a damaged backup is refused whole."""
    file = tmp_path / "x.backup"
    assert "3 entries" in _run("ledger", "backup", url, str(file))
    assert "--force" in _run("ledger", "backup", url, str(file), code=2)
    copy = f"sqlite:///{tmp_path}/copy.db"
    assert "2 entries" in _run("ledger", "restore", str(file), copy)
    assert _run("ledger", "ls", copy).splitlines() == ["/runs/a/1", "/runs/a/2"]
    assert "not empty" in _run("ledger", "restore", str(file), copy, code=2)
    whole = file.read_bytes()
    for damaged in (whole[:-10], whole.replace(b"runs", b"ruins", 1)):
        bad = tmp_path / "bad.backup"
        bad.write_bytes(damaged)
        other = f"sqlite:///{tmp_path}/other.db"
        assert "not a whole backup" in _run("ledger", "restore", str(bad), other, code=6)
        assert not (tmp_path / "other.db").exists()


def test_an_interrupted_restore_shows_and_is_finished(url: str, tmp_path: Path) -> None:
    """Killed half-way: `check` says so, and the same command again completes it."""
    with open_sync(url) as led:
        for number in range(300):
            led.txn([], [Put(f"/many/{number:03}", b"x")])
    file = tmp_path / "x.backup"
    _run("ledger", "backup", url, str(file))
    copy = f"sqlite:///{tmp_path}/copy.db"
    _run("ledger", "restore", str(file), copy, plan="ledger.sqlite.after_commit:kill@3", code=-9)
    assert "a restore was interrupted" in _run("ledger", "check", copy, code=1)
    _run("ledger", "restore", str(file), copy)
    assert "0 problems" in _run("ledger", "check", copy)
    assert len(_run("ledger", "ls", copy).splitlines()) == 302


def test_check_and_compact(url: str) -> None:
    assert "3 entries checked, 0 problems" in _run("ledger", "check", url)
    with open_sync(url) as led:
        for number in range(50):
            led.txn([], [Put("/n", str(number).encode())])
    assert "is forgotten" in _run("ledger", "compact", url, "--keep", "10")
    assert "0 problems" in _run("ledger", "check", url)
    assert "nothing to forget" in _run("ledger", "compact", url, "--keep", "1000")


def test_check_finds_damage(url: str, tmp_path: Path) -> None:
    """An entry changed behind the ledger's back does not go unnoticed."""
    import apsw

    connection = apsw.Connection(str(tmp_path / "x.db"))
    connection.execute("UPDATE entry SET value = x'00' WHERE key = '/runs/a/1'")
    connection.close()
    assert "differ from the last change" in _run("ledger", "check", url, code=1)


def test_a_backup_never_replaces_what_is_no_backup(url: str, tmp_path: Path) -> None:
    """Not the ledger, not its companions, not a pipe, not a link: also not with --force."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("x.db", "x.db-wal", "x.db-bells", "pipe", "link"):
        _run("ledger", "backup", url, str(tmp_path / name), "--force", code=2)
    assert "0 problems" in _run("ledger", "check", url)


def test_a_reader_who_leaves_is_no_failed_check(url: str) -> None:
    """`| head` ends as it does for every other program: with SIGPIPE's code, quietly."""
    with open_sync(url) as led:
        for number in range(3000):
            led.txn([], [Put(f"/many/{number:0200}", b"x")])
    with subprocess.Popen(
        [*HOLDFAST, "ledger", "ls", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(HANG_S) == 141


def test_output_that_cannot_be_written_is_said(url: str) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [*HOLDFAST, "ledger", "ls", url], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 3
    assert "No space left" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_putting_by_hand_is_checked_before_it_is_recorded(url: str, tmp_path: Path) -> None:
    """What cannot be done leaves neither a record nor a new file; a reason is a reason."""
    new = f"sqlite:///{tmp_path}/new.db"
    _run("ledger", "put", new, "no slash", "v", "--reason", "r", code=2)
    _run("ledger", "put", new, "/k", "v", "--reason", "  ", code=2)
    assert not (tmp_path / "new.db").exists()
    _run("ledger", "put", url, "/odd", b"\xff\xfe", "--reason", "bytes")
    row = json.loads(_run("ledger", "get", "--json", url, "/odd"))
    assert base64.b64decode(row["value_base64"]) == b"\xff\xfe"


def test_what_can_show_nothing_is_refused(url: str) -> None:
    """A ledger that no other process has written, and a watch of no change."""
    assert "one process" in _run("ledger", "ls", "memory:", code=2)
    for args in (("--from", "0"), ("--count", "0")):
        _run("ledger", "watch", url, *args, code=2)


def test_a_misspelt_fault_point_is_refused(url: str) -> None:
    """A plan that can never fire must not look like a plan that was survived."""
    plan = "ledger.sqlite.after_comit:kill@1"
    assert "after_commit" in _run("ledger", "ls", url, plan=plan, code=2)


def test_help_and_version() -> None:
    """Help is worth reading on every level; the version is printed."""
    assert "holdfast, version" in _run("--version")
    for args in ((), ("ledger",), ("ledger", "break-lease"), ("sim",), ("chaos",), ("doctor",)):
        text = _run(*args, "--help")
        assert len(text.splitlines()) > 8
    assert "No such command" in _run("legder", code=2)
    assert "ledger.sqlite.after_commit" in _run("faults")


@pytest.mark.long
def test_sim_command() -> None:
    """Exit 0 for what holds, 2 for what is not there (what breaks: tests/sim/test_broken.py)."""
    assert "election: ok: 20 schedules" in _run("sim", "election", "--seeds", "20")
    assert "there is no protocol" in _run("sim", "nothing", code=2)
