"""The control plane's REST: the paths and words of the Fireworks SDK, over the ledger.

`Api.handle` is given a request whose caller is known, and returns an answer; it holds no state,
so any number of processes serve it side by side. A caller sees its own account only: another
one's answers like one that is not there.
"""

import datetime
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec

from holdfast.errors import (
    Denied,
    Exists,
    Gone,
    HoldfastError,
    Mistake,
    NotFound,
    Retriable,
    TooLarge,
    UnknownOutcome,
)
from holdfast.jobs.decide import Verb
from holdfast.jobs.logs import read_log
from holdfast.jobs.openapi import DOCUMENT
from holdfast.jobs.policy import read_policy
from holdfast.jobs.records import TOMBSTONES, Checkpoint, Host, Job, check_name
from holdfast.jobs.store import Jobs
from holdfast.ledger.types import Entry
from holdfast.ledger.unreadable import Unreadable, readable

__all__ = ["BODY_BYTES", "Api", "Reply", "Request", "describe"]

BODY_BYTES: Final = 64 << 10
"""The largest body: a spec is part of a record, and of a trainer's environment."""
DEPTH_MAX: Final = 32
"""How deep a spec may be nested."""
_PAGE_MAX: Final = 200
_WISHES: Final = ("trainer", "command", "policy")
"""What a job may say below `holdfast` in its description."""
_JOBS: Final = "rlorTrainerJobs"
_PATH = re.compile(
    rf"/v1/accounts/(?P<account>[^/]+)/{_JOBS}(?:/(?P<job>[^/:]+)(?::(?P<verb>[a-z]+))?"
    r"(?:/(?P<part>checkpoints|logs))?)?"
)
_VERBS: Final[dict[str, Verb]] = {
    "resume": "resume",
    "pause": "pause",
    "cancel": "cancel",
    "archive": "archive",
    "stop": "stop_early",
}
_GRPC: Final = {
    400: (3, "INVALID_ARGUMENT"),
    401: (16, "UNAUTHENTICATED"),
    404: (5, "NOT_FOUND"),
    405: (12, "UNIMPLEMENTED"),
    409: (6, "ALREADY_EXISTS"),
    410: (5, "NOT_FOUND"),
    412: (9, "FAILED_PRECONDITION"),
    413: (3, "INVALID_ARGUMENT"),
    503: (14, "UNAVAILABLE"),
}


class Request(msgspec.Struct, frozen=True):
    """A request to the control plane."""

    method: str
    path: str
    query: str = ""
    body: bytes = b""


class Reply(msgspec.Struct, frozen=True):
    """Its answer, in JSON."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Api:
    """The REST of one run's jobs."""

    def __init__(self, jobs: Jobs, folder: Path, announce: Callable[[str, str], Awaitable[None]]):
        self._jobs = jobs
        self._folder = folder
        self._announce = announce
        """Called with account and job when a job was made."""

    async def handle(self, account: str, request: Request) -> Reply:
        """Answer one request of an account."""
        try:
            return await self._route(account, request)
        except HoldfastError as error:
            return _refusal(error)

    async def _route(self, account: str, request: Request) -> Reply:
        own = {"name": f"accounts/{account}", "displayName": account}
        fixed: dict[str, dict[str, Any]] = {
            "/v1/openapi.json": DOCUMENT,
            "/v1/accounts": {"accounts": [own], "nextPageToken": "", "totalSize": 1},
            f"/v1/accounts/{account}": own,
        }
        if request.path in fixed:
            _only(request, "GET")
            return _json(fixed[request.path])
        found = _PATH.fullmatch(request.path)
        if found is None or unquote(found["account"]) != account:
            raise NotFound("there is nothing here: check the account and the path")
        query = _query(request.query)
        if found["job"] is None:
            return await self._of_account(account, request, query)
        job = check_name("job", unquote(found["job"]))
        if found["part"]:
            _only(request, "GET")
            part = self._checkpoints if found["part"] == "checkpoints" else self._tell
            return await part(account, job, query)
        return await self._of_job(account, job, found["verb"], request)

    async def _of_account(self, account: str, request: Request, query: dict[str, str]) -> Reply:
        _only(request, "GET", "POST")
        if request.method == "GET":
            limit = _page_size(query)
            after = query.get("pageToken", "")
            jobs, more = await self._jobs.page(account, after, limit)
            last = jobs[-1].id if more else ""
            if query.get("showDeleted", "false") in ("false", "0", ""):
                jobs = [job for job in jobs if job.state not in TOMBSTONES]
            return _json({_JOBS: [describe(job) for job in jobs], "nextPageToken": last})
        spec = _spec(request.body)
        name = query.get("rlorTrainerJobId") or f"job-{secrets.token_hex(4)}"
        await self._check(spec)
        try:
            job = await self._jobs.create(account, name, spec)
        finally:
            # Also when it exists: whoever made it may have died before this.
            await self._announce(account, name)
        return _json(describe(job))

    async def _check(self, spec: dict[str, Any]) -> None:
        """Refuse what no host or trainer understands: the id would be used up.

        Without hosts, one may come.
        """
        wish = spec.get("holdfast") or {}
        if not isinstance(wish, dict):
            raise Mistake(f"the field 'holdfast' of a job is an object: {', '.join(_WISHES)}")
        if unknown := ", ".join(sorted(repr(name[:80]) for name in wish.keys() - set(_WISHES))):
            told = ", ".join(_WISHES)
            raise Mistake(f"the field 'holdfast' of a job has no {unknown[:400]}; it has: {told}")
        read_policy(wish.get("policy", {}))
        found = await self._jobs.runtime.ledger.range(self._jobs.keys.hosts)
        read = [readable(Host, entry) for entry in found.entries]
        hosts = [host for host in read if not isinstance(host, Unreadable)]
        trainer = wish.get("trainer", "default")
        if not isinstance(trainer, str):
            raise Mistake("the name of a trainer is a text")
        if not hosts or any(host.any_command for host in hosts):
            return
        if "command" in wish:
            raise Mistake("jobs may not bring their own command here (serve --allow-commands)")
        known = {name for host in hosts for name in host.trainers}
        if trainer not in known:
            told = ", ".join(sorted(known)) or "none"
            raise Mistake(f"no host has a trainer {trainer[:80]!r}; there are: {told}")

    async def _of_job(self, account: str, job: str, verb: str | None, request: Request) -> Reply:
        if verb is not None:
            _only(request, "POST")
            if verb not in _VERBS:
                raise Mistake(f":{verb} is not possible; there are {', '.join(_VERBS)}")
            return _json(describe(await self._jobs.change(account, job, _VERBS[verb])))
        _only(request, "GET", "DELETE")
        if request.method == "GET":
            found = await self._jobs.get(account, job)
            return _json(describe(found.job, lives=found.lives))
        await self._jobs.change(account, job, "delete")
        return _json({})

    async def _checkpoints(self, account: str, job: str, query: dict[str, str]) -> Reply:
        await self._jobs.get(account, job)
        folder, after = self._jobs.keys.checkpoints(account, job), query.get("pageToken", "")
        entries, more = await self._jobs.entries(folder, after, _page_size(query))
        saved = [_checkpoint(entry, entry.key.removeprefix(folder)) for entry in entries]
        parent = f"accounts/{account}/{_JOBS}/{job}/checkpoints"
        told = [
            {
                "name": f"{parent}/{one.name}",
                "createTime": _time(one.created_at),
                "checkpointType": one.kind,
                "step": one.step,
                "path": one.path,
                "contentHash": one.content,
            }
            for one in saved
        ]
        token = saved[-1].name if more else ""
        return _json({"checkpoints": told, "nextPageToken": token})

    async def _tell(self, account: str, job: str, query: dict[str, str]) -> Reply:
        """A part of what an incarnation has written."""
        found = await self._jobs.get(account, job)
        epoch = _number(query, "epoch", 0, 1 << 31)
        offset = _number(query, "offset", 0, 1 << 48)
        epoch, text, behind = read_log(self._folder, account, job, epoch, offset, found.job.epoch)
        return _json({"epoch": epoch, "text": text, "offset": behind, "state": found.job.state})


def _checkpoint(entry: Entry, name: str) -> Checkpoint:
    one = readable(Checkpoint, entry)
    return Checkpoint(name=name, kind="UNREADABLE") if isinstance(one, Unreadable) else one


def describe(job: Job, *, lives: bool = True) -> dict[str, Any]:
    """A job as the SDK expects it. Where its trainer listens is nobody's business.

    RUNNING is said only of a trainer that `lives`: whoever asks means to send it something.
    """
    if job.state == "RUNNING" and not lives:
        why = "its trainer gives no sign of life any more; another one is begun"
        job = msgspec.structs.replace(job, state="CREATING", reason=why)
    failed = job.state == "FAILED"
    spec = {key: value for key, value in job.spec.items() if key not in _OWN}
    return {
        **spec,
        "name": f"accounts/{job.account}/{_JOBS}/{job.id}",
        "state": f"JOB_STATE_{job.state}",
        "status": {"code": "INTERNAL" if failed else "OK", "message": job.reason},
        "createTime": _time(job.created_at),
        "updateTime": _time(job.changed_at),
        "epoch": job.epoch,
    }


_OWN: Final = frozenset({"name", "state", "status", "createTime", "updateTime", "epoch"})


def _time(at: float) -> str:
    return datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat().replace("+00:00", "Z")


def _json(value: Any) -> Reply:
    return Reply(200, msgspec.json.encode(value))


def _spec(body: bytes) -> dict[str, Any]:
    if len(body) > BODY_BYTES:
        raise TooLarge(f"a job's description has {len(body)} bytes; the limit is {BODY_BYTES}")
    try:
        spec = msgspec.json.decode(body or b"{}")
        deep = _depth(spec) > DEPTH_MAX
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Mistake(f"the body is not JSON: {error}") from None
    if not isinstance(spec, dict):
        raise Mistake("the body is a JSON object: the job's description")
    if deep:
        raise Mistake(f"a job's description is nested more than {DEPTH_MAX} deep")
    return spec


def _depth(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


class _WrongMethod(Mistake):
    """The path is right and the method is not."""


_STATUSES: Final[dict[type[HoldfastError] | tuple[type[HoldfastError], ...], int]] = {
    _WrongMethod: 405,
    TooLarge: 413,
    NotFound: 404,
    Denied: 401,
    Exists: 409,
    (Retriable, UnknownOutcome): 503,
    Gone: 410,
    Mistake: 400,
}
"""The first that fits counts."""


def _only(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise _WrongMethod(f"{request.method} is not possible here: {', '.join(methods)}")


def _query(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=32))
    except ValueError as error:
        raise Mistake(f"the query is not valid: {error}") from None


def _page_size(query: dict[str, str]) -> int:
    return max(1, min(_number(query, "pageSize", 50, 1 << 31), _PAGE_MAX))


def _number(query: dict[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > most:
        raise Mistake(f"{name} is a number from 0 to {most}, not {text[:40]!r}")
    return int(text)


def _refusal(error: HoldfastError) -> Reply:
    """An error as the SDK expects it."""
    status = next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 500)
    number, name = _GRPC.get(status, (2, "UNKNOWN"))
    message = str(error)
    body = {
        "code": number,
        "message": message,
        "error": {"code": name.lower(), "message": message, "status": name},
    }
    retry = (("retry-after-ms", "500"),) if status == 503 else (("x-should-retry", "false"),)
    return Reply(status, msgspec.json.encode(body), retry)
