"""Weights of before: listed, proven, loaded, followed by the next version, and swept."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from compat.programs import tensors
from compat.sides import facts, unpack
from holdfast.cli import cli
from holdfast.errors import Gone, Mistake
from holdfast.weights import Retention, open_publisher, open_subscriber

KINDS = ("ledger", "markers")


@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_is_taken_up(tmp_path: Path, kind: str) -> None:
    """What was published is there, byte for byte, and its numbers are used up."""
    folder = unpack("channels", tmp_path)
    root, contents = folder / kind, facts(folder)["contents"][kind]
    url = f"sqlite:///{root}/ledger.db" if kind == "ledger" else None
    listed = _weights("ls", root / "policy", url)
    states = {one["version"]: one["state"] for one in listed if one["type"] == "version"}
    assert states == {1: "published", 2: "published", 3: "published", 9: "unfinished"}
    assert _shared(root, 2, 3), "the fixture has no hard links"
    for channel in ("policy", "adapter"):
        assert _weights("verify", root / channel, url)
    with open_subscriber(root, url, "policy", "replica") as subscriber:
        for number in (1, 2, 3):
            with subscriber.pin(number) as pin:
                assert pin.version.content == contents[str(number)]
                assert pin.carried("config.json") == b"{}"
                for name, right in tensors(number).items():
                    np.testing.assert_array_equal(pin.numpy(name), right)
        with pytest.raises(Gone), subscriber.pin(0):
            pass
        subscriber.acknowledge(3)
        _publish_next(root, url, contents)
        assert subscriber.wait_newer(3, 60).version == 4
        with subscriber.pin(4) as pin:
            np.testing.assert_array_equal(pin.numpy("frozen.weight"), tensors(4)["frozen.weight"])
    with open_subscriber(root, url, "adapter", "replica") as reader, reader.pin() as pin:
        assert (pin.number, pin.carried("adapter_config.json")) == (1, b'{"r": 2}')


def _publish_next(root: Path, url: str | None, contents: dict[str, str]) -> None:
    """Take the channel over: old numbers keep their contents, the next one shares files, and what
    the killed publisher began goes."""
    with open_publisher(
        root, url, "policy", Retention(keep_last=1), shard_bytes=1 << 10
    ) as publisher:
        assert publisher.epoch == 2
        assert publisher.next_version() == 4
        files = {"config.json": b"{}"}
        for number in (0, 3):  # the hash outlives the files
            again = publisher.publish(number, tensors(number), files=files)
            assert again.content == contents[str(number)]
        with pytest.raises(Mistake):
            publisher.publish(3, tensors(5), files=files)
        publisher.publish(4, tensors(4), files=files)
        assert _shared(root, 3, 4)
        publisher.sweep()
    listed = _weights("ls", root / "policy", url)
    # Version 3 is served by the one who acknowledged it.
    assert {one["version"] for one in listed if one["type"] == "version"} == {3, 4}


def _shared(root: Path, one: int, other: int) -> bool:
    """Whether two versions have a file in common."""
    inodes = [
        {path.stat().st_ino for path in (root / "policy" / f"step_{number}").iterdir()}
        for number in (one, other)
    ]
    return bool(inodes[0] & inodes[1])


def _weights(command: str, path: Path, url: str | None) -> list[dict[str, object]]:
    words = ["weights", command, str(path), "--ledger", url or "none", "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.output.splitlines()]
