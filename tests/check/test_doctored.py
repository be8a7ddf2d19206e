"""Every doctored log is flagged, by the rule that it breaks and by no other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from check.stories import (
    FIRST,
    FOURTH,
    HOST,
    JOB,
    LINE,
    ORCHESTRATOR,
    STEPS,
    THIRD,
    Event,
    Logs,
    all_keys,
    calm,
    keys_of,
    killed,
)
from holdfast.check import check_run

Doctor = Callable[[Logs], object]


def without(kind: str, **which: Any) -> Doctor:
    """Take an event out."""
    return lambda logs: logs.remove(logs.one(kind, **which))


def edited(kind: str, values: Event, **which: Any) -> Doctor:
    """Let an event say something else."""
    return lambda logs: logs.one(kind, **which).update(values)


def twice(kind: str, values: Event, **which: Any) -> Doctor:
    """Put an event once more behind itself, with other values."""
    return lambda logs: logs.after(logs.one(kind, **which), **values)


def said(file: str, kind: str, **fields: Any) -> Doctor:
    """Let a process tell one thing more, at the end."""
    return lambda logs: logs.say(file, kind, **fields)


def moved(kind: str, behind: str, *, to: int | None = None, **which: int) -> Doctor:
    """Put an event behind another one, which is about the same, or about `to`."""

    def move(logs: Logs) -> None:
        event = logs.one(kind, **which)
        logs.remove(event)
        logs.after(logs.one(behind, **{name: to or which[name] for name in which}), **event)

    return move


def have(keys: Callable[[list[str]], list[str]], dropped: Sequence[int] = ()) -> Doctor:
    """Let step 2 have other samples, and let everybody agree on it."""

    def change(logs: Logs) -> None:
        for kind in ("step.committed", "step.acknowledged"):
            event = logs.one(kind, step=2)
            event["keys"] = keys(event["keys"])
        logs.one("step.committed", step=2)["dropped"] = logs.metrics[1]["dropped"] = dropped
        count = len(event["keys"])
        logs.one("step.trained", step=2)["samples"] = logs.metrics[1]["samples"] = count

    return change


def untrained(step: int) -> Doctor:
    """Let nobody tell that a step was trained and acknowledged."""
    kinds = ("step.trained", "step.acknowledged")
    return lambda logs: logs.remove(*(logs.one(kind, step=step) for kind in kinds))


CASES: list[tuple[str, Callable[[], Logs], Doctor]] = [
    # A sample that nobody made; and a second group untold where one replica died.
    ("samples.made", calm, without("rollout.made", step=2, group=1)),
    ("samples.made", killed, without("rollout.made", step=4, group=1)),
    ("samples.made", calm, edited("rollout.made", {"version": 1}, step=4, group=1)),
    # A sample is trained twice, in two steps or in one; a sample or a group is lost.
    ("samples.once", calm, have(lambda keys: [*keys, keys_of(1, 0)[0]])),
    ("samples.once", calm, have(lambda keys: [*keys, keys[0]])),
    ("samples.whole", calm, have(lambda keys: keys[1:])),
    ("samples.whole", calm, have(lambda keys: keys[2:])),
    # A group is dropped for no reason; it is dropped, and trained all the same.
    ("samples.whole", calm, have(lambda keys: keys[2:], dropped=[0])),
    ("samples.whole", calm, said(ORCHESTRATOR, "group.dropped", step=2, group=0)),
    # Others are acknowledged; an heir acknowledges what was not trained yet.
    ("samples.acknowledged", calm, edited("step.acknowledged", {"keys": keys_of(3, 0)}, step=2)),
    ("samples.acknowledged", killed, lambda logs: later(logs.one("trainer.applied", number=10))),
    ("samples.complete", calm, without("step.acknowledged", step=2)),
    ("samples.acknowledged", calm, moved("step.acknowledged", "step.committed", step=2)),
    # A step that was never trained; one that is untold by a life that went on.
    ("samples.complete", calm, untrained(2)),
    ("samples.complete", killed, untrained(1)),
    # Another operation, or another result, in the replay.
    ("operations.identity", killed, edited("trainer.applied", {"identity": "x"}, number=8)),
    ("operations.result", killed, lambda logs: logs.answers(THIRD, 9, "other")),
    # Applied twice in one term, anew after its result, again and never before.
    ("operations.once", calm, twice("trainer.applied", {}, number=6)),
    ("operations.once", killed, edited("trainer.applied", {"again": False}, number=8, term=2)),
    ("operations.once", calm, edited("trainer.applied", {"again": True}, number=6)),
    # The replay leaves something out, or begins behind no checkpoint.
    ("operations.order", killed, without("trainer.applied", number=8, term=2)),
    ("operations.order", killed, without("trainer.checkpointed")),
    ("operations.order", calm, moved("trainer.applied", "trainer.applied", number=5, to=6)),
    # An old term answers late.
    ("operations.fence", killed, lambda logs: logs.answers(FIRST, 9)),
    ("operations.replay", killed, said(THIRD, "trainer.differs", line=LINE, number=8)),
    # One optimizer step too many; numbers against the plan.
    ("operations.steps", calm, lambda logs: logs.applies(FIRST, 1, 15)),
    ("operations.steps", calm, edited("step.committed", {"numbers": [5, 6, 8]}, step=2)),
    ("run.commits", calm, twice("step.committed", {"keys": all_keys(2)[::-1]}, step=2)),
    ("run.again", calm, twice("rollout.made", {"reward": 0.75}, step=2, group=1)),
    ("run.metrics", calm, lambda logs: logs.metrics[2].update(reward=1.0)),
    ("run.metrics", calm, lambda logs: logs.metrics.pop(2)),
    ("run.end", calm, edited("run.ended", {"content": "other"})),
    ("weights.content", calm, edited("rollout.loaded", {"content": "other"}, version=1)),
    # A version that nobody published; one that the replica did not load.
    ("weights.published", calm, lambda logs: logs.loads("replica-0", 9)),
    ("weights.served", calm, without("rollout.loaded", version=1, replica="replica-1")),
    ("routes.epochs", calm, twice("job.taken", {})),
    # An old epoch serves after a newer one.
    ("routes.started", killed, said(HOST, "job.started", job=JOB, epoch=1)),
    # A trainer of an epoch that nobody took; the seat goes to an older epoch.
    ("routes.fence", calm, edited("trainer.seated", {"epoch": 7})),
    ("routes.fence", killed, edited("trainer.seated", {"epoch": 1}, term=4)),
    # One rank is two processes.
    ("membership.ranks", calm, lambda logs: logs.files.update({FIRST.replace("100", "999"): []})),
    ("logs.clock", calm, lambda logs: later(logs.one("client.retried"), 100)),
]


def doctored(rule: str, story: Callable[[], Logs] = calm) -> Callable[[Doctor], Doctor]:
    """Add a case: this rule, and no other, must flag the story after this was done to it."""

    def add(doctor: Doctor) -> Doctor:
        CASES.append((rule, story, doctor))
        return doctor

    return add


def later(event: Event, seconds: float = 5) -> None:
    """Let something happen later than it did."""
    event["at"] += seconds


@doctored("run.trained")
def step_came_out_differently(logs: Logs) -> None:
    logs.after(logs.one("step.trained", step=2), grad_norm=9.0)
    logs.metrics[1]["grad_norm"] = 9.0


@doctored("weights.published")
def loaded_before_it_was_trained(logs: Logs) -> None:
    late = logs.files[FIRST].index(logs.one("trainer.applied", number=12))
    for event in logs.files[FIRST][late:]:
        later(event)


@doctored("weights.served", killed)
def served_by_what_an_earlier_life_had_loaded(logs: Logs) -> None:
    heir = logs.files["events/replica-0.jsonl"][-1]["pid"]
    logs.remove(logs.one("rollout.loaded", version=STEPS, pid=heir))
    earlier = logs.one("rollout.loaded", version=2, replica="replica-0")
    earlier.update(version=STEPS, content=f"content{STEPS}")


@doctored("weights.version")
def version_against_the_rule(logs: Logs) -> None:
    for kind in ("step.committed", "rollout.made"):
        for event in logs.all(kind, step=4):
            if event.get("purpose") != "eval":
                event["version"] = 1
    logs.one("step.trained", step=4)["lag"] = logs.metrics[3]["lag"] = 2


@doctored("routes.epochs")
def epoch_goes_back(logs: Logs) -> None:
    first = logs.one("job.taken")
    logs.after(first)
    first["epoch"] = 3


@doctored("routes.gone")
def gone_and_it_was_not(logs: Logs) -> None:
    asked = {"account": "local", "job": "trainer", "path": "/x"}
    logs.say("events/gateway.jsonl", "gateway.access", **asked, status=200)
    logs.say("events/gateway.jsonl", "gateway.access", **asked, status=410, code="job_gone")


@doctored("membership.ranks")
def rank_started_twice(logs: Logs) -> None:
    for pid in (1, 2):
        who = {"run": "r.1", "cycle": 1, "rank": 0, "worker_pid": pid}
        logs.say("events/agent.jsonl", "launch.worker.started", **who)


@doctored("membership.ranks")
def world_sizes_differ(logs: Logs) -> None:
    for node, size in enumerate((2, 3)):
        who = {"run": "r.1", "cycle": 1, "node_rank": node, "node_count": 2}
        logs.say(f"events/agent-{node}.jsonl", "launch.crew.started", **who, world_size=size)


@doctored("membership.cycles", killed)
def old_cycle_takes_the_seat(logs: Logs) -> None:
    logs.files[FOURTH.replace("c2-r0-400", "c0-r0-500")] = logs.files.pop(FOURTH)


@pytest.mark.parametrize(
    ("rule", "story", "doctor"), CASES, ids=[f"{one[0]}-{at}" for at, one in enumerate(CASES)]
)
def test_doctored_log_is_flagged(
    rule: str, story: Callable[[], Logs], doctor: Doctor, tmp_path: Path
) -> None:
    """A doctored log is flagged by exactly the rule that it breaks, and the finding names
    records."""
    logs = story()
    doctor(logs)
    report = check_run(logs.write(tmp_path))
    wrong = {one.rule: one.findings for one in report.rules if one.findings}
    assert set(wrong) == {rule}, wrong
    assert any(one.where or one.step is not None for one in wrong[rule])
