"""Between our nouns and etcd's JSON. Pure: no sockets, no clock.

etcd's gateway writes bytes as base64, 64-bit numbers as text, and leaves out what is
zero, empty or false. msgspec does the first two; defaults of the structs do the third.
Fields that we do not know are ignored, so newer servers can say more.

Invariants: an answer never crashes the decoder because of keys that other programs
wrote (`entry` returns None for a key that is not text); `verdict` calls a failure
"refused" only when etcd surely did not apply the request; `Batches` gives each revision
once, whole and in order, however the server cut its frames.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Literal, TypeVar, assert_never

import msgspec

from holdfast.errors import Unavailable
from holdfast.ledger.types import (
    FIELDS,
    Batch,
    Compare,
    Delete,
    Entry,
    Event,
    Get,
    Op,
    Put,
    Relation,
    Txn,
)

Json = dict[str, object]
T = TypeVar("T")

INT64_MAX = (1 << 63) - 1
FRAME_BYTES_MAX = 64 << 20

_RELATIONS: dict[Relation, str] = {
    "==": "EQUAL",
    "!=": "NOT_EQUAL",
    "<": "LESS",
    ">": "GREATER",
}


# ---- what etcd says -------------------------------------------------------------


class Header(msgspec.Struct, frozen=True):
    """The part of every answer that has the newest revision."""

    revision: int = 0


class Answer(msgspec.Struct, frozen=True):
    """An answer of which only the header matters."""

    header: Header = Header()


class KeyValue(msgspec.Struct, frozen=True):
    """One key as etcd tells it."""

    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    lease: int = 0


class RangeAnswer(Answer, frozen=True):
    """The answer to a range, alone or inside a transaction."""

    kvs: tuple[KeyValue, ...] = ()
    more: bool = False


class DeleteAnswer(msgspec.Struct, frozen=True):
    """The answer to a delete inside a transaction."""

    prev_kvs: tuple[KeyValue, ...] = ()


class OpAnswer(msgspec.Struct, frozen=True):
    """The answer to one operation of a transaction."""

    response_range: RangeAnswer | None = None
    response_delete_range: DeleteAnswer | None = None


class TxnAnswer(Answer, frozen=True):
    """The answer to a transaction."""

    succeeded: bool = False
    responses: tuple[OpAnswer, ...] = ()


class LeaseAnswer(msgspec.Struct, frozen=True):
    """The answer to grant, keep-alive and time-to-live."""

    id: int = msgspec.field(default=0, name="ID")
    ttl: int = msgspec.field(default=0, name="TTL")
    granted: int = msgspec.field(default=0, name="grantedTTL")
    keys: tuple[bytes, ...] = ()


class KeepAliveFrame(msgspec.Struct, frozen=True):
    """Keep-alive is a stream; we read one frame of it."""

    result: LeaseAnswer | None = None
    error: "StreamError | None" = None


class LeaseList(msgspec.Struct, frozen=True):
    """The answer to "which leases are there"."""

    leases: tuple[LeaseAnswer, ...] = ()


class Authenticated(msgspec.Struct, frozen=True):
    """The answer to a login."""

    token: str = ""


class WatchEvent(msgspec.Struct, frozen=True):
    """One change. A delete carries the key and the revision of its tombstone."""

    kv: KeyValue
    type: str = "PUT"
    prev_kv: KeyValue | None = None


class WatchAnswer(Answer, frozen=True):
    """One message of a watch. `fragment` says that the next one belongs to it."""

    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    fragment: bool = False
    events: tuple[WatchEvent, ...] = ()


class StreamError(msgspec.Struct, frozen=True):
    """How a stream ends badly. Newer gateways say `code`, older ones `grpc_code`."""

    grpc_code: int = 0
    code: int = 0
    message: str = ""


class WatchFrame(msgspec.Struct, frozen=True):
    """One line of a watch."""

    result: WatchAnswer | None = None
    error: StreamError | None = None


def decode(data: bytes, kind: type[T]) -> T:
    """Read an answer. Raises `msgspec.MsgspecError` for what etcd would never say."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except UnicodeDecodeError as error:  # msgspec's own errors do not cover it
        raise msgspec.DecodeError(str(error)) from None


def encode(request: Json) -> bytes:
    """Write a request."""
    return msgspec.json.encode(request)


def entry(kv: KeyValue) -> Entry | None:
    """Translate one key; None when its name is not text (some other program's key)."""
    try:
        key = kv.key.decode()
    except UnicodeDecodeError:
        return None
    return Entry(key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)


# ---- what we ask ------------------------------------------------------------------


def range_json(key: bytes, end: bytes = b"", *, limit: int = 0, revision: int = 0) -> Json:
    """A linearizable read of one key, or of [key, end)."""
    request: Json = {"key": key}
    if end:
        request["range_end"] = end
    if limit:
        request["limit"] = str(limit)
    if revision:
        request["revision"] = str(min(revision, INT64_MAX))
    return request


def compare_json(compare: Compare) -> Json:
    """One condition. Numbers beyond 64 bits are cut: no real one is ever that far."""
    operand: object = compare.operand
    if isinstance(compare.operand, int):
        operand = str(max(-INT64_MAX, min(int(compare.operand), INT64_MAX)))
    return {
        "key": compare.key.encode(),
        "target": compare.target.upper(),
        "result": _RELATIONS[compare.relation],
        FIELDS[compare.target]: operand,
    }


def _op_json(op: Op) -> Json:
    key = op.key.encode()
    match op:
        case Put():
            # A number that cannot be a lease is no living lease: etcd says so itself.
            lease = op.lease if abs(op.lease) <= INT64_MAX else INT64_MAX
            return {"request_put": {"key": key, "value": op.value, "lease": str(lease)}}
        case Delete():
            return {"request_delete_range": {"key": key, "prev_kv": True}}
        case Get():
            return {"request_range": {"key": key}}
        case _ as never:
            assert_never(never)


def txn_json(compare: Sequence[Compare], then: Sequence[Op], otherwise: Sequence[Op]) -> Json:
    """A transaction."""
    return {
        "compare": [compare_json(one) for one in compare],
        "success": [_op_json(op) for op in then],
        "failure": [_op_json(op) for op in otherwise],
    }


def txn_of(answer: TxnAnswer) -> Txn:
    """Translate the answer to a transaction."""
    results: list[Entry | None] = []
    for one in answer.responses:
        kvs: tuple[KeyValue, ...] = ()
        if one.response_range is not None:
            kvs = one.response_range.kvs
        elif one.response_delete_range is not None:
            kvs = one.response_delete_range.prev_kvs
        results.append(entry(kvs[0]) if kvs else None)
    return Txn(answer.succeeded, answer.header.revision, tuple(results))


def watch_json(key: bytes, end: bytes, first: int) -> Json:
    """A watch of [key, end) that shows every revision from `first` on, or is cancelled.

    etcd lets a watch begin exactly at the compacted revision although deletes of that
    revision may be gone. One revision earlier it refuses such a watch; `Batches` drops
    what this shows too much. (Revision 1 is the empty ledger: nothing happened in it.)
    """
    return {
        "create_request": {
            "key": key,
            "range_end": end,
            "start_revision": str(max(1, min(first, INT64_MAX) - 1)),
            "prev_kv": True,
            "progress_notify": True,
            "fragment": True,
        }
    }


# ---- failures -----------------------------------------------------------------------

Verdict = Literal[
    "refused",  # surely not applied; another server, or the same one later, may take it
    "lost",  # may have been applied
    "token",  # not applied: the login is missing or has run out
    "login",  # not applied: wrong user or password
    "forbidden",  # not applied: this user may not do this
    "no_auth",  # the server wants no login at all
    "no_room",
    "too_large",
    "lease",
    "compacted",
    "future",
    "corrupt",
    "mistake",  # not applied: the request is wrong
]

_BY_TEXT: tuple[tuple[str, Verdict], ...] = (
    ("requested lease not found", "lease"),
    ("required revision has been compacted", "compacted"),
    ("required revision is a future revision", "future"),
    ("request is too large", "too_large"),
    ("database space exceeded", "no_room"),
    ("too many requests", "refused"),
    # Said before the request is looked at, because we demand a leader in every request.
    ("etcdserver: no leader", "refused"),
    # The gateway could not reach its own server: nothing was sent on.
    ("error while dialing", "refused"),
    ("raft proposal dropped", "refused"),
    ("invalid auth token", "token"),
    ("revision of auth store is old", "token"),
    ("user name is empty", "token"),
    ("authentication failed", "login"),
    ("authentication is not enabled", "no_auth"),
    ("permission denied", "forbidden"),
    ("corrupt cluster", "corrupt"),
)
# gRPC codes after which the request was surely not applied: INVALID_ARGUMENT, NOT_FOUND,
# ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED.
_CERTAIN = frozenset({3, 5, 6, 9, 11, 12})
_INVALID_ARGUMENT, _PERMISSION_DENIED, _UNAUTHENTICATED = 3, 7, 16


class Fault(Exception):
    """etcd (or what stands in its place) answered with an error."""

    def __init__(self, verdict: Verdict, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.message = message


class _ErrorAnswer(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""
    error: str | StreamError = ""


def verdict_of(code: int, message: str) -> Verdict:
    """Decide what a gRPC error means for the request that got it."""
    lowered = message.lower()
    if code == _INVALID_ARGUMENT and lowered.endswith("unexpected eof"):
        return "refused"  # the gateway got half of the request, and sent nothing on
    for text, verdict in _BY_TEXT:
        if text in lowered:
            return verdict
    if code == _PERMISSION_DENIED:
        return "forbidden"
    if code == _UNAUTHENTICATED:
        return "token"
    return "mistake" if code in _CERTAIN else "lost"


def fault_of(status: int, data: bytes) -> Fault:
    """Read an answer whose HTTP status is not 200."""
    try:
        error = decode(data, _ErrorAnswer)
    except msgspec.MsgspecError:
        error = _ErrorAnswer()
    if isinstance(error.error, StreamError):
        return stream_fault(error.error)
    if not error.code:
        # Not etcd's way to fail. Whoever does not know the path surely did nothing; a
        # proxy that gave up (502, 504) may have passed the request on.
        unknown_path = status in (301, 302, 307, 308, 404, 405, 501)
        return Fault(
            "refused" if unknown_path else "lost",
            f"answers with HTTP status {status}, but not like an etcd v3 server",
        )
    return Fault(verdict_of(error.code, error.message), error.message)


def stream_fault(error: StreamError) -> Fault:
    """Read the error that ended a stream."""
    return Fault(verdict_of(error.grpc_code or error.code, error.message), error.message)


# ---- streams ------------------------------------------------------------------------


class Frames:
    """Cuts a stream of bytes into lines. A line may be far longer than any read."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what was read; return the lines that are complete now."""
        *lines, rest = chunk.split(b"\n")
        whole: list[bytes] = []
        for line in lines:
            whole.append(b"".join((*self._parts, line)))
            self._parts.clear()
            self._size = 0
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
            if self._size > FRAME_BYTES_MAX:
                raise Unavailable(f"a frame of a watch is longer than {FRAME_BYTES_MAX} bytes")
        return [line for line in whole if line.strip()]


class Batches:
    """Makes batches from the messages of one watch.

    `first` is the first revision that has not come out yet: where a new stream has to
    go on. What belongs to an unfinished revision is held back, never half delivered.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._held: list[WatchEvent] = []

    def add(self, answer: WatchAnswer) -> list[Batch]:
        """Take one message; return the revisions that are complete now."""
        if answer.created or answer.canceled:
            return []
        if not answer.events and not self._held:
            # Sent by the server between messages: everything up to here has been shown.
            self.first = max(self.first, answer.header.revision + 1)
            return []
        self._held.extend(one for one in answer.events if one.kv.mod_revision >= self.first)
        if not self._held:
            return []
        self._held.sort(key=_revision)
        open_revision = _revision(self._held[-1]) if answer.fragment else 0
        batches: list[Batch] = []
        for revision, group in groupby(self._held, key=_revision):
            if revision == open_revision:
                break
            events = tuple(event for one in group if (event := _event(one)) is not None)
            if events:
                batches.append(Batch(revision, events))
            self.first = revision + 1
        self._held = [one for one in self._held if _revision(one) >= self.first]
        return batches

    def restart(self) -> None:
        """Forget what an ended stream had begun to say; the next one says it again."""
        self._held.clear()


def _revision(event: WatchEvent) -> int:
    return event.kv.mod_revision


def _event(event: WatchEvent) -> Event | None:
    now = entry(event.kv)
    if now is None:
        return None
    previous = entry(event.prev_kv) if event.prev_kv is not None else None
    return Event(now.key, None if event.type == "DELETE" else now, previous)
