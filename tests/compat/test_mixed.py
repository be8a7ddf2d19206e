"""An upgrade: real processes of both versions work together on one ledger and one store.

The old ones come from the fixture `package`. Every test goes both ways.
"""

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.sides import PROGRAMS, Process, Side, serve
from patience import until

Sides = tuple[Side, Side]
NODE = """
import json, os, pathlib, sys, time
told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
told["pid"] = os.getpid()
place = pathlib.Path(sys.argv[1])
(place / f"{os.environ['RANK']}.part").write_text(json.dumps(told))
(place / f"{os.environ['RANK']}.part").rename(place / f"{os.environ['RANK']}-{os.getpid()}.json")
while not (place / "end").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.db"


@pytest.fixture
def store(new: Side) -> Iterator[str]:
    """A store in shared memory."""
    name = f"shm://test-{uuid.uuid4().hex[:12]}?budget=64M&segment=1M"
    yield name
    new.command("transfer", "rm", name.partition("?")[0], "--force")


@pytest.mark.parametrize("book", ["ledger", "markers"])
def test_publisher_and_subscriber(tmp_path: Path, url: str, book: str, sides: Sides) -> None:
    """What one publishes the other loads; what it pins is not swept; then they change places."""
    one, other = sides
    root, where = str(tmp_path / "weights"), url if book == "ledger" else ""
    with (
        one.program("publish", root, where) as publisher,
        other.program("subscribe", root, where, "reader") as reader,
    ):
        for number in (0, 1):
            made = publisher.ask(publish=number)
            assert reader.ask(load=number) == {
                "loaded": number,
                "right": True,
                "content": made["content"],
            }
        held = reader.ask(load=1, hold=True)
        assert (held["pinned"], held["right"]) == (1, True)
        for number in (2, 3):  # one is kept: without the pin, version 1 would go
            publisher.ask(publish=number)
        assert (tmp_path / "weights" / "policy" / "step_1" / "STABLE").exists()
        assert reader.ask(go="on")["right"]
        publisher.kill()
        with other.program("publish", root, where) as successor:
            assert successor.ask(publish=4)["version"] == 4
            assert reader.ask(load=4)["right"]
        assert not (tmp_path / "weights" / "policy" / "step_2").exists()


def test_producer_and_consumer(url: str, store: str, sides: Sides) -> None:
    """Each sample is consumed once; what a killed consumer had claimed goes to the other."""
    one, other = sides
    with (
        one.program("queue", store, url, "one") as producer,
        other.program("queue", store, url, "other") as consumer,
    ):
        producer.ask(put=["s1", "s2", "s3", "s4"])
        first = consumer.ask(claim=2)
        assert first["right"]
        consumer.ask(put=["s5", "s6"])
        with other.program("queue", store, url, "doomed", "1") as doomed:
            held = doomed.ask(claim=2, acknowledge=False)
        rest = producer.ask(claim=4)
        assert rest["right"]
        assert set(held["claimed"]) < set(rest["claimed"])
        assert sorted(first["claimed"] + rest["claimed"]) == [f"s{at}" for at in range(1, 7)]


def test_store_in_shared_memory(store: str, sides: Sides) -> None:
    """Values are read exactly while their writer has the store open, and when it was killed."""
    one, other = sides
    with one.program("store", store) as holder:
        holder.ask(do="put", prefix="one")
        with other.program("store", store) as reader:
            assert reader.ask(do="get", prefix="one")["right"]
            reader.ask(do="put", prefix="other")
            assert holder.ask(do="get", prefix="other")["right"]
            holder.kill()
            assert reader.ask(do="get", prefix="one")["right"]
            assert all(reader.ask(do="delete", prefix="one")["deleted"].values())
            reader.kill()
        with one.program("store", store) as heir:
            assert heir.ask(do="get", prefix="other")["right"]
            assert all(heir.ask(do="delete", prefix="other")["deleted"].values())


def test_nodes_of_one_cycle(tmp_path: Path, url: str, sides: Sides) -> None:
    """Nodes of both versions agree on ranks; one that dies costs a cycle; all of them succeed."""
    script = tmp_path / "worker.py"
    script.write_text(NODE)
    words = ["-m", "holdfast", "launch", "--run", "r", "--ledger", url, "--nnodes", "2"]
    words += ["--lease", "3", "--grace", "1", "--no-warm"]

    def start(side: Side, name: str) -> Process:
        flags = ["--node-name", name, "--local-addr", "127.0.0.1"]
        return side.start(
            *words, *flags, "--log-dir", str(tmp_path / name), str(script), str(tmp_path)
        )

    def workers(count: int) -> list[dict[str, str]]:
        found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*-*.json"))]
        return found if len(found) >= count else []

    one, other = sides
    with start(one, "n0") as first, start(other, "n1") as second:
        met = until(lambda: workers(2), "a cycle of both")
        assert sorted(told["RANK"] for told in met) == ["0", "1"]
        assert {told["WORLD_SIZE"] for told in met} == {"2"}
        assert len({told["MASTER_PORT"] for told in met}) == 1
        os.kill(int(met[0]["pid"]), signal.SIGKILL)
        again = until(lambda: workers(4), "the next cycle")[:]
        assert sorted(told["RANK"] for told in again) == ["0", "0", "1", "1"]
        for side in sides:
            status = json.loads(side.command("status", "r", "--ledger", url, "--json"))
            assert (status["cycle"]["number"], len(status["nodes"])) == (2, 2)
        (tmp_path / "end").touch()
        assert (first.wait(), second.wait()) == (0, 0)


def test_gateway_and_host(tmp_path: Path, url: str, sides: Sides) -> None:
    """A gateway of one version, a host with its trainers of the other: jobs are created, reached,
    begun again, paused and resumed through either."""
    one, other = sides
    command = f"{sys.executable} {PROGRAMS} trainer"
    with (
        serve(one, tmp_path / "host", "--trainer", command, ledger=url) as host,
        serve(other, tmp_path / "gateway", "--no-host", ledger=url) as gateway,
    ):
        gateway.create("a")
        gateway.wait("a")
        told = [service.post("a", "hello", {"x": 1}) for service in (gateway, host)]
        assert told[0] == told[1]
        assert told[0]["epoch"] == 1
        if one.package is not None:
            assert Path(told[0]["package"]) == one.package / "holdfast"
        os.kill(told[0]["pid"], signal.SIGKILL)
        until(lambda: gateway.job("a")["epoch"] == 2, "the next incarnation")
        assert gateway.post("a", "hello", {})["epoch"] == 2
        for service, what, state in (
            (gateway, "pause", "PAUSED"),
            (host, "resume", "RUNNING"),
            (host, "cancel", "CANCELLED"),
        ):
            answer = service.ask("POST", service.jobs("a", f":{what}"), {})
            assert answer.status == 200, answer
            for both in (gateway, host):
                both.wait("a", state)
        assert gateway.trainer("a", "hello", {}).status not in (200, 421)
