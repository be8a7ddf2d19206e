"""A step's numbers, versions and seeds are functions of the step."""

from holdfast.run import plan
from holdfast.run.config import Config


def test_numbers_have_no_gap() -> None:
    """Operations of all steps, after creation and the first version, are 2, 3, 4, …"""
    found = [0, plan.FIRST_PUBLISH]
    for step in range(1, 50):
        one = plan.numbers(step)
        found += [one.forward_backward, one.optim_step, one.publish]
    assert [*found, plan.save_number(49)] == list(range(len(found) + 1))


def test_versions_lag() -> None:
    """With lag 0 a step's samples are made by the newest weights; with lag n by older ones."""
    assert [plan.version_for(step, 0) for step in (1, 2, 3)] == [0, 1, 2]
    assert [plan.version_for(step, 2) for step in (1, 2, 3, 4, 5)] == [0, 0, 0, 1, 2]


def test_asks_differ_and_repeat() -> None:
    """What is asked for is the same whoever asks, and differs between groups and steps."""
    ours, others = Config(seed=7), Config(seed=8)
    asks = [plan.train_ask(ours, step, group) for step in range(1, 20) for group in range(8)]
    assert len({one.seed for one in asks}) == len({one.task_seed for one in asks}) == len(asks)
    assert plan.train_ask(ours, 3, 2) in asks
    assert plan.train_ask(others, 3, 2) not in asks


def test_held_out_prompts_stay() -> None:
    """Every evaluation tries the same prompts, with the version of its step."""
    early, late = plan.eval_ask(7, 10, 3), plan.eval_ask(7, 20, 3)
    assert early.task_seed == late.task_seed
    assert (early.version, late.version) == (10, 20)
