"""How patient Holdfast's own trainer is, and how much it keeps: one table.

A job brings its own values. They are checked when the job is made: a trainer that cannot read
them would be started again and again.
"""

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS

__all__ = ["Policy", "read_policy"]


class Policy(BaseModel):
    """Bounds of a trainer. Unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gap_s: float = Field(default=DEFAULTS.trainer_gap_s, gt=0)
    """How long a missing number holds up later ones before it is given up; longer than clients try
    to send one (5 minutes)."""
    checkpoint_s: float = Field(default=10.0, ge=0)
    """Seconds of computing after which to checkpoint."""
    checkpoint_share: float = Field(default=0.1, gt=0, le=1)
    """What the last checkpoint cost, as a share of the computing before the next."""
    checkpoint_ops: int = Field(default=256, ge=1)
    """Operations after which to checkpoint, at the latest."""
    checkpoint_bytes: int = Field(default=256 << 20, ge=1)
    """Bytes of journal after which to checkpoint."""
    keep_results: int = Field(default=1000, ge=1)
    """Results per model that are kept however old they are."""
    result_s: float = Field(default=3600.0, ge=0)
    """How long a result is kept, however many follow."""
    max_waiting: int = Field(default=4096, ge=1)
    """Operations per model that may wait; then 503."""
    max_models: int = Field(default=64, ge=1)
    """Models in memory at once; others are put aside on disk."""
    max_kept_models: int = Field(default=4096, ge=1)
    """Models at once, in memory or put aside on disk."""
    silent_s: float = Field(default=DEFAULTS.session_silent_s, gt=0)
    """Models of a session that is not heard of for so long are put aside."""
    max_sessions: int = Field(default=10_000, ge=1)
    """Sessions at once."""
    max_samplers: int = Field(default=10_000, ge=1)
    """Sampling sessions at once."""
    poison_deaths: int = Field(default=3, ge=1)
    """An operation during which so many trainers died is not tried again."""
    room_s: float = Field(default=DEFAULTS.disk_room_s, ge=0)
    """How long to wait for room on a full disk."""
    session_s: float = Field(default=86_400.0, gt=0)
    """A session that is not heard of for so long ends."""
    sampler_keep: int = Field(default=16, ge=1)
    """Unnamed sampler weights that are kept per model."""
    upkeep_s: float = Field(default=2.0, gt=0)
    """How often to look for what is old."""


def read_policy(given: object) -> Policy:
    """A job's policy, or `Mistake`: which name or value is wrong, and which names there are."""
    if not isinstance(given, dict):
        raise Mistake("the policy of a job is an object: names and numbers")
    unknown = given.keys() - Policy.model_fields.keys()
    if unknown:
        named = ", ".join(sorted(repr(str(name)[:80]) for name in unknown))
        known = ", ".join(Policy.model_fields)
        raise Mistake(f"the policy of a job has no {named[:400]}; there are: {known}")
    try:
        return Policy.model_validate(given)
    except ValidationError as error:
        wrong = "; ".join(f"{one['loc'][0]}: {one['msg']}" for one in error.errors())
        raise Mistake(f"the policy of a job cannot be used: {wrong}") from None
