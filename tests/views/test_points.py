"""Which fault points were hit, which never, and at which nobody aimed."""

import json
import re
from pathlib import Path

from holdfast.chaos.plan import parse
from holdfast.chaos.runs import Planned
from holdfast.events import Event
from holdfast.faults import FaultFired, catalogue
from holdfast.views.picture import Picture
from holdfast.views.points import of_a_run
from holdfast.views.report import write_report
from holdfast.views.tail import look

from .logs import House, told

PLAN = (
    "trainer.rank1@trainer.save.kept; trainer.rank0@trainer.result.after 3;"
    "orchestrator@run.step.done 2; orchestrator@run.step.done 4; gateway@step 3"
)
POINTS = ("run.step.done", "run.step.sampled", "trainer.result.after", "trainer.save.kept")


def planned(plan: str = PLAN) -> Planned:
    """What chaos tells of a plan before anything else."""
    clauses = parse(plan)
    points = tuple(one.armed for one in clauses if one.point)
    return Planned(clauses=tuple(map(str, clauses)), points=points)


def fired(point: str, hit: int) -> Event:
    return told("fault.fired", 1.0, "o", 5, 1, {"point": point, "action": "kill", "hit": hit})


def test_each_hit_of_a_point_counts_for_itself() -> None:
    """A point that is armed for two of its hits is hit once if one of them was; what fired and
    was not armed, or at another hit, is no hit of the plan."""
    picture = Picture()
    picture.take(planned())
    picture.take(fired("run.step.done", 2))
    picture.take(fired("trainer.result.after", 1))
    picture.take(fired("run.step.sampled", 1))
    assert picture.points.facts(POINTS) == {
        "hit": ["run.step.done 2"],
        "never_hit": ["run.step.done 4", "trainer.result.after 3", "trainer.save.kept"],
        "not_aimed_at": ["run.step.sampled"],
    }


def test_what_chaos_saw_counts_too() -> None:
    """A process that had no log of its own: chaos tells of the point that it died at."""
    picture = Picture()
    picture.take(planned())
    struck = {"clause": "trainer.rank0@trainer.result.after 3", "target": "trainer.rank0"}
    picture.take(told("chaos.struck", 1.0, "chaos", 9, 2, {**struck, "action": "kill"}))
    assert picture.points.facts()["hit"] == ["trainer.result.after 3"]


def test_without_a_plan_nothing_is_missed() -> None:
    """In a run without chaos no point is armed, hit or missed."""
    picture = Picture()
    picture.take(FaultFired(point="run.step.done", action="kill", hit=1))
    assert not any(picture.points.facts().values())


def test_the_report_lists_them(tmp_path: Path) -> None:
    """The report carries the points that were hit, never hit, and not aimed at."""
    house = House(tmp_path, steps=6)
    house.begin()
    house.tell("chaos", planned())
    for _ in range(3):
        house.train()
    house.kill_rank(1)
    house.train()
    house.end()
    html = write_report(tmp_path, points=POINTS).read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    points = json.loads(found[1])["points"]
    assert points == look(tmp_path).points.facts(POINTS)
    assert points["hit"] == ["trainer.save.kept"]
    assert points["never_hit"] == ["run.step.done 2", "run.step.done 4", "trainer.result.after 3"]
    assert points["not_aimed_at"] == ["run.step.sampled"]


def test_the_points_of_a_run() -> None:
    """Every point of Holdfast is one of a run, but for those of folders that are made before
    its parts start; points of another ledger's or store's code are not."""
    every = catalogue().points
    usual = of_a_run(every, ledger="sqlite:///x", store="shm://y")
    ours = [one for one in every if not one.startswith(("test.", "engine.folder."))]
    assert sorted(usual) == sorted(ours)
    others = of_a_run(every, ledger="etcd://x", store="redis://y")
    assert set(usual) - set(others) == {
        one for one in every if one.startswith(("ledger.sqlite.", "shm."))
    }
