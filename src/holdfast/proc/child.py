"""Child processes that cannot outlive their parent.

Invariants: a child started here is killed by the kernel when the thread that started
it ends, however the parent dies (start children from a thread that lives as long as
they should); a child leads its own process group, so `kill_group` ends it together with
whatever it started, except for what left the group (setsid, a daemon). The kernel kills
the child only: what it started dies with it if it was started here too. Nothing here
ever signals a process that it did not start: a child that has ended stays a zombie, and so
keeps its pid, until its group has been killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.errors import Denied, MissingPackage, Mistake, TimedOut, Unavailable
from holdfast.files import append_to, private_folder, trim

__all__ = ["Child", "die_with_parent", "spawn"]

LOG_BYTES = 64 << 20
"""What a child's log may take of the disk, if it is trimmed every TRIM_S."""
TRIM_S = 5.0
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_TAIL_BYTES = 4096

_prctl: Callable[..., int] | None = None
if sys.platform == "linux":
    # Resolved here: between fork and exec nothing may be imported or allocated.
    _prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(parent_pid: int, signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to kill this process when its parent ends. Runs in the child."""
    if _prctl is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent_pid:  # the parent died before the request was made
        os._exit(1)


class Child:
    """A running child. Use `with`, or call `stop` or `kill_group`."""

    def __init__(self, process: "subprocess.Popen[bytes]", name: str, log: Path | None) -> None:
        self.process = process
        self.name = name
        self.log = log

    @property
    def pid(self) -> int:
        """The child's process id, which is also that of its group."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether the child itself still runs."""
        return self._exit() is None

    def signal(self, number: int) -> None:
        """Send a signal to the child's whole group; an ended child gets none."""
        if self.alive():
            os.killpg(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL the child and everything in its group, and wait for the child."""
        if self.process.returncode is not None:
            return  # collected: the pid may belong to somebody else by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout_s: float) -> int:
        """Wait for the child itself to end; return its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while (code := self._exit()) is None:
            if time.monotonic() > deadline:
                raise TimedOut(f"{self.name} still runs after {timeout_s} s")
            time.sleep(_POLL_S)
        return code

    def stop(self, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`. Returns the exit code."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimedOut):  # it had its chance
            self.wait(grace_s)
        self.kill_group()
        return self.process.returncode

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until `ready()` is true; raise if the child ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if not self.alive():
                raise Unavailable(
                    f"{self.name} ended with code {self._exit()} before it was ready{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise TimedOut(f"{self.name} was not ready after {timeout_s} s{self.tail()}")
            time.sleep(_POLL_S)

    def _exit(self) -> int | None:
        """The exit code, or None while it runs. Does not collect it: see the top."""
        if self.process.returncode is not None:
            return self.process.returncode
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            ended = os.waitid(os.P_PID, self.pid, flags)
        except ChildProcessError:  # another thread has just collected it
            return self.process.poll()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def tail(self) -> str:
        """The last lines of its log, for an error message."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-5:]
        return ": " + " | ".join(lines) if lines else ""

    def trim_log(self) -> None:
        """Bound what its log takes of the disk: to be called now and then while it runs."""
        if self.log is not None:
            trim(self.log, LOG_BYTES)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_group()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what it no longer reads
                    pipe.close()


def spawn(
    argv: Sequence[str],
    *,
    name: str = "",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    package: str = "",
) -> Child:
    """Start a program that dies with this thread.

    `log` takes both of its output streams; `env` is added to our own environment;
    `package` is named in the error when the program is not installed.
    """
    parent = os.getpid()
    sink: int | IO[Any] | None = stdout
    if log is not None:
        private_folder(log.parent)
        sink = append_to(log)
    try:
        process = subprocess.Popen(
            list(argv),
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=stdin,
            stdout=sink,
            stderr=subprocess.STDOUT if log is not None else None,
            start_new_session=True,
            # Allowed beside threads, because all it does is two system calls.
            preexec_fn=lambda: die_with_parent(parent),
        )
    except FileNotFoundError:
        if cwd is not None and not cwd.is_dir():
            raise Mistake(f"{argv[0]} cannot start in {cwd}: there is no such folder") from None
        what = f" (install the package {package})" if package else ""
        raise MissingPackage(f"the program {argv[0]} was not found{what}") from None
    except PermissionError:
        raise Denied(f"the program {argv[0]} may not be run, or not in {cwd or '.'}") from None
    finally:
        if log is not None and isinstance(sink, int):
            os.close(sink)
    return Child(process, name or Path(argv[0]).name, log)
