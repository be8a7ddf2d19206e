"""A real back end with faults between it and the store: per key, per attempt, counted."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.frame import Ref

__all__ = ["Fault", "Faulty", "faulty"]

Fault = Exception | Callable[[memoryview], memoryview]
"""Instead of an answer; or, of a get, what is done to it."""


class Faulty(Backend):
    """Answers like what it wraps, but for faults. `puts` and `gets` list the faults to come."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.puts: dict[str, list[Fault]] = {}
        self.gets: dict[str, list[Fault]] = {}
        self.sent: Counter[tuple[str, str]] = Counter()

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        self.sent.update(("put", key) for key in frames)
        failed = {key: self.puts[key].pop() for key in frames if self.puts.get(key)}
        rest = {key: frame for key, frame in frames.items() if key not in failed}
        answer = dict(self.inner.put(rest)) if rest else {}
        for key, fault in failed.items():
            assert isinstance(fault, Exception)
            answer[key] = fault
        return answer

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        self.sent.update(("get", key) for key in wanted)
        answer = dict(self.inner.get(wanted))
        for key in wanted:
            if self.gets.get(key):
                fault, found = self.gets[key].pop(), answer[key]
                if isinstance(fault, Exception):
                    answer[key] = fault
                elif not isinstance(found, Exception):
                    answer[key] = fault(found)
        return answer

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        return self.inner.delete(wanted)

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        return self.inner.exists(keys)

    def scan(self, prefix: str) -> Iterator[Stored]:
        return self.inner.scan(prefix)

    def stat(self) -> Stat:
        return self.inner.stat()

    def close(self) -> None:
        self.inner.close()


def faulty(inner: Backend) -> Faulty:
    """Wrap a back end; its limits stay."""

    class Same(Faulty):
        most_keys = type(inner).most_keys
        most_bytes = type(inner).most_bytes
        parallel = type(inner).parallel
        gives_memory = type(inner).gives_memory

    return Same(inner)
