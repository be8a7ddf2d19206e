"""One line as a trainer holds it in memory, and the names that belong to it. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from holdfast.errors import Mistake
from holdfast.trainer.line import SKIP, Arrival, Line
from holdfast.trainer.paths import SAMPLER, STATE
from holdfast.trainer.records import Model, Sampler

__all__ = [
    "Pending",
    "State",
    "channel_of",
    "check_number",
    "checkpoints_of",
    "policy_of",
    "publication",
    "publisher",
    "sampler_name",
    "saved_in",
    "unnamed_of",
]

UNNAMED = ".sampler"


@dataclass(frozen=True, slots=True)
class Pending:
    """There is no result yet."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str


@dataclass
class State:
    """One line as it is in memory."""

    name: str
    line: Line
    model: Model | None = None
    sampler: Sampler | None = None
    pending: dict[int, tuple[str, str]] = field(default_factory=dict)
    """What is being written to the journal: kind and identity."""
    restorable: int | None = None
    """The newest checkpoint."""
    changed: int = -1
    """The operation that changed its model last, as far as this trainer has carried it out."""
    loaded: bool = False
    """Whether its model is in memory; if not, it is restored when it is needed."""
    used: int = 0
    """When it was last used: counts operations of all lines."""
    cleared: bool = False
    """Whether its checkpoints were removed: its model has ended."""
    lost: str = ""
    """Why this trainer cannot restore it. What is asked of it fails; other models go on."""
    busy: bool = False
    """Whether one of its operations is being carried out."""
    since_s: float = 0.0
    """Seconds of computing since the last checkpoint."""
    since_bytes: int = 0
    saving_since: float = 0.0
    saving_s: float = 0.0
    """When the last checkpoint was begun, and what it took."""
    saving: bool = False
    """Whether a checkpoint is being written."""

    @property
    def record(self) -> Model | Sampler:
        """What the ledger has of it."""
        record = self.model or self.sampler
        assert record is not None
        return record

    @property
    def base(self) -> str:
        """The base of its model."""
        return self.record.base

    @property
    def session(self) -> str:
        """Whose it is."""
        return self.record.session

    @property
    def channel(self) -> str:
        """Where a sampling session's weights are kept; '' if they are the base's own."""
        return self.sampler.channel if self.sampler else ""

    @property
    def version(self) -> int:
        """Which of them."""
        return self.sampler.version if self.sampler else -1

    @property
    def unnamed(self) -> bool:
        """Whether it is a sampling session of weights that nobody gave a name to."""
        return self.channel.endswith(UNNAMED)

    @property
    def ended(self) -> bool:
        """Whether nothing more is done for it."""
        owner = self.model or self.sampler
        return owner is None or owner.ended

    @property
    def wanted(self) -> bool:
        """Whether something is being done for it, or waits to be."""
        return self.busy or bool(self.pending) or self.line.waiting() > 0

    @property
    def stillborn(self) -> bool:
        """Whether its first operation, which would have made the model, has failed."""
        first = self.line.results.get(0)
        return self.model is not None and first is not None and first.failed

    def arrive(self, number: int, kind: str, identity: str) -> Arrival:
        """What a send under this number is: `Line.arrive`, and what is being written counts."""
        pending = self.pending.get(number)
        if pending is None:
            return self.line.arrive(number, kind, identity)
        same = pending[0] == SKIP or pending == (kind, identity)
        return Arrival.PENDING if same else Arrival.CLASH


def sampler_name(session: str, seq: int) -> str:
    """The name of a sampling session: the client numbers them, so a repeated request is known."""
    return f"{session}-s{check_number(seq)}"


def publication(model: str, number: int) -> str:
    """The name of the sampling session that an operation of a model has made."""
    return f"{model}-p{number}"


def publisher(name: str) -> tuple[str, int] | None:
    """The model and the operation that made a sampling session of this name, if one did."""
    model, found, number = name.rpartition("-p")
    return (model, int(number)) if found and number.isdecimal() else None


def checkpoints_of(model: str) -> str:
    """The channel of a model's checkpoints: the newest one counts. Versions are numbers."""
    return f"{model}.state"


def unnamed_of(model: str) -> str:
    """The channel of weights that are sampled from, and have no name."""
    return model + UNNAMED


def policy_of(model: str) -> str:
    """The channel of the versions that replicas serve. The caller numbers them."""
    return f"{model}.policy"


def channel_of(model: str, folder: str, name: str) -> str:
    """The channel in which something is kept under a name."""
    return f"{model}.{'w' if folder == STATE else 's'}.{name}"


def saved_in(channel: str) -> tuple[str, str, str] | None:
    """Model, folder and name of what such a channel keeps; None: it keeps no saved weights."""
    model, _, rest = channel.partition(".")
    letter, dot, name = rest.partition(".")
    folder = {"w": STATE, "s": SAMPLER}.get(letter)
    return (model, folder, name) if dot and folder is not None else None


def check_number(number: int) -> int:
    """Refuse what cannot be a number of an operation."""
    if not 0 <= number <= 2**62:
        raise Mistake(f"operations are numbered from 0, not {number}")
    return number
