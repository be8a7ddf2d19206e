"""Names as long as they may be."""

from pathlib import Path

from holdfast.jobs.fence import Incarnation
from holdfast.launch.identity import identify
from holdfast.trainer.process import launch_name
from holdfast.weights.channel import Channel


def of(run: str, account: str, job: str) -> Incarnation:
    return Incarnation(run=run, account=account, job=job, epoch=7)


def test_ranks_are_launched_whatever_the_job_is_called() -> None:
    """The name for `launch` is one that it takes, and no two jobs have the same."""
    longest = [of("r" * 128, "a" * 63, "j" * 62 + end) for end in "12"]
    names = [launch_name(one) for one in (*longest, of("default", "local", "one"))]
    assert len(set(names)) == 3
    assert names[2] == "default.local.one.7"
    for name in names:
        assert identify({}, hostname="h", token="t", run=name).run == name


def test_a_channel_takes_every_name_that_launch_takes(tmp_path: Path) -> None:
    """A run of 128 characters has weights, too."""
    name = identify({}, hostname="h", token="t", run="r" * 128).run
    Channel(tmp_path, None, "policy", run=name)
