"""The interpreter that waits for its order: a child of the agent (`holdfast.proc.Child`).

Invariant: nothing of the user's runs in a `Blank` before `give`, so whoever has to know its pid
can be told first.

Start children from the thread that lives as long as the agent: its main thread.
"""

import asyncio
import contextlib
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.launch.spec import Order, encode
from holdfast.proc import Child, spawn
from holdfast.proc.forkserver import ForkServer

__all__ = ["Blank"]

_WAITING = "a waiting worker"
_FORKED = (sys.executable, "-m", "holdfast.launch.forked_child")
_CHILD = str(Path(__file__).with_name("child.py"))
# As torchrun starts its workers: what they print is not held back.
_PYTHON = (sys.executable, "-u")
# For programs the interpreter is only a door, and opens faster without site packages.
_DOOR = (sys.executable, "-I", "-S")


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
                self.process = self._forked(forks, theirs) or spawn(
                    [*(_DOOR if door else _PYTHON), _CHILD, str(theirs.fileno()), *preload],
                    name=_WAITING,
                    whole_env=env,
                    cwd=cwd,
                    stdin=None,
                    pass_fds=[theirs.fileno()],
                )
                _ = self.process.exited  # watched from here on
            except BaseException:
                self._ours.close()
                raise
        asyncio.get_running_loop().add_reader(self._ours, self._hear)

    def _forked(self, forks: ForkServer | None, line: socket.socket) -> Child | None:
        if forks is None or self.cwd != str(Path.cwd()):
            return None
        return forks.spawn([*_FORKED, *self.preload], name=_WAITING, env=self.env, line=line)

    async def give(self, order: Order) -> Child:
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
