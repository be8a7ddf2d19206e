"""Workers that stop by themselves when their agent does not renew: "safe after a pause".

A process of its own (warden_process.py) holds the workers' pidfds and a deadline that the
agent renews, always to a time before its lease ends. When the deadline passes, whatever the
agent is doing (stopped, swapped out, stuck in a system call), the warden kills the workers'
process groups. It does the same when the agent ends, however it ends; so what a worker had
started dies with the agent too, as long as it stayed in the worker's group.

Time is CLOCK_BOOTTIME, which goes on while the machine is suspended. If the whole node was
stopped, the warden kills the workers when it wakes, renewed or not; what they do in between is
what fencing (`holdfast.cycle.commit`) is for.

The agent must renew before it guards anybody, and only while its lease holds. If the warden
itself dies, or does not answer, `failed` is done, and the agent must stop its workers or
start another warden at once. Not done here: deciding for how long to renew.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from holdfast.errors import Mistake, Unavailable
from holdfast.launch.warden_process import start_time
from holdfast.proc import spawn
from holdfast.timeouts import DEFAULTS

__all__ = ["Warden", "boottime_s"]

_PROGRAM = str(Path(__file__).with_name("warden_process.py"))
_FDS_AT_ONCE = 32


def boottime_s() -> float:
    """The clock of deadlines."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Warden:
    """The agent's side. Make it in the agent's loop, in its main thread.

    `failed` is done, with the reason, when the warden can no longer be relied on; from then on
    `guard`, `release` and `renew` raise `Unavailable`. `fired` counts how often a deadline has
    passed and workers were killed.
    """

    def __init__(self, *, silence_s: float = DEFAULTS.warden_silence_s) -> None:
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[str] = loop.create_future()
        self.fired = 0
        self._silence_s = silence_s
        self._unanswered: list[float] = []
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            self._process = spawn(
                [sys.executable, "-I", "-S", _PROGRAM, str(theirs.fileno())],
                name="the warden",
                pass_fds=[theirs.fileno()],
                # It has something to do before it dies.
                death_signal=signal.SIGTERM,
            )
        loop.add_reader(self._sock, self._hear)
        self._process.exited.add_done_callback(
            lambda exited: self._fail(f"the warden ended with {exited.result()}")
        )

    @property
    def pid(self) -> int:
        """The warden's process."""
        return self._process.pid

    def guard(self, pids: Iterable[int]) -> None:
        """Guard children of ours that lead their groups and were not collected yet."""
        remaining = iter(pids)
        while some := list(islice(remaining, _FDS_AT_ONCE)):
            fds: list[int] = []
            try:
                fds.extend(os.pidfd_open(pid) for pid in some)
                words = " ".join(f"{pid} {start_time(pid)}" for pid in some)
                self._send(f"G {words}", fds)
            except ProcessLookupError:
                raise Mistake("only processes that were not collected can be guarded") from None
            finally:
                for fd in fds:
                    os.close(fd)

    def release(self) -> None:
        """Guard nobody any more: all were collected."""
        self._send("C")

    def renew(self, until_boottime_s: float) -> None:
        """Let those who are guarded live until then."""
        now = time.monotonic()
        if self._unanswered and now - self._unanswered[0] > self._silence_s:
            self._fail(f"the warden has not answered for {now - self._unanswered[0]:.1f} s")
        self._unanswered.append(now)
        self._send(f"R {int(until_boottime_s * 1e9)}")

    async def close(self) -> None:
        """End the warden; workers that are still guarded are killed."""
        self._disconnect()
        await asyncio.wait([self._process.exited], timeout=DEFAULTS.warden_close_s)
        await self._process.collect(DEFAULTS.warden_close_s)

    def _send(self, text: str, fds: Iterable[int] = ()) -> None:
        if self.failed.done():
            raise Unavailable(self.failed.result())
        try:
            socket.send_fds(self._sock, [text.encode("ascii")], list(fds))
        except OSError as error:
            self._fail(f"the warden cannot be reached: {error.strerror}")
            raise Unavailable(self.failed.result()) from None

    def _hear(self) -> None:
        try:
            word = self._sock.recv(16)
        except BlockingIOError:
            return
        except ConnectionError:
            word = b""
        if word == b"A" and self._unanswered:
            self._unanswered.pop(0)
        elif word == b"F":
            self.fired += 1
        elif not word:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)
