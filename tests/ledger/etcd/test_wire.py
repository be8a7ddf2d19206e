"""Pure: what etcd's errors mean, and how a stream of its JSON becomes batches.

What requests and answers look like is held by the conformance suite, on a real etcd.
"""

import json
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ledger.etcd import wire
from holdfast.ledger.types import Batch, Compare, Entry, Event


@pytest.mark.parametrize("number", [1 << 70, -(1 << 70)])
def test_numbers_beyond_64_bits_are_cut(number: int) -> None:
    """A comparison with a number that etcd cannot read is still a comparison."""
    shown = wire.compare_json(Compare("/a", "version", "<", number))["version"]
    assert isinstance(shown, str)
    assert abs(int(shown)) == wire.INT64_MAX


@pytest.mark.parametrize(
    ("code", "message", "verdict"),
    [
        (14, "etcdserver: no leader", "refused"),
        (8, "etcdserver: too many requests", "refused"),
        (14, 'connection error: desc = "transport: Error while dialing dial tcp"', "refused"),
        (14, "etcdserver: request timed out", "lost"),
        (14, "etcdserver: leader changed", "lost"),
        (14, "etcdserver: request timed out, possibly due to previous leader failure", "lost"),
        (14, "etcdserver: server stopped", "lost"),
        (4, "context deadline exceeded", "lost"),
        (1, "context canceled", "lost"),
        (2, "anything at all", "lost"),
        (13, "transport is closing", "lost"),
        (8, "grpc: received message larger than max", "lost"),
        (16, "etcdserver: invalid auth token", "token"),
        (3, "etcdserver: user name is empty", "token"),
        (3, "etcdserver: revision of auth store is old", "token"),
        (3, "etcdserver: authentication failed, invalid user ID or password", "login"),
        (7, "etcdserver: permission denied", "forbidden"),
        (8, "etcdserver: mvcc: database space exceeded", "no_room"),
        (3, "etcdserver: request is too large", "too_large"),
        (5, "etcdserver: requested lease not found", "lease"),
        (11, "etcdserver: mvcc: required revision has been compacted", "compacted"),
        (11, "etcdserver: mvcc: required revision is a future revision", "future"),
        (3, "etcdserver: duplicate key given in txn request", "mistake"),
    ],
)
def test_only_what_surely_did_nothing_is_called_so(code: int, message: str, verdict: str) -> None:
    """Every failure that may come after the change was made is "lost"."""
    assert wire.verdict_of(code, message) == verdict
    whole = json.dumps({"error": message, "code": code, "message": message}).encode()
    assert wire.fault_of(503, whole).verdict == verdict
    stream = json.dumps({"error": {"grpc_code": code, "message": message}}).encode()
    assert wire.fault_of(503, stream).verdict == verdict


@pytest.mark.parametrize(("status", "verdict"), [(404, "refused"), (502, "lost"), (500, "lost")])
def test_a_server_that_is_not_etcd(status: int, verdict: str) -> None:
    """Whoever does not know the path did nothing; a proxy may have passed it on."""
    fault = wire.fault_of(status, b"<html>no</html>")
    assert fault.verdict == verdict
    assert "not like an etcd" in fault.message


@given(st.lists(st.binary().filter(lambda line: b"\n" not in line and line.strip())), st.data())
def test_frames_do_not_depend_on_how_they_arrive(lines: list[bytes], data: st.DataObject) -> None:
    """However a stream is cut into reads, the same lines come out."""
    rest = b"".join(line + b"\n" for line in lines)
    frames, found = wire.Frames(), []
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        found += frames.feed(rest[:size])
        rest = rest[size:]
    assert found == lines


def put(revision: int, key: str) -> wire.WatchEvent:
    return wire.WatchEvent(wire.KeyValue(key.encode(), b"", revision, revision, 1))


def answer(
    *events: wire.WatchEvent, fragment: bool = False, revision: int = 0
) -> wire.WatchAnswer:
    return wire.WatchAnswer(header=wire.Header(revision), events=tuple(events), fragment=fragment)


@given(st.lists(st.integers(1, 4), max_size=12), st.integers(1, 15), st.randoms())
def test_every_revision_comes_out_once_and_whole(
    sizes: list[int], first: int, random: Random
) -> None:
    """Whatever the server repeats, cuts into fragments, or breaks off in the middle."""
    history = [
        (revision, [f"/{revision}/{n}" for n in range(size)])
        for revision, size in enumerate(sizes, start=2)
    ]
    batches = wire.Batches(first)
    found: list[Batch] = []
    for stream in range(5):
        start = max(1, batches.first - 1)  # as `watch_json` asks for it
        events = [put(r, key) for r, keys in history if r >= start for key in keys]
        if stream < 4:
            events = events[: random.randint(0, len(events))]
        while events:
            size = random.randint(1, len(events))
            part, events = events[:size], events[size:]
            revision = part[-1].kv.mod_revision
            whole = part[-1].kv.key.decode() == history[revision - 2][1][-1]
            last = whole and (not events or random.random() < 0.5)
            found += batches.add(answer(*part, fragment=not last))
        batches.restart()
    expected = [
        Batch(
            revision,
            tuple(Event(key, Entry(key, b"", revision, revision, 1), None) for key in keys),
        )
        for revision, keys in history
        if revision >= first
    ]
    assert found == expected


def test_progress_moves_the_place_to_go_on_from() -> None:
    """A quiet watch need not ask for history that others wrote meanwhile."""
    batches = wire.Batches(5)
    assert batches.add(wire.WatchAnswer(header=wire.Header(90), created=True)) == []
    assert batches.first == 5
    assert batches.add(answer(revision=90)) == []
    assert batches.first == 91


def test_keys_that_are_not_text_are_passed_over() -> None:
    """A batch of nothing but foreign keys is none, and is not asked for again."""
    batches = wire.Batches(2)
    foreign = wire.WatchEvent(wire.KeyValue(b"/\xff", b"", 2, 2, 1))
    assert batches.add(answer(foreign)) == []
    assert batches.first == 3


def test_garbage_is_an_error_of_the_decoder() -> None:
    with pytest.raises(msgspec.MsgspecError):
        wire.decode(b"<html>", wire.TxnAnswer)
