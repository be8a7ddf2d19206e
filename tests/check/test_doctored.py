"""Every doctored log is flagged, by the rule that it breaks and by no other."""

from collections.abc import Callable
from pathlib import Path

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
    calm,
    keys_of,
    killed,
)
from holdfast.check import check_run

Doctor = Callable[[Logs], object]
CASES: list[tuple[str, Callable[[], Logs], Doctor]] = []


def doctored(rule: str, story: Callable[[], Logs] = calm) -> Callable[[Doctor], Doctor]:
    """Add a case: this rule, and no other, must flag the story after this was done to it."""

    def add(doctor: Doctor) -> Doctor:
        CASES.append((rule, story, doctor))
        return doctor

    return add


def of_step(logs: Logs, step: int) -> list[Event]:
    """The commit and the acknowledgement of a step."""
    return [logs.one("step.committed", step=step), logs.one("step.acknowledged", step=step)]


def count(logs: Logs, step: int, samples: int) -> None:
    """Let everybody agree on how many samples a step had."""
    logs.one("step.trained", step=step)["samples"] = samples
    logs.metrics[step - 1]["samples"] = samples


# ---- samples ---------------------------------------------------------------------


@doctored("samples.once")
def sample_trained_twice(logs: Logs) -> None:
    for event in of_step(logs, 2):
        event["keys"] = [*event["keys"], keys_of(1, 0)[0]]
    count(logs, 2, 7)


@doctored("samples.once")
def sample_twice_in_one_step(logs: Logs) -> None:
    for event in of_step(logs, 2):
        event["keys"] = [*event["keys"], event["keys"][0]]
    count(logs, 2, 7)


@doctored("samples.made")
def sample_never_made(logs: Logs) -> None:
    logs.remove(logs.one("rollout.made", step=2, group=1))


@doctored("samples.made", killed)
def two_groups_untold_and_one_death(logs: Logs) -> None:
    logs.remove(logs.one("rollout.made", step=4, group=1))


@doctored("samples.made")
def made_with_another_version(logs: Logs) -> None:
    logs.one("rollout.made", step=4, group=1)["version"] = 1


@doctored("samples.whole")
def sample_lost(logs: Logs) -> None:
    for event in of_step(logs, 2):
        event["keys"] = event["keys"][1:]
    count(logs, 2, 5)


@doctored("samples.whole")
def group_lost(logs: Logs) -> None:
    for event in of_step(logs, 2):
        event["keys"] = event["keys"][2:]
    count(logs, 2, 4)


@doctored("samples.whole")
def group_dropped_for_no_reason(logs: Logs) -> None:
    for event in of_step(logs, 2):
        event["keys"] = event["keys"][2:]
    logs.one("step.committed", step=2)["dropped"] = logs.metrics[1]["dropped"] = [0]
    count(logs, 2, 4)


@doctored("samples.whole")
def dropped_group_trained(logs: Logs) -> None:
    logs.say(ORCHESTRATOR, "group.dropped", step=2, group=0, reason="x")


@doctored("samples.acknowledged")
def others_acknowledged(logs: Logs) -> None:
    logs.one("step.acknowledged", step=2)["keys"] = keys_of(3, 0)


@doctored("samples.acknowledged")
def acknowledged_before_trained(logs: Logs) -> None:
    ack = logs.one("step.acknowledged", step=2)
    logs.remove(ack)
    logs.after(logs.one("step.committed", step=2), **ack)


@doctored("samples.acknowledged", killed)
def heir_acknowledges_what_was_not_trained_yet(logs: Logs) -> None:
    logs.one("trainer.applied", number=10)["at"] += 5


@doctored("samples.complete")
def step_never_acknowledged(logs: Logs) -> None:
    logs.remove(logs.one("step.acknowledged", step=2))


@doctored("samples.complete")
def step_never_trained(logs: Logs) -> None:
    logs.remove(logs.one("step.acknowledged", step=2), logs.one("step.trained", step=2))


@doctored("samples.complete", killed)
def step_untold_by_a_life_that_went_on(logs: Logs) -> None:
    logs.remove(logs.one("step.acknowledged", step=1), logs.one("step.trained", step=1))


# ---- operations ------------------------------------------------------------------


@doctored("operations.identity", killed)
def another_operation_in_the_replay(logs: Logs) -> None:
    logs.one("trainer.applied", number=8, term=2)["identity"] = "other"


@doctored("operations.result", killed)
def result_changed(logs: Logs) -> None:
    logs.answers(THIRD, 9, "other")


@doctored("operations.once")
def applied_twice_in_one_term(logs: Logs) -> None:
    logs.after(logs.one("trainer.applied", number=6))


@doctored("operations.once", killed)
def applied_anew_after_its_result(logs: Logs) -> None:
    logs.one("trainer.applied", number=8, term=2)["again"] = False


@doctored("operations.once")
def applied_again_and_never_before(logs: Logs) -> None:
    logs.one("trainer.applied", number=6)["again"] = True


@doctored("operations.order")
def applied_out_of_order(logs: Logs) -> None:
    first = logs.one("trainer.applied", number=5)
    logs.remove(first)
    logs.after(logs.one("trainer.applied", number=6), **first)


@doctored("operations.order", killed)
def operation_left_out_of_the_replay(logs: Logs) -> None:
    logs.remove(logs.one("trainer.applied", number=8, term=2))


@doctored("operations.order", killed)
def replay_without_checkpoint(logs: Logs) -> None:
    logs.remove(logs.one("trainer.checkpointed"))


@doctored("operations.fence", killed)
def old_term_answers_late(logs: Logs) -> None:
    logs.answers(FIRST, 9)


@doctored("operations.replay", killed)
def replay_differs(logs: Logs) -> None:
    logs.say(THIRD, "trainer.differs", line=LINE, number=8)


@doctored("operations.steps")
def one_optimizer_step_too_many(logs: Logs) -> None:
    logs.applies(FIRST, 1, 15)


@doctored("operations.steps")
def numbers_against_the_plan(logs: Logs) -> None:
    logs.one("step.committed", step=2)["numbers"] = [5, 6, 8]


# ---- the run ---------------------------------------------------------------------


@doctored("run.commits")
def commit_changed(logs: Logs) -> None:
    first = logs.one("step.committed", step=2)
    logs.after(first, keys=first["keys"][::-1])


@doctored("run.trained")
def step_came_out_differently(logs: Logs) -> None:
    logs.after(logs.one("step.trained", step=2), grad_norm=9.0)
    logs.metrics[1]["grad_norm"] = 9.0


@doctored("run.again")
def group_made_differently(logs: Logs) -> None:
    logs.after(logs.one("rollout.made", step=2, group=1), reward=0.75)


@doctored("run.metrics")
def metrics_say_something_else(logs: Logs) -> None:
    logs.metrics[2]["reward"] = 1.0


@doctored("run.metrics")
def metrics_lack_a_step(logs: Logs) -> None:
    del logs.metrics[2]


@doctored("run.end")
def final_content_differs(logs: Logs) -> None:
    logs.one("run.ended")["content"] = "other"


# ---- weights ---------------------------------------------------------------------


@doctored("weights.content")
def replica_has_another_content(logs: Logs) -> None:
    logs.one("rollout.loaded", version=1, replica="replica-1")["content"] = "other"


@doctored("weights.published")
def unpublished_version_loaded(logs: Logs) -> None:
    logs.loads("replica-0", 9)


@doctored("weights.published")
def loaded_before_it_was_trained(logs: Logs) -> None:
    late = logs.files[FIRST].index(logs.one("trainer.applied", number=12))
    for event in logs.files[FIRST][late:]:
        event["at"] += 5


@doctored("weights.served")
def served_without_loading(logs: Logs) -> None:
    logs.remove(logs.one("rollout.loaded", version=1, replica="replica-1"))


@doctored("weights.served", killed)
def served_by_what_an_earlier_life_had_loaded(logs: Logs) -> None:
    heir = logs.files["events/replica-0.jsonl"][-1]["pid"]
    logs.remove(logs.one("rollout.loaded", version=STEPS, pid=heir))
    logs.one("rollout.loaded", version=2, replica="replica-0")["version"] = STEPS
    logs.one("rollout.loaded", version=STEPS, replica="replica-0")["content"] = f"content{STEPS}"


@doctored("weights.version")
def version_against_the_rule(logs: Logs) -> None:
    for kind in ("step.committed", "rollout.made"):
        for event in logs.all(kind, step=4):
            if event.get("purpose") != "eval":
                event["version"] = 1
    logs.one("step.trained", step=4)["lag"] = logs.metrics[3]["lag"] = 2


# ---- routes, membership ----------------------------------------------------------


@doctored("routes.epochs")
def epoch_goes_back(logs: Logs) -> None:
    first = logs.one("job.taken")
    logs.after(first)
    first["epoch"] = 3


@doctored("routes.epochs")
def epoch_taken_twice(logs: Logs) -> None:
    logs.after(logs.one("job.taken"))


@doctored("routes.started", killed)
def old_epoch_serves_after_a_newer_one(logs: Logs) -> None:
    logs.say(HOST, "job.started", job=JOB, epoch=1, address="127.0.0.1:1")


@doctored("routes.fence")
def trainer_of_an_epoch_that_nobody_took(logs: Logs) -> None:
    logs.one("trainer.seated")["epoch"] = 7


@doctored("routes.fence", killed)
def seat_taken_by_an_older_epoch(logs: Logs) -> None:
    logs.one("trainer.seated", term=4)["epoch"] = 1


@doctored("routes.gone")
def gone_and_it_was_not(logs: Logs) -> None:
    said = {"account": "local", "job": "trainer", "method": "POST", "path": "/x", "ms": 1.0}
    said |= {"received": 0, "sent": 0}
    logs.say("events/gateway.jsonl", "gateway.access", **said, status=200, code="")
    logs.say("events/gateway.jsonl", "gateway.access", **said, status=410, code="job_gone")


@doctored("membership.ranks")
def rank_twice_in_a_cycle(logs: Logs) -> None:
    logs.files["trainers/local/trainer/events/e1-c1-r1-999.jsonl"] = []


@doctored("membership.ranks")
def rank_started_twice(logs: Logs) -> None:
    for pid in (1, 2):
        who = {"run": "r.1", "cycle": 1, "rank": 0, "slot": 0, "warm": True, "why": ""}
        logs.say("events/agent.jsonl", "launch.worker.started", **who, worker_pid=pid)


@doctored("membership.ranks")
def world_sizes_differ(logs: Logs) -> None:
    for node, size in enumerate((2, 3)):
        who = {"run": "r.1", "cycle": 1, "node_rank": node, "node_count": 2}
        logs.say(f"events/agent-{node}.jsonl", "launch.crew.started", **who, world_size=size)


@doctored("membership.cycles", killed)
def old_cycle_takes_the_seat(logs: Logs) -> None:
    logs.files[FOURTH.replace("c2-r0-400", "c0-r0-500")] = logs.files.pop(FOURTH)


# ---- the logs themselves -----------------------------------------------------------


@doctored("logs.clock")
def clock_goes_back(logs: Logs) -> None:
    logs.one("client.retried")["at"] += 100


@pytest.mark.parametrize(
    ("rule", "story", "doctor"),
    CASES,
    ids=[getattr(doctor, "__name__", "") for _, _, doctor in CASES],
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
