"""Named fault points: places where a test, or chaos, can make this process fail.

    AFTER_RENAME = faults.declare("weights.publish.after_rename", "renamed, no marker yet")
    ...
    faults.point(AFTER_RENAME)

A plan arms points, in-process with `arm` or with the environment variable
HOLDFAST_FAULTS, which is read when this module is imported:

    weights.publish.after_rename:kill@3;ledger.txn:delay=0.5@1+

A name in it that Holdfast does not have is told on stderr.
A clause is `point:action`, then `@n` for exactly the n-th hit (the first, if not said),
`@n+` for every hit from the n-th on, or `@n!` for the n-th hit of whichever process comes
there first: those that are started in its place are spared. Actions: `kill` (SIGKILL to this
process), `stop` (SIGSTOP), `delay=SECONDS`, `raise=NAME` (a class of `holdfast.errors`, or an
error of the system such as `OSError(ENOSPC)`).

Invariants: a point costs next to nothing while nothing is armed. Hits are counted per
process (a forked child counts from 0), for the points that the plan names. A firing is told
before it acts: as the event `fault.fired`, and as a line in the file that
HOLDFAST_FAULTS_LOG names, so that the parent of a killed process knows. That file is also how
processes know that a `!` has had its one firing: without it, such a clause is a mistake.
"""

import ast
import asyncio
import contextlib
import difflib
import errno
import fcntl
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, cast, get_args

import msgspec

import holdfast
from holdfast import errors, events
from holdfast.errors import Mistake

__all__ = ["Clause", "Plan", "apoint", "arm", "catalogue", "check"]
__all__ += ["arm_from_environment", "declare", "declared_in", "disarm", "parse", "point"]

PLAN_VARIABLE = "HOLDFAST_FAULTS"
LOG_VARIABLE = "HOLDFAST_FAULTS_LOG"
MAX_CLAUSES = 100
MAX_DELAY_S = 3600.0
MAX_HIT = 10**9

Action = Literal["kill", "stop", "delay", "raise"]
_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_CLAUSE = re.compile(r"([^:]+):([a-z]+)(?:=([^@]+))?(?:@([0-9]{1,10})([+!]?))?")


class Clause(msgspec.Struct, frozen=True):
    """What one point does: `action` at hit `first`, or from there on if `onward`.

    With `once`, of all processes with the same log only the first one does it.
    """

    point: str
    action: Action
    value: str = ""
    first: int = 1
    onward: bool = False
    once: bool = False

    def __post_init__(self) -> None:
        _check_name(self.point)
        if self.action not in get_args(Action):
            raise Mistake(f"{self.action!r} is not one of {', '.join(get_args(Action))}")
        if bool(self.value) != (self.action in ("delay", "raise")):
            raise Mistake("'delay=SECONDS' and 'raise=NAME' take a value, 'kill' and 'stop' none")
        if not 1 <= self.first <= MAX_HIT:
            raise Mistake(f"hits are counted from 1 to {MAX_HIT}, not {self.first}")
        if self.onward and self.once:
            raise Mistake("a clause fires from a hit on ('+') or once ('!'), not both")
        if self.action == "delay":
            self.delay_s()
        if self.action == "raise":
            self.error()

    def matches(self, hit: int) -> bool:
        """Whether this hit makes it fire."""
        return hit == self.first or (self.onward and hit > self.first)

    def delay_s(self) -> float:
        """The seconds of a `delay`."""
        try:
            seconds = float(self.value)
        except ValueError:
            seconds = math.nan
        if not 0.0 <= seconds <= MAX_DELAY_S:
            raise Mistake(f"a delay has 0 to {MAX_DELAY_S:g} seconds, not {self.value!r}")
        return seconds

    def error(self) -> Exception:
        """A new error of the kind that a `raise` names."""
        text = f"raised on purpose at the fault point {self.point}"
        if match := re.fullmatch(r"OSError\((E[A-Z0-9]+)\)", self.value):
            number = getattr(errno, match[1], None)
            if isinstance(number, int):
                return OSError(number, f"{os.strerror(number)} ({text})")
        kind = getattr(errors, self.value, None)
        try:
            if isinstance(kind, type) and issubclass(kind, errors.HoldfastError):
                return kind(text)
        except TypeError:
            pass  # it needs more than a message
        raise Mistake(
            f"{self.value!r} cannot be raised: use a class of holdfast.errors that needs only "
            "a message, such as Unavailable, or OSError(ENOSPC)"
        )

    def __str__(self) -> str:
        value = f"={self.value}" if self.value else ""
        often = "+" if self.onward else "!" if self.once else ""
        return f"{self.point}:{self.action}{value}@{self.first}{often}"


class Plan(msgspec.Struct, frozen=True):
    """Some clauses. As text it is what HOLDFAST_FAULTS takes."""

    clauses: tuple[Clause, ...]

    def __post_init__(self) -> None:
        if len(self.clauses) > MAX_CLAUSES:
            raise Mistake(f"a plan has at most {MAX_CLAUSES} clauses, not {len(self.clauses)}")

    def __str__(self) -> str:
        return ";".join(map(str, self.clauses))


class FaultFired(events.Event, frozen=True, tag="fault.fired"):
    """A fault point is about to act."""

    labels: ClassVar[tuple[str, ...]] = ("point", "action")

    point: str
    action: str
    hit: int


_declared: dict[str, str] = {}
_armed: dict[str, tuple[Clause, ...]] | None = None
_hits: dict[str, int] = {}
_lock = threading.RLock()  # a signal handler may pass a point while we count


def declare(name: str, about: str) -> str:
    """Make a point known, at module level, and return its name for `point`."""
    _check_name(name)
    if _declared.setdefault(name, about) != about:
        raise Mistake(f"the fault point {name} is declared twice: {_declared[name]!r}, {about!r}")
    return name


def point(name: str) -> None:
    """Fail here, if the plan says so."""
    if _armed is None:
        return
    for clause in _fire(name):
        if clause.action == "delay":
            time.sleep(clause.delay_s())
        else:
            _act(clause)


async def apoint(name: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Fail here, if the plan says so; a delay is awaited and does not block the loop."""
    if _armed is None:
        return
    for clause in _fire(name):
        if clause.action == "delay":
            await sleep(clause.delay_s())
        else:
            _act(clause)


def _fire(name: str) -> Iterator[Clause]:
    """Count a hit; give the clauses that fire, each told just before it acts."""
    with _lock:
        clauses = (_armed or {}).get(name)
        if clauses is None:
            return
        _hits[name] = hit = _hits.get(name, 0) + 1
        matching = [clause for clause in clauses if clause.matches(hit)]
        told = [(one, FaultFired(point=name, action=one.action, hit=hit)) for one in matching]
        firing = [(one, fired) for one, fired in told if not one.once or _log(fired, once=True)]
    for clause, fired in firing:
        events.emit(fired)
        if not clause.once:
            _log(fired)
        yield clause


def _act(clause: Clause) -> None:
    if clause.action == "raise":
        raise clause.error()
    if clause.action == "stop":
        # To this thread, so that it does not run on until another one takes the signal.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(137)  # the first process of a container cannot kill itself


def _log(fired: FaultFired, *, once: bool = False) -> bool:
    """Tell of a firing. With `once`, only if nobody has told of it; returns whether it was us."""
    path = os.environ.get(LOG_VARIABLE)
    if not path:
        return True
    stamped = msgspec.structs.replace(fired, at=time.time(), pid=os.getpid())
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if once:
                fcntl.flock(fd, fcntl.LOCK_EX)  # until it is closed
                if _is_told(fired, Path(path).read_bytes()):
                    return False
            os.write(fd, msgspec.json.encode(stamped) + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        raise Mistake(f"{LOG_VARIABLE}={path} cannot be written: {error.strerror}") from error
    return True


def _is_told(fired: FaultFired, log: bytes) -> bool:
    """Whether a log tells of the same point, action and hit."""
    for line in log.splitlines():
        with contextlib.suppress(msgspec.MsgspecError):
            told = msgspec.json.decode(line, type=FaultFired)
            if (told.point, told.action, told.hit) == (fired.point, fired.action, fired.hit):
                return True
    return False


def parse(text: str) -> Plan:
    """Read a plan. Raises one `Mistake` that quotes the clause it does not understand."""
    clauses = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _CLAUSE.fullmatch(part)
        if match is None:
            raise Mistake(
                f"fault clause {part[:200]!r} is not like 'point:kill@3', 'point:kill@3!', "
                "'point:stop', 'point:delay=0.5@1+' or 'point:raise=Unavailable'"
            )
        name, action, value, first, often = match.groups()
        when: Any = {"first": int(first or 1), "onward": often == "+", "once": often == "!"}
        try:
            clauses.append(Clause(name, cast(Action, action), value or "", **when))
        except Mistake as error:
            raise Mistake(f"fault clause {part[:200]!r}: {error}") from None
    return Plan(tuple(clauses))


def arm(plan: Plan | str) -> None:
    """Follow this plan from now on, in place of any other; counting starts again."""
    global _armed
    plan = parse(plan) if isinstance(plan, str) else plan
    armed: dict[str, tuple[Clause, ...]] = {}
    for clause in plan.clauses:
        if clause.once and not os.environ.get(LOG_VARIABLE):
            raise Mistake(
                f"fault clause '{clause}' fires once among all processes: set {LOG_VARIABLE}, "
                "which is how they know"
            )
        armed[clause.point] = (*armed.get(clause.point, ()), clause)
    with _lock:
        _hits.clear()
        _armed = armed or None


def disarm() -> None:
    """Let every point do nothing again."""
    global _armed
    with _lock:
        _armed = None


def catalogue() -> dict[str, str]:
    """The points that Holdfast declares, and those declared beside it, with what they are."""
    return dict(sorted({**declared_in(holdfast), **_declared}.items()))


def check(plan: Plan | str) -> None:
    """Raise `Mistake` if the plan names a point that nothing in Holdfast declares."""
    known = catalogue()
    for clause in (parse(plan) if isinstance(plan, str) else plan).clauses:
        if clause.point not in known:
            hint = _hint(clause.point, known, "faults.catalogue() lists them all")
            raise Mistake(f"there is no fault point {clause.point}: {hint}")


def _hint(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def _warn(plan: Plan) -> None:
    """Say on stderr which points of a plan Holdfast does not have: nothing would happen.

    Points are declared when their modules are imported, which none is yet: so the text of the
    modules counts. Code that is not ours may declare others.
    """
    known = declared_in(holdfast)
    for name in dict.fromkeys(clause.point for clause in plan.clauses):
        if known and name not in known:
            hint = _hint(name, known, "`holdfast faults` lists them.")
            sys.stderr.write(
                f"holdfast: {PLAN_VARIABLE}: Holdfast has no fault point {name}: {hint}\n"
            )


def declared_in(package: ModuleType) -> dict[str, str]:
    """The points that the text of a package declares, imported or not, with what they are."""
    found: dict[str, str] = {}
    for folder in package.__path__:
        for path in Path(folder).rglob("*.py"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                found.update(_declarations(path.read_text()))
    return found


def _declarations(text: str) -> Iterator[tuple[str, str]]:
    if "declare(" not in text:
        return
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(
                value=ast.Call(
                    func=ast.Name("declare") | ast.Attribute(attr="declare"),
                    args=[ast.Constant(str(name)), ast.Constant(str(about))],
                )
            ):
                yield name, about


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise Mistake(f"a fault point is named like 'weights.publish.after_rename', not {name!r}")


def arm_from_environment() -> None:
    """Arm what the environment variable says: done when this is imported."""
    if plan := os.environ.get(PLAN_VARIABLE):
        arm(plan)
        _warn(parse(plan))


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()
    _hits.clear()


os.register_at_fork(after_in_child=_after_fork)
arm_from_environment()
