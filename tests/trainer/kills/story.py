"""One fixed piece of work for a trainer, and what must be the same however often it dies.

    with house(tmp_path, policy=POLICY) as there, Audit(there) as audit:
        told = tell(there, audit)
    told.check(reference)

The work is a program with the real Tinker client: training in several chunks, saves, a load,
sampling, a checkpoint that is published and one whose time runs out, and a second model that
takes turns in memory. What is compared: every result that the client was given, the hashes of
all weights that were kept, and what the ledger was told, write by write.
"""

import asyncio
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from holdfast import faults, ledger
from holdfast.errors import Retriable
from holdfast.faults import FaultFired
from holdfast.ledger.records import decode
from holdfast.ledger.types import Entry
from holdfast.loopthread import LoopThread
from holdfast.trainer.ops import OptimStep
from holdfast.trainer.ops import kind as kind_of
from holdfast.trainer.records import Keys, Result, Save, Seat, number_of
from holdfast.weights.records import Keys as WeightsKeys
from holdfast.weights.records import Version
from trainer.house import JOB, House

POLICY: dict[str, Any] = {
    "checkpoint_ops": 5,
    "checkpoint_s": 0.5,
    "upkeep_s": 0.5,
    "max_models": 1,
}
"""So that checkpoints, trims and sweeps happen all the time, and one of two models is on disk."""
STEPS = 12
RUN = "default"
KEYS = Keys(RUN, "local", JOB)
OPTIM_STEP = kind_of(OptimStep())

PROGRAM = """
import hashlib, logging
logging.disable(logging.CRITICAL)
STEPS = int(os.environ["STEPS"])
client = service.create_lora_training_client(base_model=BASE, rank=8, seed=7)
rest = service.create_rest_client()
say(model=client.model_id)
while True:
    try:
        other = service.create_lora_training_client(base_model=BASE, rank=2, seed=1)
        break
    except tinker.InternalServerError as error:  # the first one is brought back, again and again
        if error.status_code != 503:
            raise
NAMES = ["wind", "rain", "a long and quiet afternoon", "hail", "snow on the hills"]

def batch(step, half):
    if step == 2 and half == 0:  # more than the client sends at once
        return [datum("ab"[at % 2] * (1 + at % 3)) for at in range(1030)]
    return [datum(f"{step % 7} {name} {half} " * 3) for name in NAMES[half:]]

def output(future):
    found = future.result()
    digest = hashlib.sha256()
    for one in found.loss_fn_outputs:
        digest.update(one["logprobs"].to_numpy().tobytes())
    return {"metrics": found.metrics, "logprobs": digest.hexdigest()}

def short(path):
    return path.removeprefix("tinker://").partition("/")[2]

def sample(sampler, seed):
    prompt = types.ModelInput.from_ints([1, *encode("2 wi")])
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
    found = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params).result()
    say(sampled=[[list(one.tokens), list(one.logprobs)] for one in found.sequences])

def hear(step, parts, done):
    say(step=step, parts=[output(one) for one in parts], stepped=done.result().metrics)

waiting = []
for step in range(STEPS):
    parts = [client.forward_backward(batch(step, half), "cross_entropy") for half in range(2)]
    done = client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
    waiting.append((step, parts, done))
    if step == STEPS // 3:
        kept = client.save_state("middle").result().path
        say(saved=short(kept))
        rest.publish_checkpoint_from_tinker_path(kept).result()
        rest.set_checkpoint_ttl_from_tinker_path(kept, 86400).result()
        brief = client.save_weights_for_sampler("brief").result().path
        rest.set_checkpoint_ttl_from_tinker_path(brief, 1).result()
        sample(client.save_weights_and_get_sampling_client(), 11)
    if step == 2 * STEPS // 3:
        say(loaded=short(client.load_state_with_optimizer(kept).result().path))
    if step % 4 == 1:
        say(other=output(other.forward_backward(batch(step, 1), "cross_entropy")))
        other.optim_step(types.AdamParams(learning_rate=1e-2))
    while len(waiting) > 1:  # one step ahead of what has been heard
        hear(*waiting.pop(0))
hear(*waiting.pop())
say(saved=short(client.save_state("final").result().path))
path = client.save_weights_for_sampler("final").result().path
say(published=short(path))
sample(service.create_sampling_client(model_path=path), 12)
def listed():
    return rest.list_checkpoints(client.model_id).result().checkpoints
while brief in [one.tinker_path for one in listed()]:
    time.sleep(0.1)
say(listed=sorted([one.checkpoint_id, one.public, one.expires_at is not None] for one in listed()))
"""


@dataclass
class Told:
    """What a run came to."""

    lines: list[dict[str, Any]]
    """What the client was given."""
    weights: dict[str, str]
    """The hash of everything that was kept under a name, and of the newest weights."""
    kinds: dict[int, str]
    """Which operation of the model each number was."""
    terms: int
    """How many processes acted for the job, one after the other."""

    def check(self, reference: "Told") -> None:
        """Fail unless this came to the same, except for the number of trainers."""
        assert self.lines == reference.lines, "the client was given other results"
        assert self.weights == reference.weights, "the weights are others"
        assert self.kinds == reference.kinds, "other operations were carried out"


def trainer(plan: str, log: Path) -> tuple[str, str]:
    """The flag of `holdfast serve` for trainers, and nobody else, that follow a fault plan."""
    env = [f"{faults.PLAN_VARIABLE}={plan}", f"{faults.LOG_VARIABLE}={log}"]
    command = shlex.join(["env", *env, sys.executable, "-m", "holdfast.trainer"])
    return "--trainer", f"default={command}"


def fired(log: Path) -> list[FaultFired]:
    """What a plan has done so far."""
    lines = log.read_bytes().splitlines() if log.exists() else []
    return [msgspec.json.decode(line, type=FaultFired) for line in lines]


class Audit:
    """Follows what the ledger is told of results, from its first revision on."""

    def __init__(self, there: House, url: str = "") -> None:
        self.url = url or f"sqlite:///{there.folder}/ledger.db"
        self._results: dict[str, list[bytes]] = {}
        self._order: list[Entry] = []
        self._deleted: list[str] = []
        self._seen = threading.Condition()
        self._problem: Exception | None = None
        self._loop = LoopThread("audit")

    def __enter__(self) -> Self:
        self._following = self._loop.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._end())
        self._loop.stop()

    async def _begin(self) -> "asyncio.Task[None]":
        return asyncio.create_task(self._follow())

    async def _end(self) -> None:
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    async def _follow(self) -> None:
        try:
            await self._read()
        except Exception as error:  # noqa: BLE001 -- told to whoever waits
            self._problem = error

    async def _read(self) -> None:
        start = 1
        async with ledger.open(self.url) as opened:
            while True:
                try:
                    async with opened.watch(KEYS.results, start=start) as watch:
                        async for batch in watch:
                            start = batch.revision + 1
                            self._take(batch.events)
                except Retriable:
                    await asyncio.sleep(0.1)

    def _take(self, events: Any) -> None:
        with self._seen:
            for event in events:
                if event.entry is None:
                    self._deleted.append(event.key)
                else:
                    self._results.setdefault(event.key, []).append(event.entry.value)
                    self._order.append(event.entry)
            self._seen.notify_all()

    def wait(self, count: int, limit_s: float = 90.0) -> int:
        """Wait until so many operations have a result; returns how many have."""
        with self._seen:
            self._seen.wait_for(lambda: len(self._results) >= count or self._failed(), limit_s)
            assert not self._failed(), self._problem
            assert len(self._results) >= count, f"{len(self._results)} of {count} results"
            return len(self._results)

    def _failed(self) -> bool:
        return self._problem is not None

    def check(self) -> None:
        """Fail if a result was ever changed or lost, or given by one who had been replaced."""
        assert not self._failed(), self._problem
        with self._seen:
            changed = [key for key, values in self._results.items() if len(set(values)) > 1]
            assert not changed, f"results were changed after they had been given: {changed}"
            assert not self._deleted, f"results were lost: {self._deleted}"
            terms = [decode(Result, one).term for one in self._order]
            assert terms == sorted(terms), f"somebody who had been replaced gave results: {terms}"


Meanwhile = Callable[[House, Audit], None]
"""What is done to a trainer while the program runs."""


def tell(
    there: House,
    audit: Audit,
    meanwhile: Meanwhile = lambda *_: None,
    *,
    steps: int = STEPS,
    limit_s: float = 120.0,
) -> Told:
    """Run the program while something is done to its trainer; everything that came of it."""
    with there.program(PROGRAM, STEPS=str(steps)) as program:
        model = program.next()["model"]
        meanwhile(there, audit)
        lines = program.finish(limit_s)[1:]
    told = asyncio.run(_look(audit.url, model, lines))
    audit.wait(len(told.kinds))
    audit.check()
    applied = Counter(told.kinds.values())[OPTIM_STEP]
    assert applied == steps, f"{applied} results of optim_step for {steps} of them"
    return told


async def _look(url: str, model: str, lines: list[dict[str, Any]]) -> Told:
    async with ledger.open(url) as opened:
        found = (await opened.range(KEYS.root)).entries
        channels = {one.key: one for one in (await opened.range(f"/runs/{RUN}/weights/")).entries}
    results = {
        number_of(one.key)[1]: decode(Result, one)
        for one in found
        if one.key.startswith(f"{KEYS.results}{model}/")
    }
    failed = [number for number, one in results.items() if one.failed]
    assert not failed, f"operations {failed} failed"
    assert sorted(results) == list(range(len(results))), "some operations have no result"
    seat = next(decode(Seat, one) for one in found if one.key == KEYS.seat)
    return Told(
        lines=lines,
        weights=_weights(model, found, channels),
        kinds={number: one.kind for number, one in sorted(results.items())},
        terms=seat.term,
    )


def _weights(model: str, found: tuple[Entry, ...], channels: dict[str, Entry]) -> dict[str, str]:
    weights = {}
    for one in found:
        if one.key.startswith(f"{KEYS.saves}{model}/") and not decode(Save, one).deleted:
            _, folder, name = one.key.removeprefix(KEYS.saves).split("/")
            channel = f"{model}.{'w' if folder == 'weights' else 's'}.{name}"
            keys = WeightsKeys(RUN, channel)
            version = decode(Version, channels[keys.version(decode(Save, one).version)])
            weights[f"{folder}/{name}"] = version.content
    unnamed = WeightsKeys(RUN, f"{model}.sampler").versions
    for key, one in channels.items():
        if key.startswith(unnamed):
            version = decode(Version, one)
            weights[f"unnamed/{version.version}"] = version.content
    assert {"weights/middle", "weights/final", "sampler_weights/final"} < set(weights)
    return weights
