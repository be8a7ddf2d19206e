"""How often callers without a valid key may ask, and how often that is written down. Pure.

A bucket holds `burst` tokens and gains `per_s` of them; a caller that finds it empty is refused.
Each address has a bucket of its own (of IPv6, each /64: one customer has that many). The table is
bounded: the address that was seen longest ago is forgotten, and would begin with a full bucket.
"""

import ipaddress
import math
from collections.abc import Callable

__all__ = ["Bucket", "Strangers"]


class Bucket:
    """Tokens that come with time."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: float, per_s: float, now: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = burst, now

    def take(self, now: float) -> bool:
        """Take a token; False: there is none."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    @property
    def wait_s(self) -> int:
        """In how many whole seconds there is a token again."""
        return max(1, math.ceil((1.0 - self._left) / self._per_s))


class Strangers:
    """The buckets of addresses, and one for the lines that are written about them all."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        burst: float = 100.0,
        per_s: float = 10.0,
        addresses: int = 4096,
        lines_burst: float = 60.0,
        lines_per_s: float = 1.0,
    ) -> None:
        self._now = now
        self._burst, self._per_s, self._most = burst, per_s, addresses
        self._buckets: dict[str, Bucket] = {}
        self._lines = Bucket(lines_burst, lines_per_s, now())
        self._unlogged = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def knock(self, address: str) -> int:
        """A caller without a known key asks. Returns 0, or in how many seconds it may ask."""
        name, now = _network(address), self._now()
        bucket = self._buckets.pop(name, None) or Bucket(self._burst, self._per_s, now)
        self._buckets[name] = bucket
        if len(self._buckets) > self._most:
            del self._buckets[next(iter(self._buckets))]
        return 0 if bucket.take(now) else bucket.wait_s

    def may_log(self) -> bool:
        """Whether there is a line for one more refusal; if not, it is counted."""
        if self._lines.take(self._now()):
            return True
        self._unlogged += 1
        return False

    def unlogged(self) -> int:
        """How many had no line since the last call."""
        count, self._unlogged = self._unlogged, 0
        return count


def _network(address: str) -> str:
    """The address, or the /64 that it is in."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4 or found.ipv4_mapped:
        return str(found)
    return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
