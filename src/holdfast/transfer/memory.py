"""`memory:` a store inside this process, for tests and simulation.

`flip` damages what is stored, and `peek` looks at it without a call.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence

from holdfast.errors import NotFound
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.frame import Ref, open_head

__all__ = ["MemoryBackend"]


class MemoryBackend(Backend):
    """Frames in a dictionary."""

    url = "memory:"

    def __init__(self) -> None:
        self._frames: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def flip(self, key: str, at: int) -> None:
        """Damage one byte of what is stored."""
        frame = bytearray(self._frames[key])
        frame[at] ^= 0x40
        self._frames[key] = bytes(frame)

    def peek(self, key: str) -> bytes | None:
        """What is stored, without a call."""
        return self._frames.get(key)

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        with self._lock:
            for key, frame in frames.items():
                self._frames[key] = b"".join((frame.head, *frame.parts))
        return dict.fromkeys(frames)

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys."""
        with self._lock:
            return {
                key: memoryview(self._frames[key])
                if key in self._frames
                else NotFound(f"{key}: nothing is there", key=key)
                for key in wanted
            }

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys."""
        answer: dict[str, bool | Exception] = {}
        with self._lock:
            for key, generation in wanted.items():
                frame = self._frames.get(key)
                answer[key] = frame is not None and (
                    generation in (None, open_head(frame, key).generation)
                )
                if answer[key]:
                    del self._frames[key]
        return answer

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        return {key: key in self._frames for key in keys}

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
