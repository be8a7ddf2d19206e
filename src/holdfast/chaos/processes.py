"""Kill and pause processes by seed, from outside.

`plan` is pure: the same seed makes the same actions. `carry_out` does them to pids that
the caller names.

Invariants: a signal reaches the process that was named or nobody (a pidfd is bound to
one process; the start time tells whether the pid has been given to another before the
pidfd was opened); pid 1, this process and its ancestors are never touched; whatever was
stopped here is continued, also when the runner is cancelled or fails. Only SIGKILL of
the runner itself leaves a stopped process behind.
"""

import asyncio
import contextlib
import os
import random
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.errors import Denied, Gone, Mistake, Unavailable

__all__ = [
    "KINDS",
    "Action",
    "Identity",
    "Kind",
    "Outcome",
    "carry_out",
    "identify",
    "plan",
    "protected_pids",
    "stat",
]

Kind = Literal["kill", "pause"]
KINDS: tuple[Kind, ...] = ("kill", "pause")
_ANCESTORS_MAX = 4096
_DRAWS_MAX = 1_000_000
_ENDED_STATES = "ZX"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do to one target, `at_s` seconds after the start."""

    at_s: float
    kind: Kind
    target: str
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Identity:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an action: `done`, `continued` (a pause ended) or `gone`."""

    action: Action
    result: Literal["done", "continued", "gone"]
    pid: int | None
    at_s: float

    def __str__(self) -> str:
        length = f" for {self.action.pause_s:.2f} s" if self.action.kind == "pause" else ""
        verb = {
            "done": self.action.kind + length,
            "continued": "continue",
            "gone": f"{self.action.kind} skipped, it has ended",
        }[self.result]
        return f"{self.at_s:8.2f} s  {self.action.target}  {verb}"


Resolve = Callable[[str], Identity | None]


# ---- the plan, pure ------------------------------------------------------------


def plan(
    seed: int,
    targets: Sequence[str],
    duration_s: float,
    kinds: Sequence[Kind] = KINDS,
    *,
    every_s: float = 5.0,
    pause_s: tuple[float, float] = (0.5, 3.0),
    respawn: bool = False,
) -> tuple[Action, ...]:
    """Decide what happens to whom and when, one action about every `every_s`.

    A paused target is left alone until it goes on, and every pause ends within
    `duration_s`. With `respawn` a killed target comes back under its name (somebody
    restarts it) and may be chosen again; without, it is out.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise Mistake(f"{kind!r} cannot be done to a process: choose from {', '.join(KINDS)}")
    if not (targets and kinds and duration_s > 0 and every_s > 0 and 0 < pause_s[0] <= pause_s[1]):
        raise Mistake("a plan needs targets, kinds, a duration, an interval and pause lengths")
    if duration_s / every_s > _DRAWS_MAX:
        raise Mistake(f"a plan has at most {_DRAWS_MAX} moments: make it shorter or rarer")
    dice = random.Random(f"{seed}/processes")
    free_at = dict.fromkeys(targets, 0.0)
    actions: list[Action] = []
    at_s = 0.0
    while free_at:
        at_s += every_s * dice.uniform(0.5, 1.5)
        if at_s >= duration_s:
            break
        # Drawn before anybody is passed over, so that one choice does not shift the rest.
        kind, which, length_s = dice.choice(list(kinds)), dice.random(), dice.uniform(*pause_s)
        free = [target for target, since_s in free_at.items() if since_s <= at_s]
        if not free:
            continue
        target = free[int(which * len(free))]
        if kind == "pause":
            length_s = min(length_s, duration_s - at_s)
            free_at[target] = at_s + length_s
            actions.append(Action(at_s, "pause", target, length_s))
        else:
            if not respawn:
                del free_at[target]
            actions.append(Action(at_s, "kill", target))
    return tuple(actions)


# ---- who is who ----------------------------------------------------------------


def identify(pid: int) -> Identity:
    """Name a running process for good. Raises `Gone` when there is none."""
    state, _, started_ticks = stat(pid)
    if state in _ENDED_STATES:
        raise Gone(f"process {pid} has ended")
    return Identity(pid, started_ticks)


def protected_pids() -> frozenset[int]:
    """Pids that are never touched: 1, this process and its ancestors."""
    found = {0, 1, os.getpid()}
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        if pid in found:
            break
        found.add(pid)
        try:
            pid = stat(pid)[1]
        except Gone:  # it ended while we looked; its parent is not ours any more
            break
    return frozenset(found)


def stat(pid: int) -> tuple[str, int, int]:
    """(state, parent, start time in ticks since boot) from /proc/PID/stat."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise Gone(f"there is no process {pid}") from None
    # The name, in parentheses, may hold blanks and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[1]), int(fields[19])


class _Victim:
    """A pidfd of exactly the process that was named."""

    def __init__(self, identity: Identity) -> None:
        self.pid = identity.pid
        _refuse_protected(self.pid)
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise Gone(f"there is no process {self.pid}") from None
        except OSError as error:
            raise Unavailable(f"process {self.pid} cannot be opened: {error}") from error
        try:
            if identify(self.pid) != identity:
                raise Gone(f"process {self.pid} has ended and its pid belongs to another now")
        except BaseException:
            self.close()
            raise

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False when the process has ended."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if poll.poll(0):
            return False
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            raise Denied(f"process {self.pid} belongs to another user") from None
        return True

    def close(self) -> None:
        os.close(self._fd)


# ---- the runner ----------------------------------------------------------------


async def carry_out(
    actions: Sequence[Action],
    targets: Mapping[str, Identity] | Resolve,
    on_action: Callable[[Outcome], None] = lambda _: None,
) -> tuple[Outcome, ...]:
    """Do what was planned, each at its time; tell `on_action` about each, and return all.

    `targets` names the processes: a fixed mapping, or a function that is asked at the
    time of each action (for targets that are restarted under a new pid).
    """
    if callable(targets):
        resolve = targets
    else:
        resolve = targets.get
        for identity in targets.values():
            _refuse_protected(identity.pid)
    runner = _Runner(resolve, on_action)
    await runner.run(actions)
    return tuple(runner.outcomes)


class _Runner:
    """Walks through a timeline; remembers who is stopped."""

    def __init__(self, resolve: Resolve, on_action: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._resolve = resolve
        self._on_action = on_action
        self._start = time.monotonic()
        self._paused: dict[Action, _Victim] = {}

    async def run(self, actions: Sequence[Action]) -> None:
        try:
            for at_s, ends, action in _timeline(actions):
                await asyncio.sleep(max(0.0, self._start + at_s - time.monotonic()))
                if ends:
                    self._continue([action])
                else:
                    self._begin(action)
        finally:
            self._continue(list(self._paused))

    def _begin(self, action: Action) -> None:
        identity = self._resolve(action.target)
        pid = identity.pid if identity is not None else None
        done = identity is not None and self._strike(action, identity)
        self._tell(action, "done" if done else "gone", pid)

    def _strike(self, action: Action, identity: Identity) -> bool:
        try:
            victim = _Victim(identity)
        except Gone:
            return False
        if action.kind == "pause":
            # Noted first: whatever interrupts us, a stopped process is known to be so.
            self._paused[action] = victim
            return victim.send(signal.SIGSTOP)
        try:
            return victim.send(signal.SIGKILL)
        finally:
            victim.close()

    def _continue(self, actions: Sequence[Action]) -> None:
        """End these pauses. All get their signal before anything else can fail."""
        continued: list[tuple[Action, int]] = []
        for action in actions:
            victim = self._paused.get(action)
            if victim is None:
                continue
            with contextlib.suppress(Denied):  # then the stop was refused as well
                if victim.send(signal.SIGCONT):
                    continued.append((action, victim.pid))
            del self._paused[action]
            victim.close()
        for action, pid in continued:
            self._tell(action, "continued", pid)

    def _tell(
        self, action: Action, result: Literal["done", "continued", "gone"], pid: int | None
    ) -> None:
        outcome = Outcome(action, result, pid, time.monotonic() - self._start)
        self.outcomes.append(outcome)
        self._on_action(outcome)


def _timeline(actions: Sequence[Action]) -> list[tuple[float, bool, Action]]:
    """Begins and ends of all actions in order; at the same moment, ends come first."""
    moments = [(action.at_s, False, action) for action in actions]
    moments += [
        (action.at_s + action.pause_s, True, action)
        for action in actions
        if action.kind == "pause"
    ]
    return sorted(moments, key=lambda moment: (moment[0], not moment[1]))


def _refuse_protected(pid: int) -> None:
    if pid <= 1 or pid in protected_pids():
        raise Mistake(
            f"process {pid} is the first process, this one or an ancestor of it: "
            "it is never touched"
        )
