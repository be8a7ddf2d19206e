"""Every lease, time-out and poll in one table, with the order that they must keep.

Pure: values, rules as data, and a check that names every broken rule. The table in
docs/TIMEOUTS.md is made by `table()`; a test compares the two. A part that brings a time
of its own adds a field here, and a rule for whatever it must be shorter or longer than.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import Mistake

__all__ = ["DEFAULTS", "RULES", "Rule", "Timeouts", "table"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`factor` times the field `left` must stand in `relation` to the field `right`."""

    left: str
    relation: Literal["<", "<="]
    right: str
    why: str
    factor: float = 1.0

    def holds(self, left: float, right: float) -> bool:
        """Whether two values keep this rule. A billionth is forgiven: 3 × 0.1 is not 0.3."""
        slack = 1e-9 * abs(right)
        if self.relation == "<":
            return left * self.factor < right - slack
        return left * self.factor <= right + slack

    def __str__(self) -> str:
        times = f"{self.factor:g} × " if self.factor != 1.0 else ""
        return f"{times}{self.left} {self.relation} {self.right}"


RULES: tuple[Rule, ...] = (
    Rule(
        "lease_keepalive_s",
        "<=",
        "ledger_lease_s",
        "two keep-alives in a row may be lost before a living owner loses its lease",
        factor=3.0,
    ),
    Rule(
        "ledger_call_s",
        "<=",
        "ledger_lease_s",
        "a keep-alive that hangs must fail early enough for another to save the lease",
        factor=2.0,
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "ledger_lease_s",
        "etcd silently lengthens a shorter lease, and death is noticed later than asked for",
    ),
    Rule(
        "watch_backstop_s",
        "<=",
        "watch_silence_s",
        "a watch is called silent only after it has had the chance to look twice",
        factor=2.0,
    ),
    Rule(
        "watch_backstop_s",
        "<=",
        "ledger_lease_s",
        "on sqlite the end of a lease is seen by whoever looks: that must not be the slower part",
    ),
    Rule(
        "watch_silence_s",
        "<=",
        "ledger_lease_s",
        "a watch that died without a word must be opened again before a whole lease goes unseen",
    ),
    Rule(
        "sqlite_busy_s",
        "<",
        "update_deadline_s",
        "an update must outlast one wait for another process's transaction",
    ),
    Rule(
        "ledger_call_s",
        "<",
        "update_deadline_s",
        "an update reads, writes and tries again after a conflict: one slow call must not end it",
    ),
    Rule(
        "consumer_lease_s",
        "<",
        "fleet_hold_s",
        "a round waits for replicas to stop: one that died must be gone before it is given up",
    ),
    Rule(
        "marker_poll_s",
        "<=",
        "consumer_lease_s",
        "without a ledger, whoever waits must look several times within a consumer's lease",
        factor=3.0,
    ),
    Rule(
        "consumer_lease_s",
        "<=",
        "foreign_lease_s",
        "a consumer that is not ours gives a sign of life only when it loads",
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "member_lease_s",
        "etcd silently lengthens a shorter lease, and what a dead member had claimed waits",
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "host_lease_s",
        "etcd silently lengthens a shorter lease, and a dead host's trainers count for longer",
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "orchestrator_lease_s",
        "etcd silently lengthens a shorter lease, and a successor waits for longer",
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "replica_lease_s",
        "etcd silently lengthens a shorter lease, and a dead replica is asked for longer",
    ),
    Rule(
        "sdk_submit_s",
        "<",
        "trainer_gap_s",
        "a number that a client still tries to send must not be given up",
    ),
    Rule(
        "poll_hold_s",
        "<",
        "sdk_poll_s",
        "a poll that is held for longer than its caller waits is never answered",
    ),
    Rule(
        "submit_wait_s",
        "<",
        "sdk_poll_s",
        "a caller that has given up sends the same operation again beside the first",
    ),
    Rule(
        "etcd_min_lease_s",
        "<=",
        "node_lease_s",
        "etcd silently lengthens a shorter lease, and a dead node holds its rank for longer",
    ),
)


def _seconds(default: float, description: str) -> Any:
    return Field(default=default, gt=0, allow_inf_nan=False, description=description)


class Timeouts(BaseModel):
    """All times in seconds. `check()` must pass before anything is started with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ledger_lease_s: float = _seconds(
        10.0, "How long a record outlives the last sign of life of its owner."
    )
    lease_keepalive_s: float = _seconds(3.0, "How often an owner renews its lease.")
    ledger_call_s: float = _seconds(
        5.0, "How long one call to the ledger may take before it fails."
    )
    sqlite_busy_s: float = _seconds(
        10.0, "How long a transaction on sqlite waits for another process's."
    )
    watch_backstop_s: float = _seconds(
        1.0, "How often a watch on sqlite looks by itself, in case it was not woken."
    )
    etcd_min_lease_s: float = _seconds(
        2.0, "The shortest lease that etcd grants; lower it only for a ledger that is not etcd."
    )
    watch_silence_s: float = _seconds(
        5.0, "How long a watch may say nothing before its connection is doubted."
    )
    update_deadline_s: float = _seconds(
        30.0, "How long an update goes on reading and writing again after conflicts."
    )
    consumer_lease_s: float = _seconds(
        10.0, "How long a consumer of weights holds versions after its last sign of life."
    )
    fleet_hold_s: float = _seconds(
        30.0, "How long the replicas of a fleet may take to stop serving."
    )
    marker_poll_s: float = _seconds(
        0.5, "How often a channel without a ledger is looked at by whoever waits."
    )
    foreign_lease_s: float = _seconds(
        600.0, "How long a consumer that only writes marker files counts as alive."
    )
    node_lease_s: float = _seconds(
        5.0, "How long a node of a run holds its rank after its last sign of life."
    )
    host_lease_s: float = _seconds(
        5.0, "How long trainers count as RUNNING after the last sign of life of their host."
    )
    submit_wait_s: float = _seconds(
        5.0, "How long a gateway keeps a submit while its trainer has no route."
    )
    poll_hold_s: float = _seconds(20.0, "How long a gateway holds a poll that has no answer yet.")
    sdk_poll_s: float = _seconds(45.0, "How long the public SDKs wait for the answer to a poll.")
    sdk_submit_s: float = _seconds(
        300.0, "How long the public SDKs try to send an operation, all tries together."
    )
    trainer_gap_s: float = _seconds(
        600.0, "How long a missing number holds up later operations before it is given up."
    )
    member_lease_s: float = _seconds(
        10.0, "How long a member of a queue keeps what it claimed after its last sign of life."
    )
    replica_lease_s: float = _seconds(
        3.0, "How long a replica of a run is asked for groups after its last sign of life."
    )
    orchestrator_lease_s: float = _seconds(
        2.0, "How long an orchestrator's samples wait for it after its last sign of life."
    )

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Take values from a configuration; unknown names and bad values are a `Mistake`."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise Mistake("the time-outs are not valid: " + "; ".join(reasons)) from None

    def broken(self) -> tuple[Rule, ...]:
        """The rules that these values do not keep."""
        return tuple(
            rule
            for rule in RULES
            if not rule.holds(getattr(self, rule.left), getattr(self, rule.right))
        )

    def check(self) -> None:
        """Raise a `Mistake` that names every broken rule, both values, and why it matters."""
        if broken := self.broken():
            lines = [
                f"{rule} is broken by {rule.left} = {getattr(self, rule.left):g} and "
                f"{rule.right} = {getattr(self, rule.right):g}: {rule.why}"
                for rule in broken
            ]
            raise Mistake("time-outs out of order: " + "; ".join(lines))


DEFAULTS = Timeouts()


def table() -> str:
    """The tables of docs/TIMEOUTS.md: every time, and every rule."""
    lines = ["| time | default | what it is |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {field.default:g} s | {field.description} |"
        for name, field in Timeouts.model_fields.items()
    ]
    lines += ["", "| rule | why |", "| --- | --- |"]
    lines += [f"| `{rule}` | {rule.why} |" for rule in RULES]
    return "\n".join(lines) + "\n"
