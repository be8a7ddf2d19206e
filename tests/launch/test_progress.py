"""Signs of life: cheap, never torn, and harmless where nobody listens."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast import progress
from holdfast.proc import spawn
from patience import HANG_S, until


@contextmanager
def shared() -> Iterator[tuple[str, mmap.mmap]]:
    """A file for beats, as the launcher makes it."""
    with os.fdopen(os.memfd_create("beats"), "r+b", buffering=0) as file:
        os.ftruncate(file.fileno(), progress.SIZE)
        with mmap.mmap(file.fileno(), progress.SIZE, prot=mmap.PROT_READ) as seen:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}", seen


def code(text: str) -> list[str]:
    """How to run this with progress imported."""
    return [sys.executable, "-c", "import time\nfrom holdfast import progress\n" + text]


def python(text: str, path: str | None) -> str:
    """Run it; return what it printed."""
    env = {k: v for k, v in os.environ.items() if k != progress.VARIABLE}
    env |= {progress.VARIABLE: path} if path is not None else {}
    done = subprocess.run(code(text), env=env, check=True, timeout=30, capture_output=True)
    return done.stdout.decode()


def beat(seen: mmap.mmap) -> progress.Beat:
    """The last sign of life."""
    found = progress.read(seen)
    assert found is not None
    return found


def test_a_beat_is_seen_from_outside() -> None:
    """Step, time, number and longest pause, on the clock that both sides share."""
    with shared() as (path, seen):
        assert progress.read(seen) is None
        before = time.monotonic()
        python("progress.beat(7); time.sleep(0.2); progress.beat(8); progress.beat()", path)
        found = beat(seen)
        assert (found.step, found.beats, found.section) == (-1, 3, None)
        assert before < found.at_s < time.monotonic()
        assert 0.2 <= found.longest_s < HANG_S


NESTED = """
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


def test_sections_nest() -> None:
    """The innermost counts; its time is not held against the outer one; leaving is a beat."""
    env, pipe = progress.VARIABLE, subprocess.PIPE
    with shared() as (path, seen):
        with spawn(code(NESTED), env={env: path}, stdin=pipe, stdout=pipe) as child:
            kid = child.process
            assert kid.stdin is not None
            assert kid.stdout is not None
            found: list[progress.Beat] = []
            for _ in range(4):
                assert kid.stdout.readline()
                found.append(beat(seen))
                kid.stdin.write(b"\n")
                kid.stdin.flush()
        sections = [one.section for one in found if one.section is not None]
        assert [one.name[:9] for one in sections] == ["outer", "inner ééé", "outer"]
        assert [one.limit_s for one in sections] == [100, 5, 100]
        assert sections[2].since_s - sections[0].since_s >= 0.3
        assert found[3].section is None
        assert found[3].at_s > found[0].at_s


def test_nobody_listens() -> None:
    """Outside the launcher beats and sections do nothing; a bad file is told once, on stderr."""
    text = "progress.beat(1)\nwith progress.section('a', 1): print('in')\nprogress.beat(2)"
    for path in (None, "/proc/self/fd/999"):
        assert python(text, path) == "in\n"
    with pytest.raises(ValueError, match="more than 0"), progress.section("a", 0):
        pass


def test_what_is_read_together_belongs_together() -> None:
    """While a process beats as fast as it can, step and count do not come apart."""
    endless = "i = 0\nwhile True:\n    progress.beat(i)\n    i += 1"
    with (
        shared() as (path, seen),
        spawn(code(endless), env={progress.VARIABLE: path}),
    ):
        until(lambda: progress.read(seen) is not None)
        reads, halves, last = 0, 0, -1
        while reads < 10_000 or last < 1000:
            found = beat(seen)
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
        text = """
best = 9.0
for _ in range(20):
    t = time.perf_counter()
    for i in range(2000): progress.beat(i)
    best = min(best, (time.perf_counter() - t) / 2000)
print(best)
"""
        cost_s = float(python(text, path))
        print(f"a beat costs {cost_s * 1e9:.0f} ns")
        assert cost_s < 2e-6


def test_it_imports_neither_torch_nor_the_rest() -> None:
    """Training code pays for what it uses."""
    text = "import sys; print([m for m in sys.modules if m.startswith(('holdfast', 'torch'))])"
    assert python(text, None) == "['holdfast', 'holdfast.progress']\n"
