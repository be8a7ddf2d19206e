"""What the weights protocol keeps in the ledger, and under which keys.

    <prefix>/live/head                  Head: the newest version
    <prefix>/live/writer                Writer: who may publish
    <prefix>/live/versions/<N>          Version: its files are there
    <prefix>/live/consumers/<name>/<id> Consumer: leased; what it pins and acknowledges
    <prefix>/live/marks/<N>             Mark: files of this version were found damaged
    <prefix>/live/target                Target: what a fleet stages and serves
    <prefix>/swept/<N>                  Swept: it was there; its number is never used again

`<prefix>` is `/runs/<run>/weights/<channel>`. Everything that decisions need stands below
`live/`, so that one range reads it at one revision; `swept/` only grows.
"""

from typing import Literal

import msgspec

from holdfast.ledger import Record, join
from holdfast.timeouts import DEFAULTS
from holdfast.weights.policy import Needs

__all__ = [
    "Consumer",
    "Head",
    "Keys",
    "Mark",
    "Phase",
    "Swept",
    "Target",
    "Told",
    "Version",
    "Writer",
]


Phase = Literal["idle", "staging", "holding", "serving"]


class Writer(Record, frozen=True, kw_only=True):
    """Whoever wrote this last may publish; everybody before is fenced off."""

    epoch: int
    name: str
    nonce: str


class Head(Record, frozen=True, kw_only=True):
    """The newest version."""

    version: int
    content: str


class Version(Record, frozen=True, kw_only=True):
    """A published version. It is written once and never changed."""

    version: int
    parent: int | None
    epoch: int
    content: str
    """Hash over names, kinds and bytes of all tensors and carried files."""
    manifest: str
    """Hash of the manifest file."""
    bytes: int
    published_s: float
    """Wall-clock time, for people."""


class Swept(Record, frozen=True, kw_only=True):
    """A version whose files were given up. The hash outlives them."""

    version: int
    epoch: int
    content: str


class Consumer(Record, frozen=True, kw_only=True):
    """One life of one consumer, bound to its lease. Nobody else writes it."""

    name: str
    needs: Needs
    floor: int
    """With needs='every': nothing from this version on is deleted while it lives."""
    pins: tuple[int, ...] = ()
    staged: int | None = None
    """A version that was loaded and verified beside the one that is served."""
    acknowledged: int | None = None
    content: str = ""
    address: str = ""
    """Where it can be asked; empty when it is not a replica of a fleet."""
    held: int = 0
    """The fleet's round for which it has stopped serving."""
    failed: int | None = None
    """The version that it could not load, and why."""
    problem: str = ""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a consumer's record that it tells of its own accord."""

    staged: int | None = None
    acknowledged: int | None = None
    content: str = ""
    held: int = 0
    failed: int | None = None
    problem: str = ""

    def on(self, consumer: Consumer) -> Consumer:
        """The consumer's record with this in it. Its floor only rises."""
        told = {**msgspec.structs.asdict(self), "problem": self.problem[:2000]}
        floor = max(consumer.floor, self.acknowledged or 0)
        return msgspec.structs.replace(consumer, floor=floor, **told)


class Mark(Record, frozen=True, kw_only=True):
    """A version that must not be loaded any more, and why."""

    reason: str


class Target(Record, frozen=True, kw_only=True):
    """What a fleet is to do. Changed only by comparing it with what was read.

    `staging` is to be loaded aside. `allowed` is what may be served, the newest first. While
    `phase` is "holding" nobody serves anything.
    """

    round: int = 0
    phase: Phase = "idle"
    staging: int | None = None
    allowed: tuple[int, ...] = ()
    mix: int = 0
    least: int = 1
    stage_s: float = 120.0
    hold_s: float = DEFAULTS.fleet_hold_s
    problem: str = ""
    """Why the last round failed; empty when it did not."""


class Keys:
    """The keys of one channel."""

    def __init__(self, run: str, channel: str) -> None:
        self.prefix = join("runs", run, "weights", channel)
        self.live = f"{self.prefix}/live/"
        self.head = f"{self.live}head"
        self.writer = f"{self.live}writer"
        self.target = f"{self.live}target"
        self.versions = f"{self.live}versions/"
        self.consumers = f"{self.live}consumers/"
        self.marks = f"{self.live}marks/"

    def version(self, number: int) -> str:
        """The key of a version; keys sort like numbers."""
        return f"{self.versions}{number:012d}"

    def swept(self, number: int) -> str:
        """The key of what is left of a deleted version."""
        return f"{self.prefix}/swept/{number:012d}"

    def mark(self, number: int) -> str:
        """The key that marks a version as damaged."""
        return f"{self.marks}{number:012d}"

    def consumer(self, name: str, lease: int) -> str:
        """The key of one life of a consumer."""
        return f"{self.consumers}{name}/{lease}"
