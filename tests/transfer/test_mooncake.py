"""Mooncake: batches that overload it, short reads, dead holders, a line that lies."""

import contextlib
import json
import random
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

from holdfast import transfer
from holdfast.chaos.proxy import ProxyThread
from holdfast.contrib.mooncake import MooncakeBackend
from holdfast.contrib.mooncake.arenas import ARENA_BYTES
from holdfast.errors import (
    BatchFailed,
    Corrupt,
    Gone,
    Mistake,
    NoRoom,
    NotFound,
    Unavailable,
    UnknownOutcome,
)
from holdfast.proc import HeldPort
from holdfast.retry import Policy
from holdfast.servers import MooncakeHolder, MooncakeServer
from holdfast.transfer import Store
from transfer.conftest import QUICK
from transfer.outcomes import ONCE, PATIENT, fails, lying_values, only_right_values
from transfer.samples import SAMPLES, same


@pytest.fixture
def prefix() -> str:
    return f"m:{uuid.uuid4().hex}:"


@pytest.fixture
def store_url(mooncake_master: MooncakeServer, prefix: str) -> str:
    """Where the `store` of these tests is."""
    return f"{mooncake_master.url}&prefix={prefix}"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[tuple[MooncakeServer, MooncakeHolder]]:
    """A master and a holder that a test may break."""
    with (
        MooncakeServer(tmp_path) as master,
        MooncakeHolder(tmp_path, master, nbytes=64 << 20) as holder,
    ):
        yield master, holder


def test_values_that_no_buffer_of_ours_has_room_for(mooncake_client: Any, prefix: str) -> None:
    """They are mixed with small ones, and read by reference and by key."""
    with Store(MooncakeBackend(mooncake_client, prefix=prefix), QUICK) as store:
        large = np.random.default_rng(1).integers(0, 255, ARENA_BYTES + 1000, np.uint8)
        refs = store.put({**SAMPLES, "large": large})
        for wanted in (refs.values(), list(refs)):
            found = store.get(wanted)
            assert np.array_equal(found.pop("large"), large)
            assert same(found, SAMPLES)
        store.delete(refs.values())


def test_a_value_that_is_shorter_than_announced_is_corrupt(
    store: Store, mooncake_client: Any, prefix: str
) -> None:
    """Mooncake reports success and leaves the rest of the buffer as it was."""
    ref = store.put({"k": b"x" * 1000})["k"]
    whole = mooncake_client.get(prefix + "k")
    assert len(whole) == ref.nbytes
    for stored in (whole[:-1], whole[:64], b"y", whole[:500] + bytes(500), whole + b"z"):
        assert mooncake_client.upsert(prefix + "k", stored) == 0
        for wanted in (ref, "k"):
            found = Store(store.backend, ONCE).get([wanted], partial=True)
            assert isinstance(found.failures["k"], Corrupt), stored
    assert mooncake_client.upsert(prefix + "k", whole) == 0
    assert store.get([ref]) == {"k": b"x" * 1000}


def test_without_a_holder_there_is_no_room(tmp_path: Path) -> None:
    """A client that lends nothing has nowhere to put things."""
    with (
        MooncakeServer(tmp_path) as master,
        transfer.connect(master.url, ONCE) as store,
    ):
        with fails({"k": NoRoom}, match=r"\(k: no process that lends memory.*&segment=4G"):
            store.put({"k": b"value"})
        with transfer.connect(master.url + "&segment=32M", ONCE) as lender:
            ref = store.put({"k": b"value"})["k"]
            assert lender.get([ref]) == store.get([ref]) == {"k": b"value"}


def test_the_url_of_the_docs_can_store(mooncake_master: MooncakeServer, prefix: str) -> None:
    """As it stands in docs/TRANSFER.md, with addresses filled in, it lends what it needs."""
    page = (Path(__file__).parents[2] / "docs" / "TRANSFER.md").read_text()
    found = re.search(r"^\| `(mooncake://\S+)` \|", page, re.MULTILINE)
    assert found is not None
    url = found[1].replace("master:port", f"127.0.0.1:{mooncake_master.port}")
    url = url.replace("http://host:port/metadata", mooncake_master.metadata)
    url = url.replace("ADDRESS", "127.0.0.1").replace("=4G", "=32M")
    with transfer.connect(f"{url}&prefix={prefix}", ONCE) as store:
        assert store.get(store.put({"k": b"value"}).values()) == {"k": b"value"}
        store.delete(["k"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ("metadata=http://127.0.0.1:9/metadata", "http://127.0.0.1:9/metadata does not answer"),
        ("metadata={0}x", "is no metadata server: it answers 404"),
        ("metadata={0}&segment=9000G", "segment=9000G is more memory than this machine has"),
        ("metadata={0}&protocol=pigeon", "may not have protocol=pigeon"),
    ],
)
def test_a_client_that_cannot_start_says_why(
    mooncake_master: MooncakeServer, options: str, cause: str
) -> None:
    """Mooncake's own answer is -1, whatever it was."""
    url = f"mooncake://127.0.0.1:{mooncake_master.port}?"
    with pytest.raises(Unavailable, match=re.escape(cause)):
        transfer.connect(url + options.format(mooncake_master.metadata))


def test_a_full_store_has_no_room(own: tuple[MooncakeServer, MooncakeHolder]) -> None:
    with transfer.connect(own[0].url, ONCE) as store:
        refs = store.put({"a": bytes(40 << 20)})
        with fails({"b": NoRoom}):
            store.put({"b": bytes(40 << 20), "c": b"small"})
        assert store.stat().budget == 64 << 20
        assert len(store.get([refs["a"]])["a"]) == 40 << 20
        store.delete(["a"])
        store.put({"b": bytes(40 << 20)})


def test_a_dead_holder_takes_its_values_with_it(
    own: tuple[MooncakeServer, MooncakeHolder],
) -> None:
    """A get then fails or says that it is gone; never with something else."""
    master, holder = own
    with transfer.connect(master.url, ONCE) as store:
        refs = store.put({f"k{index}": bytes(1000) for index in range(10)})
        holder.kill()
        found = store.get(refs.values(), partial=True)
        assert not found.values
        assert all(isinstance(error, Unavailable | Gone) for error in found.failures.values())
        with fails({"k1": NoRoom | UnknownOutcome}):
            store.put({"k1": b"x"})


@pytest.mark.long
def test_a_dead_master_is_unavailable(own: tuple[MooncakeServer, MooncakeHolder]) -> None:
    """Nothing that is there is called missing."""
    master, _ = own
    with transfer.connect(master.url, ONCE) as store:
        refs = store.put({"a": b"1"})
        master.kill()
        for wanted in (refs.values(), ["a"]):
            found = store.get(wanted, partial=True)
            assert isinstance(found.failures["a"], Unavailable)
        for call in (lambda: store.put({"a": b"2"}), lambda: store.exists(["a"])):
            with fails({"a": Unavailable | UnknownOutcome}):
                call()
        with pytest.raises(Unavailable):
            store.stat()


def test_connecting_to_nobody_fails_soon() -> None:
    """Mooncake itself would try for a minute and a half."""
    with HeldPort() as port, pytest.raises(Unavailable, match="no Mooncake master"):
        transfer.connect(f"mooncake://127.0.0.1:{port}?metadata=http://127.0.0.1:1/metadata")


def test_scan_and_stat_need_to_know_the_master(mooncake_client: Any, prefix: str) -> None:
    with Store(MooncakeBackend(mooncake_client, prefix=prefix)) as store:
        for call in (store.stat, lambda: list(store.scan())):
            with pytest.raises(Mistake, match="admin"):
                call()


# A line that lies


@contextlib.contextmanager
def lying(
    master: MooncakeServer, holder: MooncakeHolder, policy: Policy, seed: int
) -> Iterator[tuple[ProxyThread, Store]]:
    """A store whose holder's data is behind a proxy: clients learn of it where they look it up.

    A holder that is busy starting may describe itself once more, over what was written here;
    so the way is proved before a test relies on it.
    """
    path = "/metadata?key=" + quote(f"mooncake/ram/{holder.segment}", safe="")
    described = json.loads(_http(master, "GET", path))
    with ProxyThread("127.0.0.1", described["tcp_data_port"], seed=seed) as proxy:
        host, port = proxy.address
        behind = json.dumps({**described, "tcp_data_host": host, "tcp_data_port": port})
        for _ in range(10):
            _http(master, "PUT", path, behind)
            with transfer.connect(master.url, policy) as store:
                store.put({"warm": 1})
                if proxy.stats.bytes_to_server > 0:
                    yield proxy, store
                    return
    pytest.fail("the data does not come through the proxy")


def _http(master: MooncakeServer, method: str, path: str, body: str | None = None) -> bytes:
    url = f"http://127.0.0.1:{master.metadata_port}{path}"
    return httpx.request(method, url, content=body, timeout=5).raise_for_status().content


LONG_LIE = pytest.param(200, 6, marks=[pytest.mark.long, pytest.mark.timeout(600)])


@pytest.mark.parametrize(("rounds", "seed"), [(10, 5), LONG_LIE])
def test_no_wrong_value_over_a_line_that_flips_bits(
    own: tuple[MooncakeServer, MooncakeHolder], rounds: int, seed: int
) -> None:
    """500 gets, or 10,000: each is right, or an error; and nearly all are healed."""
    values = lying_values(seed)
    with lying(*own, PATIENT, seed) as (proxy, store):
        refs = store.put(values)
        assert store.get(refs.values()) == values
        assert proxy.stats.bytes_to_client > 50_000, "the data does not come through the proxy"
        proxy.do(lambda it: it.corrupt(every_bytes=40_000, direction="to_client"))
        only_right_values(store, proxy, refs, values, rounds)
        proxy.do(lambda it: it.heal())
        assert store.get(refs.values()) == values


def test_damage_on_the_way_in_is_seen_by_every_get(
    own: tuple[MooncakeServer, MooncakeHolder],
) -> None:
    """What was stored wrong stays wrong; it is called corrupt, or a put says that it failed."""
    rng = random.Random(3)
    values = {f"k{index}": rng.randbytes(2000) for index in range(40)}
    with lying(*own, QUICK, seed=3) as (proxy, store):
        proxy.do(lambda it: it.corrupt(every_bytes=20_000, direction="to_server"))
        with contextlib.suppress(BatchFailed):
            store.put(values)
        assert proxy.stats.flips > 0
        proxy.do(lambda it: it.heal())
        found = store.get(values, partial=True)
        assert all(value == values[key] for key, value in found.values.items())
        seen = {type(error) for error in found.failures.values()}
        assert seen <= {Corrupt, NotFound, Unavailable}
