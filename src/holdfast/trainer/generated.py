"""What the engine generates, in the form in which it is kept and sent."""

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.engine.generate import Generation, TopK
from holdfast.trainer import ops

__all__ = ["sampled_of", "targets_of"]


def sampled_of(found: Generation, asked: ops.Cells | None = None) -> ops.Sampled:
    """Arrays as little-endian bytes; `asked`: the tokens that were to be scored."""
    about = found.about
    targets = None
    if asked is not None and about.targets is not None:
        values = np.zeros(len(asked.values) // 8, "<f4")
        values[_named(asked)] = about.targets
        targets = msgspec.structs.replace(asked, values=values.tobytes())
    return ops.Sampled(
        sequences=[
            ops.Sequence(
                stop_reason=one.stop_reason,
                tokens=one.tokens.astype("<i4").tobytes(),
                logprobs=one.logprobs.astype("<f4").tobytes(),
                topk=_topk(one.topk),
            )
            for one in found.continuations
        ],
        prompt_logprobs=None if about.logprobs is None else about.logprobs.tobytes(),
        topk_prompt=_topk(about.topk),
        target_prompt=targets,
        alternatives=_topk(about.alternatives),
    )


def targets_of(asked: ops.Cells) -> npt.NDArray[np.int64]:
    """[n, 2]: the place in the prompt and the token, of every cell that asks for something."""
    rows, columns = asked.shape
    if asked.crow is None:
        places = np.repeat(np.arange(rows), columns)
    else:
        places = np.repeat(np.arange(rows), np.diff(np.frombuffer(asked.crow, "<i8")))
    tokens = np.frombuffer(asked.values, "<i8")
    return np.stack([places + 1, tokens], axis=-1)[_named(asked)]


def _named(asked: ops.Cells) -> npt.NDArray[np.bool_]:
    named: npt.NDArray[np.bool_] = np.frombuffer(asked.values, "<i8") != -1
    return named


def _topk(given: TopK | None) -> ops.TopK | None:
    if given is None:
        return None
    length, k = given.tokens.shape
    return ops.TopK(
        k=k,
        length=length,
        tokens=given.tokens.astype("<i4").tobytes(),
        logprobs=given.logprobs.astype("<f4").tobytes(),
    )
