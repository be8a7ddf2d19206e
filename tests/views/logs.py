"""Writes the event logs of a run as its processes would: real files, through `EventLog`.

A made-up clock, made-up process ids, and the real event classes, so that a change of an
event's fields is felt here.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

import holdfast.launch.crew
import holdfast.trainer.journal
import holdfast.trainer.runner  # noqa: F401 -- for their events
from holdfast.events import Event, EventLog
from holdfast.views.picture import Picture
from holdfast.views.told import known, parse

_BLANKS: dict[object, object] = {
    str: "",
    int: 0,
    float: 0.0,
    bool: False,
    tuple[str, ...]: (),
    tuple[int, ...]: (),
}
BEGAN = 1_800_000_000.0
JOB = "acct/train"
REPLICAS = ("replica-0", "replica-1")


def told(kind: str, at: float, process: str, pid: int, /, **fields: Any) -> Event:
    """The event that a line gives which says this, and of the rest of its fields nothing."""
    form = known().get(kind, Event)
    line = {name: _BLANKS.get(one) for name, one in get_type_hints(form).items()}
    stamps = {"type": kind, "at": at, "process": process, "pid": pid, "seq": 1}
    event = parse(msgspec.json.encode({**line, **fields, **stamps}))
    assert event is not None
    return event


def picture_of(*events: Event) -> Picture:
    """What these events give."""
    picture = Picture()
    for event in events:
        picture.take(event)
    return picture


def data_of(report: Path) -> dict[str, Any]:
    """What a report carries."""
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', report.read_text(), re.DOTALL
    )
    assert found is not None
    return dict(json.loads(found[1]))


class House:
    """A run on one machine that can be led through steps and faults: a log per process life."""

    def __init__(self, folder: Path, *, steps: int = 30) -> None:
        self.folder = folder
        self.at = BEGAN
        self.steps = steps
        self.step = self.epoch = self.cycle = 0
        self.next_pid = 1000
        self.pids: dict[str, int] = {}
        self.lives: dict[str, int] = {}
        self._logs: dict[tuple[str, int], EventLog] = {}
        (folder / "events").mkdir(parents=True, exist_ok=True)
        about = {"run": "demo", "seed": 7, "config": {"steps": steps}, "began": BEGAN}
        (folder / "run.json").write_text(json.dumps(about))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.at += seconds

    def pid(self) -> int:
        """A process id that nobody has had."""
        self.next_pid += 1
        return self.next_pid

    def tell(self, part: str, kind: str, /, **fields: Any) -> None:
        """A part writes an event, now."""
        self._say(part, self.folder / "events", self.pids[part], kind, fields)

    def rank_says(self, rank: int, kind: str, /, **fields: Any) -> None:
        """A rank of the trainer writes an event."""
        pid = self.pids[f"rank{rank}"]
        events = self.folder / "trainers" / JOB / "events"
        events.mkdir(parents=True, exist_ok=True)
        life = f"{JOB} e{self.epoch}-c{self.cycle}-r{rank}-{pid}"
        self._say(life, events, pid, kind, fields)

    def _say(
        self, process: str, events: Path, pid: int, kind: str, fields: Mapping[str, Any]
    ) -> None:
        if (process, pid) not in self._logs:
            path = events / f"{process.rpartition(' ')[2]}-{pid}.jsonl"
            log = EventLog(path, process=process, now=lambda: self.at)
            log._pid = pid  # the only thing about these processes that is not real
            self._logs[process, pid] = log
        assert fields.keys() <= get_type_hints(known()[kind]).keys()
        self._logs[process, pid].emit(told(kind, self.at, process, pid, **fields))

    def begin(self, *, resumed: bool = False) -> None:
        """The supervisor starts everything."""
        self.pids["supervisor"] = self.pid()
        self.tell("supervisor", "run.begun", run="demo", seed=7, steps=self.steps, resumed=resumed)
        self.lives.clear()
        for part in ("host", "gateway-0", "orchestrator", *REPLICAS, "chaos"):
            self.start(part)
            self.wait(0.05)
        self.trainer()
        self.load(*REPLICAS)

    def start(self, part: str) -> None:
        """The supervisor starts a part."""
        self.pids[part] = self.pid()
        self.lives[part] = self.lives.get(part, 0) + 1
        about = {"part": part, "child": self.pids[part], "life": self.lives[part]}
        self.tell("supervisor", "part.started", **about)

    def trainer(self) -> None:
        """The host starts a new incarnation of the trainer, with two ranks and a spare."""
        self.epoch += 1
        self.tell("host", "job.taken", job=JOB, epoch=self.epoch, host="host")
        self.ranks()
        address = f"http://127.0.0.1:{9000 + self.epoch}"
        self.tell("host", "job.started", job=JOB, epoch=self.epoch, address=address)

    def ranks(self) -> None:
        """The agent starts the ranks of a new cycle."""
        self.cycle += 1
        self.tell("host", "launch.crew.started", run="demo", cycle=self.cycle, world_size=2)
        for rank in range(2):
            pid = self.pids[f"rank{rank}"] = self.pid()
            about = {"run": "demo", "cycle": self.cycle, "rank": rank, "worker_pid": pid}
            self.tell("host", "launch.worker.started", **about)
        self.tell("host", "launch.warm.ready", child_pid=self.pid())
        self.wait(0.3)
        self.rank_says(0, "trainer.seated", job=JOB, term=self.cycle, epoch=self.epoch)

    def load(self, *replicas: str) -> None:
        """Replicas load the newest version."""
        for replica in replicas:
            about = {"replica": replica, "version": self.step, "content": _hash(self.step)}
            self.tell(replica, "rollout.loaded", **about)

    def train(self, seconds: float = 0.5) -> None:
        """One whole step."""
        step = self.step + 1
        keys: list[str] = []
        for group in range(4):
            made = [f"{step}/{group}/{n}" for n in range(4)]
            keys += made
            about = {"purpose": "train", "step": step, "group": group, "keys": made}
            self.tell(REPLICAS[group % 2], "rollout.made", **about, version=self.step)
            self.wait(seconds / 8)
        self.tell("orchestrator", "step.committed", step=step, version=self.step, keys=keys)
        for number in range(3 * step, 3 * step + 3):
            self.rank_says(0, "trainer.applied", line="m", number=number, term=1)
            self.rank_says(0, "trainer.answered", line="m", number=number)
        self.wait(seconds / 2)
        self.rank_says(0, "weights.published", channel="m.policy", version=step, bytes=1 << 20)
        self.step = step
        exact = 1 / (1 + math.exp(-(step - self.steps / 2) / 3))
        self.tell(
            "orchestrator",
            "step.trained",
            step=step,
            version=step,
            content=_hash(step),
            loss=-0.05 * math.cos(step),
            reward=0.2 + 0.8 * exact,
            exact=exact,
            seconds=seconds,
        )
        self.tell("orchestrator", "step.acknowledged", step=step, keys=keys)
        self.load(*REPLICAS)
        if step % 5 == 0:
            earned = {"exact": exact, "reward": exact, "prompts": 64}
            self.tell("orchestrator", "eval.done", step=step, version=step, **earned)

    def struck(
        self, target: str, pid: int, action: str = "kill", length: str = "", point: str = ""
    ) -> str:
        """Chaos does something to a process; returns the clause that says so."""
        clause = f"{target}: {action}{length}@step 3"
        what = {"target": target, "victim": pid, "action": action, "point": point}
        self.tell("chaos", "chaos.struck", clause=clause, **what, step=self.step + 1)
        return clause

    def kill(self, part: str, back_s: float = 0.3, *, by_chaos: bool = True) -> None:
        """A part is killed, and the supervisor starts it again."""
        if by_chaos:
            self.struck(part, self.pids[part])
        self.wait(0.01)
        self.tell("supervisor", "part.died", part=part, child=self.pids[part], code=-9)
        self.wait(back_s)
        self.start(part)
        if part.startswith("replica"):
            self.wait(0.2)
            self.load(part)

    def kill_rank(self, rank: int) -> None:
        """A rank is killed; the agent ends the cycle and starts the next one."""
        point = "trainer.save.kept"
        self.struck(f"trainer.rank{rank}", self.pids[f"rank{rank}"], point=point)
        self.rank_says(rank, "fault.fired", point=point, action="kill", hit=1)
        self.wait(0.1)
        cause = f"rank {rank} was killed by signal 9"
        self.tell("host", "launch.crew.ended", run="demo", cycle=self.cycle, cause=cause)
        self.wait(1.5)
        self.ranks()

    def pause(self, part: str, seconds: float) -> None:
        """A part is stopped for a while."""
        clause = self.struck(part, self.pids[part], "pause", f" {seconds:g}s")
        self.wait(seconds)
        self.tell("chaos", "chaos.healed", clause=clause, target=part, seconds=seconds)

    def end(self) -> None:
        """The supervisor ends the run."""
        self.wait(0.1)
        content = _hash(self.step)
        self.tell("supervisor", "run.ended", how="finished", steps=self.step, content=content)
        for log in self._logs.values():
            log.close()
        final = {"weights": content, "steps": self.step, "how": "finished"}
        (self.folder / "final.json").write_text(json.dumps(final))


def storm(folder: Path, *, steps: int = 30, end: bool = True) -> House:
    """A run with a fault of every sort."""
    house = House(folder, steps=steps)
    house.begin()
    for step in range(1, steps + 1):
        match step:
            case 5:
                house.kill("replica-0")
            case 9:
                house.kill_rank(1)
            case 12:
                house.pause("replica-1", 2.0)
            case 15:
                house.kill("gateway-0", by_chaos=False)
            case 18:
                house.struck("supervisor", house.pids["supervisor"])
                house.wait(2.0)
                house.begin(resumed=True)
            case 22:
                house.kill("orchestrator")
                house.kill("host", back_s=0.2)
                house.trainer()
            case 25:
                reason = "<img src=x onerror=alert(1)>"
                house.tell("replica-1", "rollout.spoilt", step=25, group=2, reason=reason)
        house.train()
    if end:
        house.end()
    return house


def _hash(step: int) -> str:
    return f"{step * 2654435761 % 2**32:08x}" * 8
