"""Which fault points were hit, which never, and at which nobody aimed."""

from pathlib import Path
from typing import Any

from holdfast.chaos.plan import parse
from holdfast.faults import catalogue
from holdfast.views.points import of_a_run
from holdfast.views.report import write_report
from holdfast.views.tail import look

from .logs import House, data_of, picture_of, told

PLAN = parse(
    "trainer.rank1@trainer.save.kept; trainer.rank0@trainer.result.after 3;"
    "orchestrator@run.step.done 2; orchestrator@run.step.done 4; gateway@step 3"
)
PLANNED: dict[str, Any] = {
    "clauses": tuple(map(str, PLAN)),
    "points": tuple(one.armed for one in PLAN if one.point),
}
POINTS = ("run.step.done", "run.step.sampled", "trainer.result.after", "trainer.save.kept")


def test_each_hit_of_a_point_counts_for_itself() -> None:
    """A point that is armed for two of its hits is hit once if one of them was; what fired and
    was not armed, or at another hit, is no hit of the plan. A process that had no log of its own:
    chaos tells of the point that it died at. Without a plan nothing is armed, hit or missed."""
    hits = (("run.step.done", 2), ("trainer.result.after", 1), ("run.step.sampled", 1))
    fired = [told("fault.fired", 1.0, "o", 5, point=one, hit=hit) for one, hit in hits]
    assert not any(picture_of(*fired).points.facts().values())
    planned = told("chaos.planned", 1.0, "chaos", 9, **PLANNED)
    assert picture_of(planned, *fired).points.facts(POINTS) == {
        "hit": ["run.step.done 2"],
        "never_hit": ["run.step.done 4", "trainer.result.after 3", "trainer.save.kept"],
        "not_aimed_at": ["run.step.sampled"],
    }
    clause = "trainer.rank0@trainer.result.after 3"
    struck = told("chaos.struck", 1.0, "chaos", 9, clause=clause, action="kill")
    assert picture_of(planned, struck).points.facts()["hit"] == ["trainer.result.after 3"]


def test_the_report_lists_them(tmp_path: Path) -> None:
    """The report carries the points that were hit, never hit, and not aimed at."""
    house = House(tmp_path, steps=6)
    house.begin()
    house.tell("chaos", "chaos.planned", **PLANNED)
    house.train()
    house.kill_rank(1)
    house.train()
    house.end()
    points = data_of(write_report(tmp_path, points=POINTS))["points"]
    assert points == look(tmp_path).points.facts(POINTS)
    assert points["hit"] == ["trainer.save.kept"]
    assert points["never_hit"] == ["run.step.done 2", "run.step.done 4", "trainer.result.after 3"]
    assert points["not_aimed_at"] == ["run.step.sampled"]


def test_the_points_of_a_run() -> None:
    """Every point of Holdfast is one of a run, but for those of folders that are made before
    its parts start; points of another ledger's or store's code are not."""
    every = catalogue()
    usual = of_a_run(every, ledger="sqlite:///x", store="shm://y")
    ours = [one for one in every if not one.startswith(("test.", "engine.folder."))]
    assert sorted(usual) == sorted(ours)
    others = of_a_run(every, ledger="etcd://x", store="redis://y")
    backs = {one for one in every if one.startswith(("ledger.sqlite.", "shm."))}
    assert set(usual) - set(others) == backs
