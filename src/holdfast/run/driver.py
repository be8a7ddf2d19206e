"""A run under chaos: somebody hurts it, and somebody takes it up again when it is dead.

The supervisor is one of those who may die: so it is a child here, like the chaos beside it, and
is started with `--resume` as often as it is killed.

A plan that cuts the network has the orchestrator's line to the gateway lead through the chaos.
If that dies, so does the line: then the supervisor is killed and goes on without it.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

import msgspec

from holdfast import proc
from holdfast.errors import HoldfastError, Mistake, TimedOut
from holdfast.run.folder import Folder
from holdfast.run.supervisor import FAULTS, LINE
from holdfast.timeouts import DEFAULTS

__all__ = ["drive", "supervise"]

_CHAOS = [sys.executable, "-m", "holdfast.chaos.runs"]
MAX_LIVES = 100


class _Needs(msgspec.Struct):
    faults: str = ""
    line: bool = False


def drive(folder: Folder, plan: str, *, seed: int, faults: int, flags: Sequence[str] = ()) -> int:
    """Run a run that was made, under a plan; returns the exit code of its last life."""
    given = [str(folder.path), "--plan", plan, "--seed", str(seed)]
    given += ["--steps", str(folder.config.steps), "--faults", str(faults)]
    needs = _needs(given)
    children: list[proc.Child] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for child in children:
            child.signal(number)

    before = {one: signal.signal(one, on_signal) for one in (signal.SIGINT, signal.SIGTERM)}
    log = folder.path / "logs" / "chaos.log"
    try:
        with (
            proc.HeldPort() if needs.line else contextlib.nullcontext(0) as port,
            proc.spawn([*_CHAOS, *given, "--line", str(port)], name="chaos", log=log) as chaos,
        ):
            for _ in range(MAX_LIVES):
                line = port if chaos.alive() else 0
                with _supervisor(folder, flags, faults=needs.faults, line=line) as child:
                    children[:] = [child]
                    code = _ended(child, line=chaos if line else None)
                if code != -signal.SIGKILL:
                    return code
            chaos.stop()
        raise HoldfastError(f"the supervisor was killed {MAX_LIVES} times")
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def supervise(folder: Folder, *, flags: Sequence[str] = ()) -> int:
    """Run a run that was made, in peace, as a process of its own; returns its exit code."""
    with _supervisor(folder, flags) as child:
        return _ended(child)


def _needs(given: Sequence[str]) -> _Needs:
    asked = subprocess.run([*_CHAOS, *given, "--needs"], capture_output=True, text=True)
    if asked.returncode:
        raise Mistake(asked.stderr.strip().removeprefix("holdfast: "))
    return msgspec.json.decode(asked.stdout, type=_Needs)


def _supervisor(
    folder: Folder, flags: Sequence[str], *, faults: str = "", line: int = 0
) -> proc.Child:
    argv = [sys.executable, "-m", "holdfast", "run", "--resume", str(folder.path), *flags]
    env = {FAULTS: faults} if faults else {}
    if line:
        env[LINE] = str(line)
    # What it says goes where ours goes; Ctrl-C is passed on to it.
    return proc.spawn(argv, name="supervisor", env=env, stdin=None)


def _ended(child: proc.Child, *, line: proc.Child | None = None) -> int:
    """Wait for its end; bring it about if it has a line and who carries that has died."""
    while True:
        try:
            return child.wait(DEFAULTS.chaos_alive_s)
        except TimedOut:
            if line is not None and not line.alive():
                sys.stderr.write("holdfast: chaos has died: the run goes on without it\n")
                child.kill_group()
