"""A run under chaos: somebody hurts it, and somebody takes it up again when it is dead.

The supervisor is one of those who may die: so it is a child here, like the chaos beside it, and
is started with `--resume` as often as it is killed.
"""

import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from holdfast import procs
from holdfast.errors import HoldfastError, Mistake
from holdfast.run.folder import Folder

__all__ = ["drive", "supervise"]

_CHAOS = [sys.executable, "-m", "holdfast.chaos.runs"]
MAX_LIVES = 100


def drive(folder: Folder, plan: str, *, seed: int, faults: int, flags: Sequence[str] = ()) -> int:
    """Run a run that was made, under a plan; returns the exit code of its last life."""
    given = [str(folder.path), "--plan", plan, "--seed", str(seed)]
    given += ["--steps", str(folder.config.steps), "--faults", str(faults)]
    armed = _points(given)
    children: list[procs.Child] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for child in children:
            child.signal(number)

    before = {one: signal.signal(one, on_signal) for one in (signal.SIGINT, signal.SIGTERM)}
    log = folder.path / "logs" / "chaos.log"
    try:
        with procs.spawn([*_CHAOS, *given], name="chaos", log=log) as chaos:
            for _ in range(MAX_LIVES):
                with _supervisor(folder, armed, flags) as child:
                    children[:] = [child]
                    code = _ended(child)
                if code != -signal.SIGKILL:
                    return code
            chaos.stop()
        raise HoldfastError(f"the supervisor was killed {MAX_LIVES} times")
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def supervise(folder: Folder, *, flags: Sequence[str] = ()) -> int:
    """Run a run that was made, in peace, as a process of its own; returns its exit code."""
    with _supervisor(folder, "", flags) as child:
        return _ended(child)


def _points(given: Sequence[str]) -> str:
    asked = subprocess.run([*_CHAOS, *given, "--points"], capture_output=True, text=True)
    if asked.returncode:
        raise Mistake(asked.stderr.strip().removeprefix("holdfast: "))
    return asked.stdout.strip()


def _supervisor(folder: Folder, armed: str, flags: Sequence[str]) -> procs.Child:
    argv = [sys.executable, "-m", "holdfast", "run", "--resume", str(folder.path), *flags]
    env = {"HOLDFAST_RUN_FAULTS": armed} if armed else {}
    # What it says goes where ours goes; Ctrl-C is passed on to it.
    return procs.spawn(argv, name="supervisor", env=env, stdin=None)


def _ended(child: procs.Child) -> int:
    while True:
        try:
            return child.wait(3600.0)
        except HoldfastError:
            continue
