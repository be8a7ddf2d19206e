"""Everything that the ledger knows of a job's trainer, read at one moment.

A record that cannot be read costs its own line, or less, and nothing else:

- a session without its record lives until it has been silent for long;
- a model without its record is lost: what is asked of it fails;
- an operation without its record fails if it has no result yet; if it has one, and it changed its
  model, the model is lost: it cannot be computed again (`Runner`);
- a result without its record is told as a failure of the server; its operation keeps its effect;
- sampling sessions and saved weights without their record are not found.

This module is pure, but for telling of what it cannot read.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.ledger import types
from holdfast.ledger.records import Record
from holdfast.ledger.unreadable import Unreadable, readable, tell
from holdfast.trainer import ops
from holdfast.trainer.line import SKIP
from holdfast.trainer.records import (
    Content,
    Entry,
    Keys,
    Model,
    Now,
    Result,
    Sampler,
    Save,
    Session,
    number_of,
)

__all__ = ["Book", "read_book"]

K = TypeVar("K")
R = TypeVar("R", bound=Record)
T = TypeVar("T")


@dataclass
class Book:
    """See the module."""

    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Models whose record cannot be read, and why."""
    samplers: dict[str, Sampler] = field(default_factory=dict)
    entries: dict[str, dict[int, Entry]] = field(default_factory=dict)
    results: dict[str, dict[int, Result]] = field(default_factory=dict)
    saves: dict[tuple[str, str, str], Save] = field(default_factory=dict)
    now: Now | None = None


def read_book(keys: Keys, entries: Iterable[types.Entry]) -> Book:
    """The book as these entries tell it."""
    book = Book()
    for entry in entries:
        try:
            _take(book, keys, entry)
        except ValueError:  # a key that has no number, or not the parts that it should have
            tell(entry, f"{entry.key} is not a key of a trainer's journal")
    owners = {one.session for one in book.models.values()}
    for session in owners | {one.session for one in book.samplers.values()}:
        book.sessions.setdefault(session, Session(created_at=0.0, seen_at=0.0))
    return book


def _take(book: Book, keys: Keys, entry: types.Entry) -> None:
    key = entry.key
    name = key.rpartition("/")[2]
    if key.startswith(keys.ops):
        line, number = number_of(key)
        nothing = Entry(kind=SKIP, identity="", term=0, at=0.0, content=Content())
        book.entries.setdefault(line, {})[number] = _or(nothing, readable(Entry, entry))
    elif key.startswith(keys.results):
        line, number = number_of(key)
        result = readable(Result, entry)
        book.results.setdefault(line, {})[number] = (
            _unknown(result) if isinstance(result, Unreadable) else result
        )
    elif key.startswith(keys.models):
        model = readable(Model, entry)
        if isinstance(model, Unreadable):
            book.lost[name] = model.reason
            model = Model(session=name.rpartition("-")[0], base="")
        book.models[name] = model
    elif key.startswith(keys.sessions):
        unheard = Session(created_at=0.0, seen_at=0.0)
        book.sessions[name] = _or(unheard, readable(Session, entry))
    elif key.startswith(keys.samplers):
        _keep(book.samplers, name, readable(Sampler, entry))
    elif key.startswith(keys.saves):
        of_model, folder, name = key.removeprefix(keys.saves).split("/")
        _keep(book.saves, (of_model, folder, name), readable(Save, entry))
    elif key == keys.now:
        book.now = _or(None, readable(Now, entry))


def _or(other: T, record: R | Unreadable) -> T | R:
    return other if isinstance(record, Unreadable) else record


def _keep(there: dict[K, R], key: K, record: R | Unreadable) -> None:
    if not isinstance(record, Unreadable):
        there[key] = record


def _unknown(found: Unreadable) -> Result:
    """What stands for a result that cannot be read. Its operation had its effect, if any."""
    failed = ops.Failed(error=f"the result cannot be read: {found.reason}", category="server")
    content = Content(inline=ops.encode(failed))
    return Result(kind=SKIP, identity="", term=0, at=0.0, content=content)
