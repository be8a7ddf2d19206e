"""A replica: makes groups of samples, each with exactly the version that is asked for.

- A version is pinned, verified, loaded and acknowledged before it makes anything.
- A group is a function of what is asked: another replica makes the same bits, if the sampler is
  exact. So a group may be asked of two replicas, and of one twice; its samples are put into the
  queue once, by key: whoever is the first decides.
- An environment that fails spoils its group, which is an answer, not an error.
- One group is made at a time. More than `MAX_WAITING` do not wait here: whoever asks is told
  to ask somebody else.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast import events, faults
from holdfast.errors import Mistake, Unavailable
from holdfast.rollout.asks import Answer, Ask, keys_of
from holdfast.rollout.environments import Judge, Purpose, Spoilt
from holdfast.rollout.episodes import play
from holdfast.rollout.happenings import Loaded, Made
from holdfast.rollout.happenings import Spoilt as SpoiltEvent
from holdfast.rollout.samples import items_of
from holdfast.timeouts import DEFAULTS

if TYPE_CHECKING:
    from holdfast.rollout.sampler import Sampler
    from holdfast.transfer import Store
    from holdfast.transfer.queue import Item, Queue
    from holdfast.weights import Subscriber

__all__ = ["Replica"]

MAX_WAITING = 64

ASKED = faults.declare("rollout.make.before", "a group is asked for, nothing made")
MADE = faults.declare("rollout.make.after", "a group is made, not in the queue")
PUT = faults.declare("rollout.make.put", "a group is in the queue, nobody told")
LOADED = faults.declare("rollout.load.after", "a version is loaded, not acknowledged")


class Replica:
    """Makes groups."""

    def __init__(
        self,
        name: str,
        sampler: "Sampler",
        subscriber: "Subscriber",
        queue: "Queue",
        store: "Store",
        judge: Judge,
        *,
        max_tokens: int,
        max_turns: int,
    ) -> None:
        self.name = name
        self._sampler = sampler
        self._subscriber = subscriber
        self._queue = queue
        self._store = store
        self._judge = judge
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def make(self, ask: Ask) -> Answer:
        """Make a group. Raises `Unavailable` when somebody else should be asked."""
        if not 1 <= ask.count <= 4096 or ask.version < 0 or ask.purpose not in ("train", "eval"):
            raise Mistake(f"this cannot be asked for: {ask}")
        if self._waiting >= MAX_WAITING:
            raise Unavailable(f"{self.name}: {self._waiting} groups wait already")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._make(ask)
        finally:
            self._waiting -= 1

    async def _make(self, ask: Ask) -> Answer:
        began = time.monotonic()
        await faults.apoint(ASKED)
        await self._have(ask.version)
        try:
            answer = await self._play(ask)
        except Spoilt as error:
            why = str(error)[:500]
            told = SpoiltEvent(replica=self.name, step=ask.step, group=ask.group, reason=why)
            events.emit(told)
            return Answer(spoilt=why)
        events.emit(
            Made(
                replica=self.name,
                purpose=ask.purpose,
                step=ask.step,
                group=ask.group,
                version=ask.version,
                keys=answer.keys,
                reward=answer.reward,
                exact=answer.exact,
                seconds=round(time.monotonic() - began, 4),
                repeatable=self._sampler.exact,
            )
        )
        await faults.apoint(PUT)
        return answer

    async def _play(self, ask: Ask) -> Answer:
        sampler = self._sampler
        purpose: Purpose = "eval" if ask.purpose == "eval" else "train"
        (task,) = await self._judge.tasks([ask.task_seed], purpose)
        episodes = await play(
            self._judge,
            task,
            count=ask.count,
            max_turns=self._max_turns,
            say=sampler.say(ask.version, ask.temperature, self._max_tokens),
            encode=sampler.encode,
            decode=sampler.decode,
            seed=ask.seed,
            begin=sampler.first_token,
        )
        scores = await self._judge.scores(task, [(one.turns, one.pieces) for one in episodes])
        await faults.apoint(MADE)
        keys: tuple[str, ...] = ()
        if ask.purpose == "train":
            items = items_of(ask, episodes, scores)
            await (self._repair(items) if ask.repair else self._queue.put(items))
            keys = tuple(keys_of(ask.step, ask.group, ask.count))
        return Answer(
            keys,
            reward=sum(one.reward for one in scores) / len(scores),
            exact=sum(one.exact for one in scores) / len(scores),
        )

    async def _repair(self, items: "Sequence[Item]") -> None:
        """Put values where they were: made again, they are the same, or the run cannot go on."""
        for item in items:
            (sample,) = await self._queue.samples([item.key])
            for field, value in item.fields.items():
                was = sample.fields[field]
                now = await self._store.aput({was.key: value}, generation=was.generation)
                if now[was.key].checksum != was.checksum:
                    raise Mistake(
                        f"{item.key}: {field} was lost and came out differently when it was made "
                        "again: this machine computes other bits (another type of CPU, or an "
                        "engine that does not repeat itself). Go on where the run was begun",
                        key=was.key,
                    )

    async def _have(self, version: int) -> None:
        """Have a version to speak with, and in the book as ours."""
        if self._sampler.has(version):
            return
        await self._subscriber.wait_for(version, DEFAULTS.replica_version_s)
        async with self._subscriber.pin(version) as pin:
            await self._sampler.load(pin)
            await faults.apoint(LOADED)
            if version > (self._subscriber.acknowledged or -1):
                await self._subscriber.acknowledge(version)
            events.emit(Loaded(replica=self.name, version=version, content=pin.version.content))
