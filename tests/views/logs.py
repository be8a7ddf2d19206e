"""Writes the event logs of a run as its processes would: real files, through `EventLog`.

A made-up clock, made-up process ids, and the real event classes, so that a change of an
event's fields is felt here.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from holdfast.chaos import runs as chaos
from holdfast.events import Event, EventLog
from holdfast.faults import FaultFired
from holdfast.jobs import host as jobs
from holdfast.launch import crew, warm, workers
from holdfast.rollout import happenings as rollout
from holdfast.run import happenings as run
from holdfast.trainer import journal, runner
from holdfast.views.told import known, parse
from holdfast.weights import publisher

_BLANKS: dict[object, object] = {
    str: "",
    int: 0,
    float: 0.0,
    bool: False,
    tuple[str, ...]: (),
}
BEGAN = 1_800_000_000.0
JOB = "acct/train"


def told(
    kind: str, at: float, process: str, pid: int, seq: int, fields: Mapping[str, Any] = {}
) -> Event:
    """The event that a line gives which says this, and of the rest of its fields nothing."""
    form = known().get(kind, Event)
    line = {name: _BLANKS.get(one) for name, one in get_type_hints(form).items()}
    stamps = {"type": kind, "at": at, "process": process, "pid": pid, "seq": seq}
    event = parse(msgspec.json.encode({**line, **fields, **stamps}))
    assert event is not None
    return event


class Writer:
    """The logs of a run's processes, one file per process life."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at = BEGAN
        self._logs: dict[tuple[str, int], EventLog] = {}
        (folder / "events").mkdir(parents=True, exist_ok=True)

    def say(self, process: str, pid: int, event: Event) -> None:
        """Let a process write an event, now."""
        key = (process, pid)
        if key not in self._logs:
            events = self.folder / "events"
            if "/" in process:
                events = self.folder / "trainers" / JOB / "events"
                events.mkdir(parents=True, exist_ok=True)
            name = process.rpartition(" ")[2]
            log = EventLog(events / f"{name}-{pid}.jsonl", process=process, now=lambda: self.at)
            log._pid = pid  # the only thing about these processes that is not real
            self._logs[key] = log
        self._logs[key].emit(event)

    def close(self) -> None:
        """Close all files."""
        for log in self._logs.values():
            log.close()
        self._logs.clear()


class House:
    """A run on one machine that can be led through steps and faults."""

    def __init__(self, folder: Path, *, steps: int = 30, seed: int = 7) -> None:
        self.write = Writer(folder)
        self.steps = steps
        self.seed = seed
        self.step = 0
        self.epoch = 0
        self.cycle = 0
        self.next_pid = 1000
        self.pids: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        (folder / "run.json").write_text(
            json.dumps({"run": "demo", "seed": seed, "config": {"steps": steps}, "began": BEGAN})
        )

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.write.at += seconds

    def pid(self) -> int:
        """A process id that nobody has had."""
        self.next_pid += 1
        return self.next_pid

    def begin(self, *, resumed: bool = False) -> None:
        """The supervisor starts everything."""
        self.pids["supervisor"] = self.pid()
        self.tell(
            "supervisor",
            run.Begun(run="demo", seed=self.seed, steps=self.steps, resumed=resumed),
        )
        self.lives.clear()
        for part in ("host", "gateway-0", "orchestrator", "replica-0", "replica-1", "chaos"):
            self.start(part)
            self.wait(0.05)
        self.trainer()
        for replica in ("replica-0", "replica-1"):
            self.load(replica)

    def tell(self, part: str, event: Event) -> None:
        """A part writes an event."""
        self.write.say(part, self.pids[part], event)

    def start(self, part: str) -> None:
        """The supervisor starts a part."""
        self.pids[part] = self.pid()
        self.lives[part] = self.lives.get(part, 0) + 1
        started = run.PartStarted(part=part, child=self.pids[part], life=self.lives[part])
        self.tell("supervisor", started)

    def trainer(self) -> None:
        """The host starts a new incarnation of the trainer, with two ranks and a spare."""
        self.epoch += 1
        self.tell("host", jobs.Taken(job=JOB, epoch=self.epoch, host="host"))
        self.ranks()
        address = f"http://127.0.0.1:{9000 + self.epoch}"
        self.tell("host", jobs.Started(job=JOB, epoch=self.epoch, address=address))

    def ranks(self) -> None:
        """The agent starts the ranks of a new cycle."""
        self.cycle += 1
        started = crew.CrewStarted(
            run="demo", cycle=self.cycle, node_rank=0, node_count=1, world_size=2
        )
        self.tell("host", started)
        for rank in range(2):
            self.pids[f"rank{rank}"] = self.pid()
            worker = workers.WorkerStarted(
                run="demo",
                cycle=self.cycle,
                rank=rank,
                slot=rank,
                worker_pid=self.pids[f"rank{rank}"],
                warm=True,
            )
            self.tell("host", worker)
        self.tell("host", warm.WarmReady(child_pid=self.pid(), import_s=1.2, threads=3))
        self.wait(0.3)
        self.rank_says(0, journal.Seated(job=JOB, term=self.cycle, epoch=self.epoch))

    def rank_says(self, rank: int, event: Event) -> None:
        """A rank of the trainer writes an event."""
        pid = self.pids[f"rank{rank}"]
        life = f"{JOB} e{self.epoch}-c{self.cycle}-r{rank}-{pid}"
        self.write.say(life, pid, event)

    def load(self, replica: str) -> None:
        """A replica loads the newest version."""
        loaded = rollout.Loaded(replica=replica, version=self.step, content=_hash(self.step))
        self.tell(replica, loaded)

    def train(self, seconds: float = 0.5) -> None:
        """One whole step."""
        step = self.step + 1
        keys: list[str] = []
        for group in range(4):
            replica = f"replica-{group % 2}"
            made = tuple(f"{step}/{group}/{n}" for n in range(4))
            keys += made
            self.tell(
                replica,
                rollout.Made(
                    replica=replica,
                    purpose="train",
                    step=step,
                    group=group,
                    version=self.step,
                    keys=made,
                    reward=0.5,
                    exact=0.1,
                    seconds=0.05,
                ),
            )
            self.wait(seconds / 8)
        self.tell(
            "orchestrator",
            run.Committed(
                step=step,
                version=self.step,
                keys=tuple(keys),
                dropped=(),
                numbers=(3 * step, 3 * step + 1, 3 * step + 2),
                ours=True,
            ),
        )
        for place, kind in enumerate(("forward_backward", "optim_step", "publish_weights")):
            number = 3 * step + place
            applied = runner.Applied(
                line="m", number=number, kind=kind, identity="i", term=1, again=False
            )
            self.rank_says(0, applied)
            answered = runner.Answered(line="m", number=number, hash="h", failed=False)
            self.rank_says(0, answered)
        self.wait(seconds / 2)
        self.rank_says(
            0, publisher.Published(channel="m.policy", version=step, bytes=1 << 20, seconds=0.02)
        )
        self.step = step
        exact = 1 / (1 + math.exp(-(step - self.steps / 2) / 3))
        self.tell(
            "orchestrator",
            run.Trained(
                step=step,
                version=step,
                content=_hash(step),
                loss=-0.05 * math.cos(step),
                grad_norm=1.0 / step,
                reward=0.2 + 0.8 * exact,
                exact=exact,
                samples=16,
                lag=1,
                seconds=seconds,
            ),
        )
        self.tell("orchestrator", run.Acknowledged(step=step, keys=tuple(keys)))
        for replica in ("replica-0", "replica-1"):
            self.load(replica)
        if step % 5 == 0:
            held = run.Evaluated(step=step, version=step, exact=exact, reward=exact, prompts=64)
            self.tell("orchestrator", held)

    def struck(
        self, target: str, pid: int, action: str = "kill", point: str = "", length: str = ""
    ) -> None:
        """Chaos does something to a process."""
        clause = _clause(target, action, length)
        step = self.step + 1
        struck = chaos.Struck(
            clause=clause, target=target, victim=pid, action=action, step=step, point=point
        )
        self.tell("chaos", struck)

    def kill(self, part: str, back_s: float = 0.3, *, by_chaos: bool = True) -> None:
        """A part is killed, and the supervisor starts it again."""
        if by_chaos:
            self.struck(part, self.pids[part])
        self.wait(0.01)
        died = run.PartDied(part=part, child=self.pids[part], code=-9, lived_s=3.0)
        self.tell("supervisor", died)
        self.wait(back_s)
        self.start(part)
        if part.startswith("replica"):
            self.wait(0.2)
            self.load(part)

    def kill_rank(self, rank: int, back_s: float = 1.5) -> None:
        """A rank is killed; the agent ends the cycle and starts the next one."""
        self.struck(f"trainer.rank{rank}", self.pids[f"rank{rank}"], point="trainer.save.kept")
        fired = FaultFired(point="trainer.save.kept", action="kill", hit=1)
        self.rank_says(rank, fired)
        self.wait(0.1)
        cause = f"rank {rank} was killed by signal 9"
        self.tell("host", crew.CrewEnded(run="demo", cycle=self.cycle, cause=cause))
        self.wait(back_s)
        self.ranks()

    def pause(self, part: str, seconds: float) -> None:
        """A part is stopped for a while."""
        length = f" {seconds:g}s"
        self.struck(part, self.pids[part], "pause", length=length)
        self.wait(seconds)
        clause = _clause(part, "pause", length)
        self.tell("chaos", chaos.Healed(clause=clause, target=part, seconds=seconds))

    def end(self, how: str = "finished") -> None:
        """The supervisor ends the run."""
        self.wait(0.1)
        self.tell("supervisor", run.Ended(how=how, steps=self.step, content=_hash(self.step)))
        self.write.close()
        final = {"weights": _hash(self.step), "steps": self.step, "how": how}
        (self.write.folder / "final.json").write_text(json.dumps(final))


def storm(folder: Path, *, steps: int = 30, end: bool = True) -> House:
    """A run with a fault of every sort."""
    house = House(folder, steps=steps)
    house.begin()
    for step in range(1, steps + 1):
        if step == 5:
            house.kill("replica-0")
        if step == 9:
            house.kill_rank(1)
        if step == 12:
            house.pause("replica-1", 2.0)
        if step == 15:
            house.kill("gateway-0", by_chaos=False)
        if step == 18:
            house.struck("supervisor", house.pids["supervisor"])
            house.wait(2.0)
            house.begin(resumed=True)
        if step == 22:
            house.kill("orchestrator")
            house.kill("host", back_s=0.2)
            house.trainer()
        if step == 25:
            house.tell(
                "replica-1",
                rollout.Spoilt(
                    replica="replica-1", step=25, group=2, reason="<img src=x onerror=alert(1)>"
                ),
            )
        house.train()
    if end:
        house.end()
    return house


def _clause(target: str, action: str, length: str) -> str:
    return f"{target}: {action}{length}@step 3"


def _hash(step: int) -> str:
    return f"{step * 2654435761 % 2**32:08x}" * 8
