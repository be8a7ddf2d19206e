"""What the engine generates, in the form in which it is kept and sent."""

from holdfast.engine.generate import Generation, TopK
from holdfast.trainer import ops

__all__ = ["sampled_of"]


def sampled_of(found: Generation) -> ops.Sampled:
    """Arrays as little-endian bytes."""
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
        prompt_logprobs=(
            None
            if found.prompt_logprobs is None
            else found.prompt_logprobs.astype("<f4").tobytes()
        ),
        topk_prompt=_topk(found.topk_prompt),
    )


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
