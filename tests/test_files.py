"""What Holdfast writes for its owner alone, and what it refuses to write into."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import events, proc
from holdfast.errors import Denied, Mistake
from holdfast.files import append_to, private_folder, write_private
from holdfast.gateway.commands import serve
from holdfast.ledger import Put, open_sync
from holdfast.ledger.commands import backup
from holdfast.run.config import Config
from holdfast.run.folder import Folder

STRANGER = 54_321


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def foreign(tmp_path: Path) -> Path:
    """A folder of another user: made so by root, or found."""
    if os.geteuid() == 0:
        folder = tmp_path / "theirs"
        folder.mkdir()
        os.chown(folder, STRANGER, STRANGER)
        return folder
    other = [path for path in Path("/proc").glob("[0-9]*") if path.stat().st_uid > 0]
    found = next((path for path in other if path.stat().st_uid != os.geteuid()), None)
    assert found is not None, "run this test as root: here is no folder of another user to try"
    return found


def test_what_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask: files 0600, folders 0700, also a log that was there with 0644."""
    old = tmp_path / "old.log"
    old.write_bytes(b"before\n")
    old.chmod(0o644)
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
        os.close(append_to(old))
        os.close(append_to(folder / "new.log"))
        write_private(folder / "key", b"secret")
    finally:
        os.umask(before)
    assert mode(folder) == 0o700
    assert {mode(old), mode(folder / "new.log"), mode(folder / "key")} == {0o600}
    assert old.read_bytes() == b"before\n"


def test_logs_do_not_follow_links(tmp_path: Path) -> None:
    """A link planted where a log will be leads nowhere, for any kind of log."""
    victim = tmp_path / "authorized_keys"
    victim.write_bytes(b"mine\n")
    for name in ("part.log", "events.jsonl"):
        (tmp_path / name).symlink_to(victim)
    with pytest.raises(Denied, match="is a link"):
        proc.spawn([sys.executable, "-c", "print('hello')"], log=tmp_path / "part.log")
    with pytest.raises(Denied, match="is a link"):
        events.EventLog(tmp_path / "events.jsonl", process="test")
    os.mkfifo(tmp_path / "pipe.log")
    with pytest.raises(Mistake, match="not a plain file"):
        append_to(tmp_path / "pipe.log")
    assert victim.read_bytes() == b"mine\n"


def test_a_workers_log_does_not_follow_a_link(tmp_path: Path) -> None:
    """`holdfast launch`: the worker does not start, and says why."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine\n")
    place = tmp_path / "logs" / "r" / "cycle_1"
    place.mkdir(parents=True)
    (place / "rank_0.stdout").symlink_to(victim)
    script = tmp_path / "hello.py"
    script.write_text("print('hello')")
    argv = [sys.executable, "-m", "holdfast", "launch", "--run", "r", "--max-restarts", "0"]
    argv += ["--ledger", f"sqlite:///{tmp_path}/ledger.db", "--log-dir", str(tmp_path / "logs")]
    done = subprocess.run([*argv, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rank_0.stdout is a link" in done.stderr
    assert victim.read_bytes() == b"mine\n"


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    """By `serve` and `run`, with one sentence; also when a link leads there."""
    theirs = foreign(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(theirs)
    for place in (theirs, link):
        with pytest.raises(Denied, match="belongs to user"):
            private_folder(place)
        ledger = f"sqlite:///{tmp_path}/ledger.db"
        asked = ["--folder", str(place), "--ledger", ledger, "--port", "0"]
        with pytest.raises(Denied, match="belongs to user"):
            serve.main(asked, standalone_mode=False)
    if os.geteuid() == 0:
        with pytest.raises(Denied, match="belongs to user"):
            Folder.make(theirs, Config())
        assert not list(theirs.iterdir())


def test_a_run_that_went_to_another_user_is_not_resumed(tmp_path: Path) -> None:
    """A run's folder is looked at each time, not only when it is made."""
    folder = Folder.make(tmp_path / "run", Config())
    if os.geteuid() != 0:
        folder.path = foreign(tmp_path)
    else:
        os.chown(folder.path, STRANGER, STRANGER)
    with pytest.raises(Denied, match="belongs to user"), folder.held():
        pass


def test_a_backup_of_a_ledger_is_its_owners_alone(tmp_path: Path) -> None:
    """It holds what the ledger holds."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    with open_sync(url) as ledger:
        ledger.txn([], [Put("/a", b"1")])
    backup.main([url, str(tmp_path / "copy")], standalone_mode=False)
    assert mode(tmp_path / "copy") == 0o600
