"""The lines that a run prints where there is no terminal: one per step, one per notable event.

A death and the start that follows it within a second are one line. Pure.
"""

from holdfast.text import clean
from holdfast.views import told as forms
from holdfast.views.members import signal_name
from holdfast.views.picture import Picture
from holdfast.views.snapshot import summary
from holdfast.views.told import Told

__all__ = ["Lines", "closing"]

_TOGETHER_S = 1.0


class Lines:
    """Give each event after the picture has taken it."""

    def __init__(self) -> None:
        self._deaths: dict[str, tuple[float, str]] = {}

    def take(self, event: Told, picture: Picture) -> list[str]:
        """What there is to say now."""
        lines = self.flush(before=event.at - _TOGETHER_S)
        lines += [clean(line) for line in self._of(event, picture)]
        return lines

    def flush(self, before: float = float("inf")) -> list[str]:
        """Deaths that nothing has followed."""
        old = [part for part, (at, _) in self._deaths.items() if at <= before]
        return [clean(f"{part} {self._deaths.pop(part)[1]}") for part in old]

    def _of(self, event: Told, picture: Picture) -> list[str]:
        match event.kind:
            case "run.begun" if begun := event.as_(forms.Begun):
                again = f", goes on after step {picture.step}" if begun.resumed else ""
                return [f"run {begun.run}: {begun.steps} steps, seed {begun.seed}{again}"]
            case "run.ended":
                return closing(picture)
            case "step.trained" if step := event.as_(forms.Trained):
                return [_step(step, picture.steps)]
            case "eval.done" if held := event.as_(forms.Evaluated):
                return [_eval(held)]
            case "part.died" if part := event.as_(forms.Part):
                self._deaths[part.part] = (event.at, f"died ({signal_name(part.code)})")
                return []
            case "part.started" if part := event.as_(forms.Part):
                return self._restarted(part, picture)
        return _other(event)

    def _restarted(self, part: forms.Part, picture: Picture) -> list[str]:
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


def _step(step: forms.Trained, steps: int) -> str:
    width = len(str(steps))
    reward, exact, loss, _ = step.numbers()
    return (
        f"step  {step.step:>{width}}/{steps}  reward {reward:.2f}  exact {exact:.2f}  "
        f"loss {loss:+.3f}  ({step.seconds:.1f} s)"
    )


def _eval(held: forms.Evaluated) -> str:
    exact, reward = held.numbers()
    return (
        f"eval  {held.step:>3}  exact {exact:.2f}  reward {reward:.2f}  "
        f"({held.prompts} held-out prompts)"
    )


def _other(event: Told) -> list[str]:
    match event.kind:
        case "chaos.struck" if struck := event.as_(forms.Struck):
            where = f" at {struck.point}" if struck.point else ""
            return [f"chaos: {struck.action} {struck.target} in step {struck.step}{where}"]
        case "chaos.healed" if struck := event.as_(forms.Struck):
            return [f"chaos: {struck.target} is over it, next step after {struck.seconds:.1f} s"]
        case "chaos.missed":
            return [f"chaos: missed {event.fields.get('clause')}: {event.fields.get('reason')}"]
        case "job.started" if job := event.as_(forms.Job):
            return [f"trainer {job.job} serves as epoch {job.epoch}"]
        case "job.ended" if job := event.as_(forms.Job):
            return [f"trainer {job.job}: epoch {job.epoch} {job.how}: {job.reason}"]
        case "launch.crew.ended" if event.fields.get("cause"):
            return [f"the trainer's ranks have ended: {event.fields['cause']}"]
        case "group.dropped" | "rollout.spoilt" if made := event.as_(forms.Made):
            what = "does without" if event.kind == "group.dropped" else "has spoilt"
            return [f"step {made.step} {what} group {made.group}: {made.reason}"]
        case "trainer.quarantined" | "trainer.differs" | "events.dropped" | "weights.stuck":
            return [f"{event.process}: {event.kind}  {event.text()}"]
    return []
