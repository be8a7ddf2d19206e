"""Every lease, time-out and poll in one table, with the order that they must keep.

Pure: values, rules as data, and a check that names every broken rule. The table in
docs/TIMEOUTS.md is made by `table()`; a test compares the two. A part that brings a time
of its own adds a field here, and a rule for whatever it must be shorter or longer than.

`DEFAULTS` is what every part of a process uses: the values below, or those of the TOML file that
HOLDFAST_TIMEOUTS names. Child processes inherit the variable, so a whole run has one table.
"""

import ast
import difflib
import inspect
import itertools
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.errors import Mistake

__all__ = ["DEFAULTS", "RULES", "Rule", "Timeouts", "purposes", "table"]


@dataclass(frozen=True, slots=True)
class Rule:
    """`factor` times the field `left` must stand in `relation` to the field `right`."""

    left: str
    relation: str
    right: str
    why: str
    factor: float = 1.0

    @classmethod
    def parse(cls, text: str, why: str) -> Self:
        """Read what `str` writes."""
        *times, left, relation, right = text.split()
        return cls(left, relation, right, why, float(times[0]) if times else 1.0)

    def holds(self, left: float, right: float) -> bool:
        """Whether two values keep this rule. A billionth is forgiven: 3 × 0.1 is not 0.3."""
        slack = 1e-9 * abs(right)
        if self.relation == "<":
            return left * self.factor < right - slack
        return left * self.factor <= right + slack

    def __str__(self) -> str:
        times = f"{self.factor:g} × " if self.factor != 1.0 else ""
        return f"{times}{self.left} {self.relation} {self.right}"


_ORDER: dict[str, str] = {
    "3 × lease_keepalive_s <= ledger_lease_s": (
        "two keep-alives in a row may be lost before a living owner loses its lease"
    ),
    "2 × ledger_call_s <= ledger_lease_s": (
        "a keep-alive that hangs must fail early enough for another to save the lease"
    ),
    "etcd_min_lease_s <= ledger_lease_s": (
        "etcd silently lengthens a shorter lease, and death is noticed later than asked for"
    ),
    "2 × watch_backstop_s <= watch_silence_s": (
        "a watch is called silent only after it has had the chance to look twice"
    ),
    "watch_backstop_s <= ledger_lease_s": (
        "on sqlite the end of a lease is seen by whoever looks: that must not be the slower part"
    ),
    "watch_silence_s <= ledger_lease_s": (
        "a watch that died without a word must be opened again before a whole lease goes unseen"
    ),
    "sqlite_busy_s < update_deadline_s": (
        "an update must outlast one wait for another process's transaction"
    ),
    "ledger_call_s < update_deadline_s": (
        "an update reads, writes and tries again after a conflict: one slow call must not end it"
    ),
    "consumer_lease_s < fleet_hold_s": (
        "a round waits for replicas to stop: one that died must be gone before it is given up"
    ),
    "3 × marker_poll_s <= consumer_lease_s": (
        "without a ledger, whoever waits must look several times within a consumer's lease"
    ),
    "consumer_lease_s <= foreign_lease_s": (
        "a consumer that is not ours gives a sign of life only when it loads"
    ),
    "foreign_settle_s < foreign_lease_s": (
        "a step that is written again must count again while the consumer that waits for it does"
    ),
    "last_look_s < consumer_lease_s": (
        "a consumer that gives up waiting must be heard of before its lease ends"
    ),
    "store_call_s < store_deadline_s": (
        "a server that does not answer once must leave time for another attempt"
    ),
    "store_lock_s < store_deadline_s": (
        "a lock that is not had at once must leave time for another attempt"
    ),
    "store_deadline_s <= redis_unfinished_s": (
        "a large value whose next part is sent late must still be there to be added to"
    ),
    "etcd_min_lease_s <= member_lease_s": (
        "etcd silently lengthens a shorter lease, and what a dead member had claimed waits"
    ),
    "etcd_min_lease_s <= host_lease_s": (
        "etcd silently lengthens a shorter lease, and a dead host's trainers count for longer"
    ),
    "etcd_min_lease_s <= orchestrator_lease_s": (
        "etcd silently lengthens a shorter lease, and a successor waits for longer"
    ),
    "etcd_min_lease_s <= replica_lease_s": (
        "etcd silently lengthens a shorter lease, and a dead replica is asked for longer"
    ),
    "sdk_submit_s < trainer_gap_s": (
        "a number that a client still tries to send must not be given up"
    ),
    "poll_hold_s < sdk_poll_s": (
        "a poll that is held for longer than its caller waits is never answered"
    ),
    "submit_wait_s < sdk_poll_s": (
        "a caller that has given up sends the same operation again beside the first"
    ),
    "etcd_min_lease_s <= node_lease_s": (
        "etcd silently lengthens a shorter lease, and a dead node holds its rank for longer"
    ),
    "server_ask_s < server_ready_s": (
        "a server that does not answer once must be asked again while it may still start"
    ),
    "adoption_s < birth_s": (
        "a child that is not adopted must have ended before its start is given up"
    ),
    "restart_pause_s < well_s": (
        "a part that is started again must live longer than it was waited for to count as well"
    ),
    "5 × job_retry_s <= host_lease_s": (
        "a host whose call to the ledger failed must try again before its trainers count as dead"
    ),
    "host_lease_s < host_adrift_s": (
        "a host that has lost its lease must have time to take another before it stops everything"
    ),
    "2 × job_retry_s <= steward_wait_s": (
        "hosts settle each other's jobs first; a gateway does it where no host is left"
    ),
    "3 × route_confirm_s <= submit_wait_s": (
        "a request that waits for a route must look at the ledger several times"
    ),
    "key_look_s < submit_wait_s": (
        "a caller with a new key waits for the next look at the accounts, as long as for a route"
    ),
    "body_hold_s < submit_wait_s": (
        "a large body that is held back must leave time to send it to another trainer"
    ),
    "submit_wait_s < command_call_s": (
        "a gateway that cannot ask the ledger says so then: the command must still listen"
    ),
    "client_connect_s < client_call_s": ("connecting is a part of the call"),
    "submit_wait_s < client_call_s": (
        "a gateway answers a submit that found no route then: the client must still listen"
    ),
    "2 × client_call_s <= sdk_submit_s": ("a try that hangs must leave time for others"),
    "poll_pace_s < poll_hold_s": ("a poll that a server has held needs no pause after it"),
    "trainer_gap_s < result_s": (
        "an operation behind a missing number is answered after the gap: its caller must wait"
    ),
    "4 × probe_s <= warm_up_s": (
        "a probe that hangs must leave time for the three that must succeed"
    ),
    "control_pace_s < control_call_s": (
        "a question that waits for its turn must not wait for longer than for its answer"
    ),
    "control_call_s < doubt_s": ("the control plane must answer while the 404 is still doubted"),
    "doubt_s < sdk_submit_s": (
        "the client library above must still be trying when a 404 is no longer doubted"
    ),
    "disk_room_s <= sdk_submit_s": (
        "while a trainer waits for room, its callers must go on sending"
    ),
    "3 × session_heartbeat_s <= session_silent_s": (
        "two heartbeats in a row may be lost before a living run's models are put aside"
    ),
    "3 × ledger_call_s <= ledger_away_s": ("a call that hangs must leave time for others"),
    "orchestrator_lease_s < claim_s": (
        "the samples of a dead orchestrator are free after its lease: its successor must wait"
    ),
    "replica_connect_s < replica_lease_s": (
        "a replica that cannot be reached must be given up before its lease says that it is dead"
    ),
    "replica_lease_s < replica_call_s": (
        "a group may take longer than a lease; the end of the lease says whether to wait for it"
    ),
    "fleet_look_s < fleet_hold_s": (
        "a round that has taken too long must be seen before the next time has passed, too"
    ),
    "vllm_hold_s < replica_call_s": (
        "a question that was held must be answered before its orchestrator asks another replica"
    ),
    "vllm_answer_s < replica_call_s": (
        "a server that hangs must be noticed by its replica before the orchestrator gives it up"
    ),
    "node_refused_s < node_probe_s": (
        "a refusal is an answer: it must be believed before silence is"
    ),
    "node_probe_s < unreached_s": (
        "the other members must have had the time to find rank 0 out of reach, too"
    ),
    "show_s < ending_s": ("the last picture must be shown before a view ends"),
    "show_s < page_beat_s": ("a beat is for a stream that has nothing to show"),
}
"""What must stand in what order, and why."""

RULES = tuple(Rule.parse(text, why) for text, why in _ORDER.items())


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Timeouts(BaseModel):
    """All times in seconds. `check()` must pass before anything is started with them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # ---- the ledger

    ledger_lease_s: Seconds = 10.0
    """How long a record outlives the last sign of life of its owner."""
    lease_keepalive_s: Seconds = 3.0
    """How often an owner renews a lease of ledger_lease_s; other leases in proportion."""
    ledger_call_s: Seconds = 5.0
    """How long one call to the ledger may take before it fails."""
    sqlite_busy_s: Seconds = 10.0
    """How long a transaction on sqlite waits for another process's."""
    sqlite_fold_s: Seconds = 0.05
    """How long folding sqlite's log waits for a slow reader; writers wait meanwhile."""
    watch_backstop_s: Seconds = 1.0
    """How often a watch on sqlite looks by itself, in case it was not woken."""
    etcd_min_lease_s: Seconds = 2.0
    """The shortest lease that etcd grants; lower it only for a ledger that is not etcd."""
    etcd_second_look_s: Seconds = 0.1
    """When etcd is asked again about a lease that it does not know."""
    watch_silence_s: Seconds = 5.0
    """How long a watch may say nothing before its connection is doubted."""
    update_deadline_s: Seconds = 30.0
    """How long an update, or recording a version, goes on reading and writing again."""

    # ---- weights

    consumer_lease_s: Seconds = 10.0
    """How long a consumer of weights holds versions after its last sign of life."""
    fleet_hold_s: Seconds = 30.0
    """How long the replicas of a fleet may take to stop serving."""
    fleet_look_s: Seconds = 2.0
    """How often members of a fleet look whether a time has passed while nothing moves."""
    fleet_retry_s: Seconds = 1.0
    """How long a replica of a fleet waits before it loads again what it could not load."""
    fleet_door_s: Seconds = 0.5
    """How often a caller who waits for a replica of a fleet looks whether it serves."""
    vllm_look_s: Seconds = 0.2
    """How often a vLLM server of ours is looked at: whether it runs, whether it answers."""
    vllm_load_s: Seconds = 300.0
    """How long a vLLM server may take to load a version."""
    marker_poll_s: Seconds = 0.5
    """How often a channel without a ledger is looked at by whoever waits."""
    foreign_lease_s: Seconds = 600.0
    """How long a consumer that only writes marker files counts as alive."""
    foreign_settle_s: Seconds = 10.0
    """How long a foreign trainer may pause while it writes a step again."""
    last_look_s: Seconds = 2.0
    """How long a consumer that gives up waiting looks for what there is instead."""
    room_tell_s: Seconds = 30.0
    """How often a publisher that waits for room in its budget says so."""

    # ---- transfer

    member_lease_s: Seconds = 10.0
    """How long a member of a queue keeps what it claimed after its last sign of life."""
    queue_call_s: Seconds = 60.0
    """How long a call to a queue waits for room or for samples, unless it is told."""
    step_wait_s: Seconds = 600.0
    """How long a rank waits for the batch of a step of training, unless it is told."""
    store_call_s: Seconds = 5.0
    """How long the server of a store (Redis, Mooncake's master) may take to answer."""
    store_deadline_s: Seconds = 30.0
    """How long a store goes on asking for keys that failed or arrived damaged."""
    store_lock_s: Seconds = 5.0
    """How long a process waits for a lock of a store in shared memory."""
    redis_unfinished_s: Seconds = 120.0
    """How long Redis keeps a large value that is being written, after its last part."""
    mooncake_buffer_s: Seconds = 60.0
    """How long a call to Mooncake waits for a buffer that other calls have in use."""
    controller_check_s: Seconds = 2.0
    """How long TransferQueue's controller may say nothing before its port is tried."""

    # ---- rendezvous

    node_lease_s: Seconds = 5.0
    """How long a node of a run holds its rank after its last sign of life."""
    min_node_lease_s: Seconds = 0.5
    """The shortest lease of a node that `launch` takes where the ledger grants any."""
    stand_in_s: Seconds = 0.2
    """How far apart members begin to stand in for a closer: the first is nearly always alone."""
    cycle_look_s: Seconds = 1.0
    """When the closer looks at a cycle again after it tried to change it."""
    node_probe_s: Seconds = 10.0
    """How long a node that does not answer probes at all is asked."""
    node_refused_s: Seconds = 2.0
    """How long a node whose address refuses probes, or answers wrongly, is asked."""
    node_probe_pause_s: Seconds = 0.2
    """How far apart the probes of one node are."""
    unreached_s: Seconds = 60.0
    """How long a node that does not reach rank 0 waits for the end of its cycle."""
    torchrun_poll_s: Seconds = 0.05
    """How often a torchrun that waits for a store looks whether the cycle is over."""
    torchrun_farewell_s: Seconds = 10.0
    """How long a torchrun that ends tries to tell the others."""

    # ---- processes and launch

    process_look_s: Seconds = 0.02
    """How often a process looks at children, files and ports that tell it nothing."""
    log_trim_s: Seconds = 5.0
    """How often the log of a running process is bounded."""
    log_copy_s: Seconds = 0.1
    """How often a node copies what its workers wrote to its own output."""
    stack_quiet_s: Seconds = 0.1
    """How long nothing more is written before a worker's stacks count as complete."""
    server_ready_s: Seconds = 30.0
    """How long a server of our own (etcd, Redis, Mooncake) may take to start."""
    server_ask_s: Seconds = 1.0
    """How long such a server may take to answer whether it is ready."""
    well_s: Seconds = 10.0
    """A process that has lived so long was well: its death counts as a first one."""
    restart_pause_s: Seconds = 5.0
    """The longest wait before a process that keeps ending is started again."""
    server_well_s: Seconds = 300.0
    """As well_s, for a vLLM server, which loads a model."""
    server_pause_s: Seconds = 60.0
    """As restart_pause_s, for a vLLM server."""
    keeper_end_s: Seconds = 5.0
    """How long the keeper of a server may take to remove what is left of it."""
    part_end_s: Seconds = 20.0
    """How long a part of a service or a run may take to end when it is asked to."""
    serve_drain_s: Seconds = 2.0
    """How long requests that are being answered may take when their server ends."""
    fork_imports_s: Seconds = 60.0
    """How long a start waits for a fork server that is still importing."""
    birth_s: Seconds = 10.0
    """How long a fork server may take to fork."""
    adoption_s: Seconds = 5.0
    """How long a forked child waits for its parent to adopt it."""
    health_probe_s: Seconds = 5.0
    """How long a trainer that is starting may take to answer one question."""
    health_check_s: Seconds = 20.0
    """How long one health check of a node may take."""
    health_every_s: Seconds = 60.0
    """How long a node waits between two rounds of health checks."""
    hang_look_s: Seconds = 0.5
    """How often a node looks at its workers' beats."""
    signalled_s: Seconds = 0.5
    """How long after a worker was terminated its node may hear that it is to end, too."""
    report_order_s: Seconds = 0.5
    """How long after a worker's exception it is reported: most have ended by then."""
    refill_s: Seconds = 5.0
    """How long after a start new warm interpreters are made: training has begun by then."""
    warden_silence_s: Seconds = 5.0
    """How long the warden may leave a renewal unanswered."""
    warden_close_s: Seconds = 2.0
    """How long the warden may take to end."""
    worker_kill_s: Seconds = 30.0
    """How long killed workers may take to be gone before a node leaves."""

    # ---- jobs, gateway, client

    host_lease_s: Seconds = 5.0
    """How long trainers count as RUNNING after the last sign of life of their host."""
    submit_wait_s: Seconds = 5.0
    """How long a gateway keeps a submit while its trainer has no route."""
    poll_hold_s: Seconds = 20.0
    """How long a gateway holds a poll that has no answer yet."""
    sdk_poll_s: Seconds = 45.0
    """How long the public SDKs wait for the answer to a poll."""
    sdk_submit_s: Seconds = 300.0
    """How long the public SDKs try to send an operation, all tries together."""
    host_adrift_s: Seconds = 60.0
    """How long a host without a lease lets its trainers run."""
    job_retry_s: Seconds = 0.2
    """How long a host or a gateway waits before it asks a silent ledger again."""
    steward_wait_s: Seconds = 1.0
    """How long a gateway waits for a host to settle a job whose own host is silent."""
    route_confirm_s: Seconds = 0.5
    """How often a gateway reads a job from the ledger while a request waits for it."""
    key_look_s: Seconds = 1.0
    """How often a gateway reads the accounts because of a key that it does not know."""
    body_hold_s: Seconds = 2.0
    """How long a gateway holds a large body back for a trainer that has not asked for it."""
    command_call_s: Seconds = 30.0
    """How long `holdfast jobs` waits for an answer of the control plane."""
    client_call_s: Seconds = 60.0
    """How long the client waits for the answer to one request that is not a poll."""
    client_connect_s: Seconds = 10.0
    """How long the client tries to connect."""
    poll_pace_s: Seconds = 0.2
    """How far apart the client's polls are when the server does not hold them."""
    result_s: Seconds = 3600.0
    """How long the client polls for a result."""
    warm_up_s: Seconds = 120.0
    """How long a warm-up tries to reach a job's trainer, all probes together."""
    probe_s: Seconds = 10.0
    """How long one probe of a warm-up may take."""
    doubt_s: Seconds = 30.0
    """How long a request is sent again after 404s that the control plane contradicts."""
    control_call_s: Seconds = 3.0
    """How long the client waits for the control plane to tell a job's state."""
    control_pace_s: Seconds = 0.1
    """How far apart the client's questions to a control plane are while many doubt."""
    ending_s: Seconds = 2.0
    """How long a stream of the page, or a warm-up that was interrupted, may take to end."""

    # ---- trainer, rollout

    trainer_gap_s: Seconds = 600.0
    """How long a missing number holds up later operations before it is given up."""
    session_silent_s: Seconds = 300.0
    """After how long without a heartbeat a session's models are put aside."""
    disk_room_s: Seconds = 300.0
    """How long a trainer waits for room on a full disk."""
    replica_lease_s: Seconds = 3.0
    """How long a replica of a run is asked for groups after its last sign of life."""
    replica_version_s: Seconds = 30.0
    """How long a replica waits for the version that it is asked to sample with."""

    vllm_hold_s: Seconds = 20.0
    """How long a question is held while a replica's vLLM server starts."""
    vllm_answer_s: Seconds = 100.0
    """How long a replica's vLLM server may take to answer before it is killed."""
    environment_load_s: Seconds = 120.0
    """How long somebody's environment may take to load with its libraries."""
    environment_end_s: Seconds = 1.0
    """How long the process of an environment may take to end by itself."""

    # ---- run, views

    orchestrator_lease_s: Seconds = 2.0
    """How long an orchestrator's samples wait for it after its last sign of life."""
    ledger_away_s: Seconds = 60.0
    """How long an orchestrator or a trainer tries to reach the ledger before it ends."""
    claim_s: Seconds = 60.0
    """How long an orchestrator waits for samples before it claims them anew."""
    session_heartbeat_s: Seconds = 30.0
    """How often an orchestrator tells the trainer that its session lives."""
    replica_call_s: Seconds = 120.0
    """How long an orchestrator waits for one replica to make a group."""
    replica_connect_s: Seconds = 2.0
    """How long an orchestrator tries to connect to a replica."""
    show_s: Seconds = 0.25
    """How often views and waiting commands look for news, and show them."""
    page_beat_s: Seconds = 10.0
    """How often a page's idle stream shows that it lives; a caller may hang as long."""

    # ---- simulation, chaos, check

    chaos_connect_s: Seconds = 10.0
    """How long chaos' proxy tries to reach its server, or a caller its thread."""
    chaos_look_s: Seconds = 0.05
    """How often chaos looks how far a run is, and whether a victim is there."""
    chaos_refill_s: Seconds = 0.01
    """How often a fault that fills a disk takes what others have freed."""
    chaos_alive_s: Seconds = 1.0
    """How often a run under chaos looks whether the process that causes the faults lives."""
    chaos_find_s: Seconds = 20.0
    """How long chaos waits for a victim that is just being started again."""

    @classmethod
    def parse(cls, values: Mapping[str, object]) -> Self:
        """Take values from a configuration; unknown names and bad values are a `Mistake`."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            reasons = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
            raise Mistake("the time-outs are not valid: " + "; ".join(reasons)) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Take the table [timeouts] of a TOML file, and check it. What is wrong is a `Mistake`."""
        try:
            sections = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise Mistake(f"{path} is no readable TOML file: {error}") from None
        others = sections.keys() - {"timeouts"}
        if near := difflib.get_close_matches("timeouts", others, n=1):
            raise Mistake(f"{path}: nothing reads [{near[0]}]: write [timeouts]")
        section = sections.get("timeouts", {})
        if not isinstance(section, dict):
            raise Mistake(f"{path}: timeouts must be a table: write [timeouts]")
        try:
            times = cls.parse(section)
            times.check()
        except Mistake as error:
            raise Mistake(f"{path}: {error}") from None
        return times

    def changed(self, **values: float) -> Self:
        """The same with other values, checked."""
        times = self.parse(self.model_dump() | values)
        times.check()
        return times

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


_FILE = os.environ.get("HOLDFAST_TIMEOUTS")
DEFAULTS = Timeouts.read(Path(_FILE)) if _FILE else Timeouts()


def purposes() -> dict[str, str]:
    """What each time is for: the docstrings below the fields."""
    (model,) = ast.parse(inspect.getsource(Timeouts)).body
    assert isinstance(model, ast.ClassDef)
    return {
        field.target.id: str(doc.value.value)
        for field, doc in itertools.pairwise(model.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
    }


def table() -> str:
    """The tables of docs/TIMEOUTS.md: every time, and every rule."""
    lines = ["| time | default | what it is |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {getattr(Timeouts(), name):g} s | {purpose} |"
        for name, purpose in purposes().items()
    ]
    lines += ["", "| rule | why |", "| --- | --- |"]
    lines += [f"| `{rule}` | {rule.why} |" for rule in RULES]
    return "\n".join(lines) + "\n"
