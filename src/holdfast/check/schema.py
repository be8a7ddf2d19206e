"""The events that the checker reads, as it understands them: this is the schema.

An event is one line of JSON in DIR/events/*.jsonl or DIR/trainers/**/events/*.jsonl; `type` says
what it is. Each class below has the name of its type as its tag, and says *when* it is written:
most are written right after something has become durable, so a process may be killed between the
two, and then there is no event. Fields that are not named here, and types that are not, are
ignored.

Nothing here is shared with the code that writes the events: a checker that shares code with what
it checks shares its mistakes.
"""

import msgspec

__all__ = ["SCHEMA", "Record"]


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="event"):
    """What every event has. Also stands for an event of a type that is not known here."""

    at: float
    """Wall-clock seconds."""
    pid: int
    """Lives of one part append to one file, and have another process id each."""
    seq: int
    """Counts from 1 without gaps, in each life."""
    process: str = ""


class LinesDropped(Record, frozen=True, tag="events.dropped"):
    """There was no room: the events `seq` to `seq + count - 1` are lost."""

    count: int


class LineRefused(Record, frozen=True, tag="events.refused"):
    """An event of this kind could not be written, and stands here without its content."""

    kind: str


# ---- the supervisor ------------------------------------------------------------


class RunBegun(Record, frozen=True, tag="run.begun"):
    """A supervisor begins, before it starts anything. One per life of the supervisor."""

    run: str
    steps: int


class RunEnded(Record, frozen=True, tag="run.ended"):
    """A supervisor ends, after everything that it had started has ended."""

    how: str
    """finished, stopped or failed"""
    steps: int
    content: str
    """The hash of the final weights."""


class PartDied(Record, frozen=True, tag="part.died"):
    """A process of the run has ended before the run."""

    child: int


# ---- the orchestrator ----------------------------------------------------------


class StepCommitted(Record, frozen=True, tag="step.committed"):
    """Right after `commit/N` is durable, and before anything of it is submitted.

    A step that was begun and not done is committed again, in the same words, by the next life.
    So every step of which anything was submitted has such an event.
    """

    step: int
    version: int
    keys: tuple[str, ...]
    dropped: tuple[int, ...]
    numbers: tuple[int, ...]


class StepTrained(Record, frozen=True, tag="step.trained"):
    """After `done/N` is durable. A life that dies between the two leaves none, and no successor
    writes it: a step may be done without it, once per death of an orchestrator."""

    step: int
    version: int
    content: str
    loss: float
    grad_norm: float
    reward: float
    exact: float
    samples: int
    lag: int


class StepAcknowledged(Record, frozen=True, tag="step.acknowledged"):
    """After the samples were acknowledged; also by a life that finds a step done and does this
    once more. A life that dies between the two may leave none."""

    step: int
    keys: tuple[str, ...]


class GroupDropped(Record, frozen=True, tag="group.dropped"):
    """After it is durable that a step goes without a group."""

    step: int
    group: int


class EvalDone(Record, frozen=True, tag="eval.done"):
    """After what a version earned is durable."""

    step: int
    exact: float
    reward: float


# ---- replicas ------------------------------------------------------------------


class RolloutLoaded(Record, frozen=True, tag="rollout.loaded"):
    """A version is in memory and acknowledged, and its pin is still held; nothing was made with it
    in this life before."""

    version: int
    content: str


class RolloutMade(Record, frozen=True, tag="rollout.made"):
    """After the samples are in the queue, and before whoever asked is told. One group at a time.

    The keys of a training group are `STEP-GROUP-INDEX`.
    """

    replica: str
    purpose: str
    step: int
    group: int
    version: int
    keys: tuple[str, ...]
    reward: float
    exact: float
    repeatable: bool = True
    """False where the replica does not promise the same bits, as with vLLM."""


class RolloutSpoilt(Record, frozen=True, tag="rollout.spoilt"):
    """An environment has failed on a group; before whoever asked is told."""

    step: int
    group: int


# ---- trainers ------------------------------------------------------------------


class TrainerSeated(Record, frozen=True, tag="trainer.seated"):
    """After a process has the seat: it acts for the job, and has read nothing yet."""

    job: str
    term: int
    epoch: int


class TrainerApplied(Record, frozen=True, tag="trainer.applied"):
    """An operation was computed, in memory; before its result is posted. `again`: there was a
    result already when this term began, and this was for the effect alone."""

    line: str
    number: int
    kind: str
    identity: str
    term: int
    again: bool


class TrainerAnswered(Record, frozen=True, tag="trainer.answered"):
    """After a result is durable. A death between the two leaves none."""

    line: str
    number: int
    hash: str
    failed: bool


class TrainerQuarantined(Record, frozen=True, tag="trainer.quarantined"):
    """Before an operation that killed its trainers gets a failure as its result."""

    line: str
    number: int


class TrainerSkipped(Record, frozen=True, tag="trainer.skipped"):
    """Before a number that nobody used becomes a tombstone."""

    line: str
    number: int


class TrainerDiffers(Record, frozen=True, tag="trainer.differs"):
    """Carried out again, an operation gave another result."""

    line: str
    number: int


class TrainerCheckpointed(Record, frozen=True, tag="trainer.checkpointed"):
    """After a checkpoint counts. A death between the two leaves none."""

    line: str
    number: int


# ---- jobs, gateway, launch -----------------------------------------------------


class JobTaken(Record, frozen=True, tag="job.taken"):
    """After an incarnation is the job's, and before its process is started."""

    job: str
    epoch: int


class JobStarted(Record, frozen=True, tag="job.started"):
    """After the address of an incarnation is published."""

    job: str
    epoch: int


class JobEnded(Record, frozen=True, tag="job.ended"):
    """After an incarnation has ended, before that is recorded."""

    job: str
    epoch: int
    how: str
    """completed, died, refused, replaced, left"""


class GatewayAccess(Record, frozen=True, tag="gateway.access"):
    """A request was answered; `code` is set when the answer was the gateway's own."""

    account: str
    job: str
    path: str
    status: int
    code: str = ""


class WorkerStarted(Record, frozen=True, tag="launch.worker.started"):
    """A rank of a cycle was started."""

    run: str
    cycle: int
    rank: int
    worker_pid: int


class CrewStarted(Record, frozen=True, tag="launch.crew.started"):
    """All ranks of a cycle on one node were started."""

    run: str
    cycle: int
    node_rank: int
    node_count: int
    world_size: int


# ---- faults --------------------------------------------------------------------


class FaultFired(Record, frozen=True, tag="fault.fired"):
    """A named point is about to act."""


class ChaosStruck(Record, frozen=True, tag="chaos.struck"):
    """A fault was put on a process."""


SCHEMA: dict[str, type[Record]] = {
    str(kind.__struct_config__.tag): kind for kind in Record.__subclasses__()
}
"""Every type that is read, by its name."""
