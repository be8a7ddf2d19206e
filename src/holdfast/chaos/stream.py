"""What a fault does to the bytes of one direction of one connection. Pure.

Invariant: which bits are flipped and at which byte a stream ends depend only on the
seed, the number of the connection, the direction and the byte's offset in the stream,
never on how TCP cut the stream into chunks.
"""

import math
import random
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.errors import Mistake

__all__ = ["DIRECTIONS", "Direction", "Directions", "Faults", "Stream", "directions", "drop_point"]

Direction = Literal["to_server", "to_client"]
Directions = Literal["to_server", "to_client", "both"]
DIRECTIONS: tuple[Direction, ...] = ("to_server", "to_client")
_BLOCK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Faults:
    """What is wrong with one direction at the moment. The default is a healthy line."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    stalled: bool = False
    flip_probability: float = 0.0
    flip_every_bytes: int = 0
    bytes_per_s: float = math.inf
    truncate_after_bytes: int | None = None


class Stream:
    """One direction of one connection: where it stands and where it is to end."""

    def __init__(self, seed: int, connection: int, direction: Direction) -> None:
        self.direction = direction
        self.offset = 0
        self.drop_at: int | None = None
        self.truncate_at: int | None = None
        self._name = f"{seed}/{connection}/{direction}"
        self._jitter = random.Random(f"{self._name}/delay")
        self._cached: tuple[tuple[object, ...], tuple[tuple[int, int], ...]] = ((), ())

    def due(self) -> Literal["drop", "truncate"] | None:
        """The end that this stream has reached, if any."""
        if self.drop_at is not None and self.offset >= self.drop_at:
            return "drop"
        if self.truncate_at is not None and self.offset >= self.truncate_at:
            return "truncate"
        return None

    def allowance(self) -> float:
        """How many bytes may still pass before an end is reached."""
        ends = [end for end in (self.drop_at, self.truncate_at) if end is not None]
        return max(0, min(ends) - self.offset) if ends else math.inf

    def delay_s(self, faults: Faults) -> float:
        """How long the next chunk is to be held back."""
        if not faults.jitter_s:
            return faults.delay_s
        return max(0.0, faults.delay_s + self._jitter.uniform(-faults.jitter_s, faults.jitter_s))

    def flip(self, chunk: bytes | memoryview, faults: Faults) -> tuple[bytes | memoryview, int]:
        """Flip the bits that are due in the bytes at `offset`; return them and how many."""
        block_bytes = _block_bytes(faults)
        if not block_bytes:
            return chunk, 0
        changed: bytearray | None = None
        count = 0
        end = self.offset + len(chunk)
        for block in range(self.offset // block_bytes, (end - 1) // block_bytes + 1):
            for at, bit in self._flips(block, block_bytes, faults):
                if self.offset <= at < end:
                    changed = changed if changed is not None else bytearray(chunk)
                    changed[at - self.offset] ^= 1 << bit
                    count += 1
        return (chunk if changed is None else bytes(changed)), count

    def _flips(self, block: int, block_bytes: int, faults: Faults) -> tuple[tuple[int, int], ...]:
        """(offset, bit) of every flip in a block. Each block has its own random numbers, so
        that corruption may be switched on anywhere in a stream and cost no search."""
        key = (block, faults.flip_probability, faults.flip_every_bytes)
        if self._cached[0] != key:
            dice = random.Random(f"{self._name}/flip/{block}")
            start = block * block_bytes
            if faults.flip_every_bytes:
                every = faults.flip_every_bytes
                flips = tuple(
                    (window + dice.randrange(every), dice.randrange(8))
                    for window in range(start, start + block_bytes, every)
                )
            else:
                flips = _scattered(dice, start, block_bytes, faults.flip_probability)
            self._cached = (key, flips)
        return self._cached[1]


def directions(which: str) -> tuple[Direction, ...]:
    """The directions that a caller means."""
    if which not in get_args(Directions):
        raise Mistake(f"a direction is to_server, to_client or both, not {which!r}")
    return tuple(one for one in DIRECTIONS if which in (one, "both"))


def drop_point(
    seed: int, connection: int, probability: float, within_bytes: int, which: Directions
) -> tuple[Direction, int] | None:
    """Where a connection is to be dropped: a direction and a number of bytes, or None.

    Every order of magnitude is equally likely, so that headers are hit as well as bodies.
    """
    dice = random.Random(f"{seed}/{connection}/drop")
    if dice.random() >= probability:
        return None
    return dice.choice(directions(which)), int(within_bytes ** dice.random())


def _block_bytes(faults: Faults) -> int:
    if faults.flip_every_bytes:  # whole windows, one flip in each
        return max(1, _BLOCK_BYTES // faults.flip_every_bytes) * faults.flip_every_bytes
    return _BLOCK_BYTES if faults.flip_probability else 0


def _scattered(
    dice: random.Random, start: int, size: int, probability: float
) -> tuple[tuple[int, int], ...]:
    """Every byte is hit with the same probability, drawn gap by gap."""
    flips: list[tuple[int, int]] = []
    at = start - 1
    while True:
        if probability >= 1.0:
            at += 1
        else:
            at += 1 + int(min(size, math.log(1.0 - dice.random()) / math.log1p(-probability)))
        if at >= start + size:
            return tuple(flips)
        flips.append((at, dice.randrange(8)))
