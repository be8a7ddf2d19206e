"""What can be configured under `backend.Holdfast`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import Mistake
from holdfast.retry import Policy
from holdfast.transfer.store import usual_policy
from holdfast.transfer.url import without_password

__all__ = ["BACKEND", "FILLED_IN", "Settings"]

BACKEND = "Holdfast"
"""The name to write as `backend.storage_backend`."""

_USUAL = usual_policy()
FILLED_IN = ("client_name", "registration")
"""What this package and TransferQueue add to the section."""


class Settings(BaseModel):
    """The section `backend.Holdfast` of TransferQueue's configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    url: str
    """The store: shm://NAME, redis://host:port or mooncake://master:port?metadata=URL."""
    attempts: int = Field(default=_USUAL.attempts, ge=1, le=100)
    """How often a key that failed in transit, or arrived damaged, is asked for."""
    deadline_s: float = Field(default=_USUAL.deadline_s, gt=0, le=3600)
    """How long that may take in all."""
    reset: bool = False
    """Whether `tq.init` deletes what earlier runs, such as crashed ones, left in this store."""
    run: str = ""
    """Filled in by `tq.init`: what the names of this run's values begin with."""

    @classmethod
    def read(cls, section: Mapping[str, Any] | None) -> Self:
        """The section as it stands in the configuration. Raises `Mistake`."""
        if not section:
            raise Mistake(
                f"the configuration has no backend.{BACKEND}: it needs at least "
                f"backend.{BACKEND}.url, as in shm://NAME"
            )
        given = {str(name): section[name] for name in section if name not in FILLED_IN}
        try:
            found = cls.model_validate(given)
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise Mistake(f"backend.{BACKEND}: {'; '.join(reasons)}") from None
        if found.url.startswith("memory:"):
            raise Mistake(
                f"backend.{BACKEND}.url: {without_password(found.url)} is inside one process, and "
                "TransferQueue has several: use shm://NAME"
            )
        return found

    @property
    def policy(self) -> Policy:
        """How the store tries again."""
        return replace(_USUAL, attempts=self.attempts, deadline_s=self.deadline_s)
