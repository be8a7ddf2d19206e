"""The doctor: made-up machines for every finding, this machine for the whole."""

import asyncio
import json
import os
import socket
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import holdfast.ledger
from holdfast import doctor
from holdfast.doctor import EXTRAS, Check, check_ledger, examine
from patience import HANG_S

GIB = 1 << 30
HERE = Path("here")
BOOT = "b6da5571-16a7-42e0-90af-7401e53ea275"
BROKEN = "[timeouts]\nledger_lease_s = 1.0\n"


@pytest.mark.parametrize(
    ("check", "status", "said"),
    [
        (doctor.check_python((3, 11, 0)), "ok", "3.11.0"),
        (doctor.check_python((3, 10, 14)), "fail", "3.11"),
        (doctor.check_disk(HERE, 100 * GIB), "ok", "100.0 GiB"),
        (doctor.check_disk(HERE, 5 * GIB), "warn", "5.0 GiB"),
        (doctor.check_disk(HERE, GIB // 2), "fail", "512.0 MiB"),
        (doctor.check_disk(HERE, None), "fail", "no folder"),
        (doctor.check_shared_memory(16 * GIB, 15 * GIB), "ok", "15.0 GiB free of 16.0 GiB"),
        (doctor.check_shared_memory(16 * GIB, GIB // 4), "warn", "--shm-size"),
        (doctor.check_shared_memory(64 << 20, 63 << 20), "fail", "--shm-size"),
        (doctor.check_shared_memory(0, 0), "fail", "mount"),
        (doctor.check_file_system(HERE, "ext4", "/", sqlite=True), "ok", "ext4"),
        (doctor.check_file_system(HERE, "nfs4", "/data", sqlite=True), "fail", "etcd://"),
        (
            doctor.check_file_system(HERE, "lustre", "/data", sqlite=False),
            "warn",
            "never a sqlite",
        ),
        (doctor.check_file_system(HERE, "fuse.mystery", "/x", sqlite=True), "warn", "local"),
        (doctor.check_file_system(HERE, "unknown", "/", sqlite=True), "warn", "local"),
        (doctor.check_clock(7200.0, True, BOOT), "ok", "up 2.0 h, synchronised"),
        (doctor.check_clock(7200.0, False, BOOT), "warn", "chrony"),
        (doctor.check_clock(None, True, BOOT), "fail", "BOOTTIME"),
        (doctor.check_clock(7200.0, True, None), "fail", "/proc"),
        (doctor.check_open_files(65_536, 65_536), "ok", "65536"),
        (doctor.check_open_files(-1, -1), "ok", "unlimited"),
        (doctor.check_open_files(1024, 524_288), "warn", "ulimit -n"),
        (doctor.check_open_files(64, 64), "fail", "ulimit -n"),
        (doctor.check_loopback(None, "no such device"), "fail", "no such device"),
        (doctor.check_extra("etcd", ["aiohttp"]), "warn", "pip install 'holdfast-rl[etcd]'"),
        (doctor.check_server("etcd", None), "ok", "not installed"),
        (doctor.check_timeouts(Path(os.devnull)), "ok", "0 set"),
        (doctor.check_timeouts(Path("no.toml")), "fail", "no.toml"),
    ],
    ids=lambda value: value.name if isinstance(value, Check) else None,
)
def test_findings(check: Check, status: str, said: str) -> None:
    """Each reading gives its finding; what is not healthy comes with advice."""
    assert check.status == status
    assert said in check.detail + " " + check.advice
    assert bool(check.advice) == (status != "ok")


def test_every_extra_is_looked_for() -> None:
    """An extra that is added to the package is added here too."""
    project = Path(__file__).parent.parent / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras)


# ---- this machine ------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(doctor.doctor, arguments, catch_exceptions=False)


def test_this_machine_is_examined(tmp_path: Path) -> None:
    """All readings can be taken here, and say what we know of this machine."""
    found = {check.name: check for check in examine(path=tmp_path)}
    assert found["python"].status == "ok"
    assert found["loopback"].status == "ok"
    assert found["clock"].status in ("ok", "warn")
    assert found["extra etcd"].status == "ok"
    assert str(Path(sys.executable).parent) in found["etcd"].detail or "/etcd" in (
        found["etcd"].detail
    )


def test_exit_codes_and_json(tmp_path: Path) -> None:
    """0 with nothing failed, 1 otherwise; JSON for machines says the same."""
    config = tmp_path / "run.toml"
    config.write_text("[timeouts]\nledger_lease_s = 20.0\n")
    good = run("--path", str(tmp_path), "--config", str(config), "--json")
    answer = json.loads(good.output)
    assert good.exit_code == (0 if answer["ok"] else 1)
    assert answer["checks"][-1] == {
        "name": "time-outs",
        "status": "ok",
        "detail": f"1 set in {config}, all in order; used where HOLDFAST_TIMEOUTS={config}",
        "advice": "",
    }
    config.write_text(BROKEN)
    bad = run("--path", str(tmp_path), "--config", str(config))
    assert bad.exit_code == 1
    assert "2 × ledger_call_s <= ledger_lease_s" in bad.output
    assert run("--path", str(tmp_path), "--config", str(tmp_path / "none.toml")).exit_code == 1
    assert run("--path", str(tmp_path / "nowhere")).exit_code == 1


def test_a_file_system_without_locks_is_only_for_what_lies_there(tmp_path: Path) -> None:
    """The path of a sqlite ledger is examined as well as --path."""
    checks = examine(path=tmp_path, ledger="sqlite:////dev/shm/not/there.db")
    assert ["/dev/shm/not/there.db is on tmpfs" in one.detail for one in checks].count(True) == 1


# ---- a ledger ----------------------------------------------------------------------


def test_a_ledger_file_is_read_but_never_made(tmp_path: Path) -> None:
    """The doctor changes nothing: a missing file stays missing. What is there is timed."""
    path = tmp_path / "ledger.db"
    check = check_ledger(f"sqlite:///{path}", 5.0)
    assert check.status == "ok"
    assert "not there yet" in check.detail
    assert not path.exists()

    async def make() -> None:
        async with holdfast.ledger.open(f"sqlite:///{path}"):
            pass

    asyncio.run(make())
    check = check_ledger(f"sqlite:///{path}", 5.0)
    assert check.status == "ok"
    assert check.detail.endswith(" ms")
    nowhere = check_ledger(f"sqlite:///{tmp_path}/no/folder/ledger.db", 5.0)
    assert nowhere.status == "fail"
    assert "make" in nowhere.advice


def test_an_unreachable_ledger_fails_in_time_and_hides_the_password() -> None:
    """Refused or silent, the doctor says so within its bound."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        port = silent.getsockname()[1]
        start = time.monotonic()
        check = check_ledger(f"etcd://me:secret@127.0.0.1:{port}", 1.0)
    assert check.status == "fail"
    assert check.advice
    assert "secret" not in check.detail
    assert time.monotonic() - start < HANG_S


@pytest.mark.parametrize("url", ["nonsense", "mysql://x", "sqlite:", "etcd://nohost"])
def test_a_wrong_url_is_explained(url: str) -> None:
    """No traceback for a typing error."""
    check = check_ledger(url, 1.0)
    assert check.status == "fail"
    assert check.advice == "correct --ledger"
