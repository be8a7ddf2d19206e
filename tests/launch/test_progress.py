"""Signs of life: cheap, never torn, and harmless where nobody listens."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast import progress
from holdfast.proc import spawn
from launch.node import until
from patience import HANG_S


@contextmanager
def shared() -> Iterator[tuple[str, mmap.mmap]]:
    """A file for beats, as the launcher makes it."""
    with os.fdopen(os.memfd_create("beats"), "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), progress.SIZE)
        with mmap.mmap(file.fileno(), progress.SIZE, prot=mmap.PROT_READ) as seen:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}", seen


def python(text: str, path: str | None) -> str:
    """Run this with progress imported; return what it printed."""
    env = {k: v for k, v in os.environ.items() if k != progress.VARIABLE}
    env |= {progress.VARIABLE: path} if path is not None else {}
    code = "import time\nfrom holdfast import progress\n" + text
    run = [sys.executable, "-c", code]
    return subprocess.run(
        run, env=env, check=True, timeout=30, capture_output=True
    ).stdout.decode()


def test_a_beat_is_seen_from_outside() -> None:
    """Step, time, number and longest pause, on the clock that both sides share."""
    with shared() as (path, seen):
        assert progress.read(seen) is None
        before = time.monotonic()
        python("progress.beat(7); time.sleep(0.2); progress.beat(8); progress.beat()", path)
        found = progress.read(seen)
        assert found is not None
        assert (found.step, found.beats, found.section) == (-1, 3, None)
        assert before < found.at_s < time.monotonic()
        assert 0.2 <= found.longest_s < HANG_S


def test_sections_nest() -> None:
    """The innermost counts; its time is not held against the outer one; leaving is a beat."""
    with shared() as (path, seen):
        text = """
import sys
def go(): print(flush=True); sys.stdin.readline()
progress.beat(1)
with progress.section("outer", 100):
    go()
    with progress.section("inner " + "é" * 99, 5):
        time.sleep(0.3); go()
    go()
go()
"""
        code = "import time\nfrom holdfast import progress\n" + text
        child = spawn(
            [sys.executable, "-c", code],
            env={progress.VARIABLE: path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with child:
            kid = child.process
            assert kid.stdin is not None
            assert kid.stdout is not None
            seen_sections = []
            beats = []
            for _ in range(4):
                assert kid.stdout.readline()
                found = progress.read(seen)
                assert found is not None
                seen_sections.append(found.section)
                beats.append(found.at_s)
                kid.stdin.write(b"\n")
                kid.stdin.flush()
        outer, inner, again, after = seen_sections
        assert outer is not None
        assert inner is not None
        assert again is not None
        assert after is None
        assert (outer.name, outer.limit_s) == ("outer", 100)
        assert inner.name.startswith("inner ééé")
        assert inner.limit_s == 5
        assert again.since_s - outer.since_s >= 0.3
        assert beats[3] > beats[0]


def test_nobody_listens() -> None:
    """Outside the launcher beats and sections do nothing; a bad file is told once, on stderr."""
    code = "progress.beat(1)\nwith progress.section('a', 1): print('in')\nprogress.beat(2)"
    assert python(code, None) == "in\n"
    assert python(code, "/proc/self/fd/999") == "in\n"
    with pytest.raises(ValueError, match="more than 0"), progress.section("a", 0):
        pass


def test_what_is_read_together_belongs_together(tmp_path: Path) -> None:
    """While a process beats as fast as it can, step and count do not come apart."""
    with shared() as (path, seen):
        code = "i = 0\nwhile True:\n    progress.beat(i)\n    i += 1"
        whole = "from holdfast import progress\n" + code
        with spawn([sys.executable, "-c", whole], env={progress.VARIABLE: path}):
            until(lambda: progress.read(seen) is not None)
            reads, halves, last = 0, 0, -1
            while reads < 10_000 or last < 1000:
                found = progress.read(seen)
                assert found is not None
                # One ahead: the writer lost its processor in the middle of a beat.
                halves += found.step == found.beats
                assert found.step - found.beats in (-1, 0), f"torn after {reads} reads"
                assert found.step >= last
                last = found.step
                reads += 1
            assert halves < reads


def test_a_beat_costs_less_than_two_microseconds() -> None:
    """The best of several rounds, so that a busy machine does not decide."""
    with shared() as (path, _):
        code = """
best = 9.0
for _ in range(20):
    t = time.perf_counter()
    for i in range(2000): progress.beat(i)
    best = min(best, (time.perf_counter() - t) / 2000)
print(best)
"""
        cost_s = float(python(code, path))
        print(f"a beat costs {cost_s * 1e9:.0f} ns")
        assert cost_s < 2e-6


def test_it_imports_neither_torch_nor_the_rest() -> None:
    """Training code pays for what it uses."""
    text = "import sys; print([m for m in sys.modules if m.startswith(('holdfast', 'torch'))])"
    assert python(text, None) == "['holdfast', 'holdfast.progress']\n"
