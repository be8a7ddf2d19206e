"""What a rendezvous keeps in the ledger, and where.

    <rdzv>/head/cycle         Cycle: which attempt this is, and who is in it
    <rdzv>/head/closer        Closer: who looks after it (leased; makes things fast, not safe)
    <rdzv>/nodes/<name>       Node: one node, alive (leased; written by that node only)
    <rdzv>/ends/<n>/<rank>    End: this rank's node has finished cycle n (outlives the node)
    <rdzv>/drains/<name>      Drain: this node is to hold no rank from the next cycle on

`<rdzv>` is `/runs/<run>/rdzv`. The cycle's record changes only when something changes for
everybody: open → running → open → … → succeeded or failed, each under compare-and-set. So
whoever compares its revision in a transaction acts within one cycle or not at all.

This module is pure.
"""

import math
from typing import Literal

import msgspec

from holdfast.errors import Mistake
from holdfast.ledger.records import Record, put
from holdfast.ledger.types import Entry, Put, join

__all__ = [
    "Cause",
    "Closer",
    "Cycle",
    "Drain",
    "End",
    "Keys",
    "Member",
    "Node",
    "Parked",
    "Place",
    "Rules",
    "put_cycle",
]

_NODES_MAX = 10_000


class Rules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What a membership must look like. The node that begins a run sets them for all."""

    minimum: int
    maximum: int
    spares: int = 0
    """How many of `maximum` nodes are kept back, as long as `minimum` holds."""
    segment: int = 1
    """Nodes that must come from one domain; ranks of a segment are neighbours."""
    last_call_s: float = 5.0
    """How long the first cycle waits for more nodes than the minimum."""
    join_s: float = 600.0
    """How long an open cycle waits for the minimum before the run fails."""
    settle_s: float = 1.0
    """How long a later cycle waits for living nodes that have not answered yet."""
    stop_s: float = 30.0
    """How long it waits for nodes that have answered and are still stopping their workers."""
    max_restarts: int = 3
    restart_window_s: float = 0.0
    """Restarts older than this no longer count; 0: all count."""

    def check(self) -> None:
        """Refuse rules that no membership can keep."""
        if not 1 <= self.minimum <= self.maximum:
            raise Mistake(
                f"--nnodes {self.minimum}:{self.maximum} is not possible: "
                "the minimum is at least 1 and at most the maximum"
            )
        if self.maximum > _NODES_MAX:
            raise Mistake(f"--nnodes: at most {_NODES_MAX} nodes, not {self.maximum}")
        if not 0 <= self.spares <= self.maximum - self.minimum:
            raise Mistake(
                f"--spares {self.spares} of {self.maximum} nodes leaves fewer than the minimum of "
                f"{self.minimum}: keep back at most {self.maximum - self.minimum}"
            )
        if self.segment < 1 or self.lowest > self.highest:
            raise Mistake(
                f"--segment {self.segment}: no multiple of it lies between the minimum of "
                f"{self.minimum} and the {self.maximum - self.spares} nodes that may be active"
            )
        times = (
            self.last_call_s,
            self.join_s,
            self.settle_s,
            self.stop_s,
            self.restart_window_s,
        )
        if min(times) < 0 or self.max_restarts < 0 or not all(map(math.isfinite, times)):
            raise Mistake("times, and the number of restarts, are finite and not negative")

    @property
    def lowest(self) -> int:
        """The fewest active nodes: the minimum, in whole segments."""
        return -(-self.minimum // self.segment) * self.segment

    @property
    def highest(self) -> int:
        """The most active nodes: the maximum without the spares, in whole segments."""
        return max(self.minimum, self.maximum - self.spares) // self.segment * self.segment


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a cycle ended."""

    kind: str
    """failed, hung, unreachable, isolated, lost, withdrew, drained, grew, asked, or what a newer
    version calls it"""
    node: str = ""
    detail: str = ""
    cycle: int = 0
    at: float = 0.0
    """When, in seconds since 1970 by the clock of the node that saw it."""
    excused: bool = False
    """Another member did not come back for the next cycle, so `node` is not to blame."""

    def __str__(self) -> str:
        who = f"{self.node} " if self.node else ""
        return f"{who}{self.kind}" + (f": {self.detail}" if self.detail else "")


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds a rank. Its place in `Cycle.members` is its rank."""

    name: str
    life: int
    """The revision at which its record was created: a node that came back has another."""
    slots: int
    address: str = ""
    port: int = 0
    domain: str = ""
    probe_port: int = 0
    """Where its agent answers probes; 0: it does not."""


class Parked(msgspec.Struct, frozen=True, array_like=True):
    """A node that gave cause for the end of a cycle, and now comes after all others."""

    name: str
    life: int
    """The mark is on this life: a node that is started again begins without one."""
    kind: str
    """unreachable: it holds any rank but 0, and spares go first; else: it holds a rank only when
    the minimum is not there without it"""
    reason: str = ""


CycleState = Literal["open", "running", "succeeded", "failed"]


class Cycle(Record, frozen=True, kw_only=True):
    """One attempt to run with one membership."""

    number: int
    state: CycleState
    rules: Rules
    members: tuple[Member, ...] = ()
    """Who holds which rank; while open: who held it last."""
    cause: Cause | None = None
    """Why the cycle before this one ended; with `failed`: why the run did."""
    history: tuple[Cause, ...] = ()
    """The last causes, oldest first."""
    restarts: tuple[float, ...] = ()
    """When workers failed, as far as the budget counts it."""
    parked: tuple[Parked, ...] = ()
    """The nodes that have lost their rank for a reason of their own."""
    succeeded_at: float = 0.0
    """When the run succeeded, in seconds since 1970 by the closer's clock; 0: not known."""

    @property
    def ended_at(self) -> float:
        """When the run ended, in seconds since 1970; 0: it has not, or that was not recorded."""
        if self.state == "failed" and self.cause is not None:
            return self.cause.at
        return self.succeeded_at

    @property
    def final(self) -> bool:
        """Whether the rendezvous is closed for good."""
        return self.state in ("succeeded", "failed")

    def mark(self, name: str, life: int) -> Parked | None:
        """Why a node, in this life, comes after all others; None: it does not."""
        return next((one for one in self.parked if (one.name, one.life) == (name, life)), None)

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return sum(member.slots for member in self.members)


class Node(Record, frozen=True, kw_only=True):
    """One living node, and the cycle it is ready for."""

    cycle: int
    heard: int = 0
    """The newest cycle it has heard of; when that is later, it is stopping its workers."""
    address: str
    port: int
    slots: int
    infra_rank: int | None = None
    domain: str = ""
    host: str = ""
    pid: int = 0
    release: str = ""
    probe_port: int = 0
    """Where its agent answers probes (rendezvous/probe.py); 0: it does not."""
    unreached: int = 0
    """The newest cycle in which it could not reach the node with rank 0."""


class Closer(Record, frozen=True, kw_only=True):
    """Who looks after the cycle."""

    node: str


class End(Record, frozen=True, kw_only=True):
    """A node whose workers have all succeeded."""

    node: str
    life: int


class Drain(Record, frozen=True, kw_only=True):
    """Somebody wants this node without a rank."""

    reason: str = ""


class Place(msgspec.Struct, frozen=True):
    """What a member needs to know about its place in a running cycle."""

    cycle: int
    revision: int
    """That of the cycle's record: compare it, and you act within this cycle or not at all."""
    rank: int
    """This node's rank among the nodes."""
    nodes: int
    first_rank: int
    """The rank of this node's first worker among all workers."""
    world_size: int
    slots: int
    address: str
    """Where rank 0 is reached, and on which port it will listen."""
    port: int
    first: str = ""
    """The node with rank 0, and where its agent answers probes (0: it does not)."""
    probe_port: int = 0


class Keys:
    """The keys of one run's rendezvous."""

    def __init__(self, run: str) -> None:
        self.root = join("runs", run, "rdzv") + "/"
        self.head = self.root + "head/"
        self.cycle = self.head + "cycle"
        self.closer = self.head + "closer"
        self.nodes = self.root + "nodes/"
        self.ends = self.root + "ends/"
        self.drains = self.root + "drains/"

    def node(self, name: str) -> str:
        """The record of one node. A name from outside cannot smuggle in another level."""
        return self.nodes + join(name)[1:]

    def drain(self, name: str) -> str:
        """The wish that one node holds no rank."""
        return self.drains + join(name)[1:]

    def end(self, number: int, rank: int) -> str:
        """The success of one node in one cycle."""
        return f"{self.ends}{number}/{rank}"


class _Raw(msgspec.Struct):
    """The rules of a stored cycle as they were written."""

    rules: msgspec.Raw


def put_cycle(key: str, cycle: Cycle, *, over: Entry) -> Put:
    """The operation that changes a cycle's record, and leaves its rules exactly as they were.

    They never change, and may have fields of a newer version: dropping these would make the
    nodes of that version strangers to their own run.
    """
    op = put(key, cycle, over=over)
    mine, theirs = (msgspec.json.decode(raw, type=_Raw).rules for raw in (op.value, over.value))
    if mine == theirs:
        return op
    fields = msgspec.json.decode(op.value, type=dict[str, msgspec.Raw])
    return Put(key, msgspec.json.encode({**fields, "rules": theirs}))
