"""Redis: large values in parts, lost answers, errors as ours, a line that lies, kill -9."""

import contextlib
import random
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from holdfast import transfer
from holdfast.chaos.proxy import ProxyThread
from holdfast.errors import (
    BatchFailed,
    Corrupt,
    Denied,
    NoRoom,
    NotFound,
    Unavailable,
    UnknownOutcome,
)
from holdfast.proc import spawn
from holdfast.retry import Policy
from holdfast.servers import RedisServer
from holdfast.transfer import Store
from holdfast.transfer.redis import RedisBackend, from_url
from holdfast.transfer.redis_pool import MOST_CONNECTIONS
from holdfast.transfer.resp import Address, Answer, Wire, command
from patience import HANG_S, until
from transfer.conftest import QUICK
from transfer.outcomes import (
    ONCE,
    PATIENT,
    fails,
    lying_values,
    never_mixed,
    only_right_values,
    together,
)

PART = 1 << 16


def ask(server: RedisServer, *words: str | bytes | int) -> Answer:
    """What the server itself says, by another connection."""
    with contextlib.closing(Wire(Address(server.host, server.port), 5.0)) as wire:
        return wire.ask([command(*words)])[0]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that a test may break."""
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def parted(redis_server: RedisServer) -> Iterator[Store]:
    """A store whose larger values are kept in parts of 64 KiB."""
    address = Address(redis_server.host, redis_server.port)
    backend = RedisBackend(address, prefix=f"p:{uuid.uuid4().hex}:", part_bytes=PART)
    with Store(backend, QUICK) as store:
        yield store


@contextlib.contextmanager
def behind(
    server: RedisServer, policy: Policy = ONCE, *, timeout_s: float = 0.5, seed: int = 0
) -> Iterator[tuple[ProxyThread, Store]]:
    """A store whose line to the server a test may break."""
    with ProxyThread(server.host, server.port, seed=seed) as proxy:
        url = f"redis://127.0.0.1:{proxy.address[1]}?timeout={timeout_s}"
        with transfer.connect(url, policy) as store:
            yield proxy, store


# Values in parts


@pytest.mark.parametrize("size", [PART - 200, PART, PART + 1, 3 * PART, 10 * PART + 17])
def test_values_in_parts(parted: Store, size: int) -> None:
    """Around every boundary they come back whole, and every kind of call knows them."""
    value = np.random.default_rng(size).integers(0, 255, size, np.uint8)
    refs = parted.put({"k": value, "small": b"s"})
    for wanted in (refs.values(), ["k", "small"]):
        found = parted.get(wanted)
        assert np.array_equal(found["k"], value)
        assert found["small"] == b"s"
    place = np.empty_like(value)
    parted.get_into({"k": place})
    assert np.array_equal(place, value)
    assert parted.exists(["k"]) == {"k": True}
    listed = {found.key: (found.nbytes, found.generation) for found in parted.scan()}
    assert listed == {key: (ref.nbytes, ref.generation) for key, ref in refs.items()}
    assert parted.stat().nbytes == sum(ref.nbytes for ref in refs.values())
    new = parted.put({"k": value})
    assert parted.delete([refs["k"]]) == {"k": False}
    assert parted.delete(new.values()) == {"k": True}
    assert parted.exists(["k"]) == {"k": False}


def test_large_and_small_replace_each_other(parted: Store) -> None:
    for size in (10, 5 * PART, 20, 2 * PART, 7 * PART, 0):
        ref = parted.put({"k": bytes([size % 256]) * size})["k"]
        assert parted.get([ref]) == parted.get(["k"]) == {"k": bytes([size % 256]) * size}


def test_parts_of_two_values_are_never_mixed(parted: Store) -> None:
    """Read part by part while it is replaced: one of them, or an error; never a mix."""
    parted.put({"k": np.zeros(20 * PART, np.uint8)})
    good = 0

    def replace(step: int) -> None:
        size = (20 - step % 3) * PART
        parted.put({"k": np.full(size, step % 251, np.uint8)})

    def read() -> None:
        nonlocal good
        found = parted.get(["k"], partial=True)
        good += len(found.values)
        if found.values:
            assert found.values["k"].min() == found.values["k"].max()
        else:
            assert isinstance(found.failures["k"], Corrupt)

    never_mixed(read, replace, rounds=60)
    assert good > 10


WRITER = """
import sys
from holdfast.transfer.redis import RedisBackend
from holdfast.transfer.resp import Address
from holdfast.transfer.store import Store
backend = RedisBackend(Address("127.0.0.1", int(sys.argv[1])), part_bytes=1 << 16, timeout_s=60)
Store(backend).put({"k": bytes(20_000_000)})
"""


def test_what_a_killed_writer_leaves_behind_expires(own: RedisServer) -> None:
    """Nobody sees it, the old value stays, and the server will remove it by itself."""
    with transfer.connect(own.url, QUICK) as store:
        store.put({"k": b"old"})
        with ProxyThread(own.host, own.port) as proxy:
            proxy.do(lambda it: it.throttle(2_000_000, direction="to_server"))
            argv = [sys.executable, "-c", WRITER, str(proxy.address[1])]
            with spawn(argv, name="writer") as writer:
                until(lambda: len(_unfinished(own)) == 1)
                (name,) = _unfinished(own)
                until(lambda: _number(ask(own, "HLEN", name)) > 6)
                writer.kill_group()
        assert 0 < _number(ask(own, "TTL", name)) <= 120
        assert store.get(["k"]) == {"k": b"old"}
        assert [found.key for found in store.scan()] == ["k"]
        assert store.stat().keys == 1


def _unfinished(server: RedisServer) -> list[bytes]:
    names = ask(server, "KEYS", "*part:*")
    assert isinstance(names, list)
    return [bytes(name) for name in names if isinstance(name, bytearray)]


def _number(answer: Answer) -> int:
    assert isinstance(answer, int), answer
    return answer


# Lost answers


class Holding:
    """A relay that can hold back what clients say, and deliver it long after they left."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.holding = threading.Event()
        self.release = threading.Event()
        self.held = threading.Event()
        self.delivered = threading.Event()
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server.endpoint)
                self._sockets += [client, server]
                for job, args in ((self._up, (client, server)), (self._down, (server, client))):
                    threading.Thread(target=job, args=args, daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 20):
                if self.holding.is_set():
                    self.held.set()
                    assert self.release.wait(HANG_S)
                    try:
                        server.sendall(data)
                        # What was said is done, or there is nobody left to do it.
                        server.settimeout(5)
                        server.recv(1)
                    finally:
                        self.delivered.set()
                    return
                server.sendall(data)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self.holding.is_set() and (data := server.recv(1 << 20)):
                client.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def test_a_late_put_cannot_overwrite_a_newer_one(own: RedisServer) -> None:
    """A put is held up on its way, its answer is given up on, a newer one is put; then the
    old one arrives.
    """
    relay = Holding(own)
    with contextlib.closing(relay):
        url = f"redis://127.0.0.1:{relay.port}?timeout=0.5"
        with transfer.connect(url, ONCE) as store, transfer.connect(own.url, ONCE) as direct:
            store.put({"warm": 1})
            relay.holding.set()
            with fails({"k": UnknownOutcome}):
                store.put({"k": b"old"})
            assert relay.held.is_set()
            relay.holding.clear()
            store.put({"k": b"new"})
            relay.release.set()
            assert relay.delivered.wait(HANG_S)
            assert direct.get(["k"]) == {"k": b"new"}


def test_a_lost_answer_is_an_unknown_outcome_and_a_retry_settles_it(own: RedisServer) -> None:
    """The request arrives, the answer does not: never a plain failure, never a success."""
    with behind(own, QUICK) as (proxy, store), transfer.connect(own.url) as direct:
        store.put({"warm": 1})
        proxy.do(lambda it: it.stall(direction="to_client"))
        frames = store._frames({"k": b"value"}, 7)
        answer = store.backend.put(frames)["k"]
        assert isinstance(answer, UnknownOutcome)
        assert direct.get(["k"]) == {"k": b"value"}
        proxy.do(lambda it: it.heal())
        assert store.put({"k": b"value"}, generation=7)["k"] == frames["k"].ref
        assert store.get(["k"]) == {"k": b"value"}


def test_only_our_own_connection_is_ended(own: RedisServer) -> None:
    """After a restart the server gives old numbers to new connections: they are let be."""
    with transfer.connect(own.url, QUICK) as store:
        store.put({"k": 1})
        backend = from_url(own.url + "?timeout=0.3")
        for _ in range(50):
            Wire(Address(own.host, own.port), 5.0).close()  # so that its number is a high one
        with contextlib.closing(backend):
            backend.put(store._frames({"k": 2}, 5))
            own.pause()
            assert isinstance(backend.put(store._frames({"k": 3}, 6))["k"], UnknownOutcome)
            own.kill()
            own.restart()
            strangers = [Wire(Address(own.host, own.port), 5.0) for _ in range(100)]
            answer = backend.put(store._frames({"k": 4}, 7))
            assert answer == {"k": None}
            for wire in strangers:
                assert wire.ask([command("PING")]) == [b"PONG"]
                wire.close()
        assert store.get(["k"]) == {"k": 4}


def test_silence_has_an_end(own: RedisServer) -> None:
    """Every call ends within its time-out, whatever it waits for."""
    with behind(own, timeout_s=0.3) as (proxy, store):
        values = {"user/key-1": b"x", "user/key-2": b"y"}
        unread = dict.fromkeys(values, Unavailable)
        store.put(values)
        proxy.do(lambda it: it.stall())
        began = time.monotonic()
        for read in (store.get, store.exists):
            with fails(unread):
                read(values)
        for change in (lambda: store.put(values), lambda: store.delete(values)):
            with fails(dict.fromkeys(values, Unavailable | UnknownOutcome)):
                change()
        with pytest.raises(Unavailable):
            store.stat()
        assert time.monotonic() - began < HANG_S
        proxy.do(lambda it: it.cut("blackhole"))
        began = time.monotonic()
        with fails(unread):
            store.get(values)
        assert time.monotonic() - began < HANG_S


# Errors


def test_a_full_server_has_no_room(own: RedisServer) -> None:
    """And keeps what it has."""
    with transfer.connect(own.url, ONCE) as store:
        store.put({"k": b"old"})
        ask(own, "CONFIG", "SET", "maxmemory", "1")
        for value in (b"new", bytes(40 << 20)):
            with fails({"k": NoRoom}):
                store.put({"k": value})
        assert store.get(["k"]) == {"k": b"old"}
        assert store.stat().budget == 1


def test_a_server_that_only_reads_is_unavailable_for_puts(own: RedisServer) -> None:
    with transfer.connect(own.url, ONCE) as store:
        ask(own, "REPLICAOF", "127.0.0.1", "1")
        with fails({"k": Unavailable}, match="READONLY"):
            store.put({"k": b"new"})


def test_passwords(own: RedisServer) -> None:
    """Without one, or with a wrong one, the answer is Denied, at once; it is shown nowhere."""
    ask(own, "ACL", "SETUSER", "ann", "on", ">se/cret", "~*", "+@all")
    ask(own, "CONFIG", "SET", "requirepass", "hidden")
    host = f"127.0.0.1:{own.port}"
    for bad in (f"redis://{host}", f"redis://:wrong@{host}", f"redis://ann:hidden@{host}"):
        with transfer.connect(bad, QUICK) as store, pytest.raises(BatchFailed) as caught:
            store.put({"k": 1})
        assert isinstance(caught.value.failures["k"], Denied)
        assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
    for good in (f"redis://:hidden@{host}", f"redis://ann:se%2Fcret@{host}"):
        with transfer.connect(good, QUICK) as store:
            store.put({"k": 1})
            assert store.get(["k"]) == {"k": 1}
            assert "hidden" not in store.backend.url
            assert "cret" not in store.backend.url


def test_what_somebody_else_stored_is_corrupt(own: RedisServer) -> None:
    """A list, a strange hash, a text: never a value, and never a crash."""
    prefix = "holdfast:"
    ask(own, "RPUSH", prefix + "list", "a")
    ask(own, "HSET", prefix + "hash", "a", "b")
    ask(own, "HSET", prefix + "almost", "size", "99999999999999", "part", "1", "0", "x" * 64)
    ask(own, "SET", prefix + "text", "hello")
    ask(own, "SET", prefix + "empty", "")
    with transfer.connect(own.url, ONCE) as store:
        names = ["list", "almost", "text", "empty"]
        found = store.get(names, partial=True)
        assert all(isinstance(found.failures[name], Corrupt) for name in names)
        assert isinstance(store.get(["hash"], partial=True).failures["hash"], Corrupt | NotFound)
        assert list(store.scan()) == []
        refs = store.put(dict.fromkeys(names, b"mine"))
        assert store.get(refs.values()) == dict.fromkeys(names, b"mine")


def test_databases_and_prefixes_are_apart(own: RedisServer) -> None:
    urls = [own.url, f"redis://127.0.0.1:{own.port}/3", own.url + "?prefix=x*:"]
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(transfer.connect(url)) for url in urls]
        for index, store in enumerate(stores):
            store.put({"k": index})
        assert [store.get(["k"])["k"] for store in stores] == [0, 1, 2]
        assert [store.stat().keys for store in stores] == [1, 1, 1]


def test_connections_have_a_bound(redis_server: RedisServer, redis_url: str) -> None:
    """Forty threads share sixteen connections, and all of them are served."""
    with transfer.connect(redis_url, QUICK) as store:
        store.put({"k": bytes(1000)})
        before = _number(ask(redis_server, "DBSIZE"))
        most = 0

        def work() -> None:
            for _ in range(20):
                store.get(["k"])

        with ThreadPoolExecutor(40) as pool:
            working = [pool.submit(work) for _ in range(40)]
            while not all(one.done() for one in working):
                clients = ask(redis_server, "CLIENT", "LIST")
                assert isinstance(clients, bytearray)
                most = max(most, clients.count(b"cmd=mget"))
        for one in working:
            one.result()
        assert before == _number(ask(redis_server, "DBSIZE"))
        assert 0 < most <= MOST_CONNECTIONS


# A line that lies

LONG_LIE = pytest.param(200, 10_000, 6, marks=[pytest.mark.long, pytest.mark.timeout(600)])


@pytest.mark.parametrize(("rounds", "every_bytes", "seed"), [(10, 40_000, 5), LONG_LIE])
def test_no_wrong_value_over_a_line_that_flips_bits(
    own: RedisServer, rounds: int, every_bytes: int, seed: int
) -> None:
    """500 gets, or 10,000: each is right, or an error; and nearly all are healed."""
    values = lying_values(seed)
    with transfer.connect(own.url) as direct:
        refs = direct.put(values)
    with behind(own, PATIENT, seed=seed) as (proxy, store):
        proxy.do(lambda it: it.corrupt(every_bytes=every_bytes))
        only_right_values(store, proxy, refs, values, rounds)


def test_verify_reads_back_what_was_put(own: RedisServer) -> None:
    """Bits flipped on the way in are stored as they arrive. With verify=put that is seen and
    put right; without it, every get says so.
    """
    rng = random.Random(9)
    values = {f"k{index}": rng.randbytes(3000) for index in range(40)}
    with ProxyThread(own.host, own.port, seed=9) as proxy:
        port = proxy.address[1]
        proxy.do(lambda it: it.corrupt(every_bytes=30_000, direction="to_server"))
        policy = Policy(attempts=15, base_s=0.001, factor=1.5, max_s=0.02, deadline_s=60.0)
        url = f"redis://127.0.0.1:{port}?timeout=0.5&prefix="
        with (
            transfer.connect(f"{url}plain:", policy) as plain,
            transfer.connect(f"{url}verified:&verify=put", policy) as verified,
        ):
            with contextlib.suppress(BatchFailed):
                plain.put(values)
            refs = verified.put(values)
        assert proxy.stats.flips > 3
    with transfer.connect(own.url + "?prefix=verified:") as direct:
        assert direct.get(refs.values()) == values
    with transfer.connect(own.url + "?prefix=plain:", Policy(attempts=1)) as direct:
        found = direct.get(values, partial=True)
        assert any(isinstance(error, Corrupt) for error in found.failures.values())
        assert all(value == values[key] for key, value in found.values.items())


# kill -9


def test_no_acknowledged_put_is_lost_by_kill_9(own: RedisServer) -> None:
    """The server is killed and restarted three times under load. Whatever a put reported as
    done is there afterwards, and the newest of each key.
    """
    stop = threading.Event()
    done: dict[str, list[tuple[transfer.Ref, bytes]]] = {}
    policy = Policy(attempts=60, base_s=0.02, factor=1.5, max_s=0.2, deadline_s=60.0)

    def work(number: int) -> None:
        rng = random.Random(number)
        with transfer.connect(own.url + "?timeout=2", policy) as store:
            while not stop.is_set():
                keys = [f"{number}/{rng.randrange(300)}" for _ in range(5)]
                values = {key: rng.randbytes(rng.randrange(1, 2000)) for key in keys}
                for key, ref in store.put(values).items():
                    done.setdefault(key, []).append((ref, values[key]))

    def kill() -> None:
        try:
            for _ in range(3):
                known = sum(map(len, done.values()))
                until(lambda known=known: sum(map(len, done.values())) > known + 100)  # type: ignore[misc]
                own.kill()
                own.restart()
        finally:
            stop.set()

    together([kill, *(partial(work, number) for number in range(3))])
    own.kill()
    own.restart()
    with transfer.connect(own.url) as store:
        newest = {key: history[-1] for key, history in done.items()}
        found = store.get([ref for ref, _ in newest.values()])
        assert found == {key: value for key, (_, value) in newest.items()}


def test_after_a_restart_old_connections_do_no_harm(own: RedisServer) -> None:
    """Those that were open are found out before they are used."""
    with transfer.connect(own.url, ONCE) as store:
        values = {f"k{index}": bytes(100) for index in range(20_000)}
        refs = store.put(values)
        own.kill()
        own.restart()
        assert store.get(refs.values()) == values
        own.kill()
        with fails({"k1": Unavailable}):
            store.get(["k1"])
