"""The fold: what the picture of a whole run has in it, and that nothing can upset it."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.events import Event, Unknown
from holdfast.run import happenings as run
from holdfast.views.curve import Curve
from holdfast.views.picture import MAX_ENTRIES, MAX_NOISE, MAX_VERSIONS, Picture, taker_of
from holdfast.views.snapshot import prometheus, snapshot, summary
from holdfast.views.tail import look
from holdfast.views.told import known, parse

from .logs import House, picture_of, storm, told


def test_a_calm_run_has_no_fault(tmp_path: Path) -> None:
    """A run in which nothing happens has steps, curves and versions, and has lost nothing."""
    house = House(tmp_path, steps=10)
    house.begin()
    for _ in range(10):
        house.train()
    house.end()
    picture = look(tmp_path)
    facts = summary(picture)
    assert (facts["steps"], facts["faults"], facts["seconds_lost"]) == (10, 0, 0)
    assert facts["pace_s"] == pytest.approx(0.5)
    assert [point[0] for point in picture.train.points()] == list(range(1, 11))
    assert [point[0] for point in picture.evals.points()] == [5, 10]
    assert (picture.version, picture.how, picture.queue) == (10, "finished", 0)
    assert (picture.made, picture.acknowledged) == (160, 160)
    assert picture.serving() == {"replica-0": 10, "replica-1": 10}
    assert {member.state for member in picture.members.known.values()} == {"ended"}
    assert not any(member.deaths for member in picture.members.known.values())


@pytest.fixture(scope="module")
def hurt(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    """The picture of a run with a fault of every sort."""
    folder = tmp_path_factory.mktemp("storm")
    storm(folder)
    return look(folder)


def test_each_fault_is_one_and_costs_what_it_cost(hurt: Picture) -> None:
    """What several processes tell of one fault is one fault, with the seconds it took."""
    faults = hurt.faults
    found = {(fault.action, fault.target): faults.lost_s(fault) for fault in faults.kept}
    assert found == {
        ("kill", "replica-0"): pytest.approx(0.51, abs=0.01),
        ("kill", "trainer.rank1"): pytest.approx(1.9, abs=0.01),
        ("pause", "replica-1"): pytest.approx(2.0, abs=0.01),
        ("died", "gateway-0"): pytest.approx(0.31, abs=0.01),
        ("kill", "supervisor"): pytest.approx(2.6, abs=0.01),
        ("kill", "orchestrator"): pytest.approx(0.41, abs=0.01),
        ("kill", "host"): pytest.approx(0.41, abs=0.01),
    }
    facts = summary(hurt)
    assert (facts["faults"], facts["recoveries"]) == (7, 7)
    assert facts["lost_by_kind"]["kill trainer.rank"]["faults"] == 1
    [rank] = [fault for fault in faults.kept if fault.target == "trainer.rank1"]
    assert (rank.step, rank.point, rank.member) == (9, "trainer.save.kept", "trainer rank 1")
    [pause] = [fault for fault in faults.kept if fault.action == "pause"]
    assert (pause.length_s, pause.healed_s) == (2.0, 2.0)


def test_every_life_has_its_end(hurt: Picture) -> None:
    """Lives begin and end when they did, also those that nobody saw end."""
    members = hurt.members.known
    ends = {name: [life.how for life in member.lives] for name, member in members.items()}
    assert ends == {
        "supervisor": ["died", "ended"],
        "orchestrator": ["lost", "died", "ended"],
        "host": ["lost", "died", "ended"],
        "gateway-0": ["died", "lost", "ended"],
        "trainer rank 0": ["stopped", "lost", "stopped", "ended"],
        "trainer rank 1": ["died", "lost", "stopped", "ended"],
        "replica-0": ["died", "lost", "ended"],
        "replica-1": ["lost", "ended"],
        "chaos": ["lost", "ended"],
    }
    for member in members.values():
        for life, after in itertools.pairwise(member.lives):
            assert life.ended is not None
            assert life.began <= life.ended <= after.began
    killed = members["supervisor"].lives[0].ended
    assert members["gateway-0"].lives[1].ended == killed, "silent ones die with the supervisor"
    assert members["replica-0"].lives[1].after_s == pytest.approx(0.31, abs=0.01)


def test_epochs_and_routes(hurt: Picture) -> None:
    """Every incarnation of the trainer is there, with its route."""
    [epochs] = hurt.jobs.values()
    assert [epoch.epoch for epoch in epochs.values()] == [1, 2, 3]
    assert epochs[3].address == "http://127.0.0.1:9003"


def test_events_that_come_twice_count_once() -> None:
    """A step that a successor tells again, and samples made again, change nothing."""
    keys = ["1/0/0", "1/0/1"]
    made = told("rollout.made", 1.0, "r", 5, step=1, purpose="train", keys=keys)
    done = told("step.acknowledged", 2.0, "o", 6, step=1, keys=keys)
    assert picture_of(made, made).queue == 2
    picture = picture_of(made, made, done, done, made)
    assert (picture.queue, picture.made, picture.acknowledged) == (0, 2, 2)
    for at, step in ((3.0, 1), (9.0, 1), (10.0, 2)):
        picture.take(told("step.trained", at, "o", 7, step=step))
    assert picture.faults.pace_s() == 7.0
    assert len(picture.train.points()) == 2


def test_a_loss_that_is_no_number_is_still_a_step() -> None:
    """JSON writes NaN as null: the step counts, and the snapshot stays valid JSON."""
    picture = picture_of(told("step.trained", 1.0, "o", 7, step=1, loss=None, grad_norm=None))
    assert picture.step == 1
    assert math.isnan(picture.train.points()[0][3])
    assert json.loads(msgspec.json.encode(snapshot(picture)))["train"][0][3] is None


def test_memory_is_bounded() -> None:
    """However long a run lasts, the picture has a size."""
    picture = Picture()
    for step in range(1, 6000):
        at = float(step)
        made = {"step": step, "purpose": "train", "keys": [f"{step}"]}
        picture.take(told("rollout.made", at, "r", 5, **made))
        picture.take(told("step.trained", at, "o", 6, step=step, version=step))
        picture.take(told("part.died", at, "s", 4, part=f"p{step}", child=step + 9, code=1))
        picture.take(told(f"strange.k{step}", at, f"process {step}", 10000 + step))
    assert len(picture.train.points()) <= 1001
    assert picture.train.points()[-1][0] == 5999
    assert len(picture.versions) <= MAX_VERSIONS
    assert len(picture.entries()) <= MAX_ENTRIES + MAX_NOISE
    assert len(picture.members.known) <= 300
    assert len(picture.counts) <= 302
    assert len(msgspec.json.encode(snapshot(picture))) < 2_000_000


def test_whatever_makes_the_picture_has_a_class() -> None:
    """Each event that changes the picture is declared by the part that tells of it."""
    takers = {name for name in vars(Picture) if name.startswith(taker_of(""))}
    assert takers <= set(map(taker_of, known()))


def test_an_event_of_another_version_is_listed_and_changes_nothing() -> None:
    """Neither an unknown type nor a known one in another form does any harm."""
    picture = Picture()
    for line in (b'{"type":"step.dreamt","at":1,"step":3}', b'{"type":"step.trained","step":"x"}'):
        event = parse(line)
        assert isinstance(event, Unknown)
        picture.take(event)
    assert (picture.step, picture.serial) == (0, 2)
    assert [one.text for one in picture.entries()] == ["step=3", "step=x"]
    newer = run.Acknowledged(step=1, keys=("k",))
    line = msgspec.json.encode({**msgspec.to_builtins(newer), "newer": 1})
    assert parse(line) == newer


KINDS = [*sorted(known()), "other.kind"]
NAMES = ["step", "part", "child", "code", "version", "job", "epoch", "replica", "keys", "rank"]
NAMES += ["worker_pid", "child_pid", "victim", "target", "clause", "action", "purpose", "how"]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.integers(-3, 5),
    st.sampled_from(["a", "train", "kill", "died", "<b>"]),
    st.just([]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            lambda *stamps, fields: told(*stamps, **fields),
            st.sampled_from(KINDS),
            st.floats(0, 100),
            st.sampled_from(["supervisor", "acct/j e1-c1-r0-5", "acct/j e1-c2-r0-6", "x", ""]),
            st.integers(-1, 8),
            fields=st.dictionaries(st.sampled_from(NAMES), VALUES),
        ),
        max_size=60,
    )
)
def test_nothing_upsets_it(events: list[Event]) -> None:
    """Any events in any order give a picture, a snapshot and metrics."""
    picture = picture_of(*events)
    json.loads(msgspec.json.encode([snapshot(picture), summary(picture)]))
    prometheus(picture)
    for member in picture.members.known.values():
        assert all(life.ended is not None for life in member.lives[:-1])
        assert all(life.ended is None or life.ended >= life.began for life in member.lives)


def test_a_curve_keeps_its_shape() -> None:
    """A thinned curve has its first and last points, is in order, even, and not too long."""
    curve = Curve(limit=10)
    for x in range(1000):
        curve.add(x, x * 2)
        points = [point[0] for point in curve.points()]
        assert len(points) <= 11
        assert (points[0], points[-1]) == (0, x)
        assert points == sorted(set(points))
        gaps = [b - a for a, b in itertools.pairwise(points[:-1])]
        assert not gaps or max(gaps) <= 2 * min(gaps)


def test_views_need_no_torch() -> None:
    """Looking at a run does not load what trains it."""
    code = (
        "import sys, holdfast.views.web, holdfast.views.report, holdfast.views.told as told; "
        "told.known(); "
        "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_who_survives_the_supervisor_lives_on() -> None:
    """A process that was not the supervisor's, and writes on after its death, did not die."""
    picture = picture_of(
        told("run.begun", 1.0, "supervisor", 10, run="r", steps=9),
        told("chaos.healed", 2.0, "chaos", 20),
        told("run.begun", 5.0, "supervisor", 30, run="r", steps=9, resumed=True),
    )
    members = picture.members.known
    assert members["chaos"].state == "down"
    picture.take(told("chaos.healed", 6.0, "chaos", 20))
    assert (members["chaos"].state, members["chaos"].deaths) == ("up", 0)
    assert members["supervisor"].deaths == 1


def test_ranks_of_an_old_crew_are_gone() -> None:
    """Without a word from their agent, ranks end when their crew was last heard of."""
    struck = {"clause": "trainer.rank0@step 1", "target": "trainer.rank0", "victim": 5}
    picture = picture_of(
        told("trainer.seated", 1.0, "a/j e1-c1-r0-5", 5),
        told("trainer.seated", 1.1, "a/j e1-c1-r1-6", 6),
        told("trainer.seated", 4.0, "a/j e1-c1-r0-5", 5),
        told("chaos.struck", 7.0, "chaos", 9, **struck, action="kill"),
        told("trainer.seated", 9.0, "a/j e1-c2-r0-7", 7),
    )
    [dead, alive] = picture.members.known["trainer rank 0"].lives
    assert (dead.how, dead.ended, alive.after_s) == ("died", 7.0, 2.0)
    [stopped] = picture.members.known["trainer rank 1"].lives
    assert (stopped.how, stopped.ended) == ("stopped", 7.0)
    [fault] = picture.faults.kept
    assert (fault.member, fault.again_s) == ("trainer rank 0", 2.0)


def test_a_checkpoint_is_no_version_of_the_run() -> None:
    """Only what a step has made or a replica serves counts, with its own size and time."""
    picture = picture_of(
        told("weights.published", 1.0, "t", 5, version=50, bytes=900),
        told("weights.published", 2.0, "t", 5, version=3, bytes=900),
        told("weights.published", 3.0, "t", 5, version=3, bytes=100),
        told("step.trained", 3.1, "o", 6, step=3, version=3, content="c"),
        told("weights.published", 4.0, "t", 5, version=3, bytes=900),
        told("rollout.loaded", 5.0, "replica-0", 7, version=3),
    )
    assert picture.version == 3
    version = picture.versions[3]
    assert (version.published, version.bytes, version.acknowledged) == (3.0, 100, ["replica-0"])


def test_nodes_ranks_and_spares() -> None:
    """Agents are members; one without workers is a spare; a new cycle ends the old one's ranks."""
    picture = Picture()

    def say(at: float, node: str, pid: int, kind: str, **fields: object) -> None:
        picture.take(told(f"launch.{kind}", at, node, pid, run="r.1", **fields))

    for node, pid, rank in (("n1", 11, 1), ("n2", 12, 0)):
        say(1.0, node, pid, "worker.started", cycle=1, rank=rank, worker_pid=100 + rank)
    say(1.5, "n0", 10, "warm.ready", child_pid=200)
    assert picture.spare_nodes() == ["trainer node n0"]
    assert len(picture.members.spares) == 1
    picture.take(told("trainer.seated", 4.0, "a/j e1-c1-r0-100", 100))
    say(5.0, "n1", 11, "crew.ended", cycle=1, cause="rank 1 failed")
    say(6.0, "n1", 11, "worker.started", cycle=2, rank=1, worker_pid=111)
    ranks = [picture.members.known[f"trainer rank {rank}"].lives for rank in (0, 1)]
    assert [(life.how, life.ended) for life in ranks[0]] == [("stopped", 5.0)]
    assert [(life.how, life.ended) for life in ranks[1]] == [("stopped", 5.0), ("", None)]
    assert not any(member.deaths for member in picture.members.known.values())
    assert picture.spare_nodes() == ["trainer node n0", "trainer node n2"]
    picture.take(told("chaos.struck", 7.0, "chaos", 9, victim=10, action="kill"))
    assert picture.spare_nodes() == ["trainer node n2"]
    assert not picture.members.spares, "what it kept warm died with it"


def test_quiet_nodes_live_as_long_as_their_host() -> None:
    """A node that has nothing to tell, and a rank that tells nothing, end with the host."""
    worker = {"run": "r", "cycle": 1, "rank": 1}
    picture = picture_of(
        told("part.started", 1.0, "supervisor", 1, part="host", child=10),
        told("launch.worker.started", 2.0, "n0", 20, **worker, worker_pid=30),
        told("part.died", 50.0, "supervisor", 1, part="host", child=10, code=-9),
        told("launch.worker.started", 55.0, "n0", 21, **worker, worker_pid=31),
    )
    for name in ("trainer node n0", "trainer rank 1"):
        first, second = picture.members.known[name].lives
        assert (first.ended, first.how) == (50.0, "stopped")
        assert second.ended is None
