"""Where the output of workers goes: to files, and from there, with prefixes, to the terminal.

    <folder>/<run>/cycle_<n>/rank_<r>.{stdout,stderr,error.json,stacks}

Responsible for: torchrun's `--redirects` and `--tee` (0 none, 1 stdout, 2 stderr, 3 both, or
`0:3,1:0` by slot), the names of a worker's files, and copying new bytes to the terminal.

Invariants: a worker writes to its file itself, so that nothing it prints waits for the agent,
or is lost with it. The copying is done by a thread: a terminal that takes nothing holds up
that thread and nobody else, and costs no memory, because what was not copied stays in the file.
Bytes are passed through as they are. Lines of different ranks are not mixed; a line longer
than `MAX_LINE_BYTES` is shown in pieces. A carriage return ends a line too, so that progress
bars are seen. `close` shows what is left, within `drain_s`, and says where the rest is.
"""

import contextlib
import errno
import os
import re
import select
import threading
import time
from collections.abc import Mapping
from enum import IntFlag
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.errors import Denied, Mistake, NoRoom
from holdfast.launch.spec import Seat
from holdfast.proc.child import last_lines
from holdfast.timeouts import DEFAULTS

__all__ = ["MAX_LINE_BYTES", "CycleLogs", "Files", "Logs", "Streams", "parse_streams"]

MAX_LINE_BYTES = 1 << 16


class Streams(IntFlag):
    """Which of a worker's two streams."""

    NONE = 0
    OUT = 1
    ERR = 2
    BOTH = 3


StreamsBySlot = Streams | Mapping[int, Streams]


def parse_streams(text: str) -> StreamsBySlot:
    """Read `3`, or `0:3,1:0` by slot, as torchrun does."""
    if re.fullmatch(r"[0-3]", text):
        return Streams(int(text))
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        pairs = (part.split(":") for part in text.split(","))
        return {int(slot): Streams(int(value)) for slot, value in pairs}
    raise Mistake(f"{text!r} is neither 0, 1, 2 or 3 nor like 0:3,1:0 (slot:streams)")


def _of(streams: StreamsBySlot, slot: int) -> Streams:
    return streams if isinstance(streams, Streams) else streams.get(slot, Streams.NONE)


class Files(msgspec.Struct, frozen=True):
    """The files of one worker. A stream that is not redirected has none."""

    stdout: Path | None
    stderr: Path | None
    error: Path
    stacks: Path

    def last_lines(self, count: int = 10) -> str:
        """The end of stderr, for the one who wants to know why."""
        return "\n".join(last_lines(self.stderr, count))


class Logs(msgspec.Struct, frozen=True, kw_only=True):
    """How the output of workers is kept and shown, in every cycle."""

    folder: Path
    redirects: StreamsBySlot = Streams.NONE
    tee: StreamsBySlot = Streams.BOTH
    out_fd: int = 1
    err_fd: int = 2

    def cycle(self, seat: Seat) -> "CycleLogs":
        """Make the folder of a cycle, and begin to show what its workers will write."""
        return CycleLogs(self, seat)


class CycleLogs:
    """The files of one cycle on this node."""

    def __init__(self, logs: Logs, seat: Seat) -> None:
        name = quote(seat.run, safe="") or "run"
        if not name.strip("."):  # "." and ".." are other folders
            name = name.replace(".", "%2E")
        self.folder = logs.folder.absolute() / name / f"cycle_{seat.place.cycle}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except PermissionError:
            raise Denied(f"the log folder {self.folder} may not be made") from None
        except OSError as error:
            kind = NoRoom if error.errno in (errno.ENOSPC, errno.EDQUOT) else Mistake
            raise kind(f"the log folder {self.folder}: {error.strerror}") from None
        self.files = [self._files(logs, seat, slot) for slot in range(seat.place.slots)]
        tails = []
        for slot, files in enumerate(self.files):
            prefix, tee = b"[rank%d]:" % seat.rank(slot), _of(logs.tee, slot)
            if files.stdout is not None and tee & Streams.OUT:
                tails.append(_Tail(files.stdout, prefix, logs.out_fd))
            if files.stderr is not None and tee & Streams.ERR:
                tails.append(_Tail(files.stderr, prefix, logs.err_fd))
        self._tailer = _Tailer(tails)

    def _files(self, logs: Logs, seat: Seat, slot: int) -> Files:
        kept = _of(logs.redirects, slot) | _of(logs.tee, slot)
        stem = str(self.folder / f"rank_{seat.rank(slot)}")
        files = Files(
            Path(stem + ".stdout") if kept & Streams.OUT else None,
            Path(stem + ".stderr") if kept & Streams.ERR else None,
            Path(stem + ".error.json"),
            Path(stem + ".stacks"),
        )
        with contextlib.suppress(FileNotFoundError):
            files.error.unlink()  # of a worker that had this place before, after our restart
        return files

    def close(self, drain_s: float = 5.0) -> None:
        """Show what is left, for at most `drain_s`. Blocks: call it in a thread."""
        self._tailer.close(drain_s)


class _Tail:
    """One file and how far it has been shown."""

    def __init__(self, path: Path, prefix: bytes, target: int) -> None:
        self.path, self.prefix, self.target = path, prefix, target
        self.offset = path.stat().st_size if path.exists() else 0
        self._fd = -1
        self._before = b""

    def lines(self, *, last: bool) -> bytes:
        """New whole lines, with prefixes; with `last` also one that was not finished."""
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""
        data = os.pread(self._fd, MAX_LINE_BYTES, self.offset)
        lines = data.splitlines(keepends=True)
        full, same = len(data) == MAX_LINE_BYTES, data == self._before
        self._before = data
        if lines and lines[-1].endswith(b"\r"):
            if not (last or full or same):  # a line feed may follow: it waits for one look
                lines.pop()
        elif lines and not lines[-1].endswith(b"\n"):
            rest = lines.pop()
            if not lines and (last or full):  # else it comes with the next look
                lines.append(rest + b"\n")
                self.offset -= 1
        self.offset += sum(map(len, lines))
        return b"".join(self.prefix + line for line in lines)

    def left(self) -> int:
        """How many bytes have not been shown."""
        try:
            return max(0, self.path.stat().st_size - self.offset)
        except OSError:
            return 0

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Tailer:
    """The thread that copies from the files to the terminal."""

    def __init__(self, tails: list[_Tail]) -> None:
        self._tails = tails
        self._end = threading.Event()
        self._deadline = 0.0
        self._deaf: set[int] = set()
        self._thread = threading.Thread(target=self._run, name="holdfast-logs", daemon=True)
        if tails:
            self._thread.start()

    def close(self, drain_s: float) -> None:
        """Show the rest, and stop."""
        if not self._tails or self._end.is_set():
            return
        self._deadline = time.monotonic() + drain_s
        self._end.set()
        # It may be stuck in a write: then it is left behind.
        self._thread.join(drain_s + DEFAULTS.log_copy_s)

    def _run(self) -> None:
        while not self._end.wait(DEFAULTS.log_copy_s):
            while self._copy(last=False) and not self._end.is_set():
                pass
        while self._copy(last=True) and time.monotonic() < self._deadline:
            pass
        for tail in self._tails:
            if left := tail.left():
                more = b" ... %d more bytes are in %s\n" % (left, os.fsencode(tail.path))
                self._write(tail.target, tail.prefix + more)
            tail.close()

    def _copy(self, *, last: bool) -> bool:
        some = False
        for tail in self._tails:
            if lines := tail.lines(last=last):
                some = True
                self._write(tail.target, lines)
        return some

    def _write(self, fd: int, data: bytes) -> None:
        """All of it. A terminal that has gone away is not written to again."""
        view = memoryview(data)
        while view and fd not in self._deaf:
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(fd, select.POLLOUT)
                poll.poll(1000 * DEFAULTS.log_copy_s)
                if self._end.is_set() and time.monotonic() > self._deadline:
                    return
            except OSError:
                self._deaf.add(fd)
