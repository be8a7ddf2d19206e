"""Places that several owners share without a fixed part for each. Pure.

An owner may hold as many places as are free. So an owner that is alone gets half of them, two get
a third each, and there is always room for one more: an owner that takes all it can leaves as
much to the others. No place is taken back; an owner above its share gets no further one until
enough have been given back.
"""

from collections import Counter

__all__ = ["Shares"]


class Shares:
    """`places` of them."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[str] = Counter()

    def take(self, owner: str) -> bool:
        """Take a place; False: the owner has its share."""
        if self._held[owner] >= self._free:
            return False
        self._held[owner] += 1
        self._free -= 1
        return True

    def give(self, owner: str) -> None:
        """Give a place back."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
