"""A consumer's place where there is no ledger: a folder of its own that it keeps fresh.

Each life of a consumer has its own folder and is the only one that writes there, through the
folder itself. Whoever removes the folder of a dead consumer has ended that life for good: in
a folder that was removed nothing can be made.

- **A life that ended is never revived.** Every touch of the heartbeat returns the file
  system's time, and a touch that comes a whole lease after the one before came too late:
  somebody may have taken us for dead in between. `holds` touches, so a process that was
  stopped learns of it there, however long ago it was and whichever of its tasks runs first.
- **Pinning** is: write the pin, touch, and only then look whether the version is given up.
  The sweep does it the other way round: it writes that the version is given up, and only
  then looks for pins. So at least one of the two sees the other.
- **Joining** writes the floor and then looks whether the newest version is still the same;
  a sweep only gives up what lies below the newest that it saw.
"""

import asyncio
import contextlib
import errno
from typing import Never

import msgspec

from holdfast.errors import Conflict, Corrupt, Gone, HoldfastError, LeaseLost, NotFound
from holdfast.ledger import Runtime
from holdfast.weights.book import Seat
from holdfast.weights.disk import Folder
from holdfast.weights.markers import (
    HEARTBEAT,
    LOADED_STEP,
    MAX_MARKER_BYTES,
    STATE,
    Markers,
    State,
    telling,
)
from holdfast.weights.records import Consumer, Told, Version
from holdfast.weights.trouble import translate

__all__ = ["MarkerSeat", "bury"]

ATTEMPTS = 40


async def bury(markers: Markers, folder: str) -> None:
    """Remove the folder of a life that has ended, in an order that leaves no riddle."""
    path = f"{markers.layout.consumers}/{folder}"
    with contextlib.suppress(FileNotFoundError):
        async with await markers.disk.folder(path) as own:
            for name in (LOADED_STEP, HEARTBEAT, STATE):
                await own.unlink(name)
    await markers.disk.remove(path)


class MarkerSeat(Seat):
    """One life of a consumer."""

    def __init__(
        self, runtime: Runtime, markers: Markers, consumer: Consumer, lease_s: float
    ) -> None:
        self._runtime = runtime
        self._markers = markers
        self._record = consumer
        self._dirty = False
        """Whether STATE may differ from our record because writing it has failed."""
        self._lease_s = lease_s
        self._nonce = f"{runtime.random.getrandbits(64):016x}"
        self.id = f"{consumer.name}-{self._nonce}"
        self.lost = asyncio.Event()
        self._path = f"{markers.layout.consumers}/{self.id}"
        self._folder: Folder | None = None
        self._touched_s: float | None = None
        self._valid_until = 0.0
        self._turn = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # ---- living --------------------------------------------------------------

    def believes(self) -> bool:
        """See `Seat.believes`."""
        return not self.lost.is_set() and self._runtime.now() < self._valid_until

    async def join(self) -> None:
        """See `Seat.join`."""
        try:
            with telling(f"{self._record.name} cannot join"):
                await self._markers.disk.make(self._path)
                self._folder = await self._markers.disk.folder(self._path)
            await self._beat()
            self._task = self._runtime.spawn(self._keep(), name=f"heartbeat of {self.id}")
            await self._register()
        except BaseException:
            await self.leave()
            raise

    async def _register(self) -> None:
        with telling(f"{self._record.name} cannot join"):
            head = await self._markers.head()
            for _ in range(ATTEMPTS):
                await self._write(msgspec.structs.replace(self._record, pins=(), floor=head or 0))
                seen, head = head, await self._markers.head()
                if seen == head:
                    break
            else:
                raise Conflict(f"versions are published faster than {self._record.name} can join")
            await self._tell_others()

    async def leave(self) -> None:
        """See `Seat.leave`."""
        self.lost.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._folder is not None:
            self._folder.close()
            # What cannot be removed now ends with the lease and is removed by others.
            with contextlib.suppress(OSError):
                await bury(self._markers, self.id)

    async def _keep(self) -> None:
        """Touch the heartbeat until it is too late; make up for writing that has failed."""
        pause_s = self._lease_s / 3
        try:
            while self.believes():
                left_s = self._valid_until - self._runtime.now()
                await self._runtime.sleep(max(0.0, min(pause_s, left_s)))
                pause_s = self._lease_s / 3
                try:
                    await self._beat()
                    async with self._turn:
                        if self._dirty:
                            await self._write(self._record)
                except LeaseLost:
                    return
                except HoldfastError:
                    pause_s = self._lease_s / 10
        finally:  # whatever ended it, nobody touches it any more
            self.lost.set()

    async def _beat(self) -> None:
        """Touch the heartbeat; raise `LeaseLost` when that came too late."""
        assert self._folder is not None
        sent = self._runtime.now()
        try:
            touched_s = await self._folder.touch(HEARTBEAT)
        except OSError as error:
            self._judge(error, "touch its heartbeat")
        last_s = self._touched_s if self._touched_s is not None else touched_s
        if touched_s - last_s >= self._lease_s:
            self._lose()
        # Two touches at once may come back in any order.
        self._touched_s = max(last_s, touched_s)
        self._valid_until = max(self._valid_until, sent + self._lease_s)

    def _judge(self, error: OSError, what: str) -> Never:
        """Raise what an error in our own folder means: that it is gone ends this life."""
        if isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE:
            self._lose()
        raise translate(error, f"{self._record.name} could not {what}") from error

    def _lose(self) -> Never:
        self.lost.set()
        raise LeaseLost(
            f"{self._record.name} lost its lease: what it had pinned may be deleted; pin again"
        )

    async def _write(self, record: Consumer, *, surely: bool = False) -> None:
        """Write STATE; a record that must be written `surely` is tried again by `_keep`.

        Any other is taken back when it cannot be written, because its caller is told so.
        """
        if not self.believes():
            self._lose()
        assert self._folder is not None
        state = State(nonce=self._nonce, lease_s=self._lease_s, consumer=record)
        if surely:
            self._record = record
        self._dirty = True
        try:
            await self._folder.put(STATE, msgspec.json.encode(state))
        except OSError as error:
            self._judge(error, "write its state")
        self._record, self._dirty = record, False
        await self._beat()

    async def _tell_others(self) -> None:
        """Write LOADED_STEP, for tools that know nothing else."""
        if self._record.acknowledged is None:
            return
        assert self._folder is not None
        try:
            await self._folder.put(LOADED_STEP, f"{self._record.acknowledged}\n".encode())
        except OSError as error:
            self._judge(error, f"write {LOADED_STEP}")

    # ---- pinning and telling -------------------------------------------------

    async def pin(self, number: int) -> Version:
        """See `Seat.pin`. `Gone` also for a number that nobody knows to have existed."""
        async with self._turn:
            await self._look(number)
            before = self._record
            try:
                await self._write(msgspec.structs.replace(before, pins=(*before.pins, number)))
                try:
                    return await self._look(number)
                except NotFound as error:  # it was there a moment ago
                    raise Gone(f"version {number} was deleted", version=number) from error
            except BaseException as error:
                if self._record is not before:
                    self._record, self._dirty = before, True
                    if isinstance(error, HoldfastError):
                        # If this fails, or we are being cancelled, `_keep` does it.
                        with contextlib.suppress(HoldfastError):
                            await self._write(before, surely=True)
                raise

    async def _look(self, number: int) -> Version:
        """The version, if it may be loaded."""
        with telling(f"version {number} cannot be looked for"):
            # In this order: what is given up between the two is found by the second.
            found = await self._markers.find(number)
            swept = await self._markers.swept(number)
            if found is not None and swept is None:
                reason = found.problem or await self._markers.mark(number)
                if reason:
                    raise Corrupt(f"version {number}: {reason}", version=number)
                return found.version
            head = await self._markers.head()
        newest = "none was published yet" if head is None else f"the newest is {head}"
        if swept is not None:
            raise Gone(f"version {number} was deleted: {newest}", version=number)
        if head is not None and number <= head:
            raise Gone(f"version {number} is not there (any more): {newest}", version=number)
        raise NotFound(f"version {number} was not published: {newest}", version=number)

    async def holds(self, number: int) -> bool:
        """See `Seat.holds`."""
        if self.lost.is_set():
            return False
        try:
            await self._beat()
            # By its path, not through the folder that we hold: that is where others look.
            async with await self._markers.disk.folder(self._path) as folder:
                raw = await folder.read(STATE, MAX_MARKER_BYTES)
        except (LeaseLost, FileNotFoundError):
            return False
        except OSError as error:
            raise translate(error, f"{self._record.name} could not read its state") from error
        state = msgspec.json.decode(raw, type=State)
        return state.nonce == self._nonce and number in state.consumer.pins

    async def unpin(self, number: int) -> None:
        """See `Seat.unpin`."""
        async with self._turn:
            pins = list(self._record.pins)
            if number in pins:
                pins.remove(number)
                record = msgspec.structs.replace(self._record, pins=tuple(pins))
                await self._write(record, surely=True)

    async def report(self, told: Told) -> None:
        """See `Seat.report`."""
        async with self._turn:
            await self._write(told.on(self._record))
            await self._tell_others()
