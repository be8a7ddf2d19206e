"""A rank of a group whose rank 0 is the test, or the program below: it does what it is told.

    HELD=held.json python -m trainer.other_rank NAME=DIRECTORY …

`probe` makes it write the file HELD: see `held`. As rank 0 (with STATE, a file of a captured
state, and AFTER) it restores that state, goes on, and writes the state after it.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from holdfast.engine.determinism import settle
from holdfast.proc import die_with_parent
from holdfast.trainer import ops
from holdfast.trainer.machine import Machine
from holdfast.trainer.orders import END, Order, follow, lead
from holdfast.trainer.ranks import from_env
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.sharded import ShardedMachine

IDLE_S = 90.0
"""A rank that waits in vain says so before the test's time is over: no signal gets it out."""
STEP = ops.encode(
    # Where a gradient is nothing but noise (a key's bias), a smaller eps would make weights of it.
    ops.OptimStep(learning_rate=1e-2, eps=1e-5, weight_decay=0.01, grad_clip_norm=1.0)
)


def datum(*tokens: int, weight: float = 1.0) -> ops.Datum:
    """A sequence, to be learnt."""
    ids = np.array(tokens, "<i4")
    inputs = {"target_tokens": ids[1:], "weights": np.full(len(ids) - 1, weight)}
    tensors = {name: ops.Tensor.of(array) for name, array in inputs.items()}
    return ops.Datum(tokens=ids[:-1].tobytes(), inputs=tensors)


def batch(step: int, count: int = 5) -> bytes:
    """Data of different lengths."""
    data = [datum(1, *range(10 + step, 20 + step + at * 3)) for at in range(count)]
    return ops.encode(ops.ForwardBackward(data=data, loss="cross_entropy"))


def held(machine: Machine) -> dict[str, Any]:
    """How many numbers this rank has of each kind, and how many bytes of tensors in all."""
    gc.collect()
    storages = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    models = {}
    for name, trained in machine._models.items():
        weights = machine._held(trained.tenant)
        moments = {key: one for key, one in trained.moments.items() if "step" not in key}
        models[name] = {
            "numbers": {key: one.numel() for key, one in weights.items()},
            "bits": [
                one.view(torch.int32).sum().item()
                for one in (*weights.values(), *moments.values(), *trained.grads.values())
            ],
            "moments": sum(one.numel() for one in moments.values()),
            "grads": sum(one.numel() for one in trained.grads.values()),
        }
    return {"bytes": sum(storages.values()), "models": models}


class Watched(ShardedMachine):
    """Writes down what it holds when it is probed."""

    def probe(self) -> None:
        """Before the answer, so that whoever asked may read it."""
        Path(os.environ["HELD"]).write_text(json.dumps(held(self)))
        super().probe()


def never_pickle(patch: pytest.MonkeyPatch) -> None:
    """What torch sends as an object is pickled: from now on that is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was pickled")

    patch.setattr(torch.distributed.distributed_c10d, "_object_to_tensor", refuse)


def main() -> None:
    """Follow until the end, or go on from a state."""
    die_with_parent(os.getppid())
    settle()
    never_pickle(pytest.MonkeyPatch())
    ranks = from_env(IDLE_S)
    models = dict(word.split("=", 1) for word in sys.argv[1:])
    machine = Watched({name: Path(path) for name, path in models.items()}, "run", ranks)
    if ranks.rank:
        follow(machine, ranks)
    else:
        state = Snapshot(safetensors.torch.load_file(os.environ["STATE"]), {"kind": "state"}, {})
        lead(machine, ranks, Order(kind="restore", model="m", base=next(iter(models))), state)
        for op in (batch(2), STEP):
            lead(machine, ranks, Order(kind="apply", model="m", op=op))
        after = lead(machine, ranks, Order(kind="capture", model="m"))
        assert isinstance(after, Snapshot)
        safetensors.torch.save_file(dict(after.tensors), os.environ["AFTER"])
        lead(machine, ranks, Order(kind=END))
    ranks.close()


if __name__ == "__main__":
    main()
