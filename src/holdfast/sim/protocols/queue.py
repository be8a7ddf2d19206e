"""The queue: two processes put samples, three consume them in two tasks.

Each producer puts its samples, in runs of a few, and later a field that one of the tasks
waits for; started again it does all of it again. Each consumer claims, fetches, works, and
acknowledges. Invariants:

1. no sample is added twice, also after it was consumed; none that was reported is missing;
2. whatever some task still needs is in the store, as it was recorded;
3. what is fetched is what was put;
4. no sample is claimed by two living members at once, nor after it was acknowledged;
5. only what a living member claims is acknowledged, after it has worked on it, and once;
6. an acknowledgement that was reported is there.

At the end every sample has been consumed in both tasks, and nothing is left in the store.
"""

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import BatchFailed, Fenced, Retriable
from holdfast.ledger import Batch as Change
from holdfast.ledger import Entry, Event
from holdfast.ledger.runtime import Runtime
from holdfast.retry import AGAIN, insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node
from holdfast.transfer.frame import Ref, make_head, open_head
from holdfast.transfer.queue import Batch, Item, Queue, Sample
from holdfast.transfer.queue.desk import Desk
from holdfast.transfer.queue.queue import Parts, Tasks
from holdfast.transfer.queue.records import Block, Fields, Freed, Keys, State, bits, mask

__all__ = ["QueueProtocol", "parts", "queue_of"]

TASKS = {"train": ("x", "r"), "log": ("x",)}
SHARE = 5
NAME = "q"
KEYS = Keys("sim", NAME)


def parts(desk: Callable[..., Desk] = Desk, **others: Any) -> Parts:
    """The parts of a queue, with small blocks, so that there are several."""
    return Parts(desk=functools.partial(desk, block_samples=3), **others)


def queue_of(
    node: Node,
    name: str,
    tasks: Tasks,
    member: str,
    parts: Parts = Parts(),  # noqa: B008 -- frozen
) -> Queue:
    """A queue as this process reaches it."""
    given: Any = {"run": "sim", "member": member, "lease_s": TIMES.member_lease_s, "parts": parts}
    return Queue(node.values, node.ledger, name, tasks, runtime=node, **given)


class QueueProtocol(Protocol):
    """The sound protocol, with a queue of the parts that it is given."""

    steps = 400
    store = True
    # Single records are read before a member has its lease; later everything comes by watch.
    never = frozenset({("expire", "get.sent"), ("expire", "get.answered")})
    producers = ("n0", "n1")

    def __init__(self, queue: Parts | None = None) -> None:
        self._parts = queue or parts()
        self.wanted = {f"{name}-{at}" for name in self.producers for at in range(SHARE)}
        self._samples: dict[str, Sample] = {}
        self._blocks: dict[int, tuple[Sample, ...]] = {}
        self._states: dict[tuple[int, str], State] = {}
        self._freed: dict[int, int] = {}
        self._members: set[str] = set()
        self._acked: set[tuple[str, str]] = set()
        self._worked: set[tuple[str, str, str]] = set()
        self._put: set[str] = set()
        self._reported: set[tuple[str, str]] = set()
        self._needed: dict[Ref, str] = {}

    # ---- the processes -------------------------------------------------------

    async def run(self, runtime: Node, name: str) -> None:
        """Put or consume, each process its part."""
        try:
            async with queue_of(runtime, NAME, TASKS, name, self._parts) as queue:
                if name in self.producers:
                    await self._produce(runtime, name, queue)
                else:
                    await self._consume(runtime, queue)
        except BatchFailed as error:
            raise Retriable(f"the store: {error}") from error

    async def _produce(self, runtime: Runtime, name: str, queue: Queue) -> None:
        keys = [f"{name}-{at}" for at in range(SHARE)]
        while keys:
            some, keys = keys[: (n := runtime.random.randint(1, 4))], keys[n:]
            await queue.put([Item(key, {"x": _value(runtime, key, "x")}) for key in some])
            self._put.update(some)
            await runtime.sleep(runtime.random.random() * 3)
            for key in some:
                if ("train", key) not in self._acked:
                    await queue.put_fields({key: {"r": _value(runtime, key, "r")}})

    async def _consume(self, runtime: Runtime, queue: Queue) -> None:
        async def once() -> None:
            task, count = runtime.random.choice(list(TASKS)), runtime.random.randint(1, 4)
            async with await queue.claim(task, count, least=1, timeout_s=3.0) as batch:
                await self.work(runtime, batch)

        while True:
            await insist(runtime, once, on=(Fenced, BatchFailed, *AGAIN))

    async def work(self, runtime: Runtime, batch: Batch) -> None:
        """Fetch, work, acknowledge: in this order."""
        await self.look(batch)
        await runtime.sleep(runtime.random.choice((0.0, 0.1, 2.0, 15.0)))
        self.worked(batch)
        await batch.acknowledge()
        self.told(batch)

    async def look(self, batch: Batch) -> None:
        """Fetch, and compare with what the samples' references say."""
        for sample, values in zip(
            batch.samples, await batch.fetch(TASKS[batch.task]), strict=True
        ):
            for field, value in values.items():
                ref = sample.fields[field]
                _, again = make_head("bytes", ref.key, ref.generation, (value,))
                if again.checksum != ref.checksum:
                    raise Violation(f"{field} of {sample.key} is not what was put")

    def worked(self, batch: Batch) -> None:
        """Note that this life has done its work on these samples."""
        self._worked.update((batch.owner, batch.task, key) for key in batch.keys)

    def told(self, batch: Batch) -> None:
        """Note that an acknowledgement was reported."""
        for key in batch.keys:
            if (batch.task, key) in self._reported:
                raise Violation(f"{key} was acknowledged twice in {batch.task}")
            self._reported.add((batch.task, key))

    # ---- the invariants ------------------------------------------------------

    def observe(self, batch: Change) -> None:
        """Compare what one transaction changed with what was there before."""
        for event in sorted(batch.events, key=lambda one: one.key):
            kind, _, rest = event.key.removeprefix(KEYS.prefix).partition("/")
            number, _, name = rest.partition("/")
            if kind == "member":
                (self._members.discard if event.entry is None else self._members.add)(rest)
            elif kind == "block":
                self._see_block(int(number), event.entry)
            elif kind == "fields" and event.entry is not None:
                self._see_fields(int(number), event.entry)
            elif kind == "state" and event.entry is not None:
                self._see_state(int(number), name, event)
            elif kind == "freed" and event.entry is not None:
                record = msgspec.json.decode(event.entry.value, type=Freed)
                self._freed[int(number)] = mask(record.mask)
        self._need()

    def _see_block(self, number: int, entry: Entry | None) -> None:
        before = self._blocks.get(number, ())
        if entry is None:
            if any(not self._finished(one.key) for one in before):
                raise Violation(f"block {number} was removed and is not finished")
            self._blocks[number] = ()
            return
        samples = msgspec.json.decode(entry.value, type=Block).samples
        if samples[: len(before)] != before:
            raise Violation(f"block {number} has lost samples")
        for one in samples[len(before) :]:
            if one.key in self._samples:
                raise Violation(f"{one.key} was added twice")
            self._samples[one.key] = one
        self._blocks[number] = samples

    def _see_fields(self, number: int, entry: Entry) -> None:
        record = msgspec.json.decode(entry.value, type=Fields)
        for place, fields in record.fields.items():
            if number in self._blocks and place < len(self._blocks[number]):
                key = self._blocks[number][place].key
                one = self._samples[key]
                self._samples[key] = msgspec.structs.replace(one, fields={**fields, **one.fields})

    def _see_state(self, number: int, task: str, event: Event) -> None:
        assert event.entry is not None
        state = msgspec.json.decode(event.entry.value, type=State)
        before = self._states.get((number, task), State())
        if event.previous is None:
            before = State()
        self._states[number, task] = state
        keys = [one.key for one in self._blocks[number]]
        acked = mask(state.acked)
        if mask(before.acked) & ~acked:
            raise Violation(f"block {number}: something acknowledged in {task} is not any more")
        for place in bits(acked & ~mask(before.acked)):
            self._see_ack(task, keys[place], 1 << place, before)
        held = 0
        for claim in state.claims:
            if claim.owner in self._members:
                if mask(claim.mask) & (held | acked):
                    raise Violation(f"block {number}: {claim.owner} claims what is not free")
                held |= mask(claim.mask)

    def _see_ack(self, task: str, key: str, bit: int, before: State) -> None:
        owner = next((one.owner for one in before.claims if mask(one.mask) & bit), None)
        if owner is None or owner not in self._members:
            raise Violation(f"{key} was acknowledged in {task} by nobody who claims it")
        if (owner, task, key) not in self._worked:
            raise Violation(f"{key} was acknowledged in {task} before {owner} had worked on it")
        if (task, key) in self._acked:
            raise Violation(f"{key} was acknowledged again in {task}")
        self._acked.add((task, key))

    def _finished(self, key: str) -> bool:
        return all((task, key) in self._acked for task in TASKS)

    def _need(self) -> None:
        """What must be in the store from now on."""
        self._needed = {
            ref: key
            for key, one in self._samples.items()
            if not self._finished(key)
            for ref in one.fields.values()
        }

    def check(self) -> None:
        """Everything that is needed is in the store; everything that was told is true."""
        for ref, key in self._needed.items():
            frame = self.values.peek(ref.key)
            if frame is None or open_head(frame, ref.key).generation != ref.generation:
                raise Violation(f"{ref.key}, which {key} needs, is not in the store")
        if lost := self._put - self._samples.keys():
            raise Violation(f"{sorted(lost)} were reported to be put and are not there")
        if lost := {key for _, key in self._reported - self._acked}:
            raise Violation(f"{sorted(lost)} were reported to be acknowledged and are not")

    def settled(self) -> bool:
        """All samples were consumed in all tasks, and nothing is left."""
        return (
            self._samples.keys() == self.wanted
            and all(map(self._finished, self.wanted))
            and self.values.stat().keys == 0
        )


def _value(runtime: Runtime, key: str, field: str) -> bytes:
    """Never the same bytes twice, so that one put is not taken for another."""
    return f"{key}:{field}:{runtime.random.getrandbits(64)}".encode()
