"""The store: values by key, proven, with only what failed sent again.

    with transfer.connect("shm://run-7") as store:
        refs = store.put({"a": tensor, "b": b"", "c": None})
        values = store.get(["a", refs["b"]])

Every method takes many keys. Each key ends as a value or as an error, and errors are
collected: `BatchFailed` carries all of them (and the values that did arrive); with
`partial=True` both are returned instead. `status(error)` says in one word what an error
means: missing, failed, corrupt or stale. A key that failed or arrived damaged is asked for
again, alone, into the buffer that it already has, until the policy's attempts or deadline
are spent; what is missing or stale is not.

A *reference* (`Ref`, what `put` returns) means one value for ever: when that value was
deleted or replaced, the answer is "stale", never something else. A plain key means whatever
is there now. Methods that move values have an asynchronous twin with an `a` in front.
"""

import asyncio
import random
import sys
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, Self, TypeVar, overload

import msgspec
import numpy as np

from holdfast.errors import (
    BatchFailed,
    Corrupt,
    Gone,
    Mistake,
    NotFound,
    Retriable,
    UnknownOutcome,
)
from holdfast.retry import Clock, Partial, Policy
from holdfast.tensors import Source
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.backend import Backend, Frame, Stat, Stored
from holdfast.transfer.batches import collect, named, split
from holdfast.transfer.frame import Ref, check_key, make_head, open_head, prove
from holdfast.transfer.rows import RowFrames, make_rows, open_rows
from holdfast.transfer.values import Packed, fits, pack, room, unpack

__all__ = ["Status", "Store", "failed", "status", "usual_policy"]

T = TypeVar("T")
V = TypeVar("V")
Status = Literal["ok", "missing", "failed", "corrupt", "stale"]
Wanted = str | Ref

_SALT_BITS = 10
_MOST_GENERATION = (1 << 63) - 1
_LARGE = 1 << 20


def usual_policy(timeouts: Timeouts = DEFAULTS) -> Policy:
    """How a store tries again, unless it is told."""
    return Policy(attempts=8, base_s=0.05, max_s=2.0, deadline_s=timeouts.store_deadline_s)


def status(outcome: object) -> Status:
    """What an outcome means, in one word."""
    if not isinstance(outcome, Exception):
        return "ok"
    if isinstance(outcome, NotFound):
        return "missing"
    if isinstance(outcome, Corrupt):
        return "corrupt"
    return "stale" if isinstance(outcome, Gone) else "failed"


def again(error: Exception) -> bool:
    """Whether a key with this error is worth another attempt.

    A put may be repeated after an unknown outcome: the same frame twice does no harm.
    """
    return isinstance(error, Retriable | Corrupt | UnknownOutcome)


class Store:
    """A store over a back end. May be used from several threads; a context manager."""

    clock: Clock | None = None
    """Of the asynchronous methods; None: the real one."""

    def __init__(
        self, backend: Backend, policy: Policy | None = None, *, timeouts: Timeouts = DEFAULTS
    ) -> None:
        self.backend = backend
        self.policy = policy or usual_policy(timeouts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of connections and maps. What was put stays."""
        self.backend.close()

    def generation(self) -> int:
        """A number for the next put: larger than those before it, and nobody else's.

        It is the time, but a clock may be put back: then it goes on from what is there.
        """
        tick = max(time.time_ns() >> _SALT_BITS, (self.backend.newest() >> _SALT_BITS) + 1)
        return min(tick << _SALT_BITS | random.getrandbits(_SALT_BITS), _MOST_GENERATION)

    # Put

    def put(
        self, values: Mapping[str, object], *, generation: int | None = None
    ) -> dict[str, Ref]:
        """Store values; when this returns, every process can get them.

        Putting again under the same key replaces the value and makes older references stale.
        With a `generation` of your own the call can be repeated after a crash; it must be larger
        than those of the values that it replaces.
        """
        frames = self._frames(values, generation)
        return _whole(self._many(frames, _frame_bytes, self._put_once), frames)

    async def aput(
        self, values: Mapping[str, object], *, generation: int | None = None
    ) -> dict[str, Ref]:
        """Do what `put` does."""
        frames = self._frames(values, generation)
        return _whole(await self._amany(frames, _frame_bytes, self._put_once), frames)

    def put_rows(self, keys: Sequence[str], rows: Any) -> dict[str, Ref]:
        """Put each row of a tensor or array under a key of its own.

        The same as `put(dict(zip(keys, rows)))`, and several times quicker for many small rows.
        """
        frames = self._row_frames(keys, rows)
        return _whole(self._many(frames, _frame_bytes, self._put_once), frames)

    async def aput_rows(self, keys: Sequence[str], rows: Any) -> dict[str, Ref]:
        """Do what `put_rows` does."""
        frames = self._row_frames(keys, rows)
        return _whole(await self._amany(frames, _frame_bytes, self._put_once), frames)

    def _row_frames(self, keys: Sequence[str], rows: Any) -> RowFrames:
        if len(keys) != len(rows) or not len(keys):
            raise Mistake(f"{len(rows)} rows cannot be put under {len(keys)} keys")
        whole = pack("rows", rows)
        if whole.kind not in ("array", "tensor"):
            raise Mistake(f"rows are those of a tensor or an array, not of a {type(rows)}")
        payloads = np.frombuffer(whole.parts[0], np.uint8).reshape(len(keys), -1)
        if len(set(keys)) != len(keys):
            raise Mistake("a key is given twice")
        generation = self.generation()
        return make_rows(keys, payloads, generation, whole.kind, whole.dtype, whole.shape[1:])

    def _frames(self, values: Mapping[str, object], generation: int | None) -> dict[str, Frame]:
        if generation is None:
            generation = self.generation()
        if not 0 < generation <= _MOST_GENERATION:
            raise Mistake(f"a generation is a number from 1 to 2**63 - 1, not {generation!r}")
        frames = {}
        for key, value in values.items():
            packed: Packed = pack(check_key(key), value)
            head, ref = make_head(
                packed.kind,
                key,
                generation,
                packed.parts,
                dtype=packed.dtype,
                shape=packed.shape,
                split=packed.split,
            )
            frames[key] = Frame(head, packed.parts, ref)
        return frames

    def _put_once(self, frames: Mapping[str, Frame]) -> Mapping[str, Ref | Exception]:
        answer = self.backend.put(frames)
        if isinstance(frames, RowFrames) and not any(answer.values()):
            return frames.refs()
        return {key: error or frames[key].ref for key, error in answer.items()}

    # Get

    @overload
    def get(self, wanted: Iterable[Wanted]) -> dict[str, Any]: ...
    @overload
    def get(self, wanted: Iterable[Wanted], *, partial: Literal[True]) -> Partial[Any]: ...
    def get(
        self, wanted: Iterable[Wanted], *, partial: bool = False
    ) -> dict[str, Any] | Partial[Any]:
        """The values of these keys or references, in their order."""
        asked = _by_key(wanted)
        found = self._many(asked, _ref_bytes, self._get_once)
        return found if partial else _whole(found, asked)

    @overload
    async def aget(self, wanted: Iterable[Wanted]) -> dict[str, Any]: ...
    @overload
    async def aget(self, wanted: Iterable[Wanted], *, partial: Literal[True]) -> Partial[Any]: ...
    async def aget(
        self, wanted: Iterable[Wanted], *, partial: bool = False
    ) -> dict[str, Any] | Partial[Any]:
        """Do what `get` does."""
        asked = _by_key(wanted)
        found = await self._amany(asked, _ref_bytes, self._get_once)
        return found if partial else _whole(found, asked)

    def get_into(self, wanted: Mapping[Any, object]) -> None:
        """Read values into tensors, arrays or buffers of the caller, by key or reference.

        What is in a buffer whose key failed is undefined.
        """
        asked = _by_key(wanted)
        rooms = {_key(one): room(_key(one), place) for one, place in wanted.items()}

        def once(some: Mapping[str, Wanted]) -> dict[str, object]:
            answer = self.backend.get(some)
            return {
                key: _attempt(_fill, asked[key], frame, rooms[key])
                for key, frame in answer.items()
            }

        _whole(self._many(asked, _ref_bytes, once), asked)

    def _get_once(self, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
        keep = self.backend.gives_memory
        return {
            key: _attempt(_read, wanted[key], frame, keep)
            for key, frame in self.backend.get(wanted).items()
        }

    def get_rows(self, wanted: Sequence[Wanted]) -> Any:
        """Values of one dtype and shape as the rows of one tensor (or array), in this order.

        What `put_rows` has put is got several times quicker this way than by `get`.
        """
        asked = _by_key(wanted)
        if not asked:
            raise Mistake("no rows are asked for: the result would have no dtype and shape")
        if len(asked) != len(wanted):
            raise Mistake("a key is asked for twice: a row cannot be in two places")
        block = self.backend.get_rows(asked)
        if block is None:
            return _stack(self.get(wanted))
        try:
            payloads, right, head = open_rows(block, list(asked), list(asked.values()))
        except (Corrupt, Gone):
            return _stack(self.get(wanted))
        keys = list(asked)
        bad = [keys[at] for at in np.flatnonzero(~right)]
        for key, value in (self.get([asked[key] for key in bad]) if bad else {}).items():
            packed = pack(key, value)
            if (packed.dtype, packed.shape) != (head.dtype, head.shape):
                raise Mistake(f"{key} is not a row like {keys[0]}: get them one by one", key=key)
            payloads[keys.index(key)] = np.frombuffer(packed.parts[0], np.uint8)
        shape = (len(keys), *head.shape)
        return unpack(msgspec.structs.replace(head, shape=shape), payloads.reshape(-1).data)

    async def aget_rows(self, wanted: Sequence[Wanted]) -> Any:
        """Do what `get_rows` does."""
        return await self._hop(lambda: self.get_rows(wanted))

    @contextmanager
    def view(self, wanted: Iterable[Wanted]) -> Iterator[dict[str, Any]]:
        """The values where they lie, without a copy; for the block only.

        Their memory cannot be reused while the block lasts, so keep it short. Writing to a
        tensor changes a private copy. Whether anything is really shared depends on the back
        end: shared memory is.
        """
        asked = _by_key(wanted)
        with self.backend.view(asked) as found:
            values = {
                key: _attempt(_read, asked[key], frame, True) for key, frame in found.items()
            }
            failures = {key: one for key, one in values.items() if isinstance(one, Exception)}
            right = {key: one for key, one in values.items() if key not in failures}
            yield _whole(named(Partial(right, failures)), asked)

    # The rest

    def delete(self, wanted: Iterable[Wanted]) -> dict[str, bool]:
        """Delete keys, or exactly the values that references mean. Tells which were there."""
        asked = {key: _generation(one) for key, one in _by_key(wanted).items()}
        return _whole(self._many(asked, _no_bytes, self.backend.delete), asked)

    async def adelete(self, wanted: Iterable[Wanted]) -> dict[str, bool]:
        """Do what `delete` does."""
        asked = {key: _generation(one) for key, one in _by_key(wanted).items()}
        return _whole(await self._amany(asked, _no_bytes, self.backend.delete), asked)

    def exists(self, keys: Iterable[str]) -> dict[str, bool]:
        """Whether something can be got under these keys."""
        asked = dict.fromkeys(map(check_key, keys))
        return _whole(self._many(asked, _no_bytes, self._exists_once), asked)

    async def aexists(self, keys: Iterable[str]) -> dict[str, bool]:
        """Do what `exists` does."""
        asked = dict.fromkeys(map(check_key, keys))
        return _whole(await self._amany(asked, _no_bytes, self._exists_once), asked)

    def _exists_once(self, keys: Mapping[str, None]) -> Mapping[str, bool | Exception]:
        return self.backend.exists(list(keys))

    def scan(self, prefix: str = "") -> Iterator[Stored]:
        """All keys with this beginning, in no order."""
        return self.backend.scan(prefix)

    async def ascan(self, prefix: str = "") -> AsyncIterator[Stored]:
        """Do what `scan` does."""
        for one in await self._hop(lambda: list(self.backend.scan(prefix))):
            yield one

    def stat(self) -> Stat:
        """How much there is."""
        return self.backend.stat()

    def trim(self) -> int:
        """Give back memory that was empty at the last call and was not used since.

        Empty memory is kept warm for the next put, which is several times quicker there. A queue
        calls this now and then; call it yourself where a store without one lies idle.
        """
        return self.backend.trim()

    async def atrim(self) -> int:
        """Do what `trim` does."""
        return await self._hop(self.backend.trim)

    # Many keys at once

    def _many(
        self,
        items: Mapping[str, T],
        weigh: Callable[[T], int],
        once: Callable[[Mapping[str, T]], Mapping[str, V | Exception]],
    ) -> Partial[V]:
        """Call for all keys, in parts that a back end can take, side by side.

        Each part is tried again by itself: a slow one never holds the others.
        """
        parts = split(items, weigh, self.backend.most_keys, self.backend.most_bytes)

        def work(part: Mapping[str, T]) -> Partial[V]:
            def call(keys: list[str]) -> Mapping[str, V | Exception]:
                # The first time it is all of them, as they are: they may be rows of a matrix.
                return once(part if len(keys) == len(part) else {key: part[key] for key in keys})

            return named(self.policy.subset(part, call, on=again, partial=True))

        if len(parts) == 1:
            return work(parts[0])
        if self.backend.parallel == 1:
            return collect(items, map(work, parts))
        # Not kept for the next call: a fork would leave the threads behind.
        threads = min(self.backend.parallel, len(parts))
        with ThreadPoolExecutor(threads, "holdfast-transfer") as pool:
            return collect(items, pool.map(work, parts))

    async def _amany(
        self,
        items: Mapping[str, T],
        weigh: Callable[[T], int],
        once: Callable[[Mapping[str, T]], Mapping[str, V | Exception]],
    ) -> Partial[V]:
        parts = split(items, weigh, self.backend.most_keys, self.backend.most_bytes)
        free = asyncio.Semaphore(self.backend.parallel)

        async def work(part: Mapping[str, T]) -> Partial[V]:
            async def call(keys: list[str]) -> Mapping[str, V | Exception]:
                some = part if len(keys) == len(part) else {key: part[key] for key in keys}
                return await self._hop(lambda: once(some))

            async with free:
                return named(
                    await self.policy.asubset(part, call, on=again, partial=True, clock=self.clock)
                )

        return collect(items, await asyncio.gather(*map(work, parts)))

    def _hop(self, call: Callable[[], V]) -> Awaitable[V]:
        """Make a call that blocks without blocking the event loop."""
        return asyncio.to_thread(call)


def _key(one: Wanted) -> str:
    return one.key if isinstance(one, Ref) else one


def _generation(one: Wanted) -> int | None:
    return one.generation if isinstance(one, Ref) else None


def _by_key(wanted: Iterable[Wanted]) -> dict[str, Wanted]:
    if isinstance(wanted, str | Ref):
        raise Mistake(f"give a list of keys or references, not just {wanted!r}")
    asked: dict[str, Wanted] = {}
    for one in wanted:
        key = check_key(_key(one))
        if asked.setdefault(key, one) != one:
            raise Mistake(f"{key} is asked for twice, and not the same value of it", key=key)
    return asked


def _frame_bytes(frame: Frame) -> int:
    return frame.ref.nbytes


def _ref_bytes(wanted: Wanted) -> int:
    return wanted.nbytes if isinstance(wanted, Ref) else 0


def _no_bytes(_: object) -> int:
    return 0


def _attempt(read: Callable[..., V], wanted: Wanted, frame: object, *how: object) -> V | Exception:
    """A value, or why there is none."""
    if isinstance(frame, Exception):
        if isinstance(wanted, Ref) and isinstance(frame, NotFound):
            return Gone(
                f"{wanted.key}: the value that is meant is no longer there: it was deleted, or "
                "the store has lost it",
                key=wanted.key,
            )
        return frame
    try:
        return read(wanted, frame, *how)
    except (Corrupt, Gone, Mistake) as error:
        return error


def _read(wanted: Wanted, frame: memoryview, keep: bool) -> Any:
    head = open_head(frame, wanted)
    payload = frame[head.nbytes :]
    if not keep:
        payload = _copied(payload)
    prove(head, (payload,), wanted)
    return unpack(head, payload)


def _copied(payload: memoryview) -> memoryview:
    """A copy that belongs to whoever asked. numpy takes large memory in large pages."""
    if len(payload) < _LARGE:
        return memoryview(bytearray(payload))
    memory = np.empty(len(payload), np.uint8)
    memory[:] = payload
    return memory.data


def _fill(wanted: Wanted, frame: memoryview, place: Source) -> None:
    head = open_head(frame, wanted)
    fits(head, place)
    place.data[:] = frame[head.nbytes :]
    prove(head, (place.data,), wanted)


def _stack(values: Mapping[str, Any]) -> Any:
    """Values as the rows of one tensor or array."""
    rows = list(values.values())
    torch = sys.modules.get("torch")
    try:
        if torch is not None and isinstance(rows[0], torch.Tensor):
            return torch.stack(rows)
        if isinstance(rows[0], np.ndarray):
            return np.stack(rows)
    except (RuntimeError, TypeError, ValueError) as error:
        raise Mistake(f"these values are not rows of one tensor: {error}") from None
    raise Mistake(f"rows are those of a tensor or an array, not {type(rows[0]).__name__}")


def _whole(found: Partial[V], asked: Mapping[str, object]) -> dict[str, V]:
    """All values, or an error that carries every failure."""
    if not found.failures:
        return found.values
    raise failed(found, len(asked))


def failed(found: Partial[V], count: int) -> BatchFailed:
    """The error that carries every failure, and the values that did arrive."""
    reasons = [f"{key} {status(error)} ({error})" for key, error in found.failures.items()]
    more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return BatchFailed(
        f"{len(reasons)} of {count} keys failed: {'; '.join(reasons[:5])}{more}",
        failures=found.failures,
        values=found.values,
    )
