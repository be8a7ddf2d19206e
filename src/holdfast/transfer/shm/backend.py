"""The back end over a session: what `holdfast.transfer.backend` asks for.

A fork leaves the child with a back end that opens the store anew when it is first used: it
owns no slot, no lock and no view of its parent's.
"""

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from holdfast.errors import Gone, Mistake, NotFound, Unavailable
from holdfast.timeouts import DEFAULTS
from holdfast.transfer.backend import Backend, Bytes, Frame, Stat, Stored
from holdfast.transfer.frame import Ref
from holdfast.transfer.shm import burial
from holdfast.transfer.shm.index import Group
from holdfast.transfer.shm.layout import PAGE, Ints
from holdfast.transfer.shm.segment import Batch, Segment
from holdfast.transfer.shm.session import Found, Session

__all__ = ["ShmBackend"]

_ROUNDS = 100
# Otherwise Linux may refuse a large private map, because every page of it could be written to.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_all: "weakref.WeakSet[ShmBackend]" = weakref.WeakSet()


class ShmBackend(Backend):
    """Frames in shared memory."""

    def __init__(
        self,
        name: str,
        segment: int | None = None,
        budget: int | None = None,
        limit_s: float = DEFAULTS.store_lock_s,
    ) -> None:
        """`limit_s` is how long to wait for a lock that another process holds."""
        self._name = name
        self._limit_s = limit_s
        self._session: Session | None = Session(name, segment, budget, limit_s)
        self._closed = False
        _all.add(self)

    def session(self) -> Session:
        """The store as this process has it open."""
        if self._closed:
            raise Mistake(f"the store {self._name} has been closed")
        if self._session is None:
            self._session = Session(self._name, None, None, self._limit_s)
        self._session.check()
        return self._session

    def forked(self) -> None:
        """Let go of what belongs to the parent. Runs in the child of a fork."""
        if self._session is not None:
            self._session.locks.abandon()
            self._session = None

    def put(self, frames: Mapping[str, Frame]) -> Mapping[str, Exception | None]:
        """Store these frames."""
        return self.session().put(frames) if frames else {}

    def get(self, wanted: Mapping[str, Ref | str]) -> Mapping[str, memoryview | Exception]:
        """The frames of these keys, where they lie: they may be overwritten at any moment."""
        found, answer = self._find(wanted)
        for batch, positions, which in found:
            _slices(answer, which, batch.segment.view, _spans(batch, positions))
        return dict(zip(wanted, answer, strict=True))

    def get_rows(self, wanted: Mapping[str, Ref | str]) -> Bytes | None:
        """All frames as the rows of one matrix, if they lie in batches of frames like them."""
        found, answer = self._find(wanted)
        if any(answer) or not found:
            return None
        size = int(found[0][0].sizes[0])
        rows = np.empty((len(wanted), size), np.uint8)
        for batch, positions, which in found:
            if (batch.sizes != size).any():
                return None
            begin, end = int(batch.starts[0]), int(batch.starts[-1])
            there = batch.segment.memory[begin:end].reshape(batch.count, -1)[:, :size]
            if len(which) == len(rows) == batch.count and _in_order(which, positions):
                rows[:] = there
            else:
                rows[which] = there[positions]
        return rows

    def _find(self, wanted: Mapping[str, Ref | str]) -> tuple[list[Found], list[Any]]:
        """Values of the right generations; and an answer with the errors filled in."""
        keys = list(wanted)
        found, missing = self.session().look_up(keys)
        answer: list[Any] = [None] * len(keys)
        for which in missing:
            answer[which] = NotFound("nothing is there")
        meant = [one.generation if type(one) is Ref else 0 for one in wanted.values()]
        if any(meant):
            all_meant = np.array(meant, np.int64)
            found = [_meant(one, all_meant, answer) for one in found]
        return found, answer

    @contextlib.contextmanager
    def view(
        self, wanted: Mapping[str, Ref | str]
    ) -> Iterator[Mapping[str, memoryview | Exception]]:
        """The frames where they lie. Their segments are locked until the block ends."""
        session = self.session()
        held: dict[str, int] = {}
        try:
            answer = self._view(session, wanted, held)
            yield dict(zip(wanted, answer, strict=True))
        finally:
            for fd in held.values():
                session.viewing.discard(fd)
                session.locks.drop(fd)

    def _view(
        self, session: Session, wanted: Mapping[str, Ref | str], held: dict[str, int]
    ) -> list[Any]:
        for _ in range(_ROUNDS):
            found, answer = self._find(wanted)
            found = [one for one in found if len(one[1])]
            for name in {batch.segment.name for batch, _, _ in found} - held.keys():
                held[name] = session.locks.wait(name, exclusive=False)
                session.viewing.add(held[name])
            # From here on nothing can be filled anew or given back; what already was, or was
            # deleted or moved before that, is looked for again.
            if any(batch.void() or batch.dead()[at].any() for batch, at, _ in found):
                continue
            for segment, some in _by_segment(found):
                _map_privately(segment, some, answer)
            return answer
        raise Unavailable(f"{session.folder}: what is asked for is moved faster than it is found")

    def delete(self, wanted: Mapping[str, int | None]) -> Mapping[str, bool | Exception]:
        """Delete keys. Two that delete one value at the same moment may both hear True."""
        session = self.session()
        answer: dict[str, bool | Exception] = dict.fromkeys(wanted, False)
        left = wanted
        for _ in range(_ROUNDS):
            lower, doomed = self._doomed(session, left)
            try:
                # What was replaced goes first, or it would be there again for a moment.
                again = _all_keys(burial.bury(session.locks, lower, wait=True))
                moved = _all_keys(burial.bury(session.locks, doomed, wait=True))
            except Unavailable as error:
                return answer | dict.fromkeys(left, Unavailable(str(error)))
            with session.mutex:
                index = session.catalog.index
                for batch, positions in (*lower, *doomed):
                    index.forget(index.name(batch, positions))
            answer |= dict.fromkeys(_all_keys(doomed) - moved, True)
            left = {key: wanted[key] for key in again | moved}
            if not left:
                return answer
        return answer | dict.fromkeys(left, Unavailable("it is moved faster than it is found"))

    def _doomed(
        self, session: Session, wanted: Mapping[str, int | None]
    ) -> tuple[list[Group], list[Group]]:
        """What a delete is about: what was replaced and is still there, and what is meant."""
        keys = list(wanted)
        with session.mutex:
            found, _ = session.look_up(keys)
            if any(wanted.values()):
                meant = np.fromiter((one or 0 for one in wanted.values()), np.int64, len(keys))
                found = [_meant(one, meant, [None] * len(keys)) for one in found]
            index = session.catalog.index
            lower: list[int] = []
            if index.older:
                right = [keys[at] for _, _, which in found for at in which.tolist()]
                lower = [n for key in right if key in index.older for n in index.all_of(key)[:-1]]
            return index.groups(lower), [(batch, at) for batch, at, _ in found if len(at)]

    def newest(self) -> int:
        """The highest generation that was seen."""
        session = self.session()
        with session.mutex:
            session.catalog.refresh()
            return session.catalog.index.newest

    def exists(self, keys: Sequence[str]) -> Mapping[str, bool | Exception]:
        """Whether something is there."""
        absent = set(self.session().look_up(list(keys))[1])
        return {key: which not in absent for which, key in enumerate(keys)}

    def scan(self, prefix: str) -> Iterator[Stored]:
        """All keys with this beginning."""
        session = self.session()
        with session.mutex:
            session.catalog.refresh()
            keys = [key for key in session.catalog.index.tops if key.startswith(prefix)]
        found, _ = session.look_up(keys)
        for batch, positions, which in found:
            sizes, generations = batch.sizes[positions], batch.generations(positions)
            for one, size, generation in zip(
                which.tolist(), sizes.tolist(), generations.tolist(), strict=True
            ):
                yield Stored(keys[one], size, generation)

    def stat(self) -> Stat:
        """How much there is."""
        session = self.session()
        with session.mutex:
            session.catalog.refresh()
            found, _ = session.look_up(list(session.catalog.index.tops))
            keys = sum(len(positions) for _, positions, _ in found)
            nbytes = sum(int(batch.sizes[positions].sum()) for batch, positions, _ in found)
            return Stat(keys, nbytes, session.room.taken(), session.config.budget)

    def trim(self) -> int:
        """Give back memory that was empty at the last call and was not used since."""
        return self.session().trim()

    def close(self) -> None:
        """Let go of the slot, of locks and of maps. What was put stays."""
        self._closed = True
        if self._session is not None:
            self._session.close()
            self._session = None


def _meant(found: Found, meant: Ints, answer: list[Any]) -> Found:
    """Those of the right generations (0: any); the others are gone, says the answer."""
    batch, positions, which = found
    right = (meant[which] == 0) | (meant[which] == batch.generations(positions))
    for one in which[~right].tolist():
        answer[one] = Gone("the value that is meant is no longer there; another is in its place")
    return batch, positions[right], which[right]


def _in_order(which: Ints, positions: Ints) -> bool:
    everything = np.arange(len(which))
    return bool((which == everything).all() and (positions == everything).all())


def _all_keys(groups: Iterable[Group]) -> set[str]:
    return {batch.keys[one] for batch, positions in groups for one in positions.tolist()}


def _spans(batch: Batch, positions: Ints, base: int = 0) -> Iterable[slice]:
    begins = batch.starts[positions] - base
    ends = begins + batch.sizes[positions]
    return map(slice, begins.tolist(), ends.tolist())


def _slices(answer: list[Any], which: Ints, memory: memoryview, spans: Iterable[slice]) -> None:
    for one, value in zip(which.tolist(), map(memory.__getitem__, spans), strict=True):
        answer[one] = value


def _by_segment(found: list[Found]) -> list[tuple[Segment, list[Found]]]:
    segments: dict[int, tuple[Segment, list[Found]]] = {}
    for one in found:
        segments.setdefault(id(one[0].segment), (one[0].segment, []))[1].append(one)
    return list(segments.values())


def _map_privately(segment: Segment, found: list[Found], answer: list[Any]) -> None:
    """A map for one view: who writes to it changes private pages, which go with the map."""
    begin = min(int(batch.starts[positions].min()) for batch, positions, _ in found)
    begin = begin // PAGE * PAGE
    end = max(int((batch.starts[at] + batch.sizes[at]).max()) for batch, at, _ in found)
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        flags = mmap.MAP_PRIVATE | _NORESERVE
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        memory = memoryview(mmap.mmap(fd, end - begin, flags, prot, offset=begin))
    finally:
        os.close(fd)
    for batch, positions, which in found:
        _slices(answer, which, memory, _spans(batch, positions, begin))


def _after_fork() -> None:
    for one in list(_all):
        one.forked()


os.register_at_fork(after_in_child=_after_fork)
