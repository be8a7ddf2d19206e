"""A record that nobody can read concerns itself: over a real gateway, on both kinds of ledger."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gateway.service import Service, serve
from holdfast import ledger
from holdfast.jobs.records import Keys
from holdfast.ledger import Entry, Get, Op, Put
from holdfast.servers import EtcdServer
from patience import until

KEYS = Keys("default")
JOB = {"schema": 1, "account": "local", "id": "bad", "state": "PAUSED", "epoch": 3}
BROKEN: dict[str, bytes] = {
    "no-json": b"\xff{",
    "no-record": b"[1, 2]",
    "unknown-state": json.dumps({**JOB, "id": "unknown-state", "state": "WILD"}).encode(),
    "far-away": json.dumps({**JOB, "id": "far-away", "created_at": 1e308}).encode(),
    "other-job": json.dumps({**JOB, "account": "other", "id": "x"}).encode(),
    "odd-schema": json.dumps({**JOB, "id": "odd-schema", "schema": "x"}).encode(),
}


def txn(url: str, *ops: Op) -> Sequence[Entry | None]:
    async def work() -> Sequence[Entry | None]:
        async with ledger.open(url) as opened:
            return (await opened.txn([], ops)).results

    return asyncio.run(work())


@pytest.fixture(scope="module", params=["sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Service, str]]:
    folder = tmp_path_factory.mktemp("serve")
    if request.param == "sqlite":
        with serve(folder, "--lease", "2") as service:
            yield service, f"sqlite:///{folder}/ledger.db"
        return
    with EtcdServer(folder / "etcd") as etcd:
        url = "etcd://{}:{}".format(*etcd.endpoint)
        with serve(folder, "--lease", "2", ledger=url) as service:
            yield service, url


def listed(service: Service) -> dict[str, Any]:
    answer = service.ask("GET", f"{service.jobs()}?pageSize=200")
    assert answer.status == 200, answer
    return {job["name"].rpartition("/")[2]: job for job in answer.json["rlorTrainerJobs"]}


def test_a_bad_job_is_listed_told_and_deleted_and_others_go_on(
    served: tuple[Service, str],
) -> None:
    """Whatever a job's record holds: the account's other jobs do not notice."""
    service, url = served
    txn(url, *(Put(KEYS.job("local", name), raw) for name, raw in BROKEN.items()))
    txn(url, Put(KEYS.epoch("local", "no-json"), b"7"))
    service.create("good")
    service.wait("good")
    jobs = listed(service)
    assert jobs["good"]["state"] == "JOB_STATE_RUNNING"
    for name in BROKEN:
        assert jobs[name]["state"] == "JOB_STATE_UNREADABLE", name
        told = service.ask("GET", service.jobs(name))
        assert (told.status, told.json["state"]) == (200, "JOB_STATE_UNREADABLE"), told
        assert KEYS.job("local", name) in told.json["status"]["message"]
        again = service.ask("POST", f"{service.jobs()}?rlorTrainerJobId={name}", {})
        assert again.status == 409, "its id is used"
        verb = service.ask("POST", service.jobs(name, ":resume"))
        assert verb.status == 400, verb
        asked = service.ask("POST", service.way(name, "/api/v1/optim_step"), b"{}")
        assert (asked.status, asked.json["error"]["code"]) == (410, "job_unreadable")
        assert service.ask("DELETE", service.jobs(name)).status == 200
        assert service.state(name) == "DELETED"
    assert not listed(service).keys() & BROKEN.keys()
    (epoch,) = txn(url, Get(KEYS.epoch("local", "no-json")))
    assert epoch is not None
    assert epoch.value == b"8", "what is left of it is fenced"
    log = "".join(one.read_text() for one in service.folder.rglob("events/*.jsonl"))
    assert '"type":"ledger.unreadable"' in log
    assert service.ask("GET", service.way("good")).status == 200


def test_a_bad_sign_of_life_goes_with_its_job(served: tuple[Service, str]) -> None:
    """A running trainer whose alive key was overwritten is stopped when its job is deleted."""
    service, url = served
    service.create("lives")
    service.wait("lives")
    txn(url, Put(KEYS.alive("local", "lives"), b"?"))
    until(lambda: service.state("lives") == "UNREADABLE", "it is noticed")
    assert service.ask("DELETE", service.jobs("lives")).status == 200
    service.wait("lives", "DELETED")

    def is_stopped() -> bool:
        toys = service.processes("toy.py")
        return all(one.environ()["HOLDFAST_JOB"] != "local/lives" for one in toys)

    until(is_stopped, "its trainer is stopped")


def test_a_bad_host_or_account_stops_nobody(served: tuple[Service, str]) -> None:
    """Jobs are created and callers are known, whatever stands beside their records."""
    service, url = served
    txn(
        url,
        Put(KEYS.host("bad"), b"?"),
        Put(KEYS.account("bad"), b"?"),
        Put(KEYS.account("worse"), b'{"schema":1,"name":"local"}'),
        Put(KEYS.checkpoints("local", "beside") + "odd", b"?"),
    )
    service.create("beside")
    service.wait("beside")
    saved = service.ask("GET", service.jobs("beside", "/checkpoints"))
    assert [one["checkpointType"] for one in saved.json["checkpoints"]] == ["UNREADABLE"]
