"""`memory:` a store inside this process, for tests and simulation.

Faults can be injected per key and per attempt: `fail(key, times, error)` makes the next
calls fail for that key, `flip(key)` damages what is stored, `calls` counts what was sent.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from holdfast.errors import NotFound, Unavailable
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.frame import Ref, open_head

__all__ = ["MemoryBackend"]

Way = Literal["put", "get", "delete", "exists"]


class MemoryBackend(Backend):
    """Frames in a dictionary."""

    url = "memory:"

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._faults: dict[tuple[Way, str], list[Callable[[], Exception]]] = {}
        self.calls: Counter[tuple[Way, str]] = Counter()
        """How often each key was sent, by the kind of call."""

    def fail(
        self,
        way: Way,
        key: str,
        times: int = 1,
        error: Callable[[], Exception] = lambda: Unavailable("injected"),
    ) -> None:
        """Make the next calls fail for this key."""
        self._faults[way, key] = [error] * times

    def flip(self, key: str, at: int) -> None:
        """Damage one byte of what is stored."""
        frame = bytearray(self._frames[key])
        frame[at] ^= 0x40
        self._frames[key] = bytes(frame)

    def cut(self, key: str, length: int) -> None:
        """Leave only the first bytes of what is stored."""
        self._frames[key] = self._frames[key][:length]

    def peek(self, key: str) -> bytes | None:
        """What is stored, without a call."""
        return self._frames.get(key)

    def _fault(self, way: Way, key: str) -> Exception | None:
        self.calls[way, key] += 1
        waiting = self._faults.get((way, key))
        return waiting.pop()() if waiting else None

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        answer: dict[str, Exception | None] = {}
        with self._lock:
            for key, frame in frames.items():
                answer[key] = self._fault("put", key)
                if answer[key] is None:
                    self._frames[key] = b"".join((frame.head, *frame.parts))
        return answer

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys."""
        answer: dict[str, memoryview | Exception] = {}
        with self._lock:
            for key in wanted:
                fault, frame = self._fault("get", key), self._frames.get(key)
                if fault is not None:
                    answer[key] = fault
                elif frame is None:
                    answer[key] = NotFound(f"{key}: nothing is there", key=key)
                else:
                    answer[key] = memoryview(frame)
        return answer

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys."""
        answer: dict[str, bool | Exception] = {}
        with self._lock:
            for key, generation in wanted.items():
                fault, frame = self._fault("delete", key), self._frames.get(key)
                if fault is not None:
                    answer[key] = fault
                elif frame is None or generation not in (None, open_head(frame, key).generation):
                    answer[key] = False
                else:
                    del self._frames[key]
                    answer[key] = True
        return answer

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        with self._lock:
            return {key: self._fault("exists", key) or key in self._frames for key in keys}

    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning."""
        with self._lock:
            found = [(key, frame) for key, frame in self._frames.items() if key.startswith(prefix)]
        for key, frame in found:
            yield Stored(key, len(frame), open_head(frame, key).generation)

    def stat(self) -> Stat:
        """How much there is."""
        with self._lock:
            nbytes = sum(map(len, self._frames.values()))
            return Stat(len(self._frames), nbytes, nbytes, 0)

    def close(self) -> None:
        """Nothing to let go of: what was put stays while somebody holds this object."""
