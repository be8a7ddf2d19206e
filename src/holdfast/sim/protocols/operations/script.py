"""What a simulated client does: operations under numbers, some late, some never."""

import random

from holdfast.sim.protocol import Violation
from holdfast.trainer import ops

__all__ = ["Script"]

LENGTH = 14
_SAVE = "kept"


class Script:
    """One client's operations, and what it knows. It survives the client."""

    def __init__(self, seed: str) -> None:
        luck = random.Random(seed)
        self.session = ""
        self.model = ""
        self.results: dict[int, bytes] = {}
        self._ops: dict[int, ops.Op] = {}
        for number in range(1, LENGTH + 1):
            self._ops[number] = self._choose(luck, number)
        never = [number for number in self._ops if luck.random() < 0.08]
        # The last one shows that nothing is stuck.
        self.never = set(never) - {LENGTH}
        self._late = {number for number in self._ops if luck.random() < 0.3}

    def _choose(self, luck: random.Random, number: int) -> ops.Op:
        roll = luck.random()
        if roll < 0.4:
            loss = "bad" if luck.random() < 0.1 else "good"
            return ops.ForwardBackward(
                data=[], loss=loss, config={"n": float(number)}, backward=luck.random() < 0.9
            )
        if roll < 0.65:
            return ops.OptimStep(learning_rate=float(number))
        if roll < 0.8:
            return ops.SaveWeights(name=_SAVE, overwrite=True)
        if roll < 0.94:
            return ops.LoadWeights(path=_SAVE)
        return ops.SaveForSampler(session_seq=0)

    def begin(self, *, session: str = "", model: str = "") -> None:
        """What was created counts, unless a twin of this client was faster."""
        self.session = self.session or session
        self.model = self.model or model

    def order(self) -> list[int]:
        """The numbers that are sent."""
        return [number for number in self._ops if number not in self.never]

    def delay_s(self, number: int, luck: random.Random) -> float:
        """When it is sent first: in order, but some come after those that follow them."""
        return number * 3.0 + (luck.random() * 15.0 if number in self._late else 0.0)

    def op(self, number: int, luck: random.Random) -> ops.Op:
        """The operation, as it is sent this time."""
        op = self._ops[number]
        if isinstance(op, ops.SaveForSampler):
            op = ops.SaveForSampler(session_seq=1000 * number + luck.randrange(1000))
        if isinstance(op, ops.LoadWeights):
            op = ops.LoadWeights(path=f"tinker://{self.model}/weights/{_SAVE}")
        return op

    def hear(self, number: int, outcome: bytes) -> None:
        """A result came. It is the same every time."""
        if self.results.setdefault(number, outcome) != outcome:
            raise Violation(f"{self.model}:{number} had another result before")

    def complete(self) -> bool:
        """Whether everything that is sent has its result."""
        return bool(self.model) and all(number in self.results for number in self.order())
