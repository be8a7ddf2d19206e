"""What replicas tell of themselves."""

from holdfast.events import Event

__all__ = ["Loaded", "Made", "Spoilt"]


class Loaded(Event, frozen=True, tag="rollout.loaded"):
    """A replica serves a version, which it has acknowledged."""

    replica: str
    version: int
    content: str
    """The hash of the version."""


class Made(Event, frozen=True, tag="rollout.made"):
    """A replica has made a group of samples, and those for training are in the queue."""

    labels = ("purpose",)

    replica: str
    purpose: str
    """train or eval"""
    step: int
    group: int
    version: int
    keys: tuple[str, ...]
    """The samples, in the queue; none for an evaluation."""
    reward: float
    exact: float
    """The share that is exactly right."""
    seconds: float
    repeatable: bool = True
    """Whether any replica makes the same bits of it."""


class Spoilt(Event, frozen=True, tag="rollout.spoilt"):
    """An environment failed on a group: this costs the group, not the run."""

    replica: str
    step: int
    group: int
    reason: str
