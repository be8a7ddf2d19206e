"""Real runs, small ones: `holdfast run` as users start it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from patience import until

SMALL = (
    "steps=6",
    "rollout.groups=4",
    "rollout.samples=4",
    "evaluate.every=3",
    "evaluate.prompts=4",
    "environment.options.digits=3",
)
LIMIT_S = 300.0


def argv(folder: Path, *more: str, small: tuple[str, ...] = SMALL) -> list[str]:
    """The command that begins a small run in a folder."""
    settings = [word for one in small for word in ("--set", one)]
    start = [sys.executable, "-m", "holdfast", "run", "--plain"]
    return [*start, "--out", str(folder), *settings, *more]


def holdfast(
    *words: str | Path, code: int = 0, limit_s: float = LIMIT_S, cwd: Path | None = None
) -> str:
    """What a command prints; it must end with this code, and refuses without a traceback."""
    command = [sys.executable, "-m", "holdfast", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, cwd=cwd)
    assert done.returncode == code, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    assert not code or "Traceback" not in done.stderr
    return done.stdout


def run(folder: Path, *more: str) -> str:
    """Run to the end; returns what it printed."""
    return holdfast(*argv(folder, *more)[3:])


@contextlib.contextmanager
def started(command: list[str]) -> "Iterator[subprocess.Popen[str]]":
    """A run that goes on."""
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate(timeout=30)


def events(folder: Path) -> list[dict[str, Any]]:
    """Everything that its processes have told."""
    found = []
    for path in folder.glob("**/events/*.jsonl"):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return sorted(found, key=lambda one: float(one["at"]))


def wait_for_step(folder: Path, step: int, limit_s: float = 120.0) -> None:
    """Wait until a step is committed."""

    def is_there() -> bool:
        told = [one for one in events(folder) if one["type"] == "step.committed"]
        return any(one["step"] >= step for one in told)

    until(is_there, f"step {step}", limit_s)


def left_over(folder: Path) -> list[str]:
    """Processes and shared memory that a run has left behind."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            words += b"".join(str(one.readlink()).encode() for one in (path / "fd").iterdir())
            if str(folder).encode() in words and int(path.name) != os.getpid():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    store = store_of(folder)
    return [*found, *([str(store)] if store.exists() else [])]


def store_of(folder: Path) -> Path:
    """Where the run's samples are."""
    name = json.loads((folder / "run.json").read_text())["run"]
    return Path("/dev/shm") / f"holdfast-{os.geteuid()}" / str(name)


def is_same(calm: Path, hurt: Path) -> None:
    """Two runs ended with the same bits; the checker finds nothing, and nothing is left."""
    from holdfast.run.ending import differences  # not where vLLM is: that uses this file, too

    assert differences(calm, hurt) == []
    holdfast("check", hurt, limit_s=120)
    assert left_over(hurt) == []
