"""The control plane's REST: the paths and words of the SDK, one account at a time."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.jobs.api import BODY_BYTES, Api, Reply, Request
from holdfast.jobs.fence import Incarnation
from holdfast.jobs.local import log_file
from holdfast.jobs.records import Checkpoint, Host
from holdfast.jobs.store import Jobs
from holdfast.ledger.records import put
from jobs.hosts import left_running

JOBS = "/v1/accounts/a/rlorTrainerJobs"


class Caller:
    """Asks as one account."""

    def __init__(self, api: Api, account: str = "a") -> None:
        self._api = api
        self._account = account

    async def ask(self, method: str, path: str, query: str = "", body: Any = None) -> Reply:
        raw = b"" if body is None else body if isinstance(body, bytes) else _json(body)
        return await self._api.handle(self._account, Request(method, path, query, raw))

    async def ok(self, *args: Any, **kwargs: Any) -> Any:
        reply = await self.ask(*args, **kwargs)
        assert reply.status == 200, reply
        return json.loads(reply.body)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.fixture
def announced() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def api(jobs: Jobs, tmp_path: Path, announced: list[tuple[str, str]]) -> Api:
    async def announce(account: str, job: str) -> None:
        announced.append((account, job))

    return Api(jobs, tmp_path, announce)


@pytest.fixture
def caller(api: Api) -> Caller:
    return Caller(api)


async def test_the_way_of_a_job(caller: Caller, announced: list[tuple[str, str]]) -> None:
    """As the Fireworks SDK walks it."""
    deep = json.loads("[" * 31 + "]" * 31)
    spec = {
        "serviceMode": True,
        "deep": deep,
        "trainingConfig": {"baseModel": "m"},
        "displayName": "d",
    }
    made = await caller.ok("POST", JOBS, "rlorTrainerJobId=j-1&skipValidations=true", spec)
    assert made["name"] == "accounts/a/rlorTrainerJobs/j-1"
    assert made["state"] == "JOB_STATE_PENDING"
    assert made["trainingConfig"] == {"baseModel": "m"}
    assert made["createTime"].endswith("Z")
    assert announced == [("a", "j-1")]
    again = await caller.ask("POST", JOBS, "rlorTrainerJobId=j-1", spec)
    assert again.status == 409
    assert await caller.ok("GET", f"{JOBS}/j-1") == made
    assert (await caller.ok("POST", f"{JOBS}/j-1:pause"))["state"] == "JOB_STATE_PAUSED"
    assert (await caller.ok("POST", f"{JOBS}/j-1:resume"))["state"] == "JOB_STATE_PENDING"
    assert (await caller.ok("POST", f"{JOBS}/j-1:cancel"))["state"] == "JOB_STATE_CANCELLED"
    assert await caller.ok("DELETE", f"{JOBS}/j-1") == {}
    assert await caller.ok("DELETE", f"{JOBS}/j-1") == {}, "callers repeat themselves"
    assert (await caller.ok("GET", f"{JOBS}/j-1"))["state"] == "JOB_STATE_DELETED"
    assert (await caller.ask("POST", f"{JOBS}/j-1:resume")).status == 410
    assert (await caller.ask("POST", JOBS, "rlorTrainerJobId=j-1", {})).status == 409


async def test_lists_have_pages(caller: Caller, jobs: Jobs) -> None:
    """In the order of ids; tombstones are left out, and a page of them does not end the list."""
    for number in range(6):
        await caller.ok("POST", JOBS, f"rlorTrainerJobId=j{number}", {})
    await jobs.create("b", "other", {})
    for name in ("j0", "j1", "j3"):
        await caller.ok("DELETE", f"{JOBS}/{name}")
    got, token = [], ""
    for _ in range(10):
        page = await caller.ok("GET", JOBS, f"pageSize=2&pageToken={token}")
        got += [job["name"].rpartition("/")[2] for job in page["rlorTrainerJobs"]]
        token = page["nextPageToken"]
        if not token:
            break
    assert got == ["j2", "j4", "j5"]
    everything = await caller.ok("GET", JOBS, "showDeleted=1")
    assert len(everything["rlorTrainerJobs"]) == 6


async def test_accounts_do_not_see_each_other(api: Api, caller: Caller) -> None:
    """Somebody else's job answers exactly like one that is not there."""
    await caller.ok("POST", JOBS, "rlorTrainerJobId=j", {})
    other = Caller(api, "b")
    for method, path in (
        ("GET", f"{JOBS}/j"),
        ("DELETE", f"{JOBS}/j"),
        ("POST", f"{JOBS}/j:pause"),
        ("GET", f"{JOBS}/j/checkpoints"),
        ("GET", f"{JOBS}/j/logs"),
        ("GET", JOBS),
        ("GET", "/v1/accounts/a"),
    ):
        theirs = await other.ask(method, path)
        absent = await other.ask(method, path.replace("accounts/a", "accounts/zz"))
        assert theirs == absent
        assert theirs.status == 404
    assert (await other.ok("GET", "/v1/accounts"))["accounts"][0]["name"] == "accounts/b"
    assert (await caller.ok("GET", f"{JOBS}/j"))["state"] == "JOB_STATE_PENDING"
    own = JOBS.replace("accounts/a", "accounts/b")
    await other.ok("POST", own, "rlorTrainerJobId=j", {})


async def test_running_ends_with_the_lease_also_without_another_host(
    caller: Caller, jobs: Jobs
) -> None:
    """A trainer that died silently with the only host stops being RUNNING for those who ask."""
    await jobs.create("a", "j", {})
    _, lease = await left_running(jobs)
    await jobs.runtime.ledger.revoke(lease)
    assert (await caller.ok("GET", f"{JOBS}/j"))["state"] != "JOB_STATE_RUNNING"


@pytest.mark.parametrize(
    ("method", "path", "query", "body", "status"),
    [
        ("POST", JOBS, "rlorTrainerJobId=UPPER", b"{}", 400),
        ("POST", JOBS, "rlorTrainerJobId=..%2F..%2Fx", b"{}", 400),
        ("POST", JOBS, "rlorTrainerJobId=" + "x" * 64, b"{}", 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b"{", 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b"[]", 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b"\xff", 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b"[" * 60_000, 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b'{"a":%s%s}' % (b"[" * 990, b"]" * 990), 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b'{"a":%s%s}' % (b"[" * 32, b"]" * 32), 400),
        ("POST", JOBS, "rlorTrainerJobId=j", b" " * (BODY_BYTES + 1), 413),
        ("GET", JOBS, "pageSize=x", b"", 400),
        ("GET", JOBS, "pageSize=-1", b"", 400),
        ("GET", JOBS, "pageSize=" + "9" * 5000, b"", 400),
        ("GET", JOBS, "pageSize=" + "0" * 20 + "9" * 30, b"", 400),
        ("GET", JOBS, f"pageSize={1 << 62}", b"", 400),
        ("GET", JOBS, "&".join(["a=1"] * 40), b"", 400),
        ("GET", f"{JOBS}/nothing", "", b"", 404),
        ("GET", f"{JOBS}/%2e%2e", "", b"", 400),
        ("PUT", JOBS, "", b"", 405),
        ("POST", f"{JOBS}/j", "", b"", 405),
        ("GET", f"{JOBS}/j:pause", "", b"", 405),
        ("POST", f"{JOBS}/j:explode", "", b"", 400),
        ("GET", "/v1/other", "", b"", 404),
        ("GET", "/v1/accounts/a/rlorTrainerJobs/j/checkpoints/x", "", b"", 404),
    ],
)
async def test_bad_requests(
    caller: Caller, method: str, path: str, query: str, body: bytes, status: int
) -> None:
    """A clear 4xx, with a sentence, and nothing is made."""
    reply = await caller.ask(method, path, query, body)
    assert reply.status == status
    assert json.loads(reply.body)["message"]
    assert (await caller.ok("GET", JOBS))["rlorTrainerJobs"] == []


async def test_a_spec_cannot_say_who_a_job_is(caller: Caller) -> None:
    """What is the control plane's is said by the control plane."""
    lies = {"name": "accounts/b/x", "state": "JOB_STATE_RUNNING", "epoch": 99}
    told = await caller.ok("POST", JOBS, "rlorTrainerJobId=j", lies)
    assert (told["name"], told["state"], told["epoch"]) == (
        "accounts/a/rlorTrainerJobs/j",
        "JOB_STATE_PENDING",
        1,
    )


async def test_checkpoints(caller: Caller, jobs: Jobs) -> None:
    await caller.ok("POST", JOBS, "rlorTrainerJobId=j", {})
    who = Incarnation("r", "a", "j", 1)
    for number in range(3):
        saved = Checkpoint(name=f"c{number}", step=number, kind="DCP")
        await jobs.runtime.ledger.txn([who.guard()], [who.saved(saved)])
    page = await caller.ok("GET", f"{JOBS}/j/checkpoints", "pageSize=2")
    assert [one["step"] for one in page["checkpoints"]] == [0, 1]
    rest = await caller.ok("GET", f"{JOBS}/j/checkpoints", f"pageToken={page['nextPageToken']}")
    assert [one["name"] for one in rest["checkpoints"]] == [
        "accounts/a/rlorTrainerJobs/j/checkpoints/c2"
    ]


async def test_logs(caller: Caller, tmp_path: Path) -> None:
    await caller.ok("POST", JOBS, "rlorTrainerJobId=j", {})
    assert (await caller.ask("GET", f"{JOBS}/j/logs")).status == 404
    path = log_file(tmp_path, "a", "j", 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"hello\n\xff")
    told = await caller.ok("GET", f"{JOBS}/j/logs", "offset=2")
    assert (told["text"], told["offset"], told["epoch"]) == ("llo\n�", 7, 1)


async def test_what_no_host_can_start_is_refused(caller: Caller, jobs: Jobs) -> None:
    """Before the id is used up. Without any host, one may still come."""
    await caller.ok("POST", JOBS, "rlorTrainerJobId=early", {"holdfast": {"trainer": "later"}})
    host = Host(name="h", trainers=("default", "grpo"))
    await jobs.runtime.ledger.txn([], [put(jobs.keys.host("h"), host)])
    for wish in ({"trainer": "gpro"}, {"command": ["x"]}, "x", {"trainer": ["grpo"]}):
        reply = await caller.ask("POST", JOBS, "rlorTrainerJobId=j", {"holdfast": wish})
        assert reply.status == 400, reply
    unknown: list[tuple[Any, str]] = [
        ({"policy": {"gaps_s": 1}}, "no 'gaps_s'; there are: gap_s, "),
        ({"polcy": {}}, "no 'polcy'; it has: trainer, command, policy"),
    ]
    for given, why in unknown:
        reply = await caller.ask("POST", JOBS, "rlorTrainerJobId=j", {"holdfast": given})
        assert reply.status == 400, reply
        assert why in json.loads(reply.body)["message"]
    for name, wish in (("j", {}), ("k", {"trainer": "grpo"})):
        await caller.ok("POST", JOBS, f"rlorTrainerJobId={name}", {"holdfast": wish})
