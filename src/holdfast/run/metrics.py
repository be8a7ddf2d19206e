"""metrics.jsonl: what came of each step, without a word on time.

The file is a view of the ledger. Lines are added as they come; who begins, and who ends, writes
all of it anew in the order of the steps. So two runs with other faults end with the same file.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.run.records import EvalDone, StepDone, StepRecord, eval_line, metrics_line

__all__ = ["Metrics"]


class Metrics:
    """Writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(
        self,
        committed: Mapping[int, StepRecord],
        done: Mapping[int, StepDone],
        evaluated: Mapping[int, EvalDone],
    ) -> None:
        """Write what is known, in order."""
        steps = {
            step: msgspec.json.encode(metrics_line(step, committed[step], done[step]))
            for step in sorted(done)
        }
        evals = {
            step: msgspec.json.encode(eval_line(step, evaluated[step]))
            for step in sorted(evaluated)
        }
        self._write(steps, evals)

    def step(self, step: int, record: StepRecord, done: StepDone) -> None:
        """A step is done."""
        self._add(msgspec.json.encode(metrics_line(step, record, done)))

    def evaluation(self, step: int, done: EvalDone) -> None:
        """A version was evaluated."""
        self._add(msgspec.json.encode(eval_line(step, done)))

    def _add(self, line: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(line + b"\n")

    def _write(self, steps: Mapping[int, bytes], evals: Mapping[int, bytes]) -> None:
        lines = []
        for step, line in steps.items():
            lines.append(line)
            if step in evals:
                lines.append(evals[step])
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_bytes(b"".join(line + b"\n" for line in lines))
        draft.replace(self._path)
