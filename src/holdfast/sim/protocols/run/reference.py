"""What must come of a run: computed in one straight line, without a ledger, a queue or a fault.

Nothing of `holdfast.run` decides here but the plan's numbers and the names of the records.
"""

import numpy as np

from holdfast.rollout.asks import Ask
from holdfast.run import plan
from holdfast.run.config import Config
from holdfast.run.records import EvalDone, StepDone, StepRecord, eval_line, metrics_line
from holdfast.sim.protocols.operations.toy import event
from holdfast.sim.protocols.run.toy import FLAKY, SPOILS, content_of, episode, luck_of, number_of
from holdfast.trainer import ops

__all__ = ["BASE", "Reference"]

BASE = "b"
_EPS = 1e-6


class Reference:
    """A run without faults, one step at a time.

    Whether a step goes without a group whose environment fails now and then is the one thing that
    only the run itself can say.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.steps = config.steps
        self._history = [BASE]
        self.contents = [content_of(self._history)]
        """By version."""
        self.records: dict[int, StepRecord] = {}
        self.done: dict[int, StepDone] = {}
        self.lines: list[dict[str, object]] = []

    def tried(self, step: int) -> EvalDone:
        """What a version earns."""
        count = self._config.evaluate.prompts
        asks = [plan.eval_ask(self._config.seed, step, group) for group in range(count)]
        scores = [episode(self.contents[step], ask, 0)[1] for ask in asks]
        return EvalDone(
            exact=sum(float(one.exact) for one in scores) / count,
            reward=sum(one.reward for one in scores) / count,
            prompts=count,
        )

    def luck(self, step: int, group: int) -> str:
        """Whether the environment of a group works, fails, or fails now and then."""
        return luck_of(self._ask(step, group))

    def step(self, step: int, dropped: tuple[int, ...]) -> StepRecord:
        """Train a step without these groups; what must have been committed."""
        assert step == len(self.contents), "steps come one after the other"
        groups = range(self._config.rollout.groups)
        gone = {one for one in groups if self.luck(step, one) == SPOILS}
        gone |= {one for one in dropped if self.luck(step, one) == FLAKY}
        kept = [self._ask(step, group) for group in groups if group not in gone]
        numbers = plan.numbers(step)
        reward, exact = self._train(step, kept, numbers)
        self.records[step] = StepRecord(
            keys=tuple(
                f"{step:07}-{ask.group:04}-{index:04}"
                for ask in kept
                for index in range(ask.count)
            ),
            version=max(0, step - 1 - self._config.rollout.lag),
            numbers=(numbers.forward_backward, numbers.optim_step, numbers.publish),
            dropped=tuple(sorted(gone)),
            reward=reward,
            exact=exact,
        )
        self._tell(step)
        return self.records[step]

    def _train(self, step: int, asks: list[Ask], numbers: plan.Numbers) -> tuple[float, float]:
        content = self.contents[max(0, step - 1 - self._config.rollout.lag)]
        groups = [[episode(content, ask, at) for at in range(ask.count)] for ask in asks]
        total = sum(int(one.made.sum()) for group in groups for one, _ in group)
        data = []
        for group in groups:
            rewards = np.array([score.reward for _, score in group])
            found = (rewards - rewards.mean()) / (rewards.std() + _EPS)
            for (one, _), value in zip(group, found, strict=True):
                weights = np.where(one.made[1:], value / total, 0.0).astype("<f4")
                data.append(
                    ops.Datum(
                        tokens=one.tokens[:-1].astype("<i4").tobytes(),
                        inputs={
                            "target_tokens": _whole(one.tokens[1:]),
                            "logprobs": _real(one.logprobs[1:]),
                            "advantages": _real(weights),
                        },
                    )
                )
        train = self._config.train
        forward = ops.ForwardBackward(data=data, loss=train.loss)
        self._history.append(event(numbers.forward_backward, ops.identity(forward)))
        loss = number_of("loss", self._history)
        optim = ops.OptimStep(
            learning_rate=train.learning_rate,
            beta1=train.beta1,
            beta2=train.beta2,
            eps=train.eps,
            weight_decay=train.weight_decay,
            grad_clip_norm=train.grad_clip_norm,
        )
        self._history.append(event(numbers.optim_step, ops.identity(optim)))
        norm = number_of("norm", self._history)
        self.contents.append(content_of(self._history))
        self.done[step] = StepDone(content=self.contents[step], loss=loss, grad_norm=norm)
        scores = [score for group in groups for _, score in group]
        count = max(1, len(scores))
        return (
            sum(one.reward for one in scores) / count,
            sum(one.exact for one in scores) / count,
        )

    def _tell(self, step: int) -> None:
        self.lines.append(metrics_line(step, self.records[step], self.done[step]))
        every = self._config.evaluate.every
        if step == self._config.steps or (every and step % every == 0):
            self.lines.append(eval_line(step, self.tried(step)))

    def _ask(self, step: int, group: int) -> Ask:
        return plan.train_ask(self._config, step, group)


def _whole(array: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> ops.Tensor:
    return ops.Tensor(dtype="int64", shape=array.shape, data=array.astype("<i8").tobytes())


def _real(array: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> ops.Tensor:
    return ops.Tensor(dtype="float32", shape=array.shape, data=array.astype("<f4").tobytes())
