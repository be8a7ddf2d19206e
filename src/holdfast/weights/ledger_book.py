"""The book in the ledger: every change is a transaction that compares what it relies on.

- **Publishing** compares the writer's record (its epoch) and the head, so a publisher that
  was replaced commits nothing, and numbers only grow.
- **Pinning** writes the consumer's own leased record and touches the version's record in
  one transaction. **Sweeping** compares that the version was not touched since everything
  was read. So one of the two loses: a version is never given up under a pin.
- **Joining** compares the head. A sweep only gives up what lies below the head that it
  read, so whatever a new consumer's floor covers is still there.
- A consumer's record is written by that consumer alone, each time compared with what it
  wrote last: a call that arrives late changes nothing.
- A version whose record cannot be read counts as damaged. A consumer whose record cannot be read
  may need anything: while it is there, nothing is deleted. Everything else goes on.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Sequence

from holdfast.errors import Conflict, Fenced, Mistake, NoRoom, UnknownOutcome
from holdfast.ledger import (
    Compare,
    Delete,
    Entry,
    Get,
    Runtime,
    Stored,
    absent,
    follow,
    unchanged,
    update,
)
from holdfast.ledger.records import KEEP, Verdict, decode, load, put
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.retry import AGAIN, insist
from holdfast.weights.book import Book, Member, Seat, View
from holdfast.weights.ledger_seat import PATIENCE, LedgerSeat, life
from holdfast.weights.records import (
    Consumer,
    Head,
    Keys,
    Mark,
    Swept,
    Target,
    Version,
    Writer,
)

__all__ = ["LedgerBook"]


class LedgerBook(Book):
    """A channel's book in the ledger. `guards` are fences from outside (a job's epoch)."""

    def __init__(
        self,
        runtime: Runtime,
        keys: Keys,
        name: str,
        guards: Sequence[Compare] = (),
        *,
        seat: type[LedgerSeat] = LedgerSeat,
    ) -> None:
        self._runtime = runtime
        self._keys = keys
        self._name = name
        self._guards = tuple(guards)
        self._make_seat = seat
        self._writer: Stored[Writer] | None = None
        self._nonces: set[str] = set()
        """Of our takeovers, also of those whose outcome we were never told."""
        self.epoch = 0

    async def open_writer(self, *, again: bool = False) -> None:
        """See `Book.open_writer`."""
        nonce = f"{self._runtime.random.getrandbits(64):016x}"
        ours = frozenset(self._nonces)
        self._nonces.add(nonce)

        def take_over(writer: Writer | None) -> Writer | Verdict:
            if writer is not None and writer.nonce == nonce:
                return KEEP
            if again and (writer is None or writer.nonce not in ours):
                raise self._replaced(writer)
            epoch = writer.epoch + 1 if writer else 1
            return Writer(epoch=epoch, name=self._name, nonce=nonce)

        self._writer = await update(
            self._runtime,
            self._keys.writer,
            Writer,
            take_over,
            guards=self._guards,
            repeatable=True,
        )
        assert self._writer is not None
        self._nonces = {nonce}
        self.epoch = self._writer.record.epoch

    async def check_writer(self) -> None:
        """See `Book.check_writer`."""
        self._still_ours(await load(self._runtime.ledger, self._keys.writer, Writer))

    def _still_ours(self, writer: Stored[Writer] | None) -> None:
        if self._writer is None:
            raise Mistake("this publisher is not open: use `async with`")
        if writer is None or writer.record.nonce != self._writer.record.nonce:
            raise self._replaced(writer.record if writer else None)

    def _replaced(self, writer: Writer | None) -> Fenced:
        by = f"{writer.name}, epoch {writer.epoch}" if writer else "somebody"
        return Fenced(
            f"{by} has taken over publishing from {self._name}, epoch {self.epoch}: stop",
            epoch=self.epoch,
        )

    async def view(self) -> View:
        """See `Book.view`."""
        return self._read(await self._everything())

    async def _everything(self) -> tuple[Entry, ...]:
        return (await self._runtime.ledger.range(self._keys.live)).entries

    def _read(self, entries: Iterable[Entry]) -> View:
        keys = self._keys
        head, epoch, name, target = None, 0, "", None
        versions: dict[int, Version] = {}
        members: list[Member] = []
        marks: dict[int, str] = {}
        touched: dict[int, Entry] = {}
        for entry in entries:
            if (number := _number(entry.key, keys.versions)) is not None:
                version = readable(Version, entry)
                if isinstance(version, Unreadable):
                    marks[number], version = version.reason, _unknown(number)
                versions[number], touched[number] = version, entry
            elif entry.key.startswith(keys.consumers):
                consumer = readable(Consumer, entry)
                if isinstance(consumer, Unreadable):
                    consumer = Consumer(name=f"unreadable {entry.key}", needs="every", floor=0)
                members.append(Member(life(entry.key), consumer))
            elif (number := _number(entry.key, keys.marks)) is not None:
                marks[number] = readable(Mark, entry).reason
            elif entry.key == keys.head:
                head = decode(Head, entry).version
            elif entry.key == keys.writer:
                writer = decode(Writer, entry)
                epoch, name = writer.epoch, writer.name
            elif entry.key == keys.target:
                target = decode(Target, entry)
        found = (head, epoch, versions, tuple(members), marks, target)
        return View(*found, writer=name, entries=touched)

    async def lookup(self, number: int) -> Version | Swept | None:
        """See `Book.lookup`."""
        # In this order: what is swept between the two is found by the second.
        version = await load(self._runtime.ledger, self._keys.version(number), Version)
        if version is not None:
            return version.record
        swept = await load(self._runtime.ledger, self._keys.swept(number), Swept)
        return swept.record if swept else None

    async def commit(self, version: Version) -> None:
        """See `Book.commit`."""
        key = self._keys.version(version.version)
        certain = True

        def doubt(error: Exception) -> None:
            nonlocal certain
            certain = certain and not isinstance(error, UnknownOutcome)
            if certain and isinstance(error, NoRoom):
                raise error

        try:
            await insist(
                self._runtime,
                lambda: self._try_commit(key, version),
                until=self._runtime.now() + self._runtime.ledger.timeouts.update_deadline_s,
                failed=doubt,
            )
        except AGAIN as error:
            if certain and isinstance(error, NoRoom):
                raise
            raise UnknownOutcome(
                f"version {version.version} may or may not have been published "
                f"({error}): publish it again, with the same contents, to find out",
                version=version.version,
            ) from error

    async def _try_commit(self, key: str, version: Version) -> None:
        """Look, and commit if there is anything left to do."""
        entries = {entry.key: entry for entry in await self._everything()}
        if _is(version, entries.get(key)):
            return  # an answer was lost
        writer = entries.get(self._keys.writer)
        self._still_ours(Stored(writer, decode(Writer, writer)) if writer else None)
        head = entries.get(self._keys.head)
        if head is not None and decode(Head, head).version >= version.version:
            raise Conflict(f"version {version.version} is no longer the next one")
        assert self._writer is not None
        txn = await self._runtime.ledger.txn(
            [
                unchanged(self._writer.entry),
                unchanged(head) if head else absent(self._keys.head),
                absent(key),
                *self._guards,
            ],
            [
                put(key, version),
                put(self._keys.head, Head(version=version.version, content=version.content)),
            ],
            [Get(key)],
        )
        if not txn.succeeded and not _is(version, txn.results[0]):  # nor by a call before this
            await self._check_guards()
            raise Conflict(f"{self._keys.head} has just changed")

    async def _check_guards(self) -> None:
        """Raise when it is a fence from outside that no longer holds."""
        if self._guards:
            txn = await self._runtime.ledger.txn(self._guards, (), ())
            if not txn.succeeded:
                raise Fenced(f"{self._name} may no longer publish: stop", epoch=self.epoch)

    async def forget(self, view: View, number: int) -> bool:
        """See `Book.forget`."""
        version, entry = view.versions[number], view.entries[number]
        swept = Swept(version=version.version, epoch=version.epoch, content=version.content)
        newest = view.newest()  # if that is marked by now, others are needed than the view says
        good = [] if newest is None else [absent(self._keys.mark(newest.version))]

        async def once() -> bool:
            txn = await self._runtime.ledger.txn(
                [unchanged(entry), *good],
                [
                    Delete(entry.key),
                    Delete(self._keys.mark(version.version)),
                    put(self._keys.swept(version.version), swept),
                ],
                [Get(entry.key)],
            )
            return txn.succeeded or txn.results[0] is None

        with contextlib.suppress(*AGAIN):
            return await PATIENCE.acall(once, on=AGAIN, clock=self._runtime)
        return False

    async def mark(self, number: int, reason: str) -> None:
        """See `Book.mark`."""
        await self._runtime.ledger.txn(
            [Compare(self._keys.version(number), "create", "!=", 0)],
            [put(self._keys.mark(number), Mark(reason=reason[:2000]))],
        )

    async def changes(self) -> AsyncGenerator[View, None]:
        """See `Book.changes`."""
        async with contextlib.aclosing(follow(self._runtime, self._keys.live)) as steps:
            async for step in steps:
                yield self._read(step.entries.values())

    async def heads(self) -> AsyncGenerator[int | None, None]:
        """See `Book.heads`."""
        async with contextlib.aclosing(follow(self._runtime, self._keys.head)) as steps:
            async for step in steps:
                entry = step.entries.get(self._keys.head)
                yield decode(Head, entry).version if entry else None

    def seat(self, consumer: Consumer, lease_s: float) -> Seat:
        """See `Book.seat`."""
        return self._make_seat(self._runtime, self._keys, consumer, lease_s)


def _number(key: str, folder: str) -> int | None:
    """The version that a key below a folder is about; None: it is about none."""
    number = key.removeprefix(folder)
    return int(number) if key.startswith(folder) and number.isdecimal() else None


def _unknown(number: int) -> Version:
    """What stands for a version whose record cannot be read."""
    return Version(
        version=number, parent=None, epoch=0, content="", manifest="", bytes=0, published_s=0.0
    )


def _is(version: Version, entry: Entry | None) -> bool:
    return entry is not None and decode(Version, entry) == version
