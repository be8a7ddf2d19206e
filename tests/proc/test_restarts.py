"""When a part is started again, and when it is given up."""

import signal

import pytest

from holdfast.proc.restarts import PASSING, Death, RestartPolicy, Restarts

POLICY = RestartPolicy(well_s=10.0, first_s=0.1, most_s=0.3, failures=3)
KILLED = Death(1.0, -signal.SIGKILL, "boom")
OWN = Death(1.0, 1, "said before\nboom")


@pytest.mark.parametrize(
    ("_what", "deaths", "waits"),
    [
        ("killed again and again", [KILLED] * 6, [0.0, 0.1, 0.2, 0.3, 0.3, 0.3]),
        ("long life", [KILLED, KILLED, Death(10.0, -9), KILLED], [0.0, 0.1, 0.0, 0.1]),
        ("the same error", [OWN] * 3, [0.0, 0.1, None]),
        ("kills between", [OWN, KILLED, OWN, KILLED, OWN], [0.0, 0.1, 0.2, 0.3, None]),
        ("others", [OWN, OWN, Death(1.0, 1, "else"), OWN, OWN], [0.0, 0.1, 0.2, 0.3, 0.3]),
        ("numbers", [Death(1.0, 1, f"pid {n} at 0x{n:x}") for n in (7, 8, 900)], [0.0, 0.1, None]),
        ("steps", [Death(1.0, 1, "boom", n) for n in (1, 1, 2, 2, 2)], [0.0, 0.1, 0.0, 0.1, None]),
        ("long lives", [Death(11.0, 1, "boom")] * 5, [0.0] * 5),
        ("trouble elsewhere", [Death(1.0, PASSING, "away")] * 5, [0.0, 0.1, 0.2, 0.3, 0.3]),
        ("ends well", [Death(1.0, 0)] * 4, [0.0, 0.1, 0.2, 0.3]),
        ("says nothing", [Death(1.0, 1)] * 3, [0.0, 0.1, None]),
    ],
)
def test_deaths_are_answered(_what: str, deaths: list[Death], waits: list[float | None]) -> None:
    """At once, then later and later; given up for one's own repeated error only."""
    restarts = Restarts(POLICY)
    assert [restarts.died(death) for death in deaths] == [
        pytest.approx(wait) if wait else wait for wait in waits
    ]


def test_some_parts_are_never_given_up() -> None:
    """However often they end by their own error; the waits stay bounded."""
    restarts = Restarts(RestartPolicy(well_s=10.0, most_s=60.0, failures=0))
    assert [restarts.died(OWN) for _ in range(2000)][-1] == 60.0
