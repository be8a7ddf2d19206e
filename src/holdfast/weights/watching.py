"""What happens to a channel, one happening at a time.

`happened` compares two views and is pure; `watch` follows the book and compares. With a
ledger nothing is missed while it is reached, and what happened while it was away is told when
it is back. A consumer that leaves and one that dies look alike in the ledger: its record
vanishes with its lease. Leases are looked at every `show_s`, so that the two are told apart
and a consumer that has gone silent is told of before its lease ends.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable

import msgspec

from holdfast.errors import LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger import Record
from holdfast.text import size
from holdfast.timeouts import DEFAULTS
from holdfast.weights.book import Book, View, at_least_every
from holdfast.weights.channel import Channel
from holdfast.weights.records import Consumer

__all__ = ["OF_THE_LEDGER", "Happening", "happened", "watch"]

AWAY, BACK = "ledger away", "ledger back"
OF_THE_LEDGER = (AWAY, BACK)
"""What is told of the ledger itself: no changes of the channel."""


class Happening(msgspec.Struct, frozen=True):
    """One change. `what` is a word, `detail` says more."""

    what: str
    version: int | None = None
    consumer: str = ""
    detail: str = ""
    life: str = ""
    """Of a consumer that came or went: which of its lives."""


def happened(before: View, after: View) -> list[Happening]:
    """What has changed from one view to the next."""
    found: list[Happening] = []
    if after.epoch != before.epoch:
        name = f"{after.writer}, " if after.writer else ""
        found.append(Happening("opened", detail=f"by {name}epoch {after.epoch}"))
    for number in sorted(before.versions.keys() ^ after.versions.keys()):
        is_new = number in after.versions
        version = (after if is_new else before).versions[number]
        what = "published" if is_new else "swept"
        found.append(Happening(what, number, detail=size(version.bytes)))
    for number, reason in sorted(after.marks.items()):
        if reason != before.marks.get(number):
            found.append(Happening("damaged", number, detail=reason))
    if after.target is not None and after.target != before.target:
        found.append(Happening("fleet", detail=_fields(before.target, after.target)))
    old, new = _living(before), _living(after)
    for life in sorted(old.keys() | new.keys()):
        if old.get(life) != new.get(life):
            found += _consumer(life, old.get(life), new.get(life))
    return found


def _living(view: View) -> dict[str, Consumer]:
    """The consumers that count, by their lives."""
    return {one.id: one.record for one in view.members if one.until_s > view.now_s}


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
    asked = _Asked(channel)
    before: View | None = None
    paced = at_least_every(DEFAULTS.show_s, book.changes())
    async with contextlib.aclosing(paced) as views:
        async for after in views:
            news: list[Happening] = []
            if after is not None:
                if before is None:
                    news.append(Happening("watching"))
                else:
                    news += [asked.explain(one) for one in happened(before, after)]
                before = after
            if before is not None and channel.has_ledger:
                news += await asked.look(before)
            for one in news:
                yield one


class _Asked:
    """What the ledger itself says: whether it answers, and when each consumer's lease ends.

    What is silent may be quiet, or far away.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runtime = channel.runtime
        self._looked_s = float("-inf")
        self._away_since_s: float | None = None
        self._ends_s: dict[str, float] = {}
        self._silent: set[str] = set()

    async def look(self, view: View) -> list[Happening]:
        """Ask now and then, and about a new consumer at once; tells what has changed."""
        living = _living(view)
        self._silent &= living.keys()
        for key in self._ends_s.keys() - living.keys():
            del self._ends_s[key]
        due = self._runtime.now() >= self._looked_s + DEFAULTS.show_s
        found: list[Happening] = []
        if due or not living.keys() <= self._ends_s.keys():
            self._looked_s = self._runtime.now()
            for key, record in living.items():
                with contextlib.suppress(LeaseLost, Retriable):
                    found += await self._ask(key, record.name)
            found += await self._reach()
        return found

    async def _reach(self) -> list[Happening]:
        """Whether it has gone, or is back."""
        since_s = self._away_since_s
        try:
            await self._runtime.ledger.get(self._channel.keys.head)
        except (Retriable, UnknownOutcome) as error:
            if since_s is not None:
                return []
            self._away_since_s = self._runtime.now()
            return [Happening(AWAY, detail=str(error))]
        self._away_since_s = None
        if since_s is None:
            return []
        away_s = self._runtime.now() - since_s
        return [Happening(BACK, detail=f"it was away for {away_s:.0f} s")]

    async def _ask(self, key: str, name: str) -> list[Happening]:
        info = await self._runtime.ledger.lease_info(int(key.rpartition("-")[2]))
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
