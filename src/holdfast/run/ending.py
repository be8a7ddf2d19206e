"""How a run has ended: final.json, and the comparison of two runs."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from holdfast import ledger
from holdfast.files import write_private
from holdfast.ledger.runtime import LiveRuntime
from holdfast.run.folder import Folder
from holdfast.run.records import RunDone
from holdfast.run.steps import Steps

__all__ = ["differences", "final_of", "state_of", "write_final"]

FINAL = "final.json"


def state_of(folder: Folder) -> tuple[int, RunDone | None]:
    """How many steps are done, and how the run ended if it did."""
    return asyncio.run(_state(folder))


async def _state(folder: Folder) -> tuple[int, RunDone | None]:
    async with ledger.open(folder.ledger) as opened:
        steps = Steps(LiveRuntime(opened), folder.run)
        done = await steps.done()
        return len(done), await steps.read(steps.keys.end, RunDone)


def final_of(folder: Folder, done: RunDone) -> dict[str, Any]:
    """The facts of a run that is done. None of them depends on timing."""
    lines = _lines(folder.path)
    rewards = [one["reward"] for one in lines if "reward" in one]
    tried = [one for one in lines if "eval_exact" in one]
    return {
        "weights": done.content,
        "steps": folder.config.steps,
        "seed": folder.config.seed,
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
        "eval_exact": tried[-1]["eval_exact"] if tried else None,
        "eval_reward": tried[-1]["eval_reward"] if tried else None,
        "target": folder.config.evaluate.target,
        "saved": done.path.rpartition("/")[2],
    }


def write_final(folder: Folder, facts: dict[str, Any]) -> None:
    """Write final.json, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(facts)) + b"\n"
    write_private(folder.path / FINAL, text)


def differences(one: Path, other: Path) -> list[str]:
    """In what two runs differ, step by step: nothing, if the promise holds."""
    found = []
    ours, theirs = _lines(one), _lines(other)
    if len(ours) != len(theirs):
        found.append(f"metrics.jsonl has {len(ours)} lines in one and {len(theirs)} in the other")
    for left, right in zip(ours, theirs, strict=False):
        if left != right:
            fields = [name for name in left if left.get(name) != right.get(name)]
            found.append(f"step {left.get('step')}: {', '.join(fields)}")
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = (path / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line) for line in text.splitlines()]
