"""How the tensors of a captured state are named: weights, what the optimizer remembers, gradients.

One form, whether the state was spread over ranks or not, and over how many: what one trainer has
kept, another one can take over.
"""

from collections.abc import Mapping

from torch import Tensor

from holdfast.trainer.seams import Snapshot

__all__ = ["ADAM", "GRADS", "WEIGHTS", "named", "part", "weights_of"]

WEIGHTS, ADAM, GRADS = "weights.", "adam.", "grads."


def named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors, as one part of a state."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """One part of a state."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def weights_of(snapshot: Snapshot) -> dict[str, Tensor]:
    """The weights of a state, or of what was saved for samplers, which has nothing else."""
    return part(snapshot.tensors, WEIGHTS) or dict(snapshot.tensors)
