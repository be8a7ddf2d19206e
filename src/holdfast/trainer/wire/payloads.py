"""The two large results, as protobuf and as JSON.

In protobuf the arrays of all datums lie behind each other, with the offsets in bytes. A record
is rectangular: datums whose arrays have other trailing dimensions begin a new one. Every datum
of a result has the same fields, and a scalar comes out as an array of one.
"""

import itertools
import math
from typing import Any

import numpy as np

from holdfast.trainer.ops import Cells, Output, Sampled, Tensor, TopK
from holdfast.trainer.wire import schema

__all__ = ["output_json", "output_message", "sample_json", "sample_message"]

OUTPUT_TYPE = "ArrayRecord"
# How the protocol writes a place of a top-k that has no token.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0


def output_message(output: Output) -> bytes:
    """A `ForwardBackwardOutput`."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for name, value in sorted(output.metrics.items()):
        message.metrics[name] = value
    for _, group in itertools.groupby(output.outputs, key=_form):
        _add_record(message, list(group))
    return bytes(message.SerializeToString(deterministic=True))


def _form(datum: dict[str, Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, one.dtype, one.shape[1:]) for name, one in sorted(datum.items())]


def _add_record(message: Any, datums: list[dict[str, Tensor]]) -> None:
    record = message.loss_fn_outputs.add(num_datums=len(datums))
    for name, first in sorted(datums[0].items()):
        parts = [datum[name].data for datum in datums]
        ends = list(itertools.accumulate(map(len, parts), initial=0))
        field = record.fields[name]
        field.data = b"".join(parts)
        field.offsets = np.asarray(ends, dtype="<i8").tobytes()
        field.dtype = schema.DTYPES[first.dtype]
        field.trailing_shape.extend(first.shape[1:])


def output_json(output: Output) -> dict[str, Any]:
    """The same, without its metrics, as JSON has it."""
    outputs = [
        {
            name: {
                "data": _list(one.data, one.dtype),
                "dtype": one.dtype,
                "shape": list(one.shape),
            }
            for name, one in datum.items()
        }
        for datum in output.outputs
    ]
    return {"loss_fn_output_type": OUTPUT_TYPE, "loss_fn_outputs": outputs}


def _list(data: bytes, dtype: str = "float32") -> list[Any]:
    values: list[Any] = np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).tolist()
    return values


def _tokens(data: bytes) -> list[int]:
    return _list(data, "int32")


def sample_message(sampled: Sampled) -> bytes:
    """A `SampleResponse`."""
    message = schema.SampleResponse()
    for one in sampled.sequences:
        sequence = message.sequences.add(
            stop_reason=schema.STOP_REASONS[one.stop_reason],
            tokens=one.tokens,
            logprobs=one.logprobs,
        )
        if one.topk is not None:
            _fill_topk(sequence.topk_sampled_logprobs, one.topk)
    if sampled.prompt_logprobs is not None:
        message.prompt_logprobs = sampled.prompt_logprobs
    if sampled.topk_prompt is not None:
        _fill_topk(message.topk_prompt_logprobs, sampled.topk_prompt)
    if sampled.target_prompt is not None:
        _fill_cells(message.target_prompt_logprobs, sampled.target_prompt)
    if sampled.alternatives is not None:
        drawn = sampled.alternatives
        for field, dtype, data in (
            (message.prompt_alt_tokens.tokens, "int32", drawn.tokens),
            (message.prompt_alt_tokens.logprobs, "float32", drawn.logprobs),
        ):
            field.dense, field.dtype = data, schema.DTYPES[dtype]
            field.shape.extend((drawn.length, drawn.k))
    return bytes(message.SerializeToString(deterministic=True))


def _fill_cells(message: Any, cells: Cells) -> None:
    message.dtype = schema.DTYPES["float32"]
    message.shape.extend(cells.shape)
    if cells.crow is None or cells.col is None:
        message.dense = cells.values
        return
    message.sparse_csr.values = cells.values
    message.sparse_csr.crow_indices = cells.crow
    message.sparse_csr.col_indices = cells.col


def _fill_topk(message: Any, topk: TopK) -> None:
    logprobs = np.frombuffer(topk.logprobs, dtype="<f4")
    missing = np.isnan(logprobs)
    tokens = np.frombuffer(topk.tokens, dtype="<i4")
    message.k, message.length = topk.k, topk.length
    message.token_ids = np.where(missing, np.int32(_NO_TOKEN), tokens).astype("<i4").tobytes()
    filled = np.where(missing, np.float32(_NO_LOGPROB), logprobs)
    message.logprobs = filled.astype("<f4").tobytes()


def sample_json(sampled: Sampled) -> dict[str, Any]:
    """The same as JSON has it."""
    said: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": one.stop_reason,
                "tokens": _tokens(one.tokens),
                "logprobs": _list(one.logprobs),
            }
            | ({} if one.topk is None else {"topk_logprobs": _topk_lists(one.topk)})
            for one in sampled.sequences
        ],
    }
    if sampled.prompt_logprobs is not None:
        said["prompt_logprobs"] = _list(sampled.prompt_logprobs)
    if sampled.topk_prompt is not None:
        said["topk_prompt_logprobs"] = _topk_lists(sampled.topk_prompt)
    if sampled.target_prompt is not None:
        said["target_prompt_logprobs"] = _cells_json(sampled.target_prompt)
    if sampled.alternatives is not None:
        drawn, shape = sampled.alternatives, [sampled.alternatives.length, sampled.alternatives.k]
        said["prompt_alt_tokens"] = {
            "tokens": {"data": _tokens(drawn.tokens), "dtype": "int64", "shape": shape},
            "logprobs": {"data": _list(drawn.logprobs), "dtype": "float32", "shape": shape},
        }
    return said


def _cells_json(cells: Cells) -> dict[str, Any]:
    said = {"data": _list(cells.values), "dtype": "float32", "shape": list(cells.shape)}
    if cells.crow is not None and cells.col is not None:
        said["sparse_crow_indices"] = _list(cells.crow, "int64")
        said["sparse_col_indices"] = _list(cells.col, "int64")
    return said


def _topk_lists(topk: TopK) -> list[list[tuple[int, float]] | None]:
    """Per place its tokens with their log probabilities; None where nothing was scored."""
    pairs = list(zip(_tokens(topk.tokens), _list(topk.logprobs), strict=True))
    rows = [pairs[at : at + topk.k] for at in range(0, topk.length * topk.k, max(1, topk.k))]
    return [[pair for pair in row if not _is_missing(pair[1])] or None for row in rows]


def _is_missing(logprob: float) -> bool:
    return math.isnan(logprob) or logprob == _NO_LOGPROB
