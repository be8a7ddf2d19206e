"""What a replica is asked for, and what it puts into the queue: the words of both sides."""

import msgspec

__all__ = ["FIELDS", "QUEUE", "TASK", "TASKS", "Answer", "Ask", "keys_of"]

QUEUE = "rollouts"
TASK = "train"
FIELDS = ("tokens", "targets", "logprobs", "credits")
"""What a sample has: int32 tokens, int64 targets, float32 log probabilities of the targets, and
float32 credits, NaN where the model did not speak. All of one length."""
TASKS = {TASK: FIELDS}


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group: so many samples of one task, made with one version."""

    purpose: str
    """train: into the queue. eval: only the answer."""
    step: int
    group: int
    version: int
    task_seed: int
    seed: int
    count: int
    temperature: float
    repair: bool = False
    """Whether its samples are in the queue, but their values are damaged or gone."""


class Answer(msgspec.Struct, frozen=True):
    """What came of it. `spoilt` says why the environment could not do it."""

    keys: tuple[str, ...] = ()
    reward: float = 0.0
    exact: float = 0.0
    spoilt: str = ""


def keys_of(step: int, group: int, count: int) -> list[str]:
    """The keys of a group's samples."""
    return [f"{step:07}-{group:04}-{index:04}" for index in range(count)]
