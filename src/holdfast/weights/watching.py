"""What happens to a channel, one happening at a time.

`happened` compares two states and is pure; `watch` follows the book and compares. With a
ledger nothing is missed while it is reached, and what happened while it was away is told when
it is back. A consumer that leaves and one that dies look alike in the ledger: its record
vanishes with its lease. Leases are looked at every `show_s`, so that the two are told apart
and a consumer that has gone silent is told of before its lease ends.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable, Mapping

import msgspec

from holdfast.errors import LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger import Entry, Record, follow
from holdfast.ledger.unreadable import Unreadable, readable
from holdfast.text import size
from holdfast.timeouts import DEFAULTS
from holdfast.weights.book import Book, View, at_least_every
from holdfast.weights.channel import Channel
from holdfast.weights.records import Consumer, Keys, Mark, Target, Version, Writer

__all__ = ["OF_THE_LEDGER", "Happening", "State", "happened", "watch"]

AWAY, BACK = "ledger away", "ledger back"
OF_THE_LEDGER = (AWAY, BACK)
"""What is told of the ledger itself: no changes of the channel."""

State = Mapping[tuple[str, str], Record]
"""Records by what they are and whose."""


class Happening(msgspec.Struct, frozen=True):
    """One change. `what` is a word, `detail` says more."""

    what: str
    version: int | None = None
    consumer: str = ""
    detail: str = ""
    life: str = ""
    """Of a consumer that came or went: which of its lives."""


def state_of_entries(keys: Keys, entries: Iterable[Entry]) -> State:
    """The state that these entries of the ledger describe."""
    found: dict[tuple[str, str], Record] = {}
    folders: tuple[tuple[str, str, type[Record]], ...] = (
        ("version", keys.versions, Version),
        ("consumer", keys.consumers, Consumer),
        ("mark", keys.marks, Mark),
        ("writer", keys.writer, Writer),
        ("target", keys.target, Target),
    )
    for entry in entries:
        for what, folder, kind in folders:
            if entry.key.startswith(folder):
                record = readable(kind, entry)
                if not isinstance(record, Unreadable):
                    found[what, entry.key.removeprefix(folder)] = record
    return found


def state_of_view(view: View) -> State:
    """The state that a view describes, for a book that is not in a ledger."""
    found: dict[tuple[str, str], Record] = {("writer", ""): _writer(view.epoch)}
    for number, version in view.versions.items():
        found["version", f"{number:012d}"] = version
    for member in view.members:
        if member.until_s > view.now_s:
            found["consumer", member.id] = member.record
    for number, reason in view.marks.items():
        found["mark", f"{number:012d}"] = Mark(reason=reason)
    if view.target is not None:
        found["target", ""] = view.target
    return found


def _writer(epoch: int) -> Writer:
    return Writer(epoch=epoch, name="", nonce="")


def happened(before: State, after: State) -> list[Happening]:
    """What has changed from one state to the next."""
    found: list[Happening] = []
    for key in sorted(before.keys() | after.keys(), key=lambda key: (_ORDER.index(key[0]), key)):
        old, new = before.get(key), after.get(key)
        if old != new:
            found += _changed(key, old, new)
    return found


_ORDER = ("writer", "version", "mark", "target", "consumer")


def _changed(key: tuple[str, str], old: Record | None, new: Record | None) -> list[Happening]:
    match new if new is not None else old:
        case Writer() as writer if new is not None:
            name = f"{writer.name}, " if writer.name else ""
            return [Happening("opened", detail=f"by {name}epoch {writer.epoch}")]
        case Version() as version if new is None:
            return [Happening("swept", version.version, detail=size(version.bytes))]
        case Version() as version if old is None:
            return [Happening("published", version.version, detail=size(version.bytes))]
        case Mark() as mark if new is not None:
            return [Happening("damaged", int(key[1]), detail=mark.reason)]
        case Target() as target if new is not None:
            return [Happening("fleet", detail=_fields(old, target))]
        case Consumer() as consumer:
            was = old if isinstance(old, Consumer) else None
            return _consumer(key[1], was, consumer if new is not None else None)
    return []  # a mark that goes with its version


def _fields(old: Record | None, new: Record) -> str:
    """The fields that differ."""
    before = msgspec.structs.asdict(old) if old is not None else {}
    after = msgspec.structs.asdict(new)
    return ", ".join(f"{k} {v}" for k, v in after.items() if k != "schema" and before.get(k) != v)


def _consumer(life: str, old: Consumer | None, new: Consumer | None) -> list[Happening]:
    """What one consumer did."""
    if new is None:
        assert old is not None
        return [Happening("gone", consumer=old.name, detail=_last(old), life=life)]
    name = new.name
    found: list[Happening] = []
    if old is None:
        wants = f"every version from {new.floor} on" if new.needs == "every" else "the newest"
        found.append(Happening("joined", consumer=name, detail=f"needs {wants}", life=life))
        old = Consumer(name=name, needs=new.needs, floor=new.floor)
    found += [Happening("pinned", number, name) for number in _more(new.pins, old.pins)]
    if new.staged is not None and new.staged != old.staged:
        found.append(Happening("staged", new.staged, name))
    if new.acknowledged is not None and new.acknowledged != old.acknowledged:
        found.append(Happening("acknowledged", new.acknowledged, name))
    found += [Happening("unpinned", number, name) for number in _more(old.pins, new.pins)]
    if new.problem and new.problem != old.problem:
        found.append(Happening("problem", consumer=name, detail=new.problem))
    return found


def _more(these: Iterable[int], those: Iterable[int]) -> list[int]:
    """What `these` have more often than `those`."""
    left = list(those)
    found = []
    for number in these:
        if number in left:
            left.remove(number)
        else:
            found.append(number)
    return found


def _last(record: Consumer) -> str:
    """What a consumer had when it went."""
    parts = []
    if record.acknowledged is not None:
        parts.append(f"served {record.acknowledged}")
    if record.pins:
        parts.append(f"had pinned {', '.join(map(str, record.pins))}")
    return "; ".join(parts)


async def watch(channel: Channel, book: Book) -> AsyncGenerator[Happening, None]:
    """Yield "watching" once everything was read, then whatever happens, for ever."""
    leases, reach = _Leases(channel), _Reach(channel)
    before: State | None = None
    paced = at_least_every(DEFAULTS.show_s, _states(channel, book))
    async with contextlib.aclosing(paced) as states:
        async for after in states:
            news: list[Happening] = []
            if after is not None:
                if before is None:
                    news.append(Happening("watching"))
                else:
                    news += [leases.explain(one) for one in happened(before, after)]
                before = after
            if before is not None:
                news += await leases.look(before)
                news += await reach.look()
            for one in news:
                yield one


async def _states(channel: Channel, book: Book) -> AsyncGenerator[State, None]:
    if channel.has_ledger:
        async with contextlib.aclosing(follow(channel.runtime, channel.keys.live)) as steps:
            async for step in steps:
                yield state_of_entries(channel.keys, step.entries.values())
    else:
        async with contextlib.aclosing(book.changes()) as changes:
            async for _ in changes:
                yield state_of_view(await book.view())


class _Reach:
    """Whether the ledger answers: what is silent may be quiet, or far away."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runtime = channel.runtime
        self._looked_s = float("-inf")
        self._away_since_s: float | None = None

    async def look(self) -> list[Happening]:
        """Ask it something now and then; tells when it has gone and when it is back."""
        now_s = self._runtime.now()
        if not self._channel.has_ledger or now_s < self._looked_s + DEFAULTS.show_s:
            return []
        since_s, self._looked_s = self._away_since_s, now_s
        try:
            await self._runtime.ledger.get(self._channel.keys.head)
        except (Retriable, UnknownOutcome) as error:
            if since_s is not None:
                return []
            self._away_since_s = now_s
            return [Happening(AWAY, detail=str(error))]
        self._away_since_s = None
        if since_s is None:
            return []
        away_s = self._runtime.now() - since_s
        return [Happening(BACK, detail=f"it was away for {away_s:.0f} s")]


class _Leases:
    """When each consumer's lease ends if nothing more is heard of it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runtime = channel.runtime
        self._looked_s = float("-inf")
        self._ends_s: dict[str, float] = {}
        self._silent: set[str] = set()

    async def look(self, state: State) -> list[Happening]:
        """Ask about every lease now and then; tells who has gone silent or come back."""
        if not self._channel.has_ledger:
            return []
        living = {
            key: record for (_, key), record in state.items() if isinstance(record, Consumer)
        }
        self._silent &= living.keys()
        for key in self._ends_s.keys() - living.keys():
            del self._ends_s[key]
        if (
            living.keys() <= self._ends_s.keys()
            and self._runtime.now() < self._looked_s + DEFAULTS.show_s
        ):
            return []
        self._looked_s = self._runtime.now()
        found: list[Happening] = []
        for key, record in living.items():
            with contextlib.suppress(LeaseLost, Retriable):
                found += await self._ask(key, record.name)
        return found

    async def _ask(self, key: str, name: str) -> list[Happening]:
        info = await self._runtime.ledger.lease_info(int(key.rpartition("/")[2]))
        self._ends_s[key] = self._runtime.now() + info.remaining_s
        silent_s = info.ttl_s - info.remaining_s
        if silent_s > info.ttl_s / 2 and key not in self._silent:
            self._silent.add(key)
            text = f"for {silent_s:.1f} s; its lease ends in {info.remaining_s:.1f} s"
            return [Happening("silent", consumer=name, detail=text)]
        if silent_s <= info.ttl_s / 2 and key in self._silent:
            self._silent.discard(key)
            return [Happening("back", consumer=name, detail="it has renewed its lease")]
        return []

    def explain(self, happening: Happening) -> Happening:
        """Tell a lease that ended from a consumer that left."""
        if happening.what != "gone" or not self._channel.has_ledger:
            return happening
        # The last look at the lease may be as old as that.
        seen_s = self._runtime.now() + DEFAULTS.show_s
        ended = seen_s >= self._ends_s.get(happening.life, float("inf"))
        return msgspec.structs.replace(happening, what="lease ended" if ended else "left")
