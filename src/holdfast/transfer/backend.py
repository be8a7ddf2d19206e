"""What a store is made of: a place that keeps frames by key.

A back end moves frames and knows nothing of values; `store.py` packs, proves and tries
again. Every call is for many keys and answers for each of them: what it found, or the error
that befell it. The errors mean

    NotFound        nothing is there                            ("missing")
    Retriable       not reached, not now; nothing was changed    ("failed")
    UnknownOutcome  it may or may not have been put             ("failed")
    Corrupt         what is there is damaged                     ("corrupt")
    Gone            something else is there than what was meant  ("stale")

and need not name the key: the store does that (`batches.named`).

A back end keeps these promises:

- A put that answers None for a key can be got by every process from then on.
- Putting the same frame again does no harm. Putting another frame replaces the value as a
  whole: nobody ever gets a mix.
- A delete with a generation deletes nothing but that generation.
- Calls come from several threads at once, and each of them ends within a bound.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.transfer.frame import Buffer, Ref

__all__ = ["Backend", "Bytes", "Frame", "Stat", "Stored"]

Bytes = npt.NDArray[np.uint8]


class Frame(msgspec.Struct, frozen=True):
    """A frame that is to be put: head and payload, in as many parts as they lie in."""

    head: bytes
    parts: tuple[Buffer, ...]
    ref: Ref


class Stored(msgspec.Struct, frozen=True):
    """A key as `scan` sees it."""

    key: str
    nbytes: int
    generation: int


class Stat(msgspec.Struct, frozen=True):
    """How much there is."""

    keys: int
    nbytes: int
    """All frames that can be got."""
    taken: int
    """What they and everything around them take, of `budget`."""
    budget: int
    """0: no limit of ours."""


class Backend(abc.ABC):
    """A place that keeps frames by key. See the module for its promises."""

    most_keys: ClassVar[int] = 1_000_000
    """How many keys one call may have; more are split by whoever calls."""
    most_bytes: ClassVar[int] = 1 << 62
    """How many bytes one call should have; one single value may be larger."""
    parallel: ClassVar[int] = 1
    """How many calls at once are of use."""
    gives_memory: ClassVar[bool] = False
    """Whether the memory that `get` answers with is the caller's to keep and to write."""

    url: str = ""

    @abc.abstractmethod
    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames; None for each that can now be read by everybody."""

    @abc.abstractmethod
    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys, not proven yet. A reference helps to find them.

        What is answered may be overwritten while it is looked at, unless `gives_memory`:
        it must be copied and the copy proven.
        """

    def get_rows(self, wanted: Mapping[str, Ref | str]) -> Bytes | None:
        """All frames as the rows of one matrix, copied and not proven yet.

        None when they are not all there, are not of one length, or when it would be no
        quicker than `get`.
        """
        del wanted
        return None

    def view(
        self, wanted: Mapping[str, Ref | str]
    ) -> AbstractContextManager[Mapping[str, memoryview | Exception]]:
        """The frames where they lie; they stay as they are until the block ends.

        The memory can be written (privately, at most) and must not be kept.
        """
        answer = self.get(wanted)
        if not self.gives_memory:
            answer = {
                key: found if isinstance(found, Exception) else memoryview(bytearray(found))
                for key, found in answer.items()
            }
        return nullcontext(answer)

    @abc.abstractmethod
    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys; with a generation, only if that is what is there. Tells what went."""

    def newest(self) -> int:
        """A generation above which the next put must be, to replace what is there; 0: any."""
        return 0

    @abc.abstractmethod
    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something can be got under these keys."""

    @abc.abstractmethod
    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning, in no order; those that come or go may be missed."""

    @abc.abstractmethod
    def stat(self) -> Stat:
        """How much there is."""

    def trim(self) -> int:
        """Give back memory that has long been empty, if this place keeps any. Tells the bytes."""
        return 0

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of everything. What was put stays."""
