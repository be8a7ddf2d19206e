"""Parts that die, by kills and by themselves, under a supervisor of real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import HoldfastError
from holdfast.proc.restarts import RestartPolicy
from holdfast.proc.supervisor import Part, Supervisor
from patience import HANG_S

QUICK = RestartPolicy(well_s=60.0, first_s=0.01, most_s=0.02, failures=3)


def test_kills_never_add_up(tmp_path: Path) -> None:
    """A part that is killed again and again is started again and again."""
    argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    part = Part("victim", argv, log=tmp_path / "log", policy=QUICK)
    codes: list[int] = []

    def died(_: Part, code: int) -> bool:
        codes.append(code)
        return len(codes) == 8

    supervisor = Supervisor(
        [part], died=died, started=lambda it: os.kill(it.pid, signal.SIGKILL), end_s=1.0
    )
    supervisor.run()
    assert codes == [-signal.SIGKILL] * 8


def test_a_part_that_can_never_start_is_given_up(tmp_path: Path) -> None:
    """With its last words; the others end, too."""
    lives: list[int] = []
    bad = Part(
        "bad",
        [sys.executable, "-c", "raise SystemExit('no such disk')"],
        log=tmp_path / "log",
        policy=QUICK,
    )
    good = Part("good", [sys.executable, "-c", "import time; time.sleep(600)"])
    supervisor = Supervisor(
        [good, bad],
        died=lambda *_: False,
        started=lambda part: lives.append(part.pid) if part is bad else None,
    )
    with pytest.raises(HoldfastError, match=r"bad ends again and again .*code 1.*no such disk"):
        supervisor.run()
    assert len(lives) == 3
    assert not Path(f"/proc/{good.pid}").exists()


def test_serve_gives_up_a_gateway_that_cannot_start(tmp_path: Path) -> None:
    """Settings that can never work end `holdfast serve`, with the reason and a bad exit code."""
    (tmp_path / "cert.pem").write_text("no certificate")
    argv = [sys.executable, "-m", "holdfast", "serve", "--folder", str(tmp_path / "serve")]
    argv += ["--port", "0", "--no-host", "--ledger", f"sqlite:///{tmp_path}/ledger.db"]
    argv += ["--tls-cert", str(tmp_path / "cert.pem")]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    ended = subprocess.run(
        argv, env=env, capture_output=True, text=True, timeout=2 * HANG_S, check=False
    )
    assert ended.returncode == 1
    assert "gateway-0 ends again and again by the same error" in ended.stderr
    assert "PEM" in ended.stderr
