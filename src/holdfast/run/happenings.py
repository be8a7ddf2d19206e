"""What a run tells of itself: the supervisor, the orchestrator."""

from holdfast.events import Event

__all__ = [
    "Acknowledged",
    "Begun",
    "Committed",
    "Dropped",
    "Ended",
    "Evaluated",
    "PartDied",
    "PartStarted",
    "Repaired",
    "Trained",
]


class Begun(Event, frozen=True, tag="run.begun"):
    """The supervisor has begun, or has taken up what it found."""

    run: str
    seed: int
    steps: int
    resumed: bool


class Ended(Event, frozen=True, tag="run.ended"):
    """The supervisor is done."""

    how: str
    """finished, stopped or failed"""
    steps: int
    content: str
    """The hash of the final weights."""


class PartStarted(Event, frozen=True, tag="part.started"):
    """The supervisor has started a process."""

    part: str
    child: int
    """Its process id."""
    life: int
    """Which start of this part it is, in the life of this supervisor: from 1."""


class PartDied(Event, frozen=True, tag="part.died"):
    """A process has ended before the run has."""

    part: str
    child: int
    code: int
    lived_s: float


class Committed(Event, frozen=True, tag="step.committed"):
    """What a step trains on is written, once: whoever submits it submits this."""

    step: int
    version: int
    """The version that made its samples."""
    keys: tuple[str, ...]
    dropped: tuple[int, ...]
    """Groups that it goes without."""
    numbers: tuple[int, ...]
    """Its operations' numbers: forward_backward, optim_step, publish_weights."""
    ours: bool
    """Whether it was this process that wrote it."""


class Trained(Event, frozen=True, tag="step.trained"):
    """The effect of a step is durable, and its version is published."""

    step: int
    version: int
    """The version that it has made."""
    content: str
    """The hash of that."""
    loss: float
    grad_norm: float
    reward: float
    exact: float
    samples: int
    lag: int
    """How many versions older its samples are than the weights that it trained."""
    seconds: float
    """Since the step before, in this process."""


class Acknowledged(Event, frozen=True, tag="step.acknowledged"):
    """The samples of a step are consumed."""

    step: int
    keys: tuple[str, ...]


class Dropped(Event, frozen=True, tag="group.dropped"):
    """A step goes without a group."""

    step: int
    group: int
    reason: str


class Repaired(Event, frozen=True, tag="step.repaired"):
    """Values of a step's samples were damaged or gone, and are made again."""

    step: int
    reason: str


class Evaluated(Event, frozen=True, tag="eval.done"):
    """A version was tried on held-out prompts."""

    step: int
    version: int
    exact: float
    reward: float
    prompts: int
