"""What a step is made of: functions of the run's seed and the step's number, never of timing.

    version of step n's samples    max(0, n - 1 - lag): the weights after that many steps
    operations of the model        0 create, 1 publish version 0,
                                   3n - 1 forward_backward, 3n optim_step, 3n + 1 publish

So whoever takes over, wherever its predecessor was, sends the same operations under the same
numbers, and asks for the same samples.
"""

from typing import NamedTuple

from holdfast.engine.noise import seed_of
from holdfast.rollout.asks import Ask
from holdfast.run.config import Config

__all__ = ["FIRST_PUBLISH", "Numbers", "eval_ask", "numbers", "save_number", "train_ask"]
__all__ += ["version_for"]

FIRST_PUBLISH = 1


class Numbers(NamedTuple):
    """The numbers of a step's operations."""

    forward_backward: int
    optim_step: int
    publish: int


def version_for(step: int, lag: int) -> int:
    """The version that makes the samples of a step."""
    return max(0, step - 1 - lag)


def numbers(step: int) -> Numbers:
    """The numbers of a step's operations."""
    return Numbers(3 * step - 1, 3 * step, 3 * step + 1)


def save_number(steps: int) -> int:
    """The number of the operation that saves everything, after the last step."""
    return 3 * steps + 2


def train_ask(config: Config, step: int, group: int, *, repair: bool = False) -> Ask:
    """A group of a step."""
    return Ask(
        purpose="train",
        step=step,
        group=group,
        version=version_for(step, config.rollout.lag),
        task_seed=seed_of("train", config.seed, step, group),
        seed=seed_of("sample", config.seed, step, group),
        count=config.rollout.samples,
        temperature=config.rollout.temperature,
        repair=repair,
    )


def eval_ask(seed: int, step: int, group: int) -> Ask:
    """A held-out prompt, the same in every evaluation; the likeliest answer counts."""
    return Ask(
        purpose="eval",
        step=step,
        group=group,
        version=step,
        task_seed=seed_of("eval", seed, group),
        seed=0,
        count=1,
        temperature=0.0,
    )
