"""The table of a job's states, cell by cell."""

import itertools

import msgspec
import pytest

from holdfast.errors import Fenced, Gone, Mistake
from holdfast.jobs import decide
from holdfast.jobs.decide import TABLE, Budget
from holdfast.jobs.records import LIVE, STATES, TOMBSTONES, Alive, Job, State

NOW = 1000.0
BUDGET = Budget(restarts=2, window_s=100.0, well_s=50.0, base_s=1.0, max_s=8.0)


def job(state: State = "PENDING", **fields: object) -> Job:
    address = "127.0.0.1:1" if state == "RUNNING" else ""
    told = {"state": state, "epoch": 3, "address": address, "host": "h" if state in LIVE else ""}
    return Job(account="a", id="j", **{**told, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("verb", "state"), list(itertools.product(TABLE, STATES)))
def test_every_cell(verb: decide.Verb, state: State) -> None:
    """A verb leads where the table says, is done already, or is refused; a tombstone stays."""
    before = job(state)
    try:
        after = decide.change(before, verb, NOW)
    except Gone:
        assert state in TOMBSTONES
        return
    except Mistake as error:
        assert state not in TABLE[verb]
        told = str(error)
        assert state in told
        return
    assert state not in TOMBSTONES or after is None
    if after is None:
        assert state not in TABLE[verb]
        return
    assert after.state == TABLE[verb][state]
    assert bool(after.address) == (after.state == "RUNNING" and verb != "ready")
    assert bool(after.host) == (after.state in LIVE and state in LIVE)
    ended = (state in LIVE or state == "UNREADABLE") and after.state not in LIVE
    assert after.epoch == before.epoch + ended, "what is ended is fenced, and only that"


def test_names_from_outside_are_checked() -> None:
    for bad in ("", "-a", "a-", "A", "a/b", "..", "a" * 64, "a\n", "ä"):
        with pytest.raises(Mistake):
            decide.create(bad, "j", {}, NOW)
        with pytest.raises(Mistake):
            decide.create("a", bad, {}, NOW)
    assert decide.create("a" * 63, "j-1", {}, NOW).state == "PENDING"


def test_a_host_takes_only_what_waits_and_when_it_is_time() -> None:
    taken = decide.take(job(not_before=NOW), "h2", NOW)
    assert taken is not None
    assert (taken.state, taken.host, taken.epoch) == ("CREATING", "h2", 3)
    assert decide.take(job(not_before=NOW + 1), "h2", NOW) is None
    assert all(decide.take(job(state), "h2", NOW) is None for state in STATES[1:])


def test_an_address_is_that_of_the_present_epoch() -> None:
    """An incarnation that was replaced meanwhile is told so, whatever the state is."""
    running = decide.ready(job("CREATING"), 3, "127.0.0.1:9", NOW)
    assert running is not None
    assert (running.state, running.address, running.host) == ("RUNNING", "127.0.0.1:9", "h")
    assert decide.ready(running, 3, "127.0.0.1:9", NOW) is None, "said twice, done once"
    for state in STATES:
        with pytest.raises(Fenced):
            decide.ready(job(state, epoch=4), 3, "127.0.0.1:9", NOW)
    for state in set(STATES) - LIVE:
        with pytest.raises(Fenced):
            decide.ready(job(state), 3, "127.0.0.1:9", NOW)


def test_a_crash_loop_slows_down_and_ends() -> None:
    """The first death costs no wait, the next ones more and more; then the job has failed."""
    one = decide.fall(job("RUNNING", changed_at=NOW), 3, "killed", NOW, BUDGET)
    assert (one.state, one.epoch, one.not_before) == ("PENDING", 4, NOW)
    again = msgspec.structs.replace(one, state="RUNNING")
    two = decide.fall(again, 4, "killed", NOW + 1, BUDGET)
    assert (two.state, two.epoch, two.not_before) == ("PENDING", 5, NOW + 2)
    again = msgspec.structs.replace(two, state="CREATING")
    three = decide.fall(again, 5, "killed", NOW + 2, BUDGET)
    assert (three.state, three.epoch) == ("FAILED", 6)
    assert "killed" in three.reason
    assert "no more restarts" in three.reason
    later = decide.fall(again, 5, "killed", NOW + 200, BUDGET)
    assert later.state == "PENDING", "deaths long ago do not count"
    served = msgspec.structs.replace(two, state="RUNNING", changed_at=NOW + 2)
    late = decide.fall(served, 5, "killed", NOW + 52, BUDGET)
    assert (late.state, late.restarts, late.not_before) == ("PENDING", (NOW + 52,), NOW + 52)
    with pytest.raises(Fenced):
        decide.fall(job("RUNNING"), 2, "killed", NOW, BUDGET)


@pytest.mark.parametrize("state", STATES)
def test_what_becomes_of_a_job_by_itself(state: State) -> None:
    """Without a sign of life what lived is begun again, and what was being ended has ended."""
    assert decide.settle(job(state), Alive(epoch=3, host="h"), NOW, BUDGET) is None
    after = decide.settle(job(state), None, NOW, BUDGET)
    expected = {
        "CREATING": "PENDING",
        "RUNNING": "PENDING",
        "CANCELLING": "CANCELLED",
        "DELETING": "DELETED",
    }.get(state)
    assert (after.state if after else None) == expected
