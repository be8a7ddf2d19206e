"""States and schedules that must not leave a job, or an account, to nobody."""

import asyncio
import contextlib
import gc
import http.server
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast import ledger
from holdfast.errors import Denied, HoldfastError, Retriable, Unavailable, UnknownOutcome
from holdfast.jobs import decide
from holdfast.jobs.accounts import Accounts, Guests
from holdfast.jobs.api import Api, Request
from holdfast.jobs.host import Host
from holdfast.jobs.local import LocalLauncher
from holdfast.jobs.logs import Logs
from holdfast.jobs.note import Note, find_service, leave_note
from holdfast.jobs.records import Job
from holdfast.jobs.store import Jobs, Seen
from holdfast.ledger import Lease, Ledger, LiveRuntime, Put, Range, Txn
from holdfast.timeouts import Timeouts
from jobs.test_host import BUDGET, TOY, is_running, left_running, line_of, trainers, until
from patience import HANG_S

BARE = """
import os, socket
s = socket.create_server((os.environ["HOST"], int(os.environ["PORT"])))
while True:
    c, _ = s.accept()
    c.recv(4096)
    c.sendall({answer!r})
    c.close()
"""
DEAF = """
import os, signal, http.server
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((os.environ["HOST"], int(os.environ["PORT"])), H).serve_forever()
"""


def runs(program: str) -> dict[str, Any]:
    """The spec of a job whose trainer is this program."""
    return {"holdfast": {"command": [sys.executable, "-c", program]}}


@contextlib.asynccontextmanager
async def host(
    tmp_path: Path,
    kind: type[Jobs] = Jobs,
    *,
    name: str = "h1",
    through: Any = None,
    adrift_s: float = 60.0,
) -> AsyncIterator[Host]:
    """A host with a connection of its own, whose jobs may bring commands."""
    url = f"sqlite:///{tmp_path}/ledger.db"
    launcher = LocalLauncher({"default": TOY}, tmp_path, url, allow_commands=True)
    async with ledger.open(url) as opened:
        own = kind(LiveRuntime(through(opened) if through else opened), "r", time.time)
        times = Timeouts(host_lease_s=2.0, host_adrift_s=adrift_s)
        it = Host(own, launcher, name, timeouts=times, grace_s=4.0, budget=BUDGET)
        task = asyncio.create_task(it.run())
        try:
            yield it
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=10)
            gc.collect()  # a task that failed unseen is told of here, not while pytest reports


class Through:
    """A ledger reached through something that can fail."""

    def __init__(self, real: Ledger) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


# ---- a host -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        {"holdfast": {"trainer": []}},
        {"holdfast": {"command": ["a\0b"]}},
        {"fill": "x" * 140_000},
        runs(BARE.format(answer=b"HTTP/1.1\r\n")),
        runs(BARE.format(answer=b"x" * 70_000)),
    ],
    ids=["unhashable", "nul", "argument list too long", "no status", "endless line"],
)
async def test_a_job_that_cannot_be_started_does_not_hang(
    jobs: Jobs, tmp_path: Path, spec: dict[str, Any]
) -> None:
    """It fails, or is tried again; at least it can be deleted."""
    await jobs.create("a", "j", spec)
    async with host(tmp_path):
        # Long enough for a start that was refused, and for a delete after it.
        with contextlib.suppress(pytest.fail.Exception):
            await until(jobs, lambda it: it.job.state == "FAILED", limit_s=2.0)
        await jobs.change("a", "j", "delete")
        await until(jobs, lambda it: it.job.state == "DELETED", limit_s=3.0)


class _Interrupted(Jobs):
    """The answer to the first take is lost, and a user pauses the job meanwhile."""

    done = False

    async def commit(self, found: Seen, new: Job, **more: Any) -> bool:
        succeeded = await super().commit(found, new, **more)
        if new.state == "CREATING" and not self.done:
            self.done = True
            await super().change(new.account, new.id, "pause")
            raise UnknownOutcome("the answer was lost")
        return succeeded


async def test_a_job_paused_while_the_answer_to_its_take_was_lost(
    jobs: Jobs, tmp_path: Path
) -> None:
    """It can be resumed, and its host takes it."""
    await jobs.create("a", "j", {})
    async with host(tmp_path, _Interrupted):
        await until(jobs, lambda it: it.job.state == "PAUSED", limit_s=5.0)
        await jobs.change("a", "j", "resume")
        await until(jobs, is_running, limit_s=6.0)


async def test_a_host_adrift_stops_what_it_was_about_to_publish(
    jobs: Jobs, tmp_path: Path
) -> None:
    """After `adrift_s` without a ledger, as it does with trainers that were published before."""
    away = asyncio.Event()

    class Cut(Through):
        async def txn(self, compare: Any = (), then: Any = (), otherwise: Any = ()) -> Txn:
            if any(isinstance(op, Put) and b'"RUNNING"' in op.value for op in then):
                away.set()
            self._check()
            return await self._real.txn(compare, then, otherwise)

        async def keep_alive(self, lease: int) -> float:
            self._check()
            return await self._real.keep_alive(lease)

        async def grant(self, ttl_s: float) -> Lease:
            self._check()
            return await self._real.grant(ttl_s)

        def _check(self) -> None:
            if away.is_set():
                raise Unavailable("the ledger is away")

    await jobs.create("a", "j", {})
    try:
        async with host(tmp_path, through=Cut, adrift_s=1.0):
            async with asyncio.timeout(HANG_S):
                await away.wait()
                while trainers():
                    await asyncio.sleep(0.05)
    finally:
        for one in trainers():
            one.kill()


async def test_whoever_else_listens_at_the_port_is_not_the_trainer(
    jobs: Jobs, tmp_path: Path
) -> None:
    """An address is published only for an incarnation that answers itself."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    await jobs.create("a", "j", {"how": "silent"})
    async with host(tmp_path):
        async with asyncio.timeout(HANG_S):
            while not trainers():
                await asyncio.sleep(0.01)
            while not (port := int(trainers()[0].environ().get("PORT", "0"))):
                await asyncio.sleep(0.01)
        with http.server.ThreadingHTTPServer(("127.0.0.1", port), Other) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                with pytest.raises(pytest.fail.Exception):
                    await until(jobs, is_running, limit_s=2.0)
            finally:  # not in this thread: the server may be waiting for what our loop has to send
                await asyncio.to_thread(server.shutdown)
                await asyncio.to_thread(thread.join)


async def test_deleted_means_that_nothing_of_it_lives(jobs: Jobs, tmp_path: Path) -> None:
    """Also when the trainer was in its grace time after a pause."""
    await jobs.create("a", "j", runs(DEAF))
    async with host(tmp_path):
        await until(jobs, is_running)
        await jobs.change("a", "j", "pause")
        await jobs.change("a", "j", "delete")
        gone = await until(jobs, lambda it: it.job.state == "DELETED")
        mine = psutil.Process().children(recursive=True)
        living = [one for one in mine if "http.server" in " ".join(line_of(one))]
        assert (gone.alive, living) == (None, [])


# ---- the control plane --------------------------------------------------------------


async def api(jobs: Jobs, tmp_path: Path) -> Api:
    async def announce(_account: str, _job: str) -> None:
        pass

    return Api(jobs, Logs(tmp_path), announce)


async def test_tombstones_do_not_end_a_list(jobs: Jobs, tmp_path: Path) -> None:
    for name in ("a1", "a2", "b"):
        await jobs.create("x", name, {})
    for name in ("a1", "a2"):
        await jobs.change("x", name, "delete")
    control, listed, token = await api(jobs, tmp_path), [], ""
    for _ in range(5):
        query = f"pageSize=2&pageToken={token}"
        reply = await control.handle("x", Request("GET", "/v1/accounts/x/rlorTrainerJobs", query))
        page = json.loads(reply.body)
        listed += [job["name"].rpartition("/")[2] for job in page["rlorTrainerJobs"]]
        if not (token := page["nextPageToken"]):
            break
    assert listed == ["b"]


@pytest.mark.parametrize(
    "query",
    [
        "&".join(["a=1"] * 40),
        f"offset={1 << 62}",
        "offset=" + "0" * 20 + "9" * 30,
        "epoch=" + "0" * 20 + "9" * 4400,
    ],
    ids=["fields", "far", "zeros", "digits"],
)
async def test_numbers_and_fields_without_end(jobs: Jobs, tmp_path: Path, query: str) -> None:
    """Whatever a query says, the answer is an answer, and none of ours to be sorry for."""
    await jobs.create("x", "j", {})
    log = tmp_path / "logs" / "x" / "j" / "epoch-1.log"
    log.parent.mkdir(parents=True)
    log.write_text("text")
    path = "/v1/accounts/x/rlorTrainerJobs/j/logs"
    reply = await (await api(jobs, tmp_path)).handle("x", Request("GET", path, query))
    assert reply.status < 500


async def test_running_ends_with_the_lease_also_without_another_host(
    jobs: Jobs, tmp_path: Path
) -> None:
    """A trainer that died silently with the only host stops being RUNNING for those who ask."""
    _, lease = await left_running(jobs, "x", 5.0)
    await jobs.runtime.ledger.revoke(lease)
    path = "/v1/accounts/x/rlorTrainerJobs/j"
    reply = await (await api(jobs, tmp_path)).handle("x", Request("GET", path))
    assert json.loads(reply.body)["state"] != "JOB_STATE_RUNNING"


async def test_create_knows_its_own_job_when_a_host_was_faster(jobs: Jobs) -> None:
    """The answer was lost, a host took the job, and the caller is not told "exists already"."""

    class Lossy(Through):
        lost = False

        async def txn(self, compare: Any = (), then: Any = (), otherwise: Any = ()) -> Txn:
            txn = await self._real.txn(compare, then, otherwise)
            if not self.lost:
                self.lost = True
                found = await jobs.get("a", "j")
                taken = decide.take(found.job, "h", jobs.wall())
                assert taken is not None
                assert await jobs.commit(found, taken)
                raise UnknownOutcome("the answer was lost")
            return txn

    opened: Any = Lossy(jobs.runtime.ledger)
    made = await Jobs(LiveRuntime(opened), "r", time.time).create("a", "j", {"mine": 1})
    assert made.id == "j"


# ---- accounts -----------------------------------------------------------------------


@pytest.mark.parametrize("lives_s", [float("inf"), float("nan")])
async def test_a_key_for_ever_does_not_lock_its_account(jobs: Jobs, lives_s: float) -> None:
    """`--days inf` is refused or means "for ever"; the keys that were there go on working."""
    book = Accounts(jobs.runtime, "r", time.time)
    await book.add_key("bob")
    with contextlib.suppress(HoldfastError):
        await book.add_key("bob", lives_s)
    assert [account.name for account in await book.all()] == ["bob"]


async def test_a_revoked_key_does_not_come_back(jobs: Jobs) -> None:
    """A reading that began before the revocation and ended after it is not believed."""
    book = Accounts(jobs.runtime, "r", time.time)
    key, kept = await book.add_key("bob")
    slow, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Through):
        async def range(self, prefix: str, *, revision: int = 0) -> Range:
            found = await self._real.range(prefix, revision=revision)
            if slow.is_set():
                begun.set()
                await go_on.wait()
            return found

    opened: Any = Slow(jobs.runtime.ledger)
    guests = Guests(LiveRuntime(opened), "r", time.time)
    following = asyncio.create_task(guests.run())
    try:
        async with asyncio.timeout(HANG_S):
            await guests.ready.wait()
            assert await guests.who(key) == "bob"
            slow.set()
            stranger = asyncio.create_task(guests.who("tml-" + "a" * 12 + "-" + "b" * 32))
            await begun.wait()
            await book.revoke("bob", kept.id)
            while kept.id in guests._by_id:
                await asyncio.sleep(0.01)
            go_on.set()
            with pytest.raises(Denied):
                await stranger
            with pytest.raises(Denied):
                await guests.who(key)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_key_is_not_called_wrong_while_the_ledger_is_away(jobs: Jobs) -> None:
    """A gateway that has not heard of a key, and cannot ask, says so: try again."""
    key, _ = await Accounts(jobs.runtime, "r", time.time).add_key("bob")

    class Away(Through):
        async def range(self, prefix: str, *, revision: int = 0) -> Range:
            raise Unavailable(f"away: {prefix} {revision}")

    opened: Any = Away(jobs.runtime.ledger)
    with pytest.raises(Retriable):
        await Guests(LiveRuntime(opened), "r", time.time).who(key)


async def test_a_default_job_is_not_taken_by_a_later_one(jobs: Jobs) -> None:
    """Two gateways, one of which has not heard of the first job yet: the first one stays."""
    book = Accounts(jobs.runtime, "r", time.time)
    await book.add_key("bob")
    stale = Guests(jobs.runtime, "r", time.time)
    await stale._look()
    await book.set_default("bob", "first")  # through another gateway
    if not await stale.default_job("bob"):  # what the gateway's `announce` does
        await book.set_default("bob", "second")
    assert [account.default_job for account in await book.all()] == ["first"]


# ---- the user's own commands -----------------------------------------------------------


def test_the_key_of_ones_own_service_is_for_that_service_only(tmp_path: Path) -> None:
    leave_note(tmp_path, Note(url="http://127.0.0.1:8700", account="local", key="tml-secret"))
    with contextlib.suppress(HoldfastError):
        assert find_service(tmp_path, "http://elsewhere:80", None)[1] != "tml-secret"
