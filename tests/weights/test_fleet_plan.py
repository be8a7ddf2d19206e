"""The pure rules of a fleet: tables, and everything that must hold whatever replicas report."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.contrib.fleets.plan import advance, begin, offered, servable
from holdfast.weights.records import Consumer, Target


def replica(name: str = "a", **fields: object) -> Consumer:
    """A living replica."""
    plain = Consumer(name=name, needs="latest", floor=0, address=f"at-{name}")
    return msgspec.structs.replace(plain, **fields)


def target(phase: str, **fields: object) -> Target:
    """A target in round 5 that brings version 2 where 1 is served."""
    plain = Target(round=5, staging=None if phase in ("idle", "serving") else 2, allowed=(1,))
    return msgspec.structs.replace(plain, phase=phase, **fields)


def test_a_round_begins_with_staging_and_forgets_the_last_problem() -> None:
    """Beginning changes what is to be loaded, not what may be served."""
    begun = begin(target("idle", problem="old", mix=1), 2)
    assert begun == target("staging", round=6, mix=1)


@pytest.mark.parametrize(
    ("now", "members", "waited_s", "following"),
    [
        # Staging waits for everybody who has not failed, and for the first replica at all.
        ("staging", [], 0, None),
        ("staging", [replica(acknowledged=1)], 119, None),
        ("staging", [replica(staged=2), replica("b", failed=1)], 0, None),
        ("staging", [replica(staged=2), replica("b", failed=2)], 0, "holding"),
        ("staging", [replica(staged=2), replica("b")], 120, "holding"),
        ("staging", [replica(acknowledged=2)], 0, "holding"),
        # Too few have loaded it: the round has failed.
        ("staging", [replica(failed=2)], 0, "idle"),
        ("staging", [], 120, "idle"),
        # Holding waits for whoever serves something else and has not stopped for this round.
        ("holding", [replica(staged=2, acknowledged=1, held=4)], 29, None),
        ("holding", [replica(staged=2, acknowledged=1, held=4)], 30, "idle"),
        ("holding", [replica(staged=2, acknowledged=1, held=5)], 0, "serving"),
        ("holding", [replica(staged=2)], 0, "serving"),
        ("holding", [replica(acknowledged=2)], 0, "serving"),
        # Whoever had loaded it has died meanwhile.
        ("holding", [replica(acknowledged=1, held=5)], 29, None),
        ("holding", [replica(acknowledged=1, held=5)], 30, "idle"),
        # Serving waits for whoever is about to switch, and not for ever.
        ("serving", [replica(staged=1)], 29, None),
        ("serving", [replica(staged=1)], 30, "idle"),
        ("serving", [replica(acknowledged=1), replica("b", failed=1)], 0, "idle"),
        ("idle", [replica(acknowledged=1)], 1e9, None),
    ],
)
def test_the_next_step(
    now: str, members: list[Consumer], waited_s: float, following: str | None
) -> None:
    """Each phase waits for what it needs, for a limited time, and then goes on or fails."""
    found = advance(target(now), members, waited_s)
    assert (found.phase if found else None) == following
    if found is not None and found.phase == "idle" and now != "serving":
        assert found.problem
        assert found.allowed == (1,)


def test_with_a_mix_only_what_will_be_forbidden_is_held() -> None:
    """Replicas of a version that stays allowed serve on; those of an older one must stop."""
    now = target("holding", staging=3, allowed=(2, 1), mix=1)
    assert servable(now) == (2,)
    stays, leaves = replica(staged=3, acknowledged=2), replica("b", acknowledged=1)
    assert offered(now, [stays, leaves], None) == [stays]
    assert advance(now, [stays, leaves], 0) is None
    stopped = msgspec.structs.replace(leaves, held=5)
    assert advance(now, [stays, stopped], 0) == msgspec.structs.replace(
        now, phase="serving", staging=None, allowed=(3, 2)
    )


def test_whom_callers_are_offered() -> None:
    """Only replicas with an address whose acknowledged version may be served now."""
    members = [
        replica("new", acknowledged=2),
        replica("old", acknowledged=1),
        replica("loading", staged=2),
        replica("nowhere", acknowledged=2, address=""),
    ]
    names = [one.name for one in offered(target("idle", allowed=(2,)), members, None)]
    assert names == ["new"]
    both = target("idle", allowed=(2, 1), mix=1)
    assert [one.name for one in offered(both, members, None)] == ["new", "old"]
    assert [one.name for one in offered(both, members, 1)] == ["old"]
    assert offered(both, members, 7) == []
    assert offered(target("holding"), members, None) == []


VERSIONS = st.none() | st.integers(0, 3)
MEMBERS = st.lists(
    st.builds(
        replica,
        st.sampled_from("abcd"),
        acknowledged=VERSIONS,
        staged=VERSIONS,
        failed=VERSIONS,
        held=st.integers(0, 6),
        address=st.sampled_from(["", "here"]),
    ),
    max_size=4,
)
STEPS = st.lists(
    st.tuples(MEMBERS, st.sampled_from([0.0, 31.0, 1e9]), st.integers(0, 3)), max_size=30
)


@given(STEPS, st.integers(0, 2), st.integers(1, 3))
def test_whatever_replicas_report(
    steps: list[tuple[list[Consumer], float, int]], mix: int, least: int
) -> None:
    """Over any history of reports: no mix beyond the policy, nothing served that too few have,
    nobody left serving what is forbidden, and nothing but a whole round changes what is served.
    """
    now = Target(mix=mix, least=least)
    for members, waited_s, version in steps:
        if now.phase == "idle":
            now = begin(now, version)
        following = advance(now, members, waited_s)
        if following is None:
            continue
        replicas = [one for one in members if one.address]
        assert len(following.allowed) <= mix + 1
        assert len(set(following.allowed)) == len(following.allowed)
        assert following.round == now.round
        if following.allowed != now.allowed or following.phase == "serving":
            assert (now.phase, following.phase) == ("holding", "serving")
            newest = following.allowed[0]
            assert newest == now.staging
            assert sum(newest in (one.staged, one.acknowledged) for one in replicas) >= least
            for one in replicas:
                if one.acknowledged not in (None, *following.allowed):
                    assert one.held == now.round
        assert set(servable(now)) <= set(now.allowed)
        if now.phase == "holding":
            assert len({*servable(now), now.staging}) <= mix + 1
        now = following


@given(MEMBERS, st.integers(0, 2), st.integers(1, 3), st.integers(0, 3))
def test_every_round_ends(members: list[Consumer], mix: int, least: int, version: int) -> None:
    """When enough time has passed there is always a next step, until the round is over."""
    now = begin(Target(mix=mix, least=least, allowed=(1,)), version)
    phases = [now.phase]
    while now.phase != "idle":
        following = advance(now, members, 1e9)
        assert following is not None
        now = following
        phases.append(now.phase)
    assert phases in (
        ["staging", "idle"],
        ["staging", "holding", "idle"],
        ["staging", "holding", "serving", "idle"],
    )
    assert bool(now.problem) == (phases[-2] != "serving")
