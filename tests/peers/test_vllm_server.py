"""A real vLLM server rolled through versions, given broken ones, healed and killed."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.contrib.vllm.client import VllmServer, compare, expected
from holdfast.errors import Corrupt, Mistake, TimedOut, Unavailable, UnknownOutcome
from peers.conftest import VllmProcess
from peers.tiny_model import greedy, make_model
from peers.vllm_parts import PROMPT, Weights, edit, generate, weights_of

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

LONG_PROMPT = [3 + 7 * place % 50 for place in range(200)]  # longer than a block of the cache
MANY = 240
COUNT = 16


def edited(model: Path, folder: Path, change: Callable[[Weights], None]) -> Path:
    """A copy whose tensors were changed."""
    edit(shutil.copytree(model, folder), change)
    return folder


async def tokens(server: VllmServer, prompt: list[int] = PROMPT, count: int = COUNT) -> list[int]:
    return list((await generate(server.url, prompt, count))["token_ids"])


async def load(server: VllmServer, folder: Path, version: int) -> None:
    await server.pause()
    await server.reload(str(folder))
    await server.set_version(version)
    await server.resume()


async def running(server: VllmServer, wanted: int = 1) -> None:
    """Wait until so many requests are being generated."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{server.url}/metrics") as answer:
                text = await answer.text()
            lines = [line for line in text.splitlines() if "num_requests_running{" in line]
            if lines and float(lines[0].rsplit(" ", 1)[1]) == wanted:
                return
            await asyncio.sleep(0.01)


# ---- good versions ---------------------------------------------------------------


async def test_serves_what_was_loaded(vllm: VllmServer, models: dict[int, Path]) -> None:
    """After each load the server generates what transformers does with the same files, and
    loading a version again brings the same answers and checksums back."""
    wanted = {number: greedy(model, PROMPT, COUNT) for number, model in models.items()}
    assert len({tuple(answer) for answer in wanted.values()}) == 3
    seen: dict[int, dict[str, str]] = {}
    for number in (2, 3, 1, 3, 2, 1):
        await load(vllm, models[number], number)
        assert await tokens(vllm) == wanted[number]
        assert await vllm.version() == number
        digests = await vllm.checksum()
        assert seen.setdefault(number, digests) == digests
    assert seen[1] != seen[2] != seen[3] != seen[1]


async def test_checksum_is_computed_from_the_files(
    vllm: VllmServer, models: dict[int, Path]
) -> None:
    """`expected` gives for the tensors in the files what the checker answers, for every
    parameter that the checker sees, and notices another version."""
    for number, model in models.items():
        await vllm.pause()
        await vllm.reload(str(model))
        wanted = expected(weights_of(model), dtype="F32")
        blind = await vllm.verify(wanted)
        other = expected(weights_of(models[number % 3 + 1]), dtype="F32")
        assert {name for name in wanted if wanted[name] != other[name]} == set(wanted)
        with pytest.raises(Corrupt, match="other weights"):
            await vllm.verify(other)
        found = compare(other, await vllm.checksum())
        assert {*found.wrong, *blind} == set(wanted)
        assert found.blind == blind
        # The embedding, norms and biases are always seen; the projections not on a CPU.
        assert all("_proj.weight" in name for name in blind)


# ---- pausing -----------------------------------------------------------------------


async def test_wait_gives_answers_of_one_version(
    vllm: VllmServer, models: dict[int, Path]
) -> None:
    """A pause that waits returns when the running request has ended; a request that comes
    while paused is answered by the version that is resumed."""
    async with asyncio.TaskGroup() as group:
        old = group.create_task(generate(vllm.url, count=MANY))
        await running(vllm)
        await vllm.pause("wait")
        await asyncio.wait_for(asyncio.shield(old), 5)
        new = group.create_task(generate(vllm.url))
        assert await vllm.paused()
        await vllm.reload(str(models[2]))
        await vllm.set_version(2)
        assert not new.done()
        await vllm.resume()
    assert [span["version"] for span in old.result()["weight_versions"]] == ["1"]
    assert len(old.result()["token_ids"]) == MANY
    assert [span["version"] for span in new.result()["weight_versions"]] == ["2"]
    assert new.result()["token_ids"] == greedy(models[2], PROMPT, COUNT)


async def test_a_pause_can_be_taken_up_again(vllm: VllmServer) -> None:
    """A pause that ran out of time holds back new requests; the next one waits for the rest."""
    async with VllmServer(vllm.url, call_s=0.03) as hasty:
        for _ in range(20):
            old = asyncio.create_task(generate(vllm.url, count=MANY))
            await running(vllm)
            try:
                await hasty.pause("wait")
            except TimedOut:
                break
            await vllm.resume()  # the answer was finished too soon to be waited for
            await old
        else:
            pytest.fail("no pause ran out of time")
    assert await vllm.paused()
    await vllm.pause("wait")
    await asyncio.wait_for(old, 5)
    await vllm.pause("wait")
    await vllm.resume()
    await vllm.resume()
    assert not await vllm.paused()


async def test_abort_cuts_answers_short(vllm: VllmServer) -> None:
    """A pause that aborts ends the running request at once, with what it has and a reason."""
    old = asyncio.create_task(generate(vllm.url, count=MANY))
    await running(vllm)
    await vllm.pause("abort")
    choice = await asyncio.wait_for(old, 5)
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) < MANY


async def test_pause_empties_the_prefix_cache(vllm: VllmServer, models: dict[int, Path]) -> None:
    """Nothing that the old weights left in the prefix cache gets into new answers, and a
    reload that would allow it is refused."""
    wanted = greedy(models[2], LONG_PROMPT, COUNT)
    assert await tokens(vllm, LONG_PROMPT) == greedy(models[1], LONG_PROMPT, COUNT)
    with pytest.raises(Mistake, match="pause"):
        await vllm.reload(str(models[2]))
    await load(vllm, models[2], 2)
    assert await tokens(vllm, LONG_PROMPT) == wanted


# ---- broken versions -----------------------------------------------------------------


def cut_shard(model: Path, folder: Path) -> Path:
    shard = sorted(shutil.copytree(model, folder).glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size // 2)
    return folder


def no_shard(model: Path, folder: Path) -> Path:
    sorted(shutil.copytree(model, folder).glob("*.safetensors"))[1].unlink()
    return folder


def no_folder(model: Path, folder: Path) -> Path:
    return folder


def strange_tensor(model: Path, folder: Path) -> Path:
    def add(tensors: Weights) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(4, 4)

    return edited(model, folder, add)


def wrong_shape(model: Path, folder: Path) -> Path:
    def shrink(tensors: Weights) -> None:
        if "model.layers.0.self_attn.q_proj.weight" in tensors:
            tensors["model.layers.0.self_attn.q_proj.weight"] = torch.ones(4, 4)

    return edited(model, folder, shrink)


@pytest.mark.parametrize("broken", [no_folder, cut_shard, no_shard, strange_tensor])
async def test_refused_and_healed(
    vllm: VllmServer,
    models: dict[int, Path],
    tmp_path: Path,
    broken: Callable[[Path, Path], Path],
) -> None:
    """A load that fails is `Corrupt`, leaves a server that looks healthy, and has no weights
    to check; a good load before anything is generated heals it, for all later loads too."""
    await vllm.pause()
    with pytest.raises(Corrupt):
        await vllm.reload(str(broken(models[3], tmp_path / "step_9")))
    assert await vllm.healthy()
    assert await vllm.paused()
    with pytest.raises(Corrupt):
        await vllm.checksum()
    for number in (2, 3):
        await vllm.pause()
        await vllm.reload(str(models[number]))
        await vllm.verify(expected(weights_of(models[number]), dtype="F32"))
        await vllm.resume()
        assert await tokens(vllm) == greedy(models[number], PROMPT, COUNT)


def no_norm(tensors: Weights) -> None:
    tensors.pop("model.norm.weight", None)


def no_bias(tensors: Weights) -> None:
    tensors.pop("model.layers.0.self_attn.q_proj.bias", None)


def other_embedding(tensors: Weights) -> None:
    if "model.embed_tokens.weight" in tensors:
        tensors["model.embed_tokens.weight"][5] = 0


def other_projection(tensors: Weights) -> None:
    if "model.layers.1.mlp.down_proj.weight" in tensors:
        tensors["model.layers.1.mlp.down_proj.weight"].neg_()


@pytest.mark.parametrize("damage", [no_norm, no_bias, other_embedding, other_projection])
async def test_damage_that_vllm_accepts(
    vllm: VllmServer, models: dict[int, Path], tmp_path: Path, damage: Callable[[Weights], None]
) -> None:
    """vLLM loads damaged tensors and missing ones without a word and serves another model.
    The checksum tells, unless the parameter is one that the checker does not see."""
    wanted = expected(weights_of(models[2]), dtype="F32")
    await vllm.pause()
    await vllm.reload(str(edited(models[2], tmp_path / "step_2", damage)))
    assert await vllm.healthy()
    found = compare(wanted, await vllm.checksum())
    assert not found.unknown
    if damage is other_projection and found.blind:
        assert not found.wrong
    else:
        with pytest.raises(Corrupt):
            await vllm.verify(wanted)
        assert len(found.wrong) == 1
    await vllm.resume()
    assert await tokens(vllm) != greedy(models[2], PROMPT, COUNT)
    # Nothing of it stays behind.
    await load(vllm, models[2], 2)
    await vllm.verify(wanted)
    assert await tokens(vllm) == greedy(models[2], PROMPT, COUNT)


# ---- what `expected` does by itself ---------------------------------------------------


def test_expected_for_a_tied_model(tmp_path: Path) -> None:
    """A head that is the embedding is left out, whether it stands in the files or not."""
    tensors = weights_of(make_model(tmp_path / "tied", 1, tie=True))
    assert "lm_head.weight" not in tensors
    without = expected(tensors, dtype="F32", tied=True)
    again = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    assert expected(again, dtype="F32", tied=True) == without


@pytest.mark.parametrize(
    ("given", "code", "kind"),
    [
        (torch.float32, "BF16", torch.bfloat16),
        (torch.float32, "F16", torch.float16),
        (torch.bfloat16, "F32", torch.float32),
        (torch.float16, "F32", torch.float32),
    ],
)
def test_expected_casts_like_torch(given: torch.dtype, code: str, kind: torch.dtype) -> None:
    """Tensors in another dtype are rounded as torch rounds them, ties and denormals too."""
    maker = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=maker).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite()]
    values = torch.cat([values, torch.randn(50_000, generator=maker), values.bfloat16().float()])
    ties = torch.arange(1 << 16, dtype=torch.int32) << 16 | 0x8000
    values = torch.cat([values, ties.view(torch.float32)])
    values = values[values.isfinite()].to(given)
    values = values[values.isfinite()]
    assert expected({"a": values}, dtype=code) == expected({"a": values.to(kind)}, dtype=code)


def test_expected_refuses_what_it_cannot_know() -> None:
    """A part of a fused parameter without the others, and a cast that is not defined."""
    with pytest.raises(Mistake, match="made of 3"):
        expected({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, dtype="F32")
    with pytest.raises(Mistake, match="publish in the server's dtype"):
        expected({"a": torch.ones(2, dtype=torch.float64)}, dtype="F32")


# ---- servers that misbehave -------------------------------------------------------------


@contextlib.asynccontextmanager
async def answering(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    """An HTTP server that answers every path in its own way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        yield str(server.make_url("")).rstrip("/")


async def test_without_dev_mode() -> None:
    """A server that does not have the calls is a mistake whose message says what to set."""

    async def plain(request: web.Request) -> web.Response:
        if request.path == "/health":
            return web.Response()
        return web.json_response({"detail": "Not Found"}, status=404)

    async with answering(plain) as url, VllmServer(url) as server:
        assert await server.healthy()
        for call in (server.paused, server.pause, server.checksum, server.version):
            with pytest.raises(Mistake, match="VLLM_SERVER_DEV_MODE=1"):
                await call()


async def test_endless_and_foreign_answers_are_bounded() -> None:
    """An answer that does not end, or is not vLLM's, is a mistake, not a memory hog."""

    async def endless(request: web.Request) -> web.StreamResponse:
        if request.path == "/is_paused":
            return web.json_response(["hello"])
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(bytes(1 << 16))
        return response

    async with answering(endless) as url, VllmServer(url, call_s=20) as server:
        with pytest.raises(Mistake, match="not like vLLM"):
            await server.version()
        with pytest.raises(Mistake, match="not like vLLM"):
            await server.checksum()
        with pytest.raises(Mistake, match="not like vLLM"):
            await server.paused()


@pytest.mark.parametrize("way", ["silent", "broken"])
async def test_a_reload_without_an_answer_is_unknown(way: str) -> None:
    """Who gets no answer to a reload cannot know what is loaded; other calls can be repeated."""

    async def fading(request: web.Request) -> web.Response:
        if request.path == "/is_paused":
            return web.json_response({"is_paused": True})
        if way == "broken":
            assert request.transport is not None
            request.transport.abort()
        await asyncio.Event().wait()
        return web.Response()

    async with answering(fading) as url, VllmServer(url, call_s=0.5) as server:
        with pytest.raises(UnknownOutcome):
            await server.reload("/step_1")
        with pytest.raises(TimedOut if way == "silent" else Unavailable):
            await server.resume()
        assert not await server.healthy()


async def test_nobody_there() -> None:
    """A server that is not reached is unavailable, also for a reload: nothing was sent."""
    async with VllmServer("http://127.0.0.1:1", call_s=5) as server:
        assert not await server.healthy()
        for call in (server.paused(), server.pause(), server.reload("/step_1"), server.checksum()):
            with pytest.raises(Unavailable):
                await call


async def test_mistakes_are_told_at_once() -> None:
    """Addresses and paths that cannot work are refused before anything is sent."""
    for url in ("", "127.0.0.1:8000", "http://", "http://host/v1", "ftp://host"):
        with pytest.raises(Mistake):
            VllmServer(url)
    server = VllmServer("http://127.0.0.1:1/")
    with pytest.raises(Mistake, match="absolute"):
        await server.reload("org/model")
    await server.close()
    with pytest.raises(Mistake, match="closed"):
        await server.resume()


async def test_a_stopped_server_runs_out_of_time(
    vllm: VllmServer, vllm_process: VllmProcess
) -> None:
    """A server that stands still keeps no caller longer than the limit, and goes on after."""
    assert vllm_process.child is not None
    vllm_process.child.signal(signal.SIGSTOP)
    try:
        async with VllmServer(vllm.url, call_s=0.5) as hasty:
            with pytest.raises(TimedOut):
                await hasty.paused()
            assert not await hasty.healthy()
    finally:
        vllm_process.child.signal(signal.SIGCONT)
    assert await vllm.healthy()


# Last, because it ends the server.
async def test_a_refused_heal_means_restart(
    vllm: VllmServer, vllm_process: VllmProcess, models: dict[int, Path], tmp_path: Path
) -> None:
    """Where a good load after a failed one fails as well, the server is lost, and whoever
    resumes it sees it end: first its health turns bad, then the process ends, with code 0."""
    await vllm.pause()
    with pytest.raises(Corrupt):
        await vllm.reload(str(wrong_shape(models[3], tmp_path / "step_9")))
    with pytest.raises(Corrupt):
        await vllm.reload(str(models[2]))
    assert await vllm.healthy()
    await vllm.resume()
    with pytest.raises((aiohttp.ClientError, TimeoutError)):
        await generate(vllm.url)
    assert not await vllm.healthy()
    assert vllm_process.child is not None
    assert await asyncio.to_thread(vllm_process.child.wait, 60) == 0
    with pytest.raises(Unavailable):
        await vllm.reload(str(models[2]))
