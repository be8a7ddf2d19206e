"""Logs: every byte is in the file, lines on the terminal are whole, and nothing blocks."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import Denied, Mistake
from holdfast.launch.logs import MAX_LINE_BYTES, CycleLogs, Logs, Streams, parse_streams
from holdfast.launch.workers import Workers
from launch.node import make_seat, make_spec, script
from patience import HANG_S, until


class Terminal:
    """A pipe in place of a terminal; what comes through is collected."""

    def __init__(self) -> None:
        self._out, self.fd = os.pipe()
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while data := os.read(self._out, 1 << 16):
            self._data += data

    def text(self) -> bytes:
        return bytes(self._data)

    def close(self) -> bytes:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._reader.join()
            os.close(self._out)
        return self.text()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def opened(folder: Path, terminal: Terminal, slots: int = 1, **options: object) -> CycleLogs:
    logs = Logs(folder=folder, out_fd=terminal.fd, err_fd=terminal.fd, **options)  # type: ignore[arg-type]
    return logs.cycle(make_seat(slots))


def stdout(logs: CycleLogs, slot: int = 0) -> Path:
    """The file that a worker writes to."""
    path = logs.files[slot].stdout
    assert path is not None
    return path


def test_streams_are_read_as_torchrun_does() -> None:
    """A number for all, or a number for each slot; anything else is refused, in one clear line."""
    assert [parse_streams(text) for text in ("0", "3")] == [Streams.NONE, Streams.BOTH]
    assert parse_streams("0:3,2:1") == {0: Streams.BOTH, 2: Streams.OUT}
    for text in ("", "4", "0:4", "x", "0:1,", "1,2", "-1"):
        with pytest.raises(Mistake, match="neither 0, 1, 2 or 3"):
            parse_streams(text)


@pytest.mark.parametrize(
    ("redirects", "tee", "files", "shown"),
    [
        (0, 0, [], b"out\nerr\n"),
        (1, 0, ["stdout"], b"err\n"),
        (3, 0, ["stderr", "stdout"], b""),
        (0, 1, ["stdout"], b"[rank0]:out\nerr\n"),
        (1, 2, ["stderr", "stdout"], b"[rank0]:err\n"),
        (3, 3, ["stderr", "stdout"], b"[rank0]:out\n[rank0]:err\n"),
    ],
)
async def test_redirects_and_tee(
    tmp_path: Path, terminal: Terminal, redirects: int, tee: int, files: list[str], shown: bytes
) -> None:
    """Redirected: to the file only; teed: to both; neither: where the agent's goes, as it is."""
    logs = opened(tmp_path / "logs", terminal, redirects=Streams(redirects), tee=Streams(tee))
    text = "import os\nos.write(1, b'out\\n'); os.write(2, b'err\\n')"
    kept = os.dup(1), os.dup(2)
    os.dup2(terminal.fd, 1)
    os.dup2(terminal.fd, 2)
    try:
        workers = await Workers.start(make_spec(script(tmp_path, text)), make_seat(1), None, logs)
    finally:
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        os.close(kept[0])
        os.close(kept[1])
    assert (await asyncio.wait_for(workers.wait(), HANG_S)).success
    await workers.stop(0)
    logs.close()
    names = [path.suffix[1:] for path in sorted(logs.folder.iterdir())]
    assert [name for name in names if name != "stacks"] == files
    assert sorted(terminal.close().splitlines()) == sorted(shown.splitlines())


def test_bytes_pass_through(tmp_path: Path, terminal: Terminal) -> None:
    """Not UTF-8, control sequences, progress bars, empty lines, a last line without an end.

    A bar that ends in a carriage return waits one look for a line feed, and not for ever.
    """
    logs = opened(tmp_path, terminal)
    stdout(logs).write_bytes(b"10%\r")
    until(lambda: terminal.text() == b"[rank0]:10%\r", limit_s=5)
    with stdout(logs).open("ab") as file:
        file.write(b"\xff\xfe\x1b[31mred\x1b[0m\n\n20%\r30%\rdone\r\nlast")
    until(lambda: b"done" in terminal.text())
    assert b"last" not in terminal.text()
    logs.close()
    expected = [b"10%\r", b"\xff\xfe\x1b[31mred\x1b[0m\n", b"\n", b"20%\r", b"30%\r"]
    expected += [b"done\r\n", b"last\n"]
    assert terminal.close() == b"".join(b"[rank0]:" + line for line in expected)


def test_lines_of_ranks_do_not_mix_and_none_is_lost(tmp_path: Path, terminal: Terminal) -> None:
    """Four ranks write at once, in pieces; every line arrives, whole, in its rank's order."""
    logs = opened(tmp_path, terminal, slots=4)

    def write(rank: int) -> None:
        with stdout(logs, rank).open("ab", buffering=0) as file:
            for number in range(2000):
                file.write(b"line ")
                file.write(b"%d of %d %s\n" % (number, rank, b"x" * (number % 300)))

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    logs.close(60)
    lines = terminal.close().splitlines()
    for rank in range(4):
        prefix = b"[rank%d]:" % rank
        mine = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        wanted = [b"line %d of %d %s" % (n, rank, b"x" * (n % 300)) for n in range(2000)]
        assert mine == wanted
    assert len(lines) == 8000


def test_a_line_without_end_is_shown_in_pieces(tmp_path: Path, terminal: Terminal) -> None:
    """Memory is bounded, whatever a worker writes; no byte is lost."""
    logs = opened(tmp_path, terminal)
    stdout(logs).write_bytes(b"a" * (3 * MAX_LINE_BYTES + 5))
    until(lambda: len(terminal.text()) > 3 * MAX_LINE_BYTES, "three pieces while it goes on")
    logs.close(60)
    pieces = terminal.close().splitlines()
    assert [len(piece) - len(b"[rank0]:") for piece in pieces] == [MAX_LINE_BYTES] * 3 + [5]


def test_a_terminal_that_takes_nothing_holds_nobody_up(tmp_path: Path) -> None:
    """Writers go on, closing takes its time limit and no longer, and the file has it all."""
    out, fd = os.pipe()
    logs = Logs(folder=tmp_path, out_fd=fd, err_fd=fd).cycle(make_seat(1))
    stdout(logs).write_bytes(b"a line\n" * 100_000)
    began = time.monotonic()
    logs.close(0.3)
    assert time.monotonic() - began < HANG_S
    assert stdout(logs).stat().st_size == 700_000
    os.close(out)  # the thread that was left behind finds nobody, and ends
    until(lambda: not logs._tailer._thread.is_alive())
    os.close(fd)


def test_a_terminal_that_went_away_is_left_alone(tmp_path: Path) -> None:
    """EPIPE ends the showing, not the keeping."""
    out, fd = os.pipe()
    os.close(out)
    logs = Logs(folder=tmp_path, out_fd=fd, err_fd=fd).cycle(make_seat(1))
    stdout(logs).write_bytes(b"a line\n")
    logs.close(5)
    assert not logs._tailer._thread.is_alive()
    os.close(fd)


def test_names_are_safe(tmp_path: Path, terminal: Terminal) -> None:
    """A run's name cannot lead out of the folder; files and lines have the rank in the run."""
    seat = make_seat(1, run="../../x", first_rank=5, world_size=6)
    cycle = Logs(folder=tmp_path, out_fd=terminal.fd).cycle(seat)
    assert cycle.folder.parent.parent == tmp_path
    assert stdout(cycle).name == "rank_5.stdout"
    stdout(cycle).write_bytes(b"x\n")
    cycle.close()
    assert terminal.close() == b"[rank5]:x\n"
    (tmp_path / "file").touch()
    with pytest.raises((Mistake, Denied), match="log folder"):
        Logs(folder=tmp_path / "file").cycle(make_seat(1))
