"""Writes the logs of runs that never were: a calm one, and one in which everything died once.

Events are plain dictionaries, so that a test can take them apart. `seq` is counted when they are
written, per life.
"""

import json
from pathlib import Path
from typing import Any

STEPS, GROUPS, SAMPLES, LAG = 4, 3, 2, 1
LINE = "abc-0"
JOB = "local/trainer"
SUPERVISOR, HOST, ORCHESTRATOR = (
    f"events/{name}.jsonl" for name in ("supervisor", "host", "orchestrator")
)
FIRST = "trainers/local/trainer/events/e1-c1-r0-100.jsonl"
SECOND = "trainers/local/trainer/events/e1-c2-r0-200.jsonl"
THIRD = "trainers/local/trainer/events/e2-c1-r0-300.jsonl"
FOURTH = "trainers/local/trainer/events/e2-c2-r0-400.jsonl"

Event = dict[str, Any]


class Logs:
    """The events of a run by file, and metrics.jsonl."""

    def __init__(self) -> None:
        self.files: dict[str, list[Event]] = {}
        self.metrics: list[Event] = []
        self.at = 1_700_000_000.0
        self.pids: dict[str, int] = {}
        self.loaded: set[tuple[str, int, int]] = set()

    def say(self, file: str, kind: str, /, **fields: Any) -> Event:
        """Let the process that writes this file tell something, now."""
        self.at += 0.01
        pid = self.pids.setdefault(file, 10 + len(self.pids))
        event = {"type": kind, **fields, "at": self.at, "process": file, "pid": pid}
        self.files.setdefault(file, []).append(event)
        return event

    def dies(self, file: str) -> None:
        """Let the process die and be started again."""
        part = Path(file).stem
        self.say(SUPERVISOR, "part.died", part=part, child=self.pids[file], code=-9, lived_s=1.0)
        self.pids[file] += 1000

    def all(self, kind: str, /, **fields: Any) -> list[Event]:
        """The events of a type with these values."""
        return [
            event
            for events in self.files.values()
            for event in events
            if event["type"] == kind and all(event[name] == fields[name] for name in fields)
        ]

    def one(self, kind: str, /, **fields: Any) -> Event:
        """The first of them."""
        return self.all(kind, **fields)[0]

    def remove(self, *events: Event) -> None:
        """Take events out."""
        gone = set(map(id, events))
        for all in self.files.values():
            all[:] = [one for one in all if id(one) not in gone]

    def after(self, event: Event, /, **fields: Any) -> Event:
        """Put a copy of an event, with other values, right behind it."""
        new = {**event, **fields}
        for events in self.files.values():
            for at, one in enumerate(events):
                if one is event:
                    events.insert(at + 1, new)
                    return new
        raise AssertionError

    def write(self, folder: Path) -> Path:
        """Write everything into a folder."""
        for name, events in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pid, seq, lines = 0, 0, []
            for event in events:
                seq = seq + 1 if event["pid"] == pid else 1
                pid = event["pid"]
                lines.append(json.dumps({**event, "seq": seq}, separators=(",", ":")) + "\n")
            path.write_text("".join(lines))
        text = "".join(json.dumps(line) + "\n" for line in self.metrics)
        (folder / "metrics.jsonl").write_text(text)
        return folder

    # ---- what parts tell ---------------------------------------------------------

    def taken(self, epoch: int) -> None:
        self.say(HOST, "job.taken", job=JOB, epoch=epoch, host="host")

    def seated(self, file: str, term: int, epoch: int) -> None:
        self.say(file, "trainer.seated", job=f"/runs/r/trainer/{JOB}/", term=term, epoch=epoch)
        self.say(HOST, "job.started", job=JOB, epoch=epoch, address="127.0.0.1:1")

    def applies(
        self, file: str, term: int, number: int, *, again: bool = False, answers: bool = True
    ) -> None:
        kind = {0: "create_model", 3 * STEPS + 2: "save_weights"}.get(
            number, ("optim_step", "publish_weights", "forward_backward")[number % 3]
        )
        if kind == "publish_weights":
            self.say(file, "weights.published", version=(number - 1) // 3, bytes=1, seconds=0.1)
        which = {"line": LINE, "number": number, "kind": kind, "identity": f"id{number}"}
        self.say(file, "trainer.applied", **which, term=term, again=again)
        if answers and not again:
            self.answers(file, number)

    def answers(self, file: str, number: int, value: str = "") -> None:
        said = value or f"hash{number}"
        self.say(file, "trainer.answered", line=LINE, number=number, hash=said, failed=False)

    def checkpoints(self, file: str, number: int) -> None:
        self.say(file, "trainer.checkpointed", line=LINE, number=number, bytes=1)

    def loads(self, replica: str, version: int) -> None:
        file = f"events/{replica}.jsonl"
        if (life := (file, self.pids.get(file, 0), version)) in self.loaded:
            return
        what = {"version": version, "content": f"content{version}"}
        self.say(file, "rollout.loaded", replica=replica, **what)
        self.loaded |= {life, (file, self.pids[file], version)}

    def makes(self, step: int, group: int, *, purpose: str = "train") -> None:
        replica = f"replica-{group % 2}"
        version = step if purpose == "eval" else max(0, step - 1 - LAG)
        self.loads(replica, version)
        which = {"replica": replica, "purpose": purpose, "step": step, "group": group}
        keys = keys_of(step, group) if purpose == "train" else []
        earned = {"keys": keys, "reward": 0.5, "exact": 0.25}
        self.say(f"events/{replica}.jsonl", "rollout.made", **which, version=version, **earned)

    def commits(self, step: int) -> None:
        what = {"version": max(0, step - 1 - LAG), "keys": all_keys(step), "dropped": []}
        numbers = [3 * step - 1, 3 * step, 3 * step + 1]
        self.say(ORCHESTRATOR, "step.committed", step=step, **what, numbers=numbers)

    def trains(self, step: int, *, tells: bool = True) -> None:
        lag = step - 1 - max(0, step - 1 - LAG)
        came = {"step": step, "version": step, "content": f"content{step}", "lag": lag}
        came |= {"loss": 0.1 * step, "grad_norm": 0.2, "reward": 0.5, "exact": 0.25}
        came["samples"] = GROUPS * SAMPLES
        self.metrics.append({**came, "dropped": []})
        if tells:
            self.say(ORCHESTRATOR, "step.trained", **came, seconds=1.0)

    def acknowledges(self, step: int) -> None:
        self.say(ORCHESTRATOR, "step.acknowledged", step=step, keys=all_keys(step))

    def whole(self, step: int) -> None:
        """A step in which nothing dies."""
        for group in range(GROUPS):
            self.makes(step, group)
        self.commits(step)
        for number in (3 * step - 1, 3 * step, 3 * step + 1):
            self.applies(FIRST, 1, number)
            if number == 6:
                self.checkpoints(FIRST, 6)
        self.trains(step)
        self.acknowledges(step)

    def begins(self) -> None:
        self.say(SUPERVISOR, "run.begun", run="r", seed=0, steps=STEPS, resumed=False)
        self.say(ORCHESTRATOR, "client.retried", name="create_session", failures=1)
        self.taken(1)
        self.files["trainers/local/trainer/events/e1-c1-r1-101.jsonl"] = []
        self.seated(FIRST, 1, 1)
        self.applies(FIRST, 1, 0)
        self.applies(FIRST, 1, 1)

    def ends(self, file: str, term: int) -> None:
        self.makes(STEPS, 0, purpose="eval")
        self.say(ORCHESTRATOR, "eval.done", step=STEPS, exact=0.25, reward=0.5)
        self.metrics.append({"step": STEPS, "eval_exact": 0.25, "eval_reward": 0.5})
        self.applies(file, term, 3 * STEPS + 2)
        self.say(HOST, "job.ended", job=JOB, epoch=1, how="left", reason="")
        self.say(SUPERVISOR, "run.ended", how="finished", steps=STEPS, content=f"content{STEPS}")


def keys_of(step: int, group: int) -> list[str]:
    """The keys of a group."""
    return [f"{step:07}-{group:04}-{index:04}" for index in range(SAMPLES)]


def all_keys(step: int) -> list[str]:
    """The keys of all groups of a step."""
    return [key for group in range(GROUPS) for key in keys_of(step, group)]


def calm() -> Logs:
    """Nothing dies."""
    logs = Logs()
    logs.begins()
    for step in range(1, STEPS + 1):
        logs.whole(step)
    logs.ends(FIRST, 1)
    return logs


def killed() -> Logs:
    """Everything dies, at the moments between an effect and the event that tells of it."""
    logs = Logs()
    logs.begins()
    logs.whole(1)
    logs.whole(2)
    for group in range(GROUPS):
        logs.makes(3, group)
    logs.commits(3)
    logs.applies(FIRST, 1, 8)
    logs.applies(FIRST, 1, 9, answers=False)  # computed, and no result recorded
    logs.seated(SECOND, 2, 1)
    logs.applies(SECOND, 2, 8, again=True)
    logs.applies(SECOND, 2, 9)
    logs.applies(SECOND, 2, 10, answers=False)  # its result is recorded, and nobody told
    logs.dies(HOST)
    logs.taken(2)
    logs.seated(THIRD, 3, 2)
    logs.applies(THIRD, 3, 8, again=True)
    logs.applies(THIRD, 3, 9, again=True)
    logs.trains(3, tells=False)  # done on record, and nobody told
    logs.dies(ORCHESTRATOR)
    logs.acknowledges(3)
    logs.loads("replica-0", 2)
    logs.dies("events/replica-0.jsonl")  # group 0 is in the queue, and nobody told
    logs.dies(ORCHESTRATOR)
    logs.makes(4, 1)
    logs.makes(4, 2)
    logs.commits(4)
    logs.applies(THIRD, 3, 11)
    logs.applies(THIRD, 3, 12)  # a checkpoint is kept here, and nobody told
    logs.seated(FOURTH, 4, 2)
    logs.applies(FOURTH, 4, 13)
    logs.trains(4)  # acknowledged, and nobody told
    logs.dies(ORCHESTRATOR)
    logs.ends(FOURTH, 4)
    return logs
