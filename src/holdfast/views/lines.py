"""The lines that a run prints where there is no terminal: one per step, one per notable event.

A death and the start that follows it within a second are one line. Pure.
"""

from typing import Any

from holdfast.events import Event, Unknown
from holdfast.run import happenings as run
from holdfast.text import clean
from holdfast.views.members import signal_name
from holdfast.views.picture import Picture
from holdfast.views.snapshot import summary
from holdfast.views.told import kind_of, text_of

__all__ = ["Lines", "closing"]

_AS_THEY_ARE = ("trainer.quarantined", "trainer.differs", "events.dropped", "weights.stuck")
_TOGETHER_S = 1.0
"""What comes within so long of a death is told with it: how lines are written, no setting."""


class Lines:
    """Give each event after the picture has taken it."""

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[float, str]] = {}

    def take(self, event: Event, picture: Picture) -> list[str]:
        """What there is to say now."""
        lines = self.flush(before=event.at - _TOGETHER_S)
        lines += [clean(line) for line in self._of(event, picture)]
        return lines

    def flush(self, before: float = float("inf")) -> list[str]:
        """Deaths that nothing has followed."""
        old = [part for part, (at, _) in self._deaths.items() if at <= before]
        return [clean(f"{part} {self._deaths.pop(part)[1]}") for part in old]

    def _of(self, event: Event, picture: Picture) -> list[str]:
        match event:
            case run.Begun():
                again = f", goes on after step {picture.step}" if event.resumed else ""
                return [f"run {event.run}: {event.steps} steps, seed {event.seed}{again}"]
            case run.Ended():
                return closing(picture)
            case run.Trained():
                return [_step(event, picture.steps)]
            case run.Evaluated():
                return [_eval(event)]
            case run.PartDied():
                self._deaths[event.part] = (event.at, f"died ({signal_name(event.code)})")
                return []
            case run.PartStarted():
                return self._restarted(event, picture)
        kind = kind_of(event)
        if kind in _AS_THEY_ARE:
            return [f"{event.process}: {kind}  {text_of(event)}"]
        return [] if isinstance(event, Unknown) else _other(kind, event)

    def _restarted(self, part: run.PartStarted, picture: Picture) -> list[str]:
        """A restart; not of those that went with the supervisor: that it goes on says it all."""
        _, death = self._deaths.pop(part.part, (0.0, ""))
        member = picture.members.known.get(part.part)
        if member is None or len(member.lives) < 2 or member.lives[-2].how == "lost":
            return []
        again = f"started again after {member.lives[-1].after_s or 0.0:.1f} s"
        return [f"{part.part} {death}; {again}" if death else f"{part.part} {again}"]


def closing(picture: Picture) -> list[str]:
    """How it ended."""
    facts = summary(picture)
    weights = f", weights {picture.content[:16]}" if picture.content else ""
    lines = [f"{picture.how or 'ended'} after step {picture.step}{weights}"]
    if facts["faults"]:
        lines.append(
            f"{facts['faults']} faults, {facts['recoveries']} recoveries, "
            f"{facts['seconds_lost']:.1f} s lost"
        )
    return lines


def _step(step: run.Trained, steps: int) -> str:
    width = len(str(steps))
    return (
        f"step  {step.step:>{width}}/{steps}  reward {step.reward:.2f}  exact {step.exact:.2f}  "
        f"loss {step.loss:+.3f}  ({step.seconds:.1f} s)"
    )


def _eval(held: run.Evaluated) -> str:
    return (
        f"eval  {held.step:>3}  exact {held.exact:.2f}  reward {held.reward:.2f}  "
        f"({held.prompts} held-out prompts)"
    )


def _other(kind: str, event: Any) -> list[str]:
    """Of events whose classes may take long to import; `event` is of the class of its kind."""
    match kind:
        case "job.started":
            return [f"trainer {event.job} serves as epoch {event.epoch}"]
        case "job.ended":
            return [f"trainer {event.job}: epoch {event.epoch} {event.how}: {event.reason}"]
        case "group.dropped":
            return [f"step {event.step} does without group {event.group}: {event.reason}"]
        case "rollout.spoilt":
            return [f"step {event.step} has spoilt group {event.group}: {event.reason}"]
        case "chaos.struck":
            where = f" at {event.point}" if event.point else ""
            return [f"chaos: {event.action} {event.target} in step {event.step}{where}"]
        case "chaos.healed":
            return [f"chaos: {event.target} is over it, next step after {event.seconds:.1f} s"]
        case "chaos.missed":
            return [f"chaos: missed {event.clause}: {event.reason}"]
        case "launch.crew.ended" if event.cause:
            return [f"the trainer's ranks have ended: {event.cause}"]
    return []
