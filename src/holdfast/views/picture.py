"""What the logs of a run tell, as one picture: a fold over events. Pure.

Events may come twice, late and a little out of order; those of one process come in order.
Memory is bounded: curves are thinned, lists keep their ends.
"""

import re
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from holdfast.events import Event
from holdfast.views import told as forms
from holdfast.views.curve import Curve
from holdfast.views.faults import Fault, Faults
from holdfast.views.members import Members, node_name, rank_name
from holdfast.views.points import Points
from holdfast.views.told import Told, told

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

    def take(self, event: Told | Event) -> None:
        """Add one event to the picture; one without a kind only shows that a process lives."""
        event = told(event) if isinstance(event, Event) else event
        if not event.kind:
            self._seen(event)
            return
        self.serial += 1
        heard, self.now = self.now, max(self.now, event.at)
        known = event.kind in self.counts or len(self.counts) < MAX_KINDS
        self.counts[event.kind if known else "other"] += 1
        if event.kind == "run.begun" and (begun := event.as_(forms.Begun)) is not None:
            self._begun(event, begun, heard)
        self._seen(event)
        form, take = self._takers.get(event.kind, (None, None))
        if form is not None and take is not None and (fields := event.as_(form)) is not None:
            take(self, event, fields)
        who = self.members.name_of(event.pid) or event.process
        entry = Entry(self.serial, event.at, event.kind[:80], who[:100], event.text())
        (self._noise if event.kind in NOISE else self._entries).append(entry)

    def _seen(self, event: Told) -> None:
        process = event.process
        agent = event.kind.startswith("launch.") and not self.members.name_of(event.pid)
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

    # What each event changes.

    def _begun(self, event: Told, fields: forms.Begun, heard: float) -> None:
        before = self.members.known.get("supervisor")
        if before is not None and before.lives[-1].pid != event.pid and self.ended is None:
            # The last that was heard of anybody: everything died with the supervisor.
            self.members.end_all(heard, "lost", but=event.pid)
            fault = Fault(heard, "died", "supervisor", before.lives[-1].pid)
            fault.member, fault.step = "supervisor", self.step + 1
            self.faults.add(fault)
            self.faults.again("supervisor", event.at)
            self._crews.clear()
        self.resumes += self.began is not None
        self.run, self.seed = fields.run, fields.seed
        self.steps = max(self.steps, fields.steps)
        self.began = event.at if self.began is None else min(self.began, event.at)
        self.ended, self.how = None, ""
        self.members.start("supervisor", event.pid, event.at)

    def _ended(self, event: Told, fields: forms.Ended) -> None:
        self.ended, self.how, self.content = event.at, fields.how, fields.content
        self.step = max(self.step, fields.steps)
        self.members.end_all(event.at, "ended")

    def _part_started(self, event: Told, fields: forms.Part) -> None:
        if self.members.start(fields.part, fields.child, event.at) is not None:
            self.faults.again(fields.part, event.at)

    def _part_died(self, event: Told, fields: forms.Part) -> None:
        self.members.died(fields.part, fields.child, event.at, fields.code)
        if fields.part == HOST:
            self._crews.clear()
            self.members.end_trainer(event.at, "stopped")
        fault = Fault(event.at, "died", fields.part, fields.child, member=fields.part)
        fault.code, fault.step = fields.code, self.step + 1
        self.faults.add(fault)

    def _trained(self, event: Told, fields: forms.Trained) -> None:
        if fields.step > self.step:
            self.faults.stepped(event.at)
            self.step = fields.step
        self.train.add(fields.step, *fields.numbers(), fields.lag, fields.seconds)
        self._version(fields.version).content = fields.content

    def _evaluated(self, _: Told, fields: forms.Evaluated) -> None:
        self.evals.add(fields.step, *fields.numbers())

    def _made(self, event: Told, fields: forms.Made) -> None:
        if fields.purpose != "train" or fields.step in self._done:
            return
        keys = self._queued.setdefault(fields.step, set())
        before = len(keys)
        keys.update(fields.keys)
        self.made += len(keys) - before
        if len(self._queued) > MAX_QUEUED_STEPS:
            del self._queued[min(self._queued)]
        self.depth.add(event.at, self.queue)

    def _acknowledged(self, event: Told, fields: forms.Made) -> None:
        if fields.step in self._done:
            return
        self._done.append(fields.step)
        self._queued.pop(fields.step, None)
        self.acknowledged += len(fields.keys)
        self.depth.add(event.at, self.queue)

    def _published(self, event: Told, fields: forms.Version) -> None:
        """Checkpoints are published too: it is the run's version once a step says so."""
        self._fresh[fields.version] = (event.at, fields.bytes)
        if len(self._fresh) > MAX_VERSIONS:
            del self._fresh[next(iter(self._fresh))]

    def _loaded(self, event: Told, fields: forms.Version) -> None:
        name = self.members.name_of(event.pid) or fields.replica
        version = self._version(fields.version)
        version.content = fields.content or version.content
        if name not in version.acknowledged and len(version.acknowledged) < 100:
            version.acknowledged.append(name)
        if (member := self.members.known.get(name)) is not None:
            member.version = fields.version

    def _withdrawn(self, event: Told, _: forms.Version) -> None:
        if (member := self.members.known.get(self.members.name_of(event.pid))) is not None:
            member.version = None

    def _version(self, number: int) -> Version:
        version = self.versions.setdefault(number, Version(number))
        if version.published is None and number in self._fresh:
            version.published, version.bytes = self._fresh.pop(number)
        if len(self.versions) > MAX_VERSIONS:
            del self.versions[min(self.versions)]
        return version

    def _taken(self, event: Told, fields: forms.Job) -> None:
        epoch = self._epoch(fields)
        epoch.taken, epoch.host = event.at, fields.host

    def _started(self, event: Told, fields: forms.Job) -> None:
        epoch = self._epoch(fields)
        epoch.started, epoch.address = event.at, fields.address

    def _job_ended(self, event: Told, fields: forms.Job) -> None:
        epoch = self._epoch(fields)
        epoch.ended, epoch.how, epoch.reason = event.at, fields.how, fields.reason[:300]
        if fields.epoch == max(self.jobs[fields.job]):
            as_it_should = fields.how in ("completed", "left")
            self._crews.clear()
            self.members.end_trainer(event.at, "ended" if as_it_should else "stopped")
        if fields.how == "died" and self.ended is None:
            fault = Fault(event.at, "died", "trainer", step=self.step + 1)
            self.faults.consequence(fault)

    def _epoch(self, fields: forms.Job) -> Epoch:
        epochs = self.jobs.setdefault(fields.job, {})
        epoch = epochs.setdefault(fields.epoch, Epoch(fields.epoch))
        if len(epochs) > MAX_EPOCHS:
            del epochs[min(epochs)]
        if len(self.jobs) > MAX_JOBS:
            del self.jobs[next(iter(self.jobs))]
        return epoch

    def _worker(self, event: Told, fields: forms.Worker) -> None:
        name, cycle = rank_name(fields.rank), (fields.run, fields.cycle)
        heard = min(event.at, self.members.last_of_ranks())
        for node in [node for node, crew in self._crews.items() if crew.cycle != cycle]:
            self._crew_gone(node, heard, "stopped")
        if self.members.start(name, fields.worker_pid, event.at) is not None:
            self._crews.setdefault(event.process, Crew(cycle)).pids.add(fields.worker_pid)
            self.faults.again(name, event.at)

    def _crew_ended(self, event: Told, fields: forms.Worker) -> None:
        self._crew_gone(event.process, event.at, "stopped" if fields.cause else "ended")
        if fields.cause:
            fault = Fault(event.at, "died", "trainer", step=self.step + 1)
            self.faults.consequence(fault)

    def _crew_gone(self, node: str, at: float, how: str) -> None:
        crew = self._crews.pop(node, None)
        for pid in crew.pids if crew is not None else ():
            self.members.end(pid, at, how)

    def _warm_ready(self, event: Told, fields: forms.Warm) -> None:
        if not self.members.name_of(fields.child_pid) and len(self.members.spares) < 1000:
            self.members.spares[fields.child_pid] = event.pid

    def _warm_lost(self, _: Told, fields: forms.Warm) -> None:
        self.members.spares.pop(fields.child_pid, None)

    def _planned(self, _: Told, fields: forms.Planned) -> None:
        self.points.arm(fields.points)

    def _struck(self, event: Told, fields: forms.Struck) -> None:
        member = self.members.name_of(fields.victim)
        fault = Fault(event.at, fields.action, fields.target, fields.victim, fields.clause)
        fault.step, fault.point, fault.by = fields.step, fields.point, "chaos"
        fault.member = member or self.members.find(fields.target)
        length = _LENGTH.search(fields.clause)
        fault.length_s = float(length[1]) if length else None
        self.faults.add(fault)
        self.points.hit(fields.clause.rpartition("@")[2])
        if fields.action == "kill" and member:
            self.members.end(fields.victim, event.at, "died", -9)

    def _healed(self, _: Told, fields: forms.Struck) -> None:
        self.faults.heal(fields.clause, fields.target, fields.seconds)

    def _fired(self, event: Told, fields: forms.Struck) -> None:
        member = self.members.name_of(event.pid)
        fault = Fault(event.at, fields.action, member or event.process, event.pid)
        fault.step, fault.point = self.step + 1, fields.point
        fault.by, fault.member = "point", member
        self.faults.add(fault)
        self.points.hit(fields.point + (f" {fields.hit}" if fields.hit > 1 else ""))

    _takers: ClassVar[dict[str, tuple[Any, Callable[..., None]]]] = {
        "run.ended": (forms.Ended, _ended),
        "part.started": (forms.Part, _part_started),
        "part.died": (forms.Part, _part_died),
        "step.trained": (forms.Trained, _trained),
        "step.acknowledged": (forms.Made, _acknowledged),
        "eval.done": (forms.Evaluated, _evaluated),
        "rollout.made": (forms.Made, _made),
        "rollout.loaded": (forms.Version, _loaded),
        "weights.switched": (forms.Version, _loaded),
        "weights.withdrawn": (forms.Version, _withdrawn),
        "weights.published": (forms.Version, _published),
        "job.taken": (forms.Job, _taken),
        "job.started": (forms.Job, _started),
        "job.ended": (forms.Job, _job_ended),
        "launch.worker.started": (forms.Worker, _worker),
        "launch.crew.ended": (forms.Worker, _crew_ended),
        "launch.warm.ready": (forms.Warm, _warm_ready),
        "launch.warm.lost": (forms.Warm, _warm_lost),
        "chaos.planned": (forms.Planned, _planned),
        "chaos.struck": (forms.Struck, _struck),
        "chaos.healed": (forms.Struck, _healed),
        "fault.fired": (forms.Struck, _fired),
    }
