"""metrics.jsonl: what came of each step, without a word on time.

The file is a view of the ledger. Lines are added as they come; who begins, and who ends, writes
all of it anew in the order of the steps. So two runs with other faults end with the same file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
        lines = []
        for step in sorted(done):
            lines.append(metrics_line(step, committed[step], done[step]))
            if step in evaluated:
                lines.append(eval_line(step, evaluated[step]))
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        draft.replace(self._path)

    def step(self, step: int, record: StepRecord, done: StepDone) -> dict[str, Any]:
        """A step is done; returns its line."""
        line = metrics_line(step, record, done)
        self._add(line)
        return line

    def evaluation(self, step: int, done: EvalDone) -> None:
        """A version was evaluated."""
        self._add(eval_line(step, done))

    def _add(self, line: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
