"""A real back end with faults between it and the store: per key, per attempt, counted."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.transfer.backend import Backend, Frame
from holdfast.transfer.frame import Ref

__all__ = ["Fault", "Faulty"]

Fault = Exception | Callable[[memoryview], memoryview]
"""Instead of an answer; or, of a get, what is done to it."""


class Faulty:
    """Is like the back end that it wraps, but for faults. `puts` and `gets` list those to come."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.puts: dict[str, list[Fault]] = {}
        self.gets: dict[str, list[Fault]] = {}
        self.sent: Counter[tuple[str, str]] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

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
