"""Whether a transfer makes progress. Pure.

Measured in windows: at the end of each one, as many bytes must have moved as the pace asks
for. Time in which the transfer had to wait for somebody else does not count: the window
begins again afterwards.
"""

from holdfast.gateway.http.limits import Limits

__all__ = ["Pace"]


class Pace:
    """The pace of one transfer in one direction."""

    __slots__ = ("_bytes", "_since", "_window_s", "_wish")

    def __init__(self, limits: Limits) -> None:
        self._window_s = limits.pace_s
        self._wish = limits.pace_bytes_per_s * limits.pace_s
        self._since = 0.0
        self._bytes = 0
        """What had moved when the window began; `_since` 0: no window has begun."""

    def rest(self) -> None:
        """The transfer waits for somebody else."""
        self._since = 0.0

    def too_slow(self, moved_bytes: int, now: float) -> bool:
        """Whether a window has ended in which too little moved. Asked every now and then."""
        if not self._since:
            self._since, self._bytes = now, moved_bytes
        elif now - self._since >= self._window_s:
            if moved_bytes - self._bytes < self._wish:
                return True
            self._since, self._bytes = now, moved_bytes
        return False
