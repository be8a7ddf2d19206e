"""What a trainer keeps in the ledger, and where.

    <trainer>/seat                     Seat: which process acts for the job now
    <trainer>/sessions/<session>       Session: a client, and whether it has ended
    <trainer>/models/<model>           Model: what it is, and what was trimmed
    <trainer>/samplers/<sampler>       Sampler: whose weights a sampling session uses
    <trainer>/ops/<line>/<number>      Entry: an operation, as it was asked for
    <trainer>/results/<line>/<number>  Result: what came of it
    <trainer>/now                      Now: what is being carried out
    <trainer>/saved/<model>/<folder>/<name>    Save: what was saved under a name

`<trainer>` is `/runs/<run>/trainer/<account>/<job>`. A *line* is whatever numbers its
operations: a model (in order, one after the other) or a sampling session (in any order).
Small contents lie in the record itself, large ones in a segment file (`Place`).

This module is pure.
"""

import re

import msgspec

from holdfast.errors import Mistake
from holdfast.ledger.records import Record
from holdfast.ledger.types import join
from holdfast.trainer.ops import Lora

__all__ = [
    "Content",
    "Entry",
    "Keys",
    "Model",
    "Now",
    "Place",
    "Result",
    "Sampler",
    "Save",
    "Seat",
    "Session",
    "check_name",
    "number_of",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


def check_name(what: str, name: str) -> str:
    """Refuse a name that could lead out of its folder."""
    if not _NAME.fullmatch(name):
        raise Mistake(
            f"{name[:140]!r} cannot be the name of a {what}: use letters, digits, '.', '_' and "
            "'-', beginning with a letter, a digit or '_', at most 128 of them"
        )
    return name


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Some bytes of a segment file: which term's, which segment, where, and their hash."""

    term: int
    segment: int
    offset: int
    length: int
    hash: str


class Content(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes, here or elsewhere: exactly one of the two."""

    inline: bytes | None = None
    place: Place | None = None

    @property
    def size(self) -> int:
        """How many bytes these are."""
        return len(self.inline or b"") if self.place is None else self.place.length


class Seat(Record, frozen=True, kw_only=True):
    """Which process acts for the job. Every effect compares that this has not changed."""

    term: int
    """Counts those who took the seat, over all epochs of the job."""
    epoch: int
    cycle: int = 0
    by: str = ""
    """Made up by whoever took it, to know it again when an answer was lost."""
    at: float = 0.0


class Session(Record, frozen=True, kw_only=True):
    """A client's session."""

    created_at: float
    seen_at: float
    """When it was last heard of, as far as it is recorded: now, when it was created."""
    ended: bool = False
    tags: tuple[str, ...] = ()


class Model(Record, frozen=True, kw_only=True):
    """A model."""

    session: str
    base: str
    lora: Lora | None = None
    trimmed: int = -1
    """Entries up to this number are no longer kept: a checkpoint covers them."""
    forgotten: int = -1
    """Results up to this number are no longer kept."""
    ended: bool = False
    """Whether it was unloaded, or its session has ended."""
    created_at: float = 0.0
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """A user's notes."""


class Sampler(Record, frozen=True, kw_only=True):
    """A sampling session: the base, or saved weights."""

    session: str
    base: str
    lora: Lora | None = None
    channel: str = ""
    """Where its weights are kept; empty: they are the base's own."""
    version: int = -1
    forgotten: dict[str, int] = msgspec.field(default_factory=dict)
    """Results up to these numbers are no longer kept, per copy of the client (`block`)."""
    clients: int = 0
    """How many copies of the client have joined."""
    ended: bool = False


class Entry(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An operation that was promised."""

    kind: str
    identity: str
    term: int
    """Who wrote it down."""
    at: float
    content: Content
    skip: bool = False
    """Whether it is a tombstone: the number was given up, or was refused."""


class Result(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What came of an operation. Written once, never changed."""

    kind: str
    identity: str
    term: int
    at: float
    content: Content
    order: int = 0
    """Counts results in the order in which they were made."""
    failed: bool = False
    """Whether it failed, and so had no effect: a replay passes over it."""


class Now(Record, frozen=True, kw_only=True):
    """What is being carried out: if the trainer dies, this is what it died of, perhaps."""

    line: str
    number: int
    deaths: int = 0
    """How many trainers have died while they carried it out, before this one."""


class Save(Record, frozen=True, kw_only=True):
    """What was saved under a name."""

    name: str
    number: int
    """The operation that saved it."""
    version: int
    """Its version in the model's channel of that kind."""
    base: str
    lora: Lora | None = None
    optimizer: bool = False
    bytes: int = 0
    created_at: float = 0.0
    expires_at: float = 0.0
    """0: never."""
    public: bool = False
    """Whether its owner has published it: a mark in listings."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """A user's notes."""
    deleted: bool = False
    """Whether nobody may find it any more: its files are being removed."""


class Keys:
    """The keys of one job's trainer."""

    def __init__(self, run: str, account: str, job: str) -> None:
        self.root = join("runs", run, "trainer", account, job) + "/"
        self.seat = self.root + "seat"
        self.sessions = self.root + "sessions/"
        self.models = self.root + "models/"
        self.samplers = self.root + "samplers/"
        self.ops = self.root + "ops/"
        self.results = self.root + "results/"
        self.now = self.root + "now"
        self.saves = self.root + "saved/"

    def session(self, session: str) -> str:
        """The record of one session."""
        return self.sessions + check_name("session", session)

    def model(self, model: str) -> str:
        """The record of one model."""
        return self.models + check_name("model", model)

    def sampler(self, sampler: str) -> str:
        """The record of one sampling session."""
        return self.samplers + check_name("sampling session", sampler)

    def op(self, line: str, number: int) -> str:
        """An operation of a line."""
        return f"{self.ops}{check_name('line', line)}/{number:010}"

    def result(self, line: str, number: int) -> str:
        """What came of an operation."""
        return f"{self.results}{check_name('line', line)}/{number:010}"

    def save(self, model: str, folder: str, name: str) -> str:
        """What was saved under a name."""
        return f"{self.saves}{check_name('model', model)}/{folder}/{check_name('save', name)}"


def number_of(key: str) -> tuple[str, int]:
    """The line and the number that a key of `ops` or `results` ends with."""
    head, _, number = key.rpartition("/")
    return head.rpartition("/")[2], int(number)
