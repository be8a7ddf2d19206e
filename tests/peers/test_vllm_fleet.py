"""A real vLLM server as the only replica of a fleet: rolled, damaged, killed, started again.

Every test has a channel and a ledger of its own; the server goes on from one to the next,
with whatever the last test left in it. It runs in bfloat16, so that its checker sees all.
"""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM  # type: ignore[import-not-found,unused-ignore]

from holdfast import ledger as ledgers
from holdfast.contrib.fleets.fleet import Fleet, FleetPolicy
from holdfast.contrib.fleets.replica import Replica
from holdfast.contrib.vllm.client import VllmServer, expected
from holdfast.contrib.vllm.engine import HEALING, LOADING, VllmEngine, serve_vllm
from holdfast.contrib.vllm.process import ServerProcess
from holdfast.errors import Unavailable
from holdfast.ledger import Ledger
from holdfast.proc import HeldPort, spawn
from holdfast.weights.pin import Pin
from holdfast.weights.policy import Retention
from holdfast.weights.publisher import Publisher
from holdfast.weights.subscriber import Subscriber
from patience import auntil, gives
from peers.conftest import ENVIRONMENT, ONE_PROCESS, START_S, VllmProcess, command
from peers.tiny_model import make_model
from peers.vllm_parts import Weights, carried_of, edit, ended, generate, group_of, weights_of

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

COUNT = 48
LEASE_S = 6.0
SHARD_BYTES = 300_000
STARTUP = 9
DTYPE = torch.bfloat16

Answer = tuple[tuple[str, ...], tuple[int, ...]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Four versions and the model that the server is started with."""
    root = tmp_path_factory.mktemp("models")
    return {
        seed: make_model(root / f"m{seed}", seed, dtype=DTYPE) for seed in (1, 2, 3, 4, STARTUP)
    }


@pytest.fixture(scope="module")
def weights(folders: dict[int, Path]) -> dict[int, Weights]:
    return {seed: weights_of(folder) for seed, folder in folders.items()}


@pytest.fixture(scope="module")
def process(
    folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("fleet") / "vllm.log"
    process = VllmProcess(folders[STARTUP], log, dtype="bfloat16", env=ONE_PROCESS)
    process.start()
    yield process
    process.stop()


def compared(blind: tuple[str, ...]) -> bool:
    """Whether all was compared but projections, which some processors' kernels take over."""
    return all(".mlp." in name or ".self_attn." in name for name in blind)


@dataclasses.dataclass
class Bench:
    """A channel, its ledger, its publisher, its fleet, and the server."""

    root: Path
    ledger: Ledger
    publisher: Publisher
    process: VllmProcess
    server: VllmServer
    carried: dict[str, bytes | str | Path]
    weights: dict[int, Weights]

    async def publish(self, number: int, tensors: Weights | None = None) -> None:
        await self.publisher.publish(number, tensors or self.weights[number], files=self.carried)

    @contextlib.asynccontextmanager
    async def fleet(self, mix: int = 0) -> AsyncIterator[Fleet]:
        async with Fleet(self.ledger, "policy", FleetPolicy(mix=mix, hold_s=40.0)) as fleet:
            yield fleet

    @contextlib.asynccontextmanager
    async def serving(self, engine: VllmEngine | None = None) -> AsyncIterator[VllmEngine]:
        """The process beside the server, here a task."""
        engine = engine or VllmEngine(self.process.url)
        work = serve_vllm(
            self.root, self.ledger, "policy", "r0", engine.url, lease_s=LEASE_S, engine=engine
        )
        task = asyncio.create_task(work)
        try:
            yield engine
        finally:
            assert not task.done(), task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def first(self, fleet: Fleet) -> None:
        """Publish version 1, and bring the fleet to answer with it."""
        await self.publish(1)
        await fleet.update(1)
        await self.offered(fleet)
        await answers(self, 1)

    async def offered(self, fleet: Fleet, number: int | None = None) -> None:
        """Wait until callers are offered the server; with a number, for that version."""
        there = [self.server.url]
        await auntil(lambda: gives(fleet.addresses(number), there), "it is offered", START_S)

    async def gone(self, fleet: Fleet) -> None:
        """Wait until nobody is offered."""
        await auntil(lambda: gives(fleet.addresses(), []), "it is not offered any more")

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[VllmEngine]:
        """A replica of the server without `serve_vllm`."""
        url = self.process.url
        how: dict[str, Any] = {"needs": "latest", "address": url, "lease_s": LEASE_S}
        async with (
            VllmEngine(url) as engine,
            Subscriber(self.root, self.ledger, "policy", "alone", **how) as subscriber,
            Replica(subscriber, engine),
        ):
            yield engine

    async def right(self, number: int) -> None:
        """The server says that it holds this version, and every parameter is the version's."""
        assert await self.server.version() == number
        assert compared(await self.server.verify(expected(self.weights[number], dtype="BF16")))


@pytest.fixture
async def bench(
    tmp_path: Path, process: VllmProcess, folders: dict[int, Path], weights: dict[int, Weights]
) -> AsyncIterator[Bench]:
    carried = carried_of(folders[1])
    assert {"config.json", "tokenizer.json"} <= carried.keys()
    keep = Retention(keep_last=8)
    async with (
        ledgers.open(f"sqlite:///{tmp_path}/ledger.db") as ledger,
        Publisher(tmp_path / "w", ledger, "policy", keep, shard_bytes=SHARD_BYTES) as publisher,
        VllmServer(process.url, call_s=60) as server,
    ):
        yield Bench(tmp_path / "w", ledger, publisher, process, server, carried, weights)


async def ask(url: str) -> Answer:
    """The versions that an answer names, and its tokens."""
    choice = await generate(url, count=COUNT)
    assert choice["finish_reason"] == "length"
    return (
        tuple(span["version"] for span in choice["weight_versions"]),
        tuple(choice["token_ids"]),
    )


_RECORDED: dict[int, tuple[int, ...]] = {}


async def answers(bench: Bench, number: int) -> None:
    """The server answers as this version, and as it did whenever this version was served."""
    versions, tokens = await ask(bench.server.url)
    assert versions == (str(number),)
    assert _RECORDED.setdefault(number, tokens) == tokens
    assert len(set(_RECORDED.values())) == len(_RECORDED)


# ---- what other readers make of a version ------------------------------------------


@pytest.mark.parametrize("shard_bytes", [1 << 30, SHARD_BYTES])
async def test_a_version_is_a_transformers_folder(
    tmp_path: Path, folders: dict[int, Path], weights: dict[int, Weights], shard_bytes: int
) -> None:
    """transformers loads a published folder, in one file or in several, to the same bits."""
    async with (
        ledgers.open("memory:") as ledger,
        Publisher(tmp_path, ledger, "policy", shard_bytes=shard_bytes) as publisher,
    ):
        await publisher.publish(7, weights[1], files=carried_of(folders[1]))
    folder = tmp_path / "policy" / "step_7"
    count = len(list(folder.glob("*.safetensors")))
    assert (count > 1) == (shard_bytes == SHARD_BYTES)
    assert (folder / "model.safetensors.index.json").exists() == (count > 1)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPE, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = model.state_dict()
    assert loaded.keys() == weights[1].keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights[1].items())


def test_importing_needs_neither_torch_nor_http(tmp_path: Path) -> None:
    """Whoever imports the engine does not import torch or aiohttp by that."""
    code = (
        "import sys, holdfast.contrib.vllm.engine\n"
        "assert not {'torch', 'aiohttp', 'vllm'} & sys.modules.keys()"
    )
    with spawn([sys.executable, "-c", code], log=tmp_path / "log") as child:
        assert child.wait(60) == 0, (tmp_path / "log").read_text()


# ---- good versions -----------------------------------------------------------------


async def test_rolled_through_versions_under_requests(bench: Bench) -> None:
    """Requests that run all the time are each answered by one version, the one that they
    name, in the order of the versions; the server holds every byte of each."""
    seen: list[Answer] = []
    stop = asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            seen.append(await ask(bench.server.url))

    async with bench.fleet() as fleet, bench.serving() as engine:
        await bench.first(fleet)
        async with asyncio.TaskGroup() as group:
            group.create_task(keep_asking())
            for number in (2, 3, 4):
                at = len(seen)
                await auntil(lambda at=at: len(seen) >= at + 2, "requests are answered")  # type: ignore[misc]
                await bench.publish(number)
                update = await fleet.update(number)
                assert update.serving == ("r0",)
                assert await fleet.addresses(number) == [bench.server.url]
                await bench.right(number)
            at = len(seen)
            await auntil(lambda: len(seen) >= at + 2, "the last version answers")
            stop.set()
        for number in (2, 3, 4):
            await fleet.update(number, rollback=True)
            await answers(bench, number)
        assert compared(engine.blind)
        await auntil(lambda: gives(bench.server.paused(), False), "the server is resumed")
    # Nobody keeps it in step any more.
    assert await bench.server.paused()
    named = [versions for versions, _ in seen]
    assert {*named} == {("1",), ("2",), ("3",), ("4",)}
    assert named == sorted(named)
    for versions, tokens in seen:
        assert tokens == _RECORDED[int(versions[0])]


# ---- bad versions ------------------------------------------------------------------


async def test_bad_versions_never_reach_the_server(bench: Bench) -> None:
    """A flipped byte, a missing tensor and a wrong shape are refused before vLLM is asked to
    load anything; the round fails with the reason, and the old version is served on."""
    async with bench.fleet() as fleet, bench.serving():
        await bench.first(fleet)
        loads = bench.process.asked("/collective_rpc")

        await bench.publish(2)
        shard = sorted((bench.root / "policy" / "step_2").glob("*.safetensors"))[1]
        data = bytearray(shard.read_bytes())
        data[-1000] ^= 4
        shard.chmod(0o644)
        shard.write_bytes(data)
        with pytest.raises(Unavailable, match="Corrupt"):
            await fleet.update(2)

        lacking = dict(bench.weights[3])
        del lacking["model.norm.weight"]
        await bench.publish(3, lacking)
        with pytest.raises(Unavailable, match=r"model\.norm\.weight"):
            await fleet.update(3)

        bent = dict(bench.weights[4])
        bent["model.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4, dtype=DTYPE)
        await bench.publish(4, bent)
        with pytest.raises(Unavailable, match=r"shapes.*q_proj\.weight"):
            await fleet.update(4)

        assert bench.process.asked("/collective_rpc") == loads
        assert await fleet.addresses() == [bench.server.url]
        await answers(bench, 1)
        await bench.right(1)


async def test_a_first_version_that_does_not_fit(bench: Bench) -> None:
    """Also before anything was loaded, a version that lacks a tensor is refused: what the
    server was started with has it."""
    lacking = dict(bench.weights[3])
    del lacking["model.norm.weight"]
    async with bench.fleet() as fleet, bench.serving():
        loads = bench.process.asked("/collective_rpc")
        await bench.publish(1, lacking)
        with pytest.raises(Unavailable, match=r"lacks.*model\.norm\.weight"):
            await fleet.update(1)
        assert bench.process.asked("/collective_rpc") == loads
        assert await fleet.addresses() == []
        assert await bench.server.paused()


class Tampering(VllmEngine):
    """Somebody changes the folder of version 2 after it was staged."""

    damage: Callable[[Weights], None] | None = None
    done = 0

    async def stage(self, pin: Pin) -> None:
        await super().stage(pin)
        if pin.number == 2 and self.damage is not None:
            assert self._staged is not None
            edit(Path(self._staged.path), self.damage)
            self.done += 1


def negate(tensors: Weights) -> None:
    if "model.norm.weight" in tensors:  # which every processor's checker sees
        tensors["model.norm.weight"].neg_()


def bend(tensors: Weights) -> None:
    if "model.layers.0.self_attn.q_proj.weight" in tensors:
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4, dtype=DTYPE)


async def test_changed_between_staging_and_loading(bench: Bench) -> None:
    """Bytes that change after they were verified are noticed after the load, before anybody
    is answered; the old version is loaded again and served, and the next try can succeed."""
    engine = Tampering(bench.process.url)
    engine.damage = negate
    async with bench.fleet(mix=1) as fleet, bench.serving(engine):
        await bench.first(fleet)
        await bench.publish(2)
        update = await fleet.update(2)
        assert update.left_behind == ("r0",)
        assert await fleet.addresses() == [bench.server.url]
        tries = engine.done
        assert tries >= 1
        while engine.done < tries + 2:  # it is tried again and again meanwhile
            await answers(bench, 1)
        engine.damage = None
        await bench.offered(fleet, 2)
        await answers(bench, 2)
        await bench.right(2)


# ---- deaths ------------------------------------------------------------------------

_DRIVER = """
import asyncio, sys
from holdfast import ledger
from holdfast.contrib.vllm.client import VllmServer
from holdfast.contrib.vllm.engine import serve_vllm

root, place, url, lease_s, hang = sys.argv[1:]
load = VllmServer.reload

async def reload(self, path):
    await load(self, path)
    if path.endswith(hang):
        print("loaded, not checked", flush=True)
        await asyncio.Event().wait()

VllmServer.reload = reload

async def main():
    async with ledger.open(place) as book:
        await serve_vllm(root, book, "policy", "r0", url, lease_s=float(lease_s))

asyncio.run(main())
"""


async def test_killed_in_the_middle_of_a_load(bench: Bench, tmp_path: Path) -> None:
    """Whoever drives the server is killed after the load of a version and before it was
    checked: the server stays paused, and the next one loads it again, checks and resumes.
    A request that came in between is answered by the new version."""
    log = tmp_path / "driver.log"
    place = f"sqlite:///{tmp_path}/ledger.db"
    argv = [sys.executable, "-c", _DRIVER, str(bench.root), place, bench.process.url]
    async with bench.fleet() as fleet:
        await bench.publish(1)
        await bench.publish(2)
        with spawn([*argv, str(LEASE_S), "step_2"], name="driver", log=log) as driver:
            await fleet.update(1)
            await bench.offered(fleet)
            await answers(bench, 1)
            second = asyncio.create_task(fleet.update(2))

            async def loaded() -> bool:
                assert driver.alive(), log.read_text()
                return "loaded, not checked" in log.read_text()

            await auntil(loaded, "the load")
            driver.kill_group()
        assert await bench.server.paused()
        assert await bench.server.version() == LOADING
        early = asyncio.create_task(ask(bench.server.url))
        async with bench.serving():
            await bench.offered(fleet, 2)
            await second
            assert (await early)[0] == ("2",)
            await answers(bench, 2)
            await bench.right(2)


async def test_paused_or_loaded_by_others(bench: Bench) -> None:
    """A server that somebody pauses is resumed; one that somebody loads with other weights is
    taken out, loaded again and offered again."""
    async with bench.fleet() as fleet, bench.serving() as engine:
        await bench.first(fleet)
        await bench.server.pause()
        await answers(bench, 1)  # waits until it is resumed

        losses = engine.losses
        await bench.server.pause()
        await bench.server.set_version(3)
        await asyncio.wait_for(engine.lost(losses), 30)
        assert "loaded by others" in engine.problem
        await bench.offered(fleet)
        await auntil(lambda: gives(bench.server.version(), 1), "version 1 is back")
        await auntil(lambda: gives(bench.server.paused(), False), "it is resumed")
        await answers(bench, 1)


@pytest.mark.parametrize("driver", ["serving", "alone"])
async def test_a_server_that_was_started_again(bench: Bench, driver: str) -> None:
    """A server that is killed leaves the fleet, driven by `serve_vllm` or by a replica alone.
    Started again, with the weights of its start, it is loaded and checked before it is offered."""
    async with bench.fleet() as fleet, getattr(bench, driver)():
        await bench.first(fleet)
        assert bench.process.child is not None
        await asyncio.to_thread(bench.process.child.kill_group)
        await bench.gone(fleet)
        bench.process.launch()  # from this thread: children end with the thread that made them
        labels = []

        async def back() -> bool:
            there = await fleet.addresses()
            if there:
                labels.append(await bench.server.version())
            return bool(there)

        await auntil(back, "it is offered again", START_S)
        assert labels == [1]
        await answers(bench, 1)
        await bench.right(1)


async def test_a_server_of_our_own(bench: Bench, folders: dict[int, Path], tmp_path: Path) -> None:
    """A server that we start: when its first process is killed the others end with it, and the
    next one is loaded and offered; it ends with us."""
    held = HeldPort()
    port = held.port
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "own.log"
    argv = command(folders[STARTUP], port, "bfloat16")
    process = ServerProcess(argv, env=ENVIRONMENT, log=log)

    async def there() -> bool:
        assert not task.done(), task
        return await fleet.addresses(1) == [url]

    work = serve_vllm(
        bench.root, bench.ledger, "policy", "own", url, lease_s=LEASE_S, process=process
    )
    async with bench.fleet() as fleet, VllmServer(url, call_s=60) as server:
        await bench.publish(1)
        task = asyncio.create_task(work)
        try:
            await auntil(server.healthy, "it answers", START_S)
            await fleet.update(1)
            await auntil(there, "it is offered")
            first = group_of(f"--port={port}")
            assert {"VLLM::EngineCore", "VLLM::Worker"} <= {*first.values()}, first
            [head] = [pid for pid, words in first.items() if words.startswith(" ".join(argv))]
            os.kill(head, signal.SIGKILL)
            await bench.gone(fleet)
            await auntil(lambda: ended(first), "all of it has ended", 30)
            await auntil(there, "it is offered again", START_S)
            assert (await ask(url))[0] == ("1",)
        finally:
            last = group_of(f"--port={port}")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await auntil(lambda: ended(last), "it ends with us", 30)


# Last, because the server is lost afterwards.
async def test_a_server_beyond_healing(bench: Bench) -> None:
    """Where the one good load after a failed one fails as well, the server is never resumed:
    it stays paused and out of the fleet, also for the next one who finds it."""
    engine = Tampering(bench.process.url)
    engine.damage = bend
    async with bench.fleet(mix=1) as fleet:
        async with bench.serving(engine):
            await bench.first(fleet)
            resumes, losses = bench.process.asked("/resume"), engine.losses
            await bench.publish(2)
            second = asyncio.create_task(fleet.update(2))
            await asyncio.wait_for(engine.lost(losses), 60)
            assert "restart it" in engine.problem

            await bench.gone(fleet)
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
        loads = bench.process.asked("/collective_rpc")
        other = VllmEngine(bench.process.url)
        async with bench.serving(other):
            await asyncio.wait_for(other.lost(0), 60)
            assert "restart it" in other.problem
            assert await fleet.addresses() == []
        assert await bench.server.version() == HEALING
        assert await bench.server.paused()
        assert bench.process.asked("/resume") == resumes
        assert bench.process.asked("/collective_rpc") == loads
