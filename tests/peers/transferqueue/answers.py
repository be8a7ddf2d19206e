"""Answers of TransferQueue as plain data, so that those of two back ends can be compared.

Everything that a caller can see is in them: types, dtypes, shapes, bits, order, layouts. What a
back end keeps for itself is not (`_custom_backend_meta`), nor how it words an error.
"""

import enum
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from peers.transferqueue.system import NonTensorData, NonTensorStack, TensorDict, tq

__all__ = ["Recorder", "plain"]


class Recorder:
    """Makes calls and keeps their answers by label, in order."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}

    def __call__(self, label: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Make a call. Its answer, or None if it raises, which is an answer as well."""
        assert label not in self.answers, f"{label} is called twice"
        try:
            answer = call(*args, **named)
        except Exception as error:  # noqa: BLE001 -- an answer to be compared
            self.answers[label] = ("raises",)
            self.answers[f"{label} "] = f"{type(error).__name__}: {error}"
            return None
        self.answers[label] = plain(answer)
        return answer


def plain(value: Any) -> Any:
    """A value as plain data that is equal exactly if the values are the same."""
    if isinstance(value, TensorDict):
        fields = {name: plain(value.get(name)) for name in sorted(value.keys())}
        return "TensorDict", tuple(value.batch_size), fields
    if isinstance(value, NonTensorStack):
        return "stack", [plain(item) for item in value.tolist()]
    if isinstance(value, NonTensorData):
        return "one for all", tuple(value.batch_size), plain(value.data)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, np.ndarray):
        items = [plain(item) for item in value.ravel().tolist()]
        return "array", value.dtype.str, value.shape, items
    if isinstance(value, tq.BatchMeta):
        return "meta", _meta(value)
    if isinstance(value, tq.KVBatchMeta):
        about = (value.keys, value.tags, value.partition_id, sorted(value.fields or []))
        return "keys", plain(about), plain(value.extra_info)
    if isinstance(value, dict):
        return type(value).__name__, [(plain(key), plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if isinstance(value, enum.Enum | torch.dtype | torch.Size):
        return repr(value)
    return type(value).__name__, repr(value)


def _tensor(value: torch.Tensor) -> Any:
    if value.is_nested:
        return "nested", str(value.layout), [_tensor(row) for row in value.unbind()]
    here = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = here.flatten().view(torch.uint8).numpy().tobytes() if here.numel() else b""
    return "tensor", str(value.dtype), tuple(value.shape), data.hex()


def _meta(meta: Any) -> Any:
    schema = {
        field: {name: plain(about) for name, about in sorted(entry.items())}
        for field, entry in sorted(meta.field_schema.items())
    }
    return (
        meta.global_indexes,
        meta.partition_ids,
        schema,
        plain(np.asarray(meta.production_status)),
        plain(meta.custom_meta),
        plain(meta.extra_info),
        meta.is_ready,
    )
