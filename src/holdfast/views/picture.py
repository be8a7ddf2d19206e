"""What the logs of a run tell, as one picture: a fold over events. Pure.

Events may come twice, late and a little out of order; those of one process come in order.
Memory is bounded: curves are thinned, lists keep their ends.
"""

import re
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from holdfast.events import Event, Unknown
from holdfast.faults import FaultFired
from holdfast.jobs import host as jobs
from holdfast.rollout import happenings as rollout
from holdfast.run import happenings as run
from holdfast.views.curve import Curve
from holdfast.views.faults import Fault, Faults
from holdfast.views.members import Members, node_name, rank_name
from holdfast.views.points import Points
from holdfast.views.told import kind_of, text_of

if TYPE_CHECKING:  # these need packages of other extras, or take long to import
    from holdfast.chaos import runs as chaos
    from holdfast.contrib.fleets import replica as fleets
    from holdfast.launch import crew, warm, workers
    from holdfast.weights import publisher

__all__ = ["Entry", "Epoch", "Picture", "Version"]

HOST = "host"
"""The part of a run below which its trainers are."""
MAX_ENTRIES = 2000
MAX_NOISE = 500
MAX_VERSIONS = 200
MAX_JOBS = 20
MAX_EPOCHS = 100
MAX_KINDS = 300
MAX_NODES = 100
MAX_QUEUED_STEPS = 1000
_LENGTH = re.compile(r": \w+ ([0-9]+(?:\.[0-9]+)?)s")
NOISE = frozenset(
    {
        "client.probed",
        "client.retried",
        "gateway.access",
        "gateway.unlogged",
        "launch.warm.ready",
        "rollout.made",
        "trainer.answered",
        "trainer.applied",
        "weights.staged",
        "weights.swept",
    }
)
"""Types that come so often that they would push out the others."""


class Entry(msgspec.Struct, frozen=True):
    """A line of the event log that people see."""

    n: int
    at: float
    kind: str
    process: str
    text: str


class Version(msgspec.Struct):
    """A version of the weights that are trained: a step has made it, or a replica serves it."""

    version: int
    published: float | None = None
    content: str = ""
    bytes: int = 0
    acknowledged: list[str] = []
    """Who has ever served it."""


class Epoch(msgspec.Struct):
    """An incarnation of a job's trainer."""

    epoch: int
    taken: float | None = None
    started: float | None = None
    ended: float | None = None
    host: str = ""
    address: str = ""
    how: str = ""
    reason: str = ""


class Crew(msgspec.Struct):
    """The workers of a node in one cycle of one launched run."""

    cycle: tuple[str, int]
    pids: set[int] = set()


def taker_of(kind: str) -> str:
    """The method of a picture that takes events of this type."""
    return "_on_" + kind.replace(".", "_")


class Picture:
    """Everything that the views show. `serial` grows with every event."""

    def __init__(self) -> None:
        self.serial = 0
        self.now = 0.0
        self.run = self.how = self.content = ""
        self.seed = self.step = self.steps = self.resumes = 0
        self.began: float | None = None
        self.ended: float | None = None
        self.train, self.evals, self.depth = Curve(), Curve(), Curve()
        self.members = Members()
        self.faults = Faults()
        self.points = Points()
        self.versions: dict[int, Version] = {}
        self._fresh: dict[int, tuple[float, int]] = {}
        self.jobs: dict[str, dict[int, Epoch]] = {}
        self.counts: Counter[str] = Counter()
        self.made = self.acknowledged = 0
        self._crews: dict[str, Crew] = {}  # the workers that each node has now
        self._nodes: set[str] = set()
        self._queued: dict[int, set[str]] = {}
        self._done: deque[int] = deque(maxlen=MAX_QUEUED_STEPS)
        self._entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._noise: deque[Entry] = deque(maxlen=MAX_NOISE)

    @property
    def queue(self) -> int:
        """Samples that were made and are not consumed."""
        return sum(map(len, self._queued.values()))

    @property
    def version(self) -> int | None:
        """The newest version."""
        return max(self.versions, default=None)

    def take(self, event: Event) -> None:
        """Add one event to the picture; one without a kind only shows that a process lives."""
        kind = kind_of(event)
        if not kind:
            self._seen(event)
            return
        self.serial += 1
        heard, self.now = self.now, max(self.now, event.at)
        listed = kind in self.counts or len(self.counts) < MAX_KINDS
        self.counts[kind if listed else "other"] += 1
        if isinstance(event, run.Begun):
            self._begun(event, heard)
        self._seen(event)
        taker = getattr(self, taker_of(kind), None)
        if taker is not None and not isinstance(event, Unknown):
            taker(event)
        who = self.members.name_of(event.pid) or event.process
        entry = Entry(self.serial, event.at, kind[:80], who[:100], text_of(event))
        (self._noise if kind in NOISE else self._entries).append(entry)

    def _seen(self, event: Event) -> None:
        process = event.process
        agent = kind_of(event).startswith("launch.") and not self.members.name_of(event.pid)
        if agent and len(self._nodes) < MAX_NODES:
            self._nodes.add(process)
        if process in self._nodes:
            process = node_name(process)
        if again := self.members.seen(process, event.pid, event.at):
            self.faults.again(again, event.at)

    def entries(self, after: int = 0) -> list[Entry]:
        """The last events, in the order in which they were taken."""
        both = [entry for log in (self._entries, self._noise) for entry in log if entry.n > after]
        return sorted(both, key=lambda entry: entry.n)

    def serving(self) -> dict[str, int]:
        """Which member serves which version."""
        members = self.members.sorted()
        return {member.name: member.version for member in members if member.version is not None}

    def spare_nodes(self) -> list[str]:
        """Nodes that live and have no workers."""
        names = [node_name(node) for node in sorted(self._nodes - self._crews.keys())]
        known = self.members.known
        return [name for name in names if name in known and known[name].state == "up"]

    # What each event changes: the one that it is called after (`taker_of`).

    def _begun(self, event: run.Begun, heard: float) -> None:
        before = self.members.known.get("supervisor")
        if before is not None and before.lives[-1].pid != event.pid and self.ended is None:
            # The last that was heard of anybody: everything died with the supervisor.
            self.members.end_all(heard, "lost", but=event.pid)
            self._died(heard, "supervisor", before.lives[-1].pid)
            self.faults.again("supervisor", event.at)
            self._crews.clear()
        self.resumes += self.began is not None
        self.run, self.seed = event.run, event.seed
        self.steps = max(self.steps, event.steps)
        self.began = event.at if self.began is None else min(self.began, event.at)
        self.ended, self.how = None, ""
        self.members.start("supervisor", event.pid, event.at)

    def _on_run_ended(self, event: run.Ended) -> None:
        self.ended, self.how, self.content = event.at, event.how, event.content
        self.step = max(self.step, event.steps)
        self.members.end_all(event.at, "ended")

    def _on_part_started(self, event: run.PartStarted) -> None:
        if self.members.start(event.part, event.child, event.at) is not None:
            self.faults.again(event.part, event.at)

    def _on_part_died(self, event: run.PartDied) -> None:
        self.members.died(event.part, event.child, event.at, event.code)
        if event.part == HOST:
            self._crews.clear()
            self.members.end_trainer(event.at, "stopped")
        self._died(event.at, event.part, event.child, event.code)

    def _died(self, at: float, part: str, pid: int, code: int | None = None) -> None:
        """A part is dead that should not be."""
        step = self.step + 1
        self.faults.add(Fault(at, "died", part, pid, member=part, code=code, step=step))

    def _on_step_trained(self, event: run.Trained) -> None:
        if event.step > self.step:
            self.faults.stepped(event.at)
            self.step = event.step
        numbers = event.reward, event.exact, event.loss, event.grad_norm
        self.train.add(event.step, *numbers, event.lag, event.seconds)
        self._version(event.version).content = event.content

    def _on_eval_done(self, event: run.Evaluated) -> None:
        self.evals.add(event.step, event.exact, event.reward)

    def _on_rollout_made(self, event: rollout.Made) -> None:
        if event.purpose != "train" or event.step in self._done:
            return
        keys = self._queued.setdefault(event.step, set())
        before = len(keys)
        keys.update(event.keys)
        self.made += len(keys) - before
        if len(self._queued) > MAX_QUEUED_STEPS:
            del self._queued[min(self._queued)]
        self.depth.add(event.at, self.queue)

    def _on_step_acknowledged(self, event: run.Acknowledged) -> None:
        if event.step in self._done:
            return
        self._done.append(event.step)
        self._queued.pop(event.step, None)
        self.acknowledged += len(event.keys)
        self.depth.add(event.at, self.queue)

    def _on_weights_published(self, event: "publisher.Published") -> None:
        """Checkpoints are published too: it is the run's version once a step says so."""
        self._fresh[event.version] = (event.at, event.bytes)
        if len(self._fresh) > MAX_VERSIONS:
            del self._fresh[next(iter(self._fresh))]

    def _on_rollout_loaded(self, event: "rollout.Loaded | fleets.Switched") -> None:
        name = self.members.name_of(event.pid) or event.replica
        version = self._version(event.version)
        if isinstance(event, rollout.Loaded):
            version.content = event.content or version.content
        if name not in version.acknowledged and len(version.acknowledged) < 100:
            version.acknowledged.append(name)
        if (member := self.members.known.get(name)) is not None:
            member.version = event.version

    _on_weights_switched = _on_rollout_loaded

    def _on_weights_withdrawn(self, event: "fleets.Withdrawn") -> None:
        if (member := self.members.known.get(self.members.name_of(event.pid))) is not None:
            member.version = None

    def _version(self, number: int) -> Version:
        version = self.versions.setdefault(number, Version(number))
        if version.published is None and number in self._fresh:
            version.published, version.bytes = self._fresh.pop(number)
        if len(self.versions) > MAX_VERSIONS:
            del self.versions[min(self.versions)]
        return version

    def _on_job_taken(self, event: jobs.Taken) -> None:
        epoch = self._epoch(event)
        epoch.taken, epoch.host = event.at, event.host

    def _on_job_started(self, event: jobs.Started) -> None:
        epoch = self._epoch(event)
        epoch.started, epoch.address = event.at, event.address

    def _on_job_ended(self, event: jobs.Ended) -> None:
        epoch = self._epoch(event)
        epoch.ended, epoch.how, epoch.reason = event.at, event.how, event.reason[:300]
        if event.epoch == max(self.jobs[event.job]):
            as_it_should = event.how in ("completed", "left")
            self._crews.clear()
            self.members.end_trainer(event.at, "ended" if as_it_should else "stopped")
        if event.how == "died" and self.ended is None:
            self.faults.consequence(Fault(event.at, "died", "trainer", step=self.step + 1))

    def _epoch(self, event: jobs.Taken | jobs.Started | jobs.Ended) -> Epoch:
        epochs = self.jobs.setdefault(event.job, {})
        epoch = epochs.setdefault(event.epoch, Epoch(event.epoch))
        if len(epochs) > MAX_EPOCHS:
            del epochs[min(epochs)]
        if len(self.jobs) > MAX_JOBS:
            del self.jobs[next(iter(self.jobs))]
        return epoch

    def _on_launch_worker_started(self, event: "workers.WorkerStarted") -> None:
        name, cycle = rank_name(event.rank), (event.run, event.cycle)
        heard = min(event.at, self.members.last_of_ranks())
        for node in [node for node, crew in self._crews.items() if crew.cycle != cycle]:
            self._crew_gone(node, heard, "stopped")
        if self.members.start(name, event.worker_pid, event.at) is not None:
            self._crews.setdefault(event.process, Crew(cycle)).pids.add(event.worker_pid)
            self.faults.again(name, event.at)

    def _on_launch_crew_ended(self, event: "crew.CrewEnded") -> None:
        self._crew_gone(event.process, event.at, "stopped" if event.cause else "ended")
        if event.cause:
            self.faults.consequence(Fault(event.at, "died", "trainer", step=self.step + 1))

    def _crew_gone(self, node: str, at: float, how: str) -> None:
        crew = self._crews.pop(node, None)
        for pid in crew.pids if crew is not None else ():
            self.members.end(pid, at, how)

    def _on_launch_warm_ready(self, event: "warm.WarmReady") -> None:
        if not self.members.name_of(event.child_pid) and len(self.members.spares) < 1000:
            self.members.spares[event.child_pid] = event.pid

    def _on_launch_warm_lost(self, event: "warm.WarmLost") -> None:
        self.members.spares.pop(event.child_pid, None)

    def _on_chaos_planned(self, event: "chaos.Planned") -> None:
        self.points.arm(event.points)

    def _on_chaos_struck(self, event: "chaos.Struck") -> None:
        member = self.members.name_of(event.victim)
        fault = Fault(event.at, event.action, event.target, event.victim, event.clause)
        fault.step, fault.point, fault.by = event.step, event.point, "chaos"
        fault.member = member or self.members.find(event.target)
        length = _LENGTH.search(event.clause)
        fault.length_s = float(length[1]) if length else None
        self.faults.add(fault)
        self.points.hit(event.clause.rpartition("@")[2])
        if event.action == "kill" and member:
            self.members.end(event.victim, event.at, "died", -9)

    def _on_chaos_healed(self, event: "chaos.Healed") -> None:
        self.faults.heal(event.clause, event.target, event.seconds)

    def _on_fault_fired(self, event: FaultFired) -> None:
        member = self.members.name_of(event.pid)
        fault = Fault(event.at, event.action, member or event.process, event.pid)
        fault.step, fault.point = self.step + 1, event.point
        fault.by, fault.member = "point", member
        self.faults.add(fault)
        self.points.hit(event.point + (f" {event.hit}" if event.hit > 1 else ""))
