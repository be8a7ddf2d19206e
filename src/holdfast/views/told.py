"""One line of an event log as the views take it, and the fields they look for. Pure.

The structs here are not the events themselves: they name the fields that a view shows, all
with defaults, so that logs of older and newer writers are read alike.
"""

import math
import re
from typing import Any, TypeVar

import msgspec

from holdfast.events import Event, Unknown
from holdfast.text import clean

__all__ = ["Told", "parse", "told"]

T = TypeVar("T")
_TEXT_CHARS = 300
_HASH = re.compile(r"[0-9a-f]{32,128}")
_STAMPS = ("type", "at", "process", "pid", "seq")


class Told(msgspec.Struct, frozen=True):
    """An event: its type, its stamps, and everything else that it says."""

    kind: str
    at: float = 0.0
    process: str = ""
    pid: int = 0
    seq: int = 0
    fields: dict[str, Any] = {}

    def as_(self, form: type[T]) -> T | None:
        """Its fields in this form; None if they do not fit it."""
        try:
            return msgspec.convert(self.fields, form)
        except msgspec.ValidationError:
            return None

    def text(self) -> str:
        """Its fields in one line, safe for a terminal; long lists only by their length."""
        return clean("  ".join(f"{k}={_short(v)}" for k, v in self.fields.items()), _TEXT_CHARS)


class _Stamp(msgspec.Struct):
    type: str
    at: float = 0.0
    process: str = ""
    pid: int = 0
    seq: int = 0


def parse(line: bytes) -> Told | None:
    """The event of a line, or None if the line is none."""
    try:
        fields = msgspec.json.decode(line)
        stamp = msgspec.convert(fields, _Stamp)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
        return None
    for name in _STAMPS:
        fields.pop(name, None)
    return Told(stamp.type, stamp.at, stamp.process, stamp.pid, stamp.seq, fields)


def told(event: Event) -> Told:
    """What a typed event says."""
    fields = msgspec.to_builtins(event)
    kind = fields["type"]
    for name in _STAMPS:
        fields.pop(name, None)
    if isinstance(event, Unknown):
        kind, fields = event.kind, dict(event.fields)
        for name in _STAMPS:
            fields.pop(name, None)
    return Told(kind, event.at, event.process, event.pid, event.seq, fields)


def _short(value: object) -> str:
    if isinstance(value, str) and _HASH.fullmatch(value):
        return f"{value[:12]}…"
    if isinstance(value, list | tuple) and len(value) > 3:
        return f"[{len(value)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Begun(msgspec.Struct):
    """run.begun"""

    run: str = ""
    seed: int = 0
    steps: int = 0
    resumed: bool = False


class Ended(msgspec.Struct):
    """run.ended"""

    how: str = ""
    steps: int = 0
    content: str = ""


class Part(msgspec.Struct):
    """part.started, part.died"""

    part: str
    child: int = 0
    code: int = 0


def _real(value: float | None) -> float:
    return math.nan if value is None else value


class Trained(msgspec.Struct):
    """step.trained. JSON has no NaN: what is none there is NaN again here."""

    step: int
    version: int = 0
    content: str = ""
    loss: float | None = None
    grad_norm: float | None = None
    reward: float | None = None
    exact: float | None = None
    samples: int = 0
    lag: int = 0
    seconds: float = 0.0

    def numbers(self) -> tuple[float, float, float, float]:
        """Reward, exact, loss, norm of the gradient."""
        return _real(self.reward), _real(self.exact), _real(self.loss), _real(self.grad_norm)


class Evaluated(msgspec.Struct):
    """eval.done"""

    step: int
    version: int = 0
    exact: float | None = None
    reward: float | None = None
    prompts: int = 0

    def numbers(self) -> tuple[float, float]:
        """Exact, reward."""
        return _real(self.exact), _real(self.reward)


class Made(msgspec.Struct):
    """rollout.made, rollout.spoilt, group.dropped, step.acknowledged"""

    step: int
    replica: str = ""
    purpose: str = ""
    group: int = 0
    keys: tuple[str, ...] = ()
    reason: str = ""


class Version(msgspec.Struct):
    """Every event about a version of the weights."""

    version: int
    replica: str = ""
    content: str = ""
    bytes: int = 0
    seconds: float = 0.0


class Job(msgspec.Struct):
    """job.taken, job.started, job.ended, trainer.seated, gateway.resolved"""

    job: str
    epoch: int = 0
    host: str = ""
    address: str = ""
    how: str = ""
    reason: str = ""
    term: int = 0


class Worker(msgspec.Struct):
    """launch.worker.started, launch.crew.ended"""

    run: str = ""
    cycle: int = 0
    rank: int = 0
    worker_pid: int = 0
    warm: bool = False
    cause: str = ""


class Warm(msgspec.Struct):
    """launch.warm.ready, launch.warm.lost"""

    child_pid: int


class Planned(msgspec.Struct):
    """chaos.planned"""

    points: tuple[str, ...] = ()


class Struck(msgspec.Struct):
    """chaos.struck, chaos.healed, fault.fired"""

    clause: str = ""
    target: str = ""
    victim: int = 0
    action: str = ""
    step: int = 0
    point: str = ""
    hit: int = 1
    seconds: float = 0.0
