"""The run's parts where they touch the world: production code with another way to travel.

- `SimClient`: the client's own submits, polls and readings of answers, over the simulated network
  instead of HTTP. It stands for the gateway, too: it asks whichever trainer is there.
- `SimPool`: who is asked for which group, and who is asked as well.
- `SimReplica`: makes groups of the toy model's samples; putting and repairing them are its own.
- `Page`: metrics.jsonl, in memory.
"""

import asyncio
from typing import Any

import msgspec

from holdfast.client.native import ANSWER_BYTES, RESULT_BYTES, Client, _Answer
from holdfast.errors import BatchFailed, HoldfastError, Mistake, Unavailable, UnknownOutcome
from holdfast.retry import Pauses
from holdfast.rollout.asks import Answer, Ask, keys_of
from holdfast.rollout.environments import Spoilt
from holdfast.rollout.replica import Replica
from holdfast.rollout.samples import items_of
from holdfast.run.pool import Pool, _Replica
from holdfast.run.records import ModelRecord
from holdfast.run.steps import Steps
from holdfast.sim.protocols.run.toy import FLAKY, SPOILS, episode, luck_of, read_content, vault_key
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node
from holdfast.timeouts import DEFAULTS
from holdfast.trainer.wire.answers import Answer as HttpAnswer
from holdfast.transfer.queue import Queue

__all__ = ["Page", "SimClient", "SimPool", "SimReplica"]

_JSON = "application/json"


class SimClient(Client):
    """The client. Only how bytes travel, and the clock, are others."""

    def __init__(self, node: Node, addresses: list[str]) -> None:
        self._node = node
        self._addresses = addresses
        self._address = node.random.choice(addresses)
        self._max_result_bytes = RESULT_BYTES
        self._clock, self.timeouts = node, DEFAULTS

    async def _post(
        self,
        name: str,
        body: bytes,
        content_type: str,
        limit_s: float,  # noqa: ARG002 -- as in the client
        accept: str = _JSON,
        limit: int = ANSWER_BYTES,  # noqa: ARG002
    ) -> _Answer:
        headers = {"content-type": content_type, "accept": accept}
        try:
            answer: HttpAnswer = await self._node.net.call(
                self._address, (name, headers, body), TIMES.client_call_s
            )
            if answer.status == 421:
                raise Unavailable(f"{self._address} has been replaced")
        except (Unavailable, UnknownOutcome) as error:
            self._address = self._node.random.choice(self._addresses)
            raise Unavailable(f"{name}: {error}") from None
        told = {"content-type": answer.content_type, **dict(answer.headers)}
        return _Answer(answer.status, told, answer.body)


class SimPool(Pool):
    """The replicas, which are always the same."""

    def __init__(self, node: Node, addresses: list[str], *, patience_s: float) -> None:
        self._node = node
        self._patience_s = patience_s
        self._replicas = {one: _Replica(one, one) for one in addresses}
        self._changed = asyncio.Event()
        self._pauses = Pauses(node)

    async def _post(self, replica: _Replica, ask: Ask) -> Answer:
        body = msgspec.json.encode(ask)
        try:
            answer = await self._node.net.call(replica.address, body, TIMES.replica_call_s)
        except (Unavailable, UnknownOutcome) as error:
            await self._pauses.wait(error)
            raise Unavailable(f"{replica.name}: {error}") from None
        self._pauses.reset()
        if isinstance(answer, Answer):
            return answer
        kind, text = answer
        raise (Mistake if kind == "mistake" else Unavailable)(f"{replica.name}: {text}")


class _Engine:
    """All that is asked of one here."""

    exact = True


class SimReplica(Replica):
    """Makes groups of samples of the toy model."""

    def __init__(
        self, node: Node, name: str, steps: Steps, queue: Queue, repaired: set[str]
    ) -> None:
        none: Any = None  # there is no subscription and no judge here
        engine: Any = _Engine
        super().__init__(name, engine, none, queue, node.values, none, max_tokens=0, max_turns=1)
        self._node = node
        self._steps = steps
        self._repaired = repaired
        self._contents: dict[int, str] = {}

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for an answer."""
        return self._waiting > 0

    async def answer(self, body: bytes) -> Answer | tuple[str, str]:
        """One request, as HTTP has it."""
        try:
            return await self.make(msgspec.json.decode(body, type=Ask))
        except Mistake as error:
            return "mistake", str(error)
        except (HoldfastError, BatchFailed) as error:
            return "again", str(error)

    async def _have(self, version: int) -> None:
        until = self._node.now() + 20.0
        while version not in self._contents:
            record = await self._steps.read(self._steps.keys.model, ModelRecord)
            if record is not None:
                entry = await self._node.ledger.get(vault_key(record.channel, version))
                if entry is not None:
                    self._contents[version] = read_content(entry.value)
                    return
            if self._node.now() >= until:
                raise Unavailable(f"version {version} is not there yet")
            await self._node.sleep(1.0)

    async def _play(self, ask: Ask) -> Answer:
        luck = luck_of(ask)
        if luck == SPOILS or (luck == FLAKY and self._node.random.random() < 0.4):
            raise Spoilt("the environment fails")
        await self._node.sleep(self._node.random.random() * 2)
        content = self._contents[ask.version]
        made = [episode(content, ask, index) for index in range(ask.count)]
        scores = [score for _, score in made]
        keys: tuple[str, ...] = ()
        if ask.purpose == "train":
            items = items_of(ask, [one for one, _ in made], scores)
            keys = tuple(keys_of(ask.step, ask.group, ask.count))
            if ask.repair:
                self._repaired.update(keys)
            await (self._repair(items) if ask.repair else self._queue.put(items))
        return Answer(
            keys,
            reward=sum(one.reward for one in scores) / len(scores),
            exact=sum(one.exact for one in scores) / len(scores),
        )


class Page:
    """A file in memory, as far as `Metrics` needs one."""

    def __init__(self, files: dict[str, bytes], name: str) -> None:
        self._files = files
        self.name = name

    def with_name(self, name: str) -> "Page":
        """A file beside this one."""
        return Page(self._files, name)

    def write_bytes(self, data: bytes) -> None:
        """Write all of it."""
        self._files[self.name] = data

    def replace(self, other: "Page") -> None:
        """Give it the name of the other, which is gone then."""
        self._files[other.name] = self._files.pop(self.name)

    def open(self, _mode: str) -> "Page":
        """Open it, to add something."""
        return self

    def __enter__(self) -> "Page":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is held."""

    def write(self, data: bytes) -> None:
        """Add something."""
        self._files[self.name] = self._files.get(self.name, b"") + data
