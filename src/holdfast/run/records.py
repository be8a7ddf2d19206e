"""What a run keeps in the ledger, beside what its parts keep.

/runs/RUN/steps/model        ModelRecord: which model is trained, written once
/runs/RUN/steps/commit/N     StepRecord: what step N trains on, written once
/runs/RUN/steps/done/N       StepDone: what came of it, written once
/runs/RUN/steps/eval/N       EvalDone: what version N earned on held-out prompts
/runs/RUN/steps/drop/N/G     Drop: step N goes without group G; the first writer decides
/runs/RUN/steps/end          RunDone: everything is done
"""

from typing import Any

from holdfast.ledger import join
from holdfast.ledger.records import Record

__all__ = ["Drop", "EvalDone", "Keys", "ModelRecord", "RunDone", "StepDone", "StepRecord"]


class ModelRecord(Record, frozen=True):
    """The session and, as soon as it is known, the model."""

    session: str = ""
    model: str = ""
    channel: str = ""


class StepRecord(Record, frozen=True):
    """What a step trains on."""

    keys: tuple[str, ...] = ()
    version: int = 0
    numbers: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    reward: float = 0.0
    exact: float = 0.0


class StepDone(Record, frozen=True):
    """What came of a step."""

    content: str = ""
    loss: float = 0.0
    grad_norm: float = 0.0


class EvalDone(Record, frozen=True):
    """What a version earned."""

    exact: float = 0.0
    reward: float = 0.0
    prompts: int = 0


class Drop(Record, frozen=True):
    """A step goes without a group."""

    reason: str = ""


class RunDone(Record, frozen=True):
    """The final state: hashes of the weights, and of all that was saved."""

    content: str = ""
    path: str = ""


class Keys:
    """The keys of a run's steps."""

    def __init__(self, run: str) -> None:
        self.root = join("runs", run, "steps") + "/"
        self.model = self.root + "model"
        self.commits = self.root + "commit/"
        self.dones = self.root + "done/"
        self.evals = self.root + "eval/"
        self.end = self.root + "end"

    def commit(self, step: int) -> str:
        """What a step trains on."""
        return f"{self.commits}{step:08}"

    def done(self, step: int) -> str:
        """What came of a step."""
        return f"{self.dones}{step:08}"

    def evaluated(self, step: int) -> str:
        """What a version earned."""
        return f"{self.evals}{step:08}"

    def drop(self, step: int, group: int) -> str:
        """Whether a step goes without a group."""
        return f"{self.root}drop/{step:08}/{group:05}"


def metrics_line(step: int, record: StepRecord, done: StepDone) -> dict[str, Any]:
    """A step's line in metrics.jsonl: nothing in it depends on timing."""
    return {
        "step": step,
        "version": step,
        "content": done.content,
        "loss": done.loss,
        "grad_norm": done.grad_norm,
        "reward": record.reward,
        "exact": record.exact,
        "samples": len(record.keys),
        "lag": step - 1 - record.version,
        "dropped": list(record.dropped),
    }


def eval_line(step: int, done: EvalDone) -> dict[str, Any]:
    """An evaluation's line in metrics.jsonl."""
    return {"step": step, "eval_exact": done.exact, "eval_reward": done.reward}
