"""Whether a rank hangs, and who waits for whom. `judge` is pure; `dump` asks the workers.

A rank is judged from its first beat on. It hangs when its last beat is older than the limit,
or when it has been in a section for longer than the section allows. Two things excuse it:
it is waiting for a rank that is not ahead of it and is in a section that may still last; or
nobody was awake to see its beats (`awake_since_s`): after a pause of the whole node every
limit counts from the end of the pause.

Of several ranks that are late the named one is the one that is behind: lowest step, then
oldest beat. The others stand in a collective and wait for it. That is a guess, and the dump
is there to be read.
"""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.launch.workers import Worker
from holdfast.progress import NO_STEP, Beat
from holdfast.timeouts import DEFAULTS

__all__ = ["Hang", "Learnt", "Limits", "dump", "judge"]

_MAX_STACK_BYTES = 1 << 18
_THREAD = re.compile(r"(Thread|Current thread) 0x[0-9a-f]+( \[.*?\])? \(most recent call first\)")


class Learnt(msgspec.Struct, frozen=True):
    """A limit learnt from the run: `factor` times the longest time between two beats so far.

    Never below `min_s`, and not before `after` beats of a rank.
    """

    factor: float = 10.0
    min_s: float = 30.0
    after: int = 10


class Limits(msgspec.Struct, frozen=True):
    """How long a rank may be silent. Without either only sections are judged.

    `longest_s` is the longest time between two beats in earlier cycles of this run.
    """

    beat_s: float | None = None
    learnt: Learnt | None = None
    longest_s: float = 0.0


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A rank is late. `waiting` are the other late ones, nearest to it first."""

    rank: int
    step: int
    kind: Literal["beat", "section"]
    section: str
    silent_s: float
    limit_s: float
    waiting: tuple[int, ...]

    def __str__(self) -> str:
        where = f" in section {self.section!r}" if self.kind == "section" else ""
        step = f" at step {self.step}" if self.step != NO_STEP else ""
        text = (
            f"rank {self.rank} hangs{step}{where}: no sign of life for {self.silent_s:.1f} s, "
            f"{self.limit_s:.1f} s are allowed"
        )
        if self.waiting:
            text += f"; waiting for it: {', '.join(map(str, self.waiting))}"
        return text


def judge(
    beats: Mapping[int, Beat], now_s: float, limits: Limits, *, awake_since_s: float = 0.0
) -> Hang | None:
    """The hang, if there is one. `beats` has what running ranks said; times are monotonic."""
    late = []
    for rank, beat in beats.items():
        limit_s = _limit_s(beat, beats, limits)
        since_s = max(beat.section.since_s if beat.section else beat.at_s, awake_since_s)
        if limit_s is None or now_s - since_s <= limit_s:
            continue
        if beat.section is None and _waits_for_a_section(rank, beats, now_s, awake_since_s):
            continue
        late.append((behind(beat), rank, now_s - since_s, limit_s))
    if not late:
        return None
    (_, rank, silent_s, limit_s), *others = sorted(late)
    beat = beats[rank]
    return Hang(
        rank=rank,
        step=beat.step,
        kind="section" if beat.section else "beat",
        section=beat.section.name if beat.section else "",
        silent_s=silent_s,
        limit_s=limit_s,
        waiting=tuple(other[1] for other in others),
    )


def behind(beat: Beat) -> tuple[int, float]:
    """Sorts ranks: the one that the others wait for comes first."""
    return (beat.step, beat.at_s)


def _limit_s(beat: Beat, beats: Mapping[int, Beat], limits: Limits) -> float | None:
    if beat.section is not None:
        return beat.section.limit_s
    if not beat.beats:
        return None
    found = [] if limits.beat_s is None else [limits.beat_s]
    learnt = limits.learnt
    if learnt is not None and beat.beats >= learnt.after:
        longest_s = max(limits.longest_s, *(other.longest_s for other in beats.values()))
        found.append(max(learnt.min_s, learnt.factor * longest_s))
    return min(found, default=None)


def _waits_for_a_section(
    rank: int, beats: Mapping[int, Beat], now_s: float, awake_since_s: float
) -> bool:
    return any(
        other != rank
        and beat.section is not None
        and beat.step <= beats[rank].step
        and now_s - max(beat.section.since_s, awake_since_s) <= beat.section.limit_s
        for other, beat in beats.items()
    )


async def dump(workers: Sequence[Worker], *, limit_s: float = 3.0) -> str:
    """The stacks of all workers, those that are behind first, identical ones together.

    Takes at most about `limit_s`; who does not answer is told as such, with the state in which
    the kernel has it.
    """
    now_s = time.monotonic()
    running = [worker for worker in workers if worker.running()]
    texts = await asyncio.gather(*(_stacks(worker, limit_s) for worker in running))
    groups: dict[str, list[Worker]] = {}
    for worker, text in sorted(zip(running, texts, strict=True), key=lambda pair: _key(pair[0])):
        groups.setdefault(text, []).append(worker)
    parts = ["who waits for whom, furthest behind first:"]
    parts += [f"  {_about(worker, now_s)}" for group in groups.values() for worker in group]
    for text, group in groups.items():
        ranks = ", ".join(str(rank) for rank in sorted(worker.rank for worker in group))
        parts += ["", f"rank{'s' if len(group) > 1 else ''} {ranks}:", text.rstrip("\n")]
    return "\n".join(parts) + "\n"


def _key(worker: Worker) -> tuple[tuple[int, float], int]:
    beat = worker.beat()
    # One that has never beaten says nothing about where it is: last.
    return (behind(beat) if beat is not None else (1 << 63, 0.0), worker.rank)


def _about(worker: Worker, now_s: float) -> str:
    beat = worker.beat()
    if beat is None:
        return f"rank {worker.rank} (pid {worker.pid}): has given no sign of life yet"
    text = f"rank {worker.rank} (pid {worker.pid}): "
    text += "no beat yet" if not beat.beats else f"last beat {now_s - beat.at_s:.1f} s ago"
    if beat.step != NO_STEP:
        text += f", step {beat.step}"
    if beat.section is not None:
        inside_s = now_s - beat.section.since_s
        text += f", {inside_s:.1f} s in section {beat.section.name!r}"
        text += f" (limit {beat.section.limit_s:g} s)"
    return text


async def _stacks(worker: Worker, limit_s: float) -> str:
    path = worker.stacks
    if path is None:
        return f"  no stacks: not a Python worker; {_state(worker.pid)}"
    offset = _size(path)
    worker.process.signal_alone(signal.SIGUSR2)
    if not await _settled(lambda: _size(path) - offset, limit_s):
        return f"  no stacks within {limit_s:g} s; {_state(worker.pid)}"
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(offset)
        text = file.read(_MAX_STACK_BYTES).decode(errors="replace")
        return _THREAD.sub(r"Thread", text)
    return "  no stacks: the file is gone"


async def _settled(grown: Callable[[], int], limit_s: float) -> bool:
    """Wait until something was written and no more comes. Python writes it bit by bit."""
    loop = asyncio.get_running_loop()
    deadline, before, since = loop.time() + limit_s, 0, loop.time()
    while loop.time() < deadline:
        if (size := grown()) != before:
            before, since = size, loop.time()
        elif size and loop.time() - since >= DEFAULTS.stack_quiet_s:
            return True
        await asyncio.sleep(DEFAULTS.process_look_s)
    return before > 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(pid: int) -> str:
    """What the kernel says a process is doing."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        where = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return "it is gone"
    letter = stat[stat.rindex(")") + 2]
    names = {"R": "running", "S": "sleeping", "D": "waiting in the kernel", "T": "stopped"}
    state = names.get(letter, letter)
    return f"the kernel has it as {state}" + (f" in {where}" if where not in ("", "0") else "")
