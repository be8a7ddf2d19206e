"""Checks of a node: what they find, and that a bad one harms nobody."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import Mistake
from holdfast.launch import health

EB = 1 << 60


def test_disk_and_memory(tmp_path: Path) -> None:
    """Room is counted where the logs go; the verdict has both figures. Some memory is left."""
    assert health.disk(tmp_path, 1) is None
    wrong = health.disk(tmp_path, EB) or ""
    assert str(tmp_path) in wrong
    assert f"{EB >> 20} MiB are needed" in wrong
    assert health.memory(1) is None
    assert "MiB of memory left" in (health.memory(EB) or "")


def test_a_disk_that_became_read_only(tmp_path: Path) -> None:
    """What file systems do after an error: there is room, but not for us."""
    if os.geteuid() != 0:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("only root may mount a tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path)], check=True)
    try:
        assert health.disk(tmp_path, 0) == f"{tmp_path} is on a file system that is read-only"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("address", "fine"),
    [
        ("127.0.0.1", True),
        ("127.0.9.9", True),
        ("localhost", True),
        ("192.0.2.1", False),  # of nobody, by RFC 5737
        ("2001:db8::1", False),
        ("no-such-host.invalid", False),
    ],
)
def test_network(address: str, fine: bool) -> None:
    """We must be able to listen where we tell the others to find us."""
    wrong = health.network(address)
    assert wrong is None if fine else address in (wrong or "")


async def test_the_checks_of_every_node(tmp_path: Path) -> None:
    """They find nothing here, GPUs or not. One that cannot be made is no good news."""
    assert await health.examine(health.built_in("127.0.0.1", tmp_path)) is None
    wrong = await health.examine(health.built_in("127.0.0.1", tmp_path / "none")) or ""
    assert wrong.startswith("disk: FileNotFoundError")


async def test_limits_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are found wanting, in one verdict; a limit that is no number is told at once."""
    monkeypatch.setenv("HOLDFAST_LEAST_DISK_MIB", str(1 << 40))
    monkeypatch.setenv("HOLDFAST_LEAST_MEMORY_MIB", str(1 << 40))
    wrong = await health.examine(health.built_in("127.0.0.1", tmp_path)) or ""
    assert wrong.startswith("disk: ")
    assert "; memory: " in wrong
    monkeypatch.setenv("HOLDFAST_LEAST_MEMORY_MIB", "8G")
    with pytest.raises(Mistake, match="HOLDFAST_LEAST_MEMORY_MIB is a number of MiB, not '8G'"):
        health.built_in("127.0.0.1", tmp_path)


def _raises() -> str | None:
    raise RuntimeError("sensor says no")


def _exits() -> str | None:
    sys.exit("the check has had enough")


async def test_a_check_that_raises_is_unhealthy() -> None:
    """Whatever it raises; the others are made all the same."""
    made = threading.Event()
    wrong = await health.examine(
        {"one": _raises, "two": _exits, "three": made.set, "four": lambda: "broken"}
    )
    assert wrong == (
        "one: RuntimeError: sensor says no; two: SystemExit: the check has had enough; "
        "four: broken"
    )
    assert made.is_set()


async def test_a_check_that_hangs_is_unhealthy() -> None:
    """It costs its limit once, however many hang, and its late answer is of no consequence."""
    release = threading.Event()

    def hangs() -> str | None:
        release.wait(60)
        return "too late"

    began = time.monotonic()
    wrong = await health.examine({"a": hangs, "b": hangs, "c": lambda: None}, limit_s=0.3)
    assert time.monotonic() - began < 30  # they would hang for twice as long
    assert wrong == "a: no answer within 0.3 s; b: no answer within 0.3 s"
    release.set()
    for thread in threading.enumerate():
        if thread.name in ("check a", "check b"):
            await asyncio.to_thread(thread.join, 5)
    await asyncio.sleep(0)  # what they had to say is heard now, by nobody


def test_a_check_that_hangs_does_not_hold_up_the_end() -> None:
    """The process ends while the check still hangs."""
    program = (
        "import asyncio, time\n"
        "from holdfast.launch.health import examine\n"
        "checks = {'stuck': lambda: time.sleep(600)}\n"
        "raise SystemExit(asyncio.run(examine(checks, limit_s=0.2)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == "stuck: no answer within 0.2 s\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed packages with checks: good, bad, broken, and two of one name."""
    (tmp_path / "rack_checks.py").write_text(
        "def fan(): return None\n"
        "def door(): return 'the door is open'\n"
        "def lamp(): raise OSError('dark')\n"
    )
    for package, lines in {
        "rack": "fan = rack_checks:fan\ndoor = rack_checks:door\nlamp = rack_checks:lamp\n",
        "other": "fan = rack_checks:door\nnone = no_such_module:check\n",
    }.items():
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[holdfast.health]\n{lines}")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("package")
async def test_checks_of_other_packages() -> None:
    """All are made, by name; a broken one is told like any other and stops nothing."""
    found = health.load()
    assert set(found) >= {"fan", "door", "lamp", "none"}
    assert len(found) == 5, "two of one name are both made"
    wrong = await health.examine(found) or ""
    verdicts = set(wrong.split("; "))
    assert "door: the door is open" in verdicts
    assert "lamp: OSError: dark" in verdicts
    assert "none: ModuleNotFoundError: No module named 'no_such_module'" in verdicts
    assert sum(one.startswith("fan") for one in verdicts) == 1
