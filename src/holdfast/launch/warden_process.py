"""The program of the warden (see warden.py): kills workers whose agent no longer renews.

    python -I -S warden_process.py FD

Small and on Python's own modules only: it is there in a few milliseconds and holds little.
Messages come over a socket that keeps their boundaries:

    G pid start_time ...   guard these process groups; their pidfds come along
    R nanoseconds          live until then, on CLOCK_BOOTTIME
    C                      guard nobody any more

Answers: `A` to a renewal, `F` when the deadline has passed and the groups were killed.

Invariants: **the deadline is looked at before any message**, so that a renewal that comes after
it does not save those who were guarded when it passed. The end of the agent (of its end of the
socket, or by the kernel's signal) kills all groups. Nobody else is ever hit: a group is
signalled through the pidfd of its leader, which the kernel ties to the process and not to its
number; where the kernel cannot do that (before 6.9), the number is used only while the process
that has it started when our worker did, or while nobody has it and the group still exists.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time

_MAX_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 64
_WHOLE_GROUP = 4  # PIDFD_SIGNAL_PROCESS_GROUP
_TIMER_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
_ABSOLUTE = 1


class _Timer:
    """A file descriptor that becomes readable at a time of CLOCK_BOOTTIME."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(time.CLOCK_BOOTTIME, _TIMER_FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def set(self, at_ns: int) -> None:
        at_ns = max(1, at_ns)  # 0 would disarm it
        spec = (ctypes.c_long * 4)(0, 0, at_ns // 10**9, at_ns % 10**9)
        if self._libc.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")


class _Group:
    """A worker and everything in its process group."""

    def __init__(self, pid: int, start: str, pidfd: int) -> None:
        self.pid, self.start, self.pidfd = pid, start, pidfd

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL, None, _WHOLE_GROUP)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if start_time(self.pid) in (self.start, ""):
                    os.killpg(self.pid, signal.SIGKILL)
        os.close(self.pidfd)


def start_time(pid: int) -> str:
    """When a process started, in ticks, as the kernel says it; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- starts faster without
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


class _Warden:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._timer = _Timer()
        self._groups: list[_Group] = []
        self._deadline_ns = 0  # none yet

    def run(self, signals: int) -> None:
        """Guard until the agent has ended. `signals` becomes readable when one arrives."""
        agent = os.getppid()
        poll = select.poll()
        for fd in (self._sock.fileno(), self._timer.fd, signals):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            self._look()
            if signals in ready:
                os.read(signals, 4096)
            # A signal is the kernel's word that the agent is dead, or somebody's who signals
            # every process of a job: then the agent hears it too, and decides.
            if os.getppid() != agent or (self._sock.fileno() in ready and not self._hear()):
                self._kill()
                return
            self._look()

    def _look(self) -> None:
        if self._deadline_ns and time.clock_gettime_ns(time.CLOCK_BOOTTIME) >= self._deadline_ns:
            if self._groups:
                self._kill()
                self._say(b"F")
            with contextlib.suppress(BlockingIOError):
                os.read(self._timer.fd, 8)

    def _hear(self) -> bool:
        try:
            data, fds, *_ = socket.recv_fds(self._sock, _MAX_MESSAGE_BYTES, _MAX_FDS)
        except ConnectionError:
            return False
        if not data:
            return False
        kind, *words = data.decode("ascii").split()
        if kind == "G":
            for pid, start, fd in zip(words[::2], words[1::2], fds, strict=True):
                self._groups.append(_Group(int(pid), start, fd))
        elif kind == "R":
            self._deadline_ns = int(words[0])
            self._timer.set(self._deadline_ns)
            self._say(b"A")
        elif kind == "C":
            for group in self._groups:
                os.close(group.pidfd)
            self._groups.clear()
        return True

    def _kill(self) -> None:
        for group in self._groups:
            group.kill()
        self._groups.clear()

    def _say(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._sock.send(word, socket.MSG_DONTWAIT)


def main(fd: int) -> None:
    """Guard until the agent has ended."""
    signals, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # where it may: it must not be late
    with socket.socket(fileno=fd) as sock:
        _Warden(sock).run(signals)


if __name__ == "__main__":
    main(int(sys.argv[1]))
