"""The language of faults, and storms by seed."""

import pytest

from holdfast.chaos.plan import PROCESSES, parse, storm
from holdfast.errors import Mistake

TEXTS = (
    "trainer.rank1@step 7",
    "gateway@12s",
    "replica0: pause 20s@step 9",
    "gateway: cut 5s@step 9",
    "gateway: cut 2.5s@12s",
    "ledger: cut 5s@step 4",
    "disk: full 10s@step 8",
    "store: corrupt@step 6",
    "supervisor@step 3 + 0.25s",
    "orchestrator@run.step.committed",
    "trainer.rank0@trainer.result.after 3",
)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text: str) -> None:
    """A clause prints as it is written."""
    assert [str(one) for one in parse(text)] == [text]


def test_many() -> None:
    """Clauses are separated by semicolons or lines; comments and blanks do not count."""
    text = "gateway@1s; host@2s\n\n# nobody\nreplica0@3s  # and him\n"
    assert [one.target for one in parse(text)] == ["gateway", "host", "replica0"]
    assert parse("") == ()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("gateway", "say when"),
        ("gatway@1s", "nothing is called 'gatway'"),
        ("gateway: pause@1s", "last some seconds"),
        ("replica0: cut 3s@1s", "what can be done to replica0 is: kill or pause"),
        ("gateway: corrupt@1s", "kill or pause or cut"),
        ("gateway: cut@1s", "last some seconds"),
        ("gateway: cut 99999s@1s", "not 0 to"),
        ("gateway: cut 3s@run.step.done", "say when"),
        ("ledger: pause 3s@1s", "what can be done to ledger is: cut"),
        ("gateway@0s", "not 0 to"),
        ("replica0: pause 3s@run.step.done", "say when"),
        ("disk: full 99999s@1s", "not 0 to"),
        ("a b c", "is not like"),
    ],
)
def test_mistakes(text: str, hint: str) -> None:
    """What is not understood is quoted, and told what is."""
    with pytest.raises(Mistake, match=hint):
        parse(text)


@pytest.mark.parametrize("seed", range(20))
def test_a_storm(seed: int) -> None:
    """A storm has its faults, kills everybody, hits some points, cuts the network once, and is
    the same for its seed."""
    found = storm(seed, 12, faults=20)
    assert sum(not one.point for one in found) == 20
    assert {one.target for one in found if one.step and one.action == "kill"} == set(PROCESSES)
    [cut] = [one for one in found if one.cuts_line]
    assert 1.0 <= cut.length_s <= 4.0
    assert sum(bool(one.point) for one in found) >= 5
    assert all(2 <= one.step <= 11 for one in found if one.step)
    assert found == storm(seed, 12, faults=20)
    assert parse(";".join(map(str, found))) == found
    assert found != storm(seed + 1, 12, faults=20)


def test_a_storm_needs_room() -> None:
    """A run of three steps is no place for a storm."""
    with pytest.raises(Mistake, match="4 steps"):
        storm(1, 3)
