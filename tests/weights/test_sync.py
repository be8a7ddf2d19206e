"""Publishing and subscribing without an event loop."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from holdfast import ledger
from holdfast.errors import Fenced, Gone, LeaseLost, Mistake, NotFound, TimedOut
from holdfast.ledger import Compare, Put
from holdfast.weights import Retention, Ticket, open_publisher, open_subscriber


@pytest.fixture(params=["sqlite", "markers"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return f"sqlite:///{tmp_path}/ledger.db" if request.param == "sqlite" else None


def test_a_training_loop_and_a_replica(tmp_path: Path, url: str | None) -> None:
    """What a trainer publishes step by step is what a replica loads, acknowledges and stages."""
    model, replica = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    with (
        open_publisher(tmp_path, url, "policy", Retention(keep_last=1)) as publisher,
        open_subscriber(tmp_path, url, "policy", "r0") as subscriber,
    ):
        assert publisher.epoch == 1
        with pytest.raises(NotFound), subscriber.pin():
            pass
        with pytest.raises(TimedOut):
            subscriber.wait_for(0, timeout_s=0.2)
        for step in range(3):
            torch.nn.init.constant_(model.weight, float(step))
            assert publisher.next_version() == step
            publisher.publish(step, model.state_dict(), files={"config.json": b"{}"})
            assert subscriber.wait_newer(step - 1 if step else None, 10).version == step
            with subscriber.pin() as pin:
                pin.load_into(replica.state_dict())
                staged = Path(pin.stage())
                assert (staged / "config.json").read_bytes() == b"{}"
                pin.check()
                subscriber.acknowledge(pin.number)
            assert not staged.exists()
            assert torch.equal(replica.weight, model.weight)
        publisher.sweep()
        latest = subscriber.latest()
        assert latest is not None
        assert latest.version == 2
        with pytest.raises(Gone), subscriber.pin(0):
            pass


def test_ranks_shard_sizes_and_guards(tmp_path: Path, url: str | None) -> None:
    """What several ranks wrote is published; a guard that no longer holds fences the publisher."""
    guards: list[Compare] = []
    if url:
        with ledger.open_sync(url) as led:
            led.txn([], [Put("/job", b"1")])
        guards = [Compare("/job", "value", "==", b"1")]
    with (
        open_publisher(tmp_path, url, guards=guards, shard_bytes=4096) as publisher,
        open_subscriber(tmp_path, url) as subscriber,
    ):
        ticket = publisher.begin(0, new_bytes=8000)
        sent = msgspec.json.decode(msgspec.json.encode(ticket), type=Ticket)
        publisher.write_part(sent, 0, {"a": np.ones(1000)})
        publisher.write_part(ticket, 1, {"b": np.ones(1000)})
        assert publisher.finish(ticket, 2, files={"config.json": b"{}"}).version == 0
        with subscriber.pin() as pin:
            assert (pin.verified, pin.lost, pin.carried("config.json")) == (True, False, b"{}")
            assert len({one.file for one in pin.manifest.tensors}) == 2
            target = {"a": torch.ones(1000).double(), "b": pin.torch("b")}
            assert pin.fits(target).keys() == target.keys()
        if url:
            with ledger.open_sync(url) as led:
                led.txn([], [Put("/job", b"2")])
            with pytest.raises(Fenced):
                publisher.publish(1, {"a": np.ones(1)})


def test_leaving_closes_everything(tmp_path: Path, url: str | None) -> None:
    """After `close` every call says so, and a pin's tensors stay readable."""
    publisher = open_publisher(tmp_path, url)
    publisher.publish(7, {"w": torch.arange(4)})
    subscriber = open_subscriber(tmp_path, url)
    with subscriber.pin(7) as pin:
        tensor = pin.torch("w")
    for one in (subscriber, publisher):
        one.close()
        one.close()
    assert tensor.tolist() == [0, 1, 2, 3]
    with pytest.raises(Mistake, match="closed"):
        subscriber.latest()
    with pytest.raises(Mistake, match="closed"):
        publisher.publish(8, {"w": torch.arange(4)})


def test_a_bad_url_leaves_no_thread(tmp_path: Path) -> None:
    """What cannot be opened is one clear error."""
    with pytest.raises(Mistake, match="not a ledger URL"):
        open_publisher(tmp_path, "nonsense")
    with pytest.raises((Mistake, LeaseLost)):
        open_subscriber(tmp_path, "nonsense:x")
