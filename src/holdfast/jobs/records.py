"""What the control plane keeps in the ledger, and where.

    <jobs>/records/<account>/<job>    Job: state, epoch and address, in one record
    <jobs>/epochs/<account>/<job>     the epoch alone, as digits: what a transaction compares
    <jobs>/alive/<account>/<job>      Alive: whose incarnation lives, and the secret that opens
                                      its port (bound to its host's lease)
    <jobs>/checkpoints/<account>/<job>/<name>    Checkpoint: what its trainer has saved
    <jobs>/hosts/<name>               Host: who starts trainers here (leased)
    <accounts>/<account>              Account: its API keys, hashed
    <run>/commands                    Commands: jobs may bring commands, and whose

`<jobs>` is `/runs/<run>/jobs`. A job's record and its epoch key are written by the same
transaction whenever the epoch changes, so they cannot disagree. Deleted jobs leave their
record behind, as a tombstone: an id is never used twice.

A record that cannot be read stands for a job that is UNREADABLE: that is never written. Such a
job is listed and can be deleted; nothing else can be done with it.

This module is pure.
"""

import re
from typing import Annotated, Any, Final, Literal

import msgspec

from holdfast.errors import Mistake
from holdfast.ledger.records import Record, encode
from holdfast.ledger.types import Compare, Entry, Op, Put, absent, join, unchanged, value_is

__all__ = [
    "GONE",
    "LIVE",
    "STATES",
    "TOMBSTONES",
    "Account",
    "Alive",
    "ApiKey",
    "Checkpoint",
    "Host",
    "Job",
    "Keys",
    "State",
    "check_name",
    "write",
]

State = Literal[
    "PENDING",
    "CREATING",
    "RUNNING",
    "PAUSED",
    "FAILED",
    "CANCELLING",
    "CANCELLED",
    "COMPLETED",
    "EARLY_STOPPED",
    "DELETING",
    "DELETED",
    "ARCHIVED",
    "UNREADABLE",
]

STATES: Final[tuple[State, ...]] = State.__args__  # type: ignore[attr-defined]  # a Literal has it
LIVE: Final = frozenset[State]({"CREATING", "RUNNING"})
"""States in which an incarnation may act."""
TOMBSTONES: Final = frozenset[State]({"DELETED", "ARCHIVED"})
GONE: Final = frozenset(STATES) - LIVE - {"PENDING", "PAUSED"}
"""States in which a caller is told that there is nothing to wait for."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_799)]
"""Seconds since 1970, up to the end of the year 9999: what can be told as a date."""

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


class Job(Record, frozen=True, kw_only=True):
    """One trainer job."""

    account: str
    id: str
    state: State = "PENDING"
    epoch: int = 0
    """Counts incarnations. It grows when one begins, and when one is ended from outside."""
    address: str = ""
    """Where the incarnation of this epoch is reached (host:port); only while RUNNING."""
    host: str = ""
    """Who starts it."""
    reason: str = ""
    """Why it is in this state, for people."""
    spec: dict[str, Any] = msgspec.field(default_factory=dict)
    """What was asked for, as it came."""
    restarts: tuple[float, ...] = ()
    """When incarnations died, as far as the budget counts it (seconds since 1970)."""
    not_before: float = 0.0
    """When the next incarnation may begin (seconds since 1970): a crash loop slows down."""
    created_at: Seconds = 0.0
    changed_at: Seconds = 0.0

    @property
    def name(self) -> str:
        """Account and id: what the fence's header says."""
        return f"{self.account}/{self.id}"


class Alive(Record, frozen=True, kw_only=True):
    """An incarnation lives, as long as the lease does."""

    epoch: int
    host: str
    secret: str = ""
    """What gateways show to this incarnation's port; empty from a host of an older version."""


class Checkpoint(Record, frozen=True, kw_only=True):
    """What a trainer has saved, as it tells the control plane."""

    name: str
    created_at: Seconds = 0.0
    kind: str = ""
    step: int = 0
    path: str = ""
    content: str = ""
    """Hash over names, kinds and bytes of all its tensors."""


class Host(Record, frozen=True, kw_only=True):
    """A process that starts trainers."""

    name: str
    trainers: tuple[str, ...] = ()
    """The trainers that jobs may name here."""
    any_command: bool = False
    """Whether jobs may bring commands of their own."""
    place: str = ""
    """The machine, its boot and its pid namespace: where the next two mean what they say."""
    pid: int = 0
    began: int = 0
    """When that process began: pids are used again."""


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key, hashed: the key itself is shown once, when it is made."""

    id: str
    sha256: str
    created_at: float = 0.0
    expires_at: float = 0.0
    """0: never."""


class Account(Record, frozen=True, kw_only=True):
    """Whom jobs belong to."""

    name: str
    keys: tuple[ApiKey, ...] = ()
    default_job: str = ""
    """The job that paths without a job's name lead to."""


class Commands(Record, frozen=True, kw_only=True):
    """Jobs may bring commands of their own, which can read and write the whole ledger."""

    account: str = ""
    """The only account that may have keys then. Empty: all accounts are trusted."""


class Keys:
    """The keys of one run's jobs."""

    def __init__(self, run: str) -> None:
        self.root = join("runs", run, "jobs") + "/"
        self.records = self.root + "records/"
        self.epochs = self.root + "epochs/"
        self.alives = self.root + "alive/"
        self.hosts = self.root + "hosts/"
        self.saved = self.root + "checkpoints/"
        self.accounts = join("runs", run, "accounts") + "/"
        self.commands = join("runs", run, "commands")

    def job(self, account: str, job: str) -> str:
        """The record of one job. A name from outside cannot smuggle in another level."""
        return self.records + join(account, job)[1:]

    def of_account(self, account: str) -> str:
        """The folder of an account's jobs."""
        return self.records + join(account)[1:] + "/"

    def epoch(self, account: str, job: str) -> str:
        """The job's epoch alone."""
        return self.epochs + join(account, job)[1:]

    def alive(self, account: str, job: str) -> str:
        """The sign of life of the job's incarnation."""
        return self.alives + join(account, job)[1:]

    def checkpoints(self, account: str, job: str) -> str:
        """The folder of what a job's trainer has saved."""
        return self.saved + join(account, job)[1:] + "/"

    def host(self, name: str) -> str:
        """The record of one host."""
        return self.hosts + join(name)[1:]

    def account(self, name: str) -> str:
        """The record of one account."""
        return self.accounts + join(name)[1:]

    def guard(self, account: str, job: str, epoch: int) -> Compare:
        """True while this epoch is the job's present one: for every effect of a trainer."""
        return value_is(self.epoch(account, job), str(epoch).encode())


def write(keys: Keys, job: Job, *, over: Entry | None) -> tuple[list[Compare], list[Op]]:
    """The conditions and operations that put a job's record, and its epoch with it."""
    key = keys.job(job.account, job.id)
    record = Put(key, encode(job, over=over.value if over else None))
    epoch = Put(keys.epoch(job.account, job.id), str(job.epoch).encode())
    return [unchanged(over) if over else absent(key)], [record, epoch]


def check_name(what: str, name: str) -> str:
    """Refuse what cannot name an account or a job."""
    if type(name) is not str or not NAME.fullmatch(name):
        raise Mistake(
            f"{what} {str(name)[:80]!r} is not valid: 1 to 63 lower-case letters, digits and "
            "hyphens, with a letter or digit first and last"
        )
    return name
