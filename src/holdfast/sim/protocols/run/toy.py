"""A model that is the history of what was done to it, and samples that are functions of it.

Samples depend on the version that made them, and versions on the samples that were trained on:
a wrong version, and a step that is lost, done twice or out of order, change all that comes after.
"""

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np

from holdfast.rollout.asks import Ask
from holdfast.rollout.environments import Score
from holdfast.rollout.episodes import Episode
from holdfast.sim.protocols.operations.toy import ToyCompute, ToyVault, digest, event
from holdfast.trainer import ops
from holdfast.trainer.seams import Kept, Snapshot

__all__ = ["FINE", "FLAKY", "SPOILS", "Compute", "Vault", "content_of", "episode", "luck_of"]
__all__ += ["number_of", "read_content", "vault_key"]

FINE, SPOILS, FLAKY = "fine", "spoils", "flaky"


def content_of(history: Sequence[str]) -> str:
    """The hash of weights."""
    return hashlib.sha256("\n".join(history).encode()).hexdigest()[:16]


def number_of(what: str, history: Sequence[str]) -> float:
    """A loss, or a norm: a number that a history has."""
    return digest([what, *history])


def vault_key(channel: str, version: int) -> str:
    """Where a version is."""
    return f"/vault/{channel}/{version:010}"


class Compute(ToyCompute):
    """Adds what is done to the history. The same twice is the same to the last bit."""

    async def apply(
        self, model: str, number: int, op: ops.ForwardBackward | ops.OptimStep
    ) -> ops.Outcome:
        """Add to the history."""
        await self._node.sleep(self._node.random.random())
        history = self._models[model]
        history.append(event(number, ops.identity(op)))
        if isinstance(op, ops.OptimStep):
            return ops.Stepped(metrics={"grad_norm:mean": number_of("norm", history)})
        return ops.Output(outputs=[], metrics={"loss:sum": number_of("loss", history)})


class Vault(ToyVault):
    """Says what it keeps by its content."""

    async def save(self, channel: str, version: int, snapshot: Snapshot, keep: int) -> Kept:
        """Keep it."""
        kept = await super().save(channel, version, snapshot, keep)
        return Kept(kept.version, content_of(snapshot.facts["history"]), kept.bytes)


def read_content(value: bytes) -> str:
    """The hash of weights in the vault."""
    return content_of(msgspec.json.decode(value, type=list[str]))


def episode(content: str, ask: Ask, index: int) -> tuple[Episode, Score]:
    """One sample of a group: what the model said, and what it is worth."""
    told = f"{content} {ask.task_seed} {ask.seed} {index}"
    said = hashlib.sha256(told.encode()).digest()
    made = Episode(
        tokens=np.array([ask.task_seed % 50, said[0], said[1]], np.int32),
        made=np.array([False, True, True]),
        logprobs=np.array([0.0, -said[2] / 256, -said[3] / 256], np.float32),
        turns=[],
        pieces=[],
        ended="stop",
    )
    return made, Score(reward=float(said[4] % 5), exact=said[5] % 2 == 0)


def luck_of(ask: Ask) -> str:
    """Whether a group's environment works, spoils the group, or does so now and then."""
    if ask.group == 0:
        return FINE  # a step without any group is nobody's fault
    luck = hashlib.sha256(f"luck {ask.task_seed}".encode()).digest()[0] % 6
    return SPOILS if luck == 0 else FLAKY if luck == 1 else FINE
