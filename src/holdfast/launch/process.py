"""One child of the agent, and the interpreter that waits for its order.

Responsible for: starting a process that dies with the agent, leads its own session and
tells its end through a pidfd (no polling, no SIGCHLD); giving a waiting `child.py` its
order.

Invariants: as in `holdfast.proc`, an ended child stays a zombie, and so keeps its pid and
the number of its group, until `collect` has killed the group. `collect` never blocks on a
process that still runs, and is not through before everybody in the group is dead. Nothing of
the user's runs in a `Blank` before `give`, so whoever has to know its pid can be told first.

Start children from the thread that lives as long as the agent: its main thread.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import Denied, NotFound, TooLarge, Unavailable
from holdfast.launch.spec import Order, encode
from holdfast.proc import Child, die_with_parent
from holdfast.proc.forkserver import ForkServer

__all__ = ["Blank", "Process"]

_LOOK_S = 0.005
_WAITING = "a waiting worker"
_FORKED = (sys.executable, "-m", "holdfast.launch.forked_child")
_CHILD = str(Path(__file__).with_name("child.py"))
# As torchrun starts its workers: what they print is not held back.
_PYTHON = (sys.executable, "-u")
# For programs the interpreter is only a door, and opens faster without site packages.
_DOOR = (sys.executable, "-I", "-S")


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


class Process:
    """A running child. `exited` is done, with the code, when it has ended."""

    def __init__(self, popen: "subprocess.Popen[bytes]", name: str) -> None:
        self.name = name
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._child = Child(popen, name, None)
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended)

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str],
        cwd: str | None = None,
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
        death_signal: int = signal.SIGKILL,
    ) -> "Process":
        """Start a program with exactly this environment; it gets `death_signal` when we die."""
        parent = os.getpid()
        try:
            popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=stdin,
                pass_fds=pass_fds,
                start_new_session=True,
                # Allowed beside threads, because all it does is two system calls.
                preexec_fn=lambda: die_with_parent(parent, death_signal),
            )
        except FileNotFoundError:
            where = cwd if cwd is not None and not Path(cwd).is_dir() else argv[0]
            raise NotFound(f"{name} cannot start: there is no {where}") from None
        except PermissionError as error:
            raise Denied(f"{name} cannot start: {error}") from None
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise TooLarge(f"{name} cannot start: its environment is too large") from None
            raise Unavailable(f"{name} cannot start: {error.strerror}") from error
        try:
            return cls(popen, name)
        except OSError as error:  # no descriptor left for its pidfd
            popen.kill()
            popen.wait()
            raise Unavailable(f"{name} cannot be watched: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """The process id, which is also that of its group and session."""
        return self._child.pid

    @property
    def collected(self) -> bool:
        """Whether it has ended and been collected; its pid may be anybody's."""
        return self._child.process.returncode is not None

    def running(self) -> bool:
        """Whether it has not ended yet, as of now."""
        return not self.exited.done() and self._child.alive()

    def signal(self, number: int) -> None:
        """Signal the process alone."""
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def signal_group(self, number: int) -> None:
        """Signal the whole group; also what is left of it when the process itself ended."""
        if not self.collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def collect(self, timeout_s: float) -> bool:
        """Kill the group and collect the process. False if not all are dead in time."""
        if self.collected:
            return True
        deadline = time.monotonic() + timeout_s
        self.signal_group(signal.SIGKILL)
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        if not done:
            return False  # it hangs in the kernel: waiting for it would hang us
        self._child.kill_group()
        # The others of the group are not our children: nothing tells when they are dead, which
        # they are in a moment. Looking signals nobody, whosever the number may be by then.
        while _group_lives(self.pid):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_S)
        return True

    def _ended(self) -> None:
        self._forget()
        self.exited.set_result(self._child.wait(1.0))

    def _forget(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)


class Blank:
    """A `child.py` that waits for its order, with `preload` imported when it is ready.

    `env` and `cwd` are what it was started with. `told` is done when it is ready, with what it
    says about itself, or, empty, when it will never be.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        cwd: str,
        preload: Sequence[str] = (),
        door: bool = False,
        forks: ForkServer | None = None,
    ) -> None:
        """`door`: it becomes a program, and need not be a good home for Python code."""
        self.env, self.cwd, self.preload = env, cwd, tuple(preload)
        self.told: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._ours, theirs = socket.socketpair()
        with theirs:
            self._ours.setblocking(False)
            try:
                self.process = self._forked(forks, theirs) or Process.start(
                    [*(_DOOR if door else _PYTHON), _CHILD, str(theirs.fileno()), *preload],
                    name=_WAITING,
                    env=env,
                    cwd=cwd,
                    pass_fds=[theirs.fileno()],
                )
            except BaseException:
                self._ours.close()
                raise
        asyncio.get_running_loop().add_reader(self._ours, self._hear)

    def _forked(self, forks: ForkServer | None, line: socket.socket) -> Process | None:
        if forks is None or self.cwd != str(Path.cwd()):
            return None
        child = forks.spawn([*_FORKED, *self.preload], name=_WAITING, env=self.env, line=line)
        return Process(child.process, _WAITING) if child is not None else None

    async def give(self, order: Order) -> Process:
        """Tell it what to run. That it may have died meanwhile is seen at its process."""
        data = encode(order)
        # Our end stays open until it has closed its own (`_hear`): closing it over a word of
        # the child's that we have not read would take the order back.
        with contextlib.suppress(ConnectionError, OSError):
            await asyncio.get_running_loop().sock_sendall(self._ours, data)
        return self.process

    async def discard(self, timeout_s: float) -> bool:
        """End it without an order. False if it cannot be killed in time."""
        ended = await self.process.collect(timeout_s)
        self._close()
        return ended

    def _hear(self) -> None:
        try:
            heard = self._ours.recv(4096)
        except ConnectionError:
            heard = b""
        if not self.told.done():
            self.told.set_result(heard)
        if not heard:  # it has read its order, or is dead
            self._close()

    def _close(self) -> None:
        if self._ours.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._ours)
            self._ours.close()
