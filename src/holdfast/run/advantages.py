"""Advantages of a group of samples: pure functions of what the samples earned.

A sample's *credits* are numbers for the tokens that the model said. Where an environment gives
one reward for the whole sample, all of them are that reward, and samples are compared by it.
Where it gives one per token (`per_token`), token j of a sample is compared with token j of the
others in the group, as far as they have one.

    grpo     (r - mean) / (std + eps)     arXiv 2402.03300
    dr_grpo  r - mean                     arXiv 2503.20783: neither std nor length
    rloo     r - mean of the others       arXiv 2402.14740
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["KINDS", "advantages"]

Floats = npt.NDArray[np.float64]

_EPS = 1e-6


def _dr_grpo(rewards: Floats) -> Floats:
    centred: Floats = rewards - rewards.mean()
    return centred


def _grpo(rewards: Floats) -> Floats:
    scaled: Floats = _dr_grpo(rewards) / (rewards.std() + _EPS)
    return scaled


def _rloo(rewards: Floats) -> Floats:
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (len(rewards) - 1)
    compared: Floats = rewards - others
    return compared


KINDS: dict[str, Callable[[Floats], Floats]] = {
    "grpo": _grpo,
    "dr_grpo": _dr_grpo,
    "rloo": _rloo,
}


def advantages(kind: str, earned: Sequence[Floats], *, per_token: bool) -> list[Floats]:
    """The advantage of every token that was said, for each sample of one group."""
    compare = KINDS[kind]
    given = [np.asarray(one, np.float64) for one in earned]
    if not per_token:
        rewards = np.array([one[0] if len(one) else 0.0 for one in given])
        found = compare(rewards) if len(rewards) else rewards
        return [np.full(len(one), value) for one, value in zip(given, found, strict=True)]
    made = [np.zeros(len(one)) for one in given]
    for place in range(max(map(len, given), default=0)):
        who = [index for index, one in enumerate(given) if len(one) > place]
        column = compare(np.array([given[index][place] for index in who]))
        for index, value in zip(who, column, strict=True):
            made[index][place] = value
    return made
