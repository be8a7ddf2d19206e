"""Child processes that cannot outlive their parent.

Invariants: a child started here is killed by the kernel when the thread that started
it ends, however the parent dies (start children from a thread that lives as long as
they should); a child leads its own process group, so `kill_group` ends it together with
whatever it started, except for what left the group (setsid, a daemon). The kernel kills
the child only: what it started dies with it if it was started here too. Nothing here
ever signals a process that it did not start: a child that has ended stays a zombie, and so
keeps its pid, until its group has been killed.

In a loop, `exited` tells the end through a pidfd (no polling, no SIGCHLD), and `collect` ends a
group without blocking on a process that hangs in the kernel.
"""

import asyncio
import contextlib
import ctypes
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from holdfast.errors import Denied, MissingPackage, Mistake, TimedOut, TooLarge, Unavailable
from holdfast.files import append_to, private_folder, trim
from holdfast.timeouts import DEFAULTS

__all__ = ["Child", "Forked", "die_with_parent", "last_lines", "spawn"]

LOG_BYTES = 64 << 20
"""What a child's log may take of the disk, if it is trimmed every `log_trim_s`."""
_PR_SET_PDEATHSIG = 1
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


class Forked:
    """A child that was forked, or adopted: as much of a `subprocess.Popen` as `Child` needs."""

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    stderr: IO[bytes] | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Collect it if it has ended."""
        return self._collect(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Collect it when it has ended; nobody waits for a limited time here."""
        code = self._collect(0)
        assert code is not None
        assert timeout is None
        return code

    def _collect(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # collected by somebody who waits for anybody
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Child:
    """A running child. Use `with`, or call `stop`, `kill_group` or `collect`."""

    def __init__(
        self, process: "subprocess.Popen[bytes] | Forked", name: str, log: Path | None = None
    ) -> None:
        self.process = cast("subprocess.Popen[bytes]", process)
        self.name = name
        self.log = log
        self._exited: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        """The child's process id, which is also that of its group."""
        return self.process.pid

    @property
    def exited(self) -> "asyncio.Future[int]":
        """Done, with the code, when it has ended. The loop that asks first is told of it."""
        if self._exited is None:
            loop = asyncio.get_running_loop()
            try:
                pidfd = os.pidfd_open(self.pid)
            except OSError as error:  # no descriptor is left
                self.kill_group()
                raise Unavailable(f"{self.name} cannot be watched: {error.strerror}") from error
            exited = self._exited = loop.create_future()

            def end() -> None:
                loop.remove_reader(pidfd)
                os.close(pidfd)
                exited.set_result(self.wait(1.0))

            loop.add_reader(pidfd, end)
        return self._exited

    @property
    def collected(self) -> bool:
        """Whether it has ended and been collected; its pid may be anybody's."""
        return self.process.returncode is not None

    def alive(self) -> bool:
        """Whether the child itself still runs."""
        return self._exit() is None

    def signal(self, number: int) -> None:
        """Send a signal to the child's whole group, also to what is left of it."""
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def signal_alone(self, number: int) -> None:
        """Send a signal to the child itself."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """SIGKILL the child and everything in its group, and wait for the child."""
        if not self.collected:
            self.signal(signal.SIGKILL)
            self.process.wait()

    async def collect(self, timeout_s: float) -> bool:
        """Kill the group and collect the child. False if not all are dead in time."""
        if self.collected:
            return True
        deadline = time.monotonic() + timeout_s
        self.signal(signal.SIGKILL)
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        if not done:
            return False  # it hangs in the kernel: waiting for it would hang us
        self.kill_group()
        # The others of the group are not our children: nothing tells when they are dead, which
        # they are in a moment. Looking signals nobody, whosever the number may be by then.
        while _group_lives(self.pid):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(DEFAULTS.process_look_s)
        return True

    def wait(self, timeout_s: float) -> int:
        """Wait for the child itself to end; return its exit code, negative for a signal."""
        deadline = time.monotonic() + timeout_s
        while (code := self._exit()) is None:
            if time.monotonic() > deadline:
                raise TimedOut(f"{self.name} still runs after {timeout_s} s")
            time.sleep(DEFAULTS.process_look_s)
        return code

    def stop(self, grace_s: float = 5.0) -> int:
        """SIGTERM, then SIGKILL after `grace_s`. Returns the exit code."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimedOut):  # it had its chance
            self.wait(grace_s)
        self.kill_group()
        assert self.process.returncode is not None
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
            time.sleep(DEFAULTS.process_look_s)

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
        lines = last_lines(self.log, 5)
        return ": " + " | ".join(lines) if lines else ""

    def last_line(self) -> str:
        """The last line of its log; empty if there is none."""
        return "".join(last_lines(self.log, 1))

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
    whole_env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    log: Path | None = None,
    stdin: int | IO[Any] | None = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
    death_signal: int = signal.SIGKILL,
    package: str = "",
) -> Child:
    """Start a program that gets `death_signal` when this thread ends.

    `log` takes both of its output streams; `env` is added to our own environment, `whole_env`
    stands in its place; `package` is named in the error when the program is not installed.
    """
    parent = os.getpid()
    name = name or Path(argv[0]).name
    sink: int | IO[Any] | None = stdout
    if log is not None:
        private_folder(log.parent)
        sink = append_to(log)
    try:
        process = subprocess.Popen(
            list(argv),
            env={**(os.environ if whole_env is None else whole_env), **(env or {})},
            cwd=cwd,
            stdin=stdin,
            stdout=sink,
            stderr=subprocess.STDOUT if log is not None else None,
            pass_fds=pass_fds,
            start_new_session=True,
            # Allowed beside threads, because all it does is two system calls.
            preexec_fn=lambda: die_with_parent(parent, death_signal),
        )
    except FileNotFoundError:
        if cwd is not None and not Path(cwd).is_dir():
            raise Mistake(f"{argv[0]} cannot start in {cwd}: there is no such folder") from None
        what = f" (install the package {package})" if package else ""
        raise MissingPackage(f"the program {argv[0]} was not found{what}") from None
    except PermissionError:
        raise Denied(f"the program {argv[0]} may not be run, or not in {cwd or '.'}") from None
    except (OSError, ValueError) as error:
        raise _unable(name, error) from error
    finally:
        if log is not None and isinstance(sink, int):
            os.close(sink)
    return Child(process, name, log)


def last_lines(path: Path | None, count: int) -> list[str]:
    """The end of a file of output, if there is one."""
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def _unable(name: str, error: OSError | ValueError) -> Exception:
    """What the caller can do about a program that does not start."""
    if isinstance(error, ValueError) or error.errno == errno.ENOEXEC:
        return Mistake(f"{name} cannot be started: {error}")
    if error.errno == errno.E2BIG:
        return TooLarge(f"{name} cannot be started: its arguments and environment are too large")
    return Unavailable(f"{name} could not be started: {error.strerror}")


def _group_lives(group: int) -> bool:
    """Whether anybody of a process group still runs.

    One that only waits to be collected by whoever has inherited it does not: in a container
    that may never happen.
    """
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):  # nobody, or by now somebody else's
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            letter, _, found = path.read_text().rpartition(")")[2].split()[:3]
            if int(found) == group and letter not in "ZX":
                return True
    return False
