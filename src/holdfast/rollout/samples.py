"""Episodes → samples of the queue. Pure."""

from collections.abc import Sequence

import numpy as np

from holdfast.rollout.asks import Ask, keys_of
from holdfast.rollout.environments import Score
from holdfast.rollout.episodes import Episode
from holdfast.transfer.queue import Item

__all__ = ["items_of"]


def items_of(ask: Ask, episodes: Sequence[Episode], scores: Sequence[Score]) -> list[Item]:
    """A group's samples: whatever predicts the next token, and what that token earned."""
    keys = keys_of(ask.step, ask.group, ask.count)
    return [
        Item(
            key,
            {
                "tokens": episode.tokens[:-1].astype(np.int32),
                "targets": episode.tokens[1:].astype(np.int64),
                "logprobs": episode.logprobs[1:].astype(np.float32),
                "credits": _credits(episode, score)[1:],
            },
            group=f"{ask.step}/{ask.group}",
            version=ask.version,
            tags={
                "reward": float(score.reward),
                "exact": bool(score.exact),
                "per_token": score.per_token is not None,
            },
        )
        for key, episode, score in zip(keys, episodes, scores, strict=True)
    ]


def _credits(episode: Episode, score: Score) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    credits = np.full(len(episode.tokens), np.nan, np.float32)
    earned = score.reward if score.per_token is None else np.array(score.per_token, np.float32)
    credits[episode.made] = earned
    return credits
