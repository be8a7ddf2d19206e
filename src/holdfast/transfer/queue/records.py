"""What a queue keeps in the ledger.

    /runs/RUN/queue/NAME/config           tasks and limits, written once
                        /head             the newest block; how many samples there ever were
                        /block/N          up to 1,000 samples: what and where their fields are
                        /fields/N/ID      fields of some of them that became ready later
                        /state/N/TASK     who claimed which, and which are acknowledged
                        /freed/N          whose payloads are deleted
                        /done/N           what is left of a finished block: its keys
                        /member/ID        a producer or consumer, while its lease lasts
                        /steps/TASK/N     the samples of a step of training (`steps.py`)
                        /finished/TASK    the last step that is durable
                        /barrier          written to learn how new a view is

A block never changes its samples' order, and a sample keeps its place in its block, so the
state of a task is a few masks: whole numbers whose bit i stands for sample i. They are
written as hexadecimal text. A claim of a thousand samples changes a handful of records.
"""

from base64 import b64decode, b64encode
from typing import ClassVar

import msgspec
from xxhash import xxh3_64_digest

from holdfast.errors import Mistake
from holdfast.ledger import join
from holdfast.ledger.records import Record
from holdfast.transfer.frame import Ref

__all__ = [
    "Block",
    "Claim",
    "Config",
    "Done",
    "Fields",
    "Freed",
    "Head",
    "Keys",
    "Member",
    "Sample",
    "State",
    "Tag",
    "bits",
    "digest",
    "mask",
    "text",
]

DIGEST_BYTES = 8

Tag = str | int | float | bool | None


def mask(written: str) -> int:
    """A mask from its text."""
    return int(written, 16) if written else 0


def text(number: int) -> str:
    """A mask as text."""
    return f"{number:x}" if number else ""


def bits(number: int) -> list[int]:
    """The places of a mask's bits, lowest first."""
    digits = bin(number)[:1:-1]
    return [place for place, digit in enumerate(digits) if digit == "1"]


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sample: what is known of it, and where its fields are."""

    key: str
    fields: dict[str, Ref]
    group: str = ""
    version: int = 0
    """The version of the weights that made it."""
    tags: dict[str, Tag] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of its payloads."""
        return sum(ref.nbytes for ref in self.fields.values())


class Config(Record, frozen=True):
    """The tasks and the fields that each of them needs, and the limits."""

    tasks: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    max_samples: int = 0
    max_bytes: int = 0


class Head(Record, frozen=True):
    """The newest block, and how many samples were ever added."""

    block: int = -1
    samples: int = 0
    newest: int = 0
    """The highest version of weights that a sample was made with."""


class Block(Record, frozen=True):
    """Samples, in the order in which they were put."""

    samples: tuple[Sample, ...] = ()


class Fields(Record, frozen=True):
    """Fields that became ready after their samples were put, by the samples' places."""

    fields: dict[int, dict[str, Ref]] = msgspec.field(default_factory=dict)


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """These samples are a member's until its lease ends."""

    id: str
    owner: str
    mask: str


class State(Record, frozen=True):
    """What has become of a block's samples in one task."""

    KEEP_SETTLED: ClassVar[int] = 32

    acked: str = ""
    dropped: str = ""
    """Too old for the task when they were claimed; they count as done."""
    claims: tuple[Claim, ...] = ()
    settled: tuple[str, ...] = ()
    """The last acknowledgements, for whoever lost the answer to one."""


class Freed(Record, frozen=True):
    """Samples that every task is done with and whose payloads are deleted."""

    mask: str = ""


class Done(Record, frozen=True):
    """A block that is finished: its keys' digests, so that none of them is added again."""

    digests: str = ""

    def keys(self) -> list[bytes]:
        """The digests."""
        raw = b64decode(self.digests)
        return [raw[at : at + DIGEST_BYTES] for at in range(0, len(raw), DIGEST_BYTES)]


def digest(key: str) -> bytes:
    """A key, short enough to be remembered.

    Two keys with one digest would be a sample lost: with 100,000 keys remembered, that is one
    in 10**14 samples.
    """
    return xxh3_64_digest(key.encode())


def done(block: Block) -> Done:
    """What is left of a block."""
    return Done(digests=b64encode(b"".join(digest(one.key) for one in block.samples)).decode())


class Member(Record, frozen=True):
    """A producer or a consumer, while its lease lasts."""

    name: str = ""
    pid: int = 0
    host: str = ""


class Keys:
    """The keys of one queue."""

    def __init__(self, run: str, name: str) -> None:
        if not all(part and part.isprintable() and "/" not in part for part in (run, name)):
            raise Mistake(f"{run!r} and {name!r}: a run and a queue have plain names without '/'")
        self.prefix = join("runs", run, "queue", name) + "/"
        self.place = f"{run}/{name}"
        """What the keys of its payloads in a store begin with."""
        self.config = self.prefix + "config"
        self.head = self.prefix + "head"
        self.barrier = self.prefix + "barrier"

    def block(self, number: int) -> str:
        """Where a block's samples are."""
        return f"{self.prefix}block/{number:012d}"

    def state(self, number: int, task: str) -> str:
        """Where a block's state in a task is."""
        return f"{self.prefix}state/{number:012d}/{task}"

    def fields(self, number: int, name: str) -> str:
        """Where some later fields are."""
        return f"{self.prefix}fields/{number:012d}/{name}"

    def freed(self, number: int) -> str:
        """Where it says whose payloads are deleted."""
        return f"{self.prefix}freed/{number:012d}"

    def done(self, number: int) -> str:
        """Where the keys of a finished block are."""
        return f"{self.prefix}done/{number:012d}"

    def member(self, name: str, lease: int) -> str:
        """Where a member is."""
        return f"{self.prefix}member/{name}-{lease}"
