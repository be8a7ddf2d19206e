"""One set of weights on a base: what is trained, sampled from, published and loaded.

- `logits` knows nothing of other rows: no row's numbers depend on what is in another row of the
  batch, nor on where another row ends. Batches are padded on the right, where causal
  attention does not look, so no mask is given to the model; with a mask it may choose other
  kernels for a batch with padding than for one without. Equal shapes, equal bits.
- Dropout is off, always.
- `load_state` changes everything or nothing.

A tenant is used by one thread at a time. Different tenants do not share anything that changes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast.errors import Gone, Mistake
from holdfast.text import several

if TYPE_CHECKING:
    from holdfast.engine.base import Base

__all__ = ["Tenant"]

_NAMED = 3


class Tenant:
    """Made by `Base.full`, `Base.lora` and `Base.frozen`."""

    def __init__(
        self,
        base: "Base",
        name: str,
        model: Any,
        parameters: Mapping[str, nn.Parameter],
        files: Mapping[str, bytes],
        weights_file: str,
        buffers: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.base = base
        self.name = name
        self.weights_file = weights_file
        """What the file with `state` must be called, beside `carried_files`."""
        self._model = model
        self._parameters = dict(sorted(parameters.items()))
        self._buffers = dict(buffers or {})
        self._files = dict(files)

    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, in the order of the names, which are those of `state`."""
        self.model()
        return dict(self._parameters)

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What the model says after each token: [B, T, V] in the model's dtype, with gradients.

        `tokens` [B, T] are integers and `mask` [B, T] is 1 (or true) for tokens and 0 for
        padding, which stands at the end of a row. What comes out at padding means nothing.
        """
        rows = self._checked(tokens, mask)
        outputs: torch.Tensor = self._pass(input_ids=rows, use_cache=False).logits
        return outputs

    def advance(self, tokens: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
        """Read [B, T] more tokens; give the logits [B, V] after the last, and the cache.

        The cache is the model's own; it is changed in place. The first call makes it. The
        tokens must be in the vocabulary.
        """
        output = self._pass(
            input_ids=tokens.to(self.base.device), past_key_values=cache, use_cache=True,
            **self.base.last_only,
        )  # fmt: skip
        return output.logits[:, -1], output.past_key_values

    def state(self) -> dict[str, torch.Tensor]:
        """What is published, by name: all the weights, or those of the adapter.

        The tensors are the tenant's own, not copies: write them out, or copy them, before the
        weights change again.
        """
        self.model()
        return {name: tensor.detach() for name, tensor in self._everything().items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take these weights. Names and shapes must be those of `state`, or nothing changes."""
        self.model()
        mine = self._everything()
        problems = [
            *_told("not given", mine.keys() - state.keys()),
            *_told("not of this model", state.keys() - mine.keys()),
        ]
        shapes = {
            f"{name} {list(state[name].shape)}, not {list(tensor.shape)}"
            for name, tensor in mine.items()
            if name in state and state[name].shape != tensor.shape
        }
        problems += _told("of another shape", shapes)
        kinds = {
            f"{name} {state[name].dtype}"
            for name, tensor in mine.items()
            if name in state and state[name].is_floating_point() != tensor.is_floating_point()
        }
        problems += _told("of another kind", kinds)
        if problems:
            raise Mistake(f"weights for {self.name} were not loaded: {'; '.join(problems)}")
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])

    def carried_files(self) -> dict[str, bytes]:
        """The files that, beside `weights_file` with `state`, make a folder others can load."""
        self.model()
        return dict(self._files)

    def model(self) -> Any:
        """The transformers module itself."""
        if self._model is None:
            raise Gone(f"{self.name} has been dropped from {self.base.name}")
        return self._model

    def release(self) -> None:
        """Let go of the weights. `Base.drop` calls this."""
        self._model = None
        self._parameters, self._buffers, self._files = {}, {}, {}

    def _pass(self, **given: Any) -> Any:
        """Let the model compute: every use of it goes through here."""
        return self.model()(**given)

    def _everything(self) -> dict[str, torch.Tensor]:
        return dict(sorted({**self._parameters, **self._buffers}.items()))

    def _checked(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The tokens as the model wants them, with padding that is in the vocabulary."""
        if tokens.ndim != 2 or tokens.shape != mask.shape or 0 in tokens.shape:
            raise Mistake(
                f"tokens {list(tokens.shape)} and mask {list(mask.shape)} must have one shape "
                "[rows, tokens], with at least one of each"
            )
        if tokens.is_floating_point() or tokens.is_complex():
            raise Mistake(f"tokens are integers, not {tokens.dtype}")
        if tokens.shape[1] > self.base.context_length:
            raise Mistake(
                f"{tokens.shape[1]} tokens are more than the {self.base.context_length} that "
                f"{self.base.name} can take: shorten the text"
            )
        real = mask.bool()
        if bool((real[:, 1:] & ~real[:, :-1]).any()):
            raise Mistake("padding must stand at the end of a row: the mask has a gap")
        rows = torch.where(real, tokens.long(), 0)
        self.base.check_tokens(rows)
        return rows.to(self.base.device)


def _told(what: str, names: set[str]) -> list[str]:
    return [f"{what}: {several(sorted(names), _NAMED)}"] if names else []
