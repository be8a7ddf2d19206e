"""A simulated world: processes, the ledger between them, and the faults that befall them.

Everything that happens is a function of the seed and the list of faults. Each process
draws its delays from a generator of its own, so leaving a fault out disturbs the others
as little as possible.
"""

import asyncio
import contextlib
import contextvars
import random
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from holdfast.errors import Fenced, HoldfastError, LeaseLost, Retriable, UnknownOutcome
from holdfast.ledger import Batch
from holdfast.ledger.mvcc import Store
from holdfast.sim.client import SimLedger
from holdfast.sim.disk import SimDisk
from holdfast.sim.faults import APPLIES, NET, STORE, Fault, Swarm, Table, describe, pairs
from holdfast.sim.files import SimFiles
from holdfast.sim.loop import OWNER, Owner, VirtualLoop
from holdfast.sim.net import Handler, SimNet
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.store import SimStore
from holdfast.transfer.memory import MemoryBackend

__all__ = ["Node", "World", "first_of"]

T = TypeVar("T")

_HEALED_S = 600.0
"""How long a healed world may take until the protocol has settled."""
_CALM_S = 120.0
"""How long it is watched after that."""
_STEPS_MAX = 50_000
"""A schedule that goes on longer than this runs in circles."""
_TWINS_MAX = 4
"""How many lives of one process may run at the same time."""
_TICK_S = 1e-6
_OUTSIDE = contextvars.Context()
"""The context of what belongs to no process: the network and the ledger."""


class Dead(BaseException):
    """Ends code of a process that no longer exists."""


class Node(Owner):
    """One life of one process: from a start to a crash or to the end.

    `ledger`, `disk`, `values` and `net` are the world as this process reaches it.
    """

    def __init__(self, world: "World", name: str, life: int) -> None:
        super().__init__()
        self.world = world
        self.name = name
        self.random = random.Random(f"{world.seed} {name} {life}")
        self.ledger = SimLedger(self)
        self.disk = SimDisk(self)
        self.values = SimStore(self)
        self.net = SimNet(self)
        self.cut_until = 0.0
        self.rate = 1.0
        self.offset = 0.0
        self.leases: set[int] = set()
        self.finished = False
        self.context = contextvars.Context()
        self.context.run(OWNER.set, self)

    def is_cut(self) -> bool:
        """Whether the way to the ledger is cut now."""
        return self.cut_until > self.world.loop.time()

    def delay_s(self) -> float:
        """How long one message takes: mostly little, sometimes long."""
        luck = self.random.random()
        if luck < 0.7:
            return 0.001 + luck * 0.01
        return (luck - 0.7) * (1.0 if luck < 0.95 else 10.0)

    # ---- the Runtime of its shells -------------------------------------------

    def now(self) -> float:
        """The process's own clock."""
        return self.offset + self.world.loop.time() * self.rate

    async def sleep(self, seconds: float) -> None:
        """Wait, by the process's own clock."""
        # A wait takes some time, however short: adding less than the clock can show to its time
        # would leave it where it is, and whoever waits for a moment would wait for ever.
        await asyncio.sleep(max(seconds / self.rate, _TICK_S) if seconds > 0 else 0.0)
        await self.world.contact(self, "timer")

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> "asyncio.Task[T]":
        """Start a task of this process."""
        return self.world.loop.create_task(work, name=name)


class World:
    """One schedule: run it with `play`."""

    def __init__(
        self,
        protocol: Protocol,
        seed: int,
        *,
        steps: int | None = None,
        faults: list[Fault] | None = None,
        trace: bool = False,
    ) -> None:
        self.protocol = protocol
        self.seed = seed
        protocol.world = self
        protocol.prepare(seed)
        self.loop = VirtualLoop()  # type: ignore[abstract]  # it has what its users call
        self.store = Store()
        protocol.truth = self.store
        protocol.taken = set()
        self.files = SimFiles(self.loop.time, protocol.disk_bytes)
        protocol.files = self.files
        self.values = protocol.values = MemoryBackend()
        self.ports: dict[str, tuple[Node, Handler]] = {}
        """Who listens where, alive or dead."""
        possible = pairs(
            disk=protocol.disk, store=protocol.store, net=protocol.net, never=protocol.never
        )
        self.table = Table(possible)
        self.fired: list[Fault] = []
        self.story: list[tuple[float, str, str]] = []
        self._steps_max = protocol.steps if steps is None else steps
        self._steps = 0
        self._swarm = Swarm(seed, possible, self._steps_max) if faults is None else None
        self._planned = {(fault.node, fault.step): fault for fault in faults or ()}
        self._node_steps: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._nodes: dict[str, Node] = {}
        self._everybody: list[Node] = []
        self._watchers: list[Callable[[], None]] = []
        self._seen = self.store.revision
        self._expiry = 0.0
        self.healed = False
        self._dark_until = 0.0
        self.tracing = trace
        self._broken: Violation | None = None

    # ---- playing -------------------------------------------------------------

    def play(self) -> Violation | None:
        """Run the schedule to its end; returns the promise that was broken, if any."""
        names = [f"n{number}" for number in range(self.protocol.nodes)]
        try:
            for name in names:
                self.later(0.0, self._start, name)
            self.loop.run(lambda: self._is_broken() or self._steps >= self._steps_max, 1e6)
            if self._broken is None:
                self._heal(names)
                limit_s = self.loop.time() + _HEALED_S
                self.loop.run(self._over, limit_s)
            if not self._over():
                self.fail(
                    f"not settled {_HEALED_S:.0f} s after the last fault: something waits for ever"
                )
            if not self._is_broken():
                # What is still on its way arrives, and must not break anything either.
                self.loop.run(self._is_broken, self.loop.time() + _CALM_S)
                self.check()
        finally:
            self._bury()
        return self._broken

    def _is_broken(self) -> bool:
        if self.loop.problems and self._broken is None:
            self.fail(self.loop.problems[0])
        return self._broken is not None

    def _over(self) -> bool:
        if self._steps > _STEPS_MAX:
            self.fail(f"not settled after {_STEPS_MAX} steps: something runs in circles")
        return self._is_broken() or self.protocol.settled()

    def _heal(self, names: list[str]) -> None:
        self.healed = True
        self.note("world", "no more faults from here on")
        for node in self._nodes.values():
            node.cut_until = 0.0
        self.files.full_until = 0.0
        for name in names:
            self.later(1.0, self._start, name)

    def _bury(self) -> None:
        """Close what is left of the processes, so that nothing of it runs later."""
        for node in self._everybody:
            self._look_for_bugs(node)
            node.dead = True
            for task in node.tasks:
                coroutine = task.get_coro()
                if coroutine is not None:
                    _close(coroutine)
        self.loop.close()

    def _look_for_bugs(self, node: Node) -> None:
        """A task that failed with something unexpected is a bug, even if nobody waits for it."""
        for task in node.tasks:
            if task.done() and not task.cancelled() and (raised := task.exception()) is not None:
                error = first_of(raised)
                if not isinstance(error, HoldfastError | Dead | Violation):
                    self._fail_with(node, error)

    def _fail_with(self, node: Node, error: BaseException) -> None:
        where = traceback.extract_tb(error.__traceback__)[-1]
        self.fail(
            f"{node.name} failed with {type(error).__name__}: {error} "
            f"({where.filename}:{where.lineno})"
        )

    def later(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        """Something that happens outside of every process."""
        self.loop.call_later(delay_s, act, *args, context=_OUTSIDE)

    def note(self, who: str, what: str) -> None:
        """A line of the story, kept only when a story is wanted."""
        if self.tracing:
            self.story.append((self.loop.time(), who, what))

    # ---- processes -----------------------------------------------------------

    def _start(self, name: str, twin: bool = False) -> None:
        if self.loop.time() < self._dark_until:
            self.later(self._dark_until - self.loop.time(), self._start, name)
            return
        last = self._nodes.get(name)
        if last is not None and (last.finished or not (last.dead or twin)):
            return
        life = self._lives[name] = self._lives.get(name, 0) + 1
        node = self._nodes[name] = Node(self, name, life)
        self._everybody.append(node)
        self.note(name, "starts" if life == 1 else f"starts again (life {life})")
        self.loop.call_soon(self._begin, node, context=node.context)

    def _begin(self, node: Node) -> None:
        task = node.spawn(self._live(node), name=node.name)
        task.add_done_callback(lambda done: self._ended(node, done))

    async def _live(self, node: Node) -> None:
        await self.contact(node, "start")
        await self.protocol.run(node, node.name)

    def _ended(self, node: Node, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self.fail(f"{node.name} was cancelled by itself")
            return
        error = task.exception()
        node.dead = True
        node.finished = error is None
        if isinstance(error, Violation):
            self.fail(error)
        elif isinstance(error, Retriable | UnknownOutcome | Fenced | LeaseLost):
            self.note(node.name, f"exits: {type(error).__name__}: {error}")
            self.later(1.0, self._start, node.name)
        elif error is not None and not isinstance(error, Dead):
            self._fail_with(node, error)

    def fail(self, violation: Violation | str) -> None:
        """End the schedule with this violation, the first one."""
        if self._broken is None:
            self._broken = Violation(violation) if isinstance(violation, str) else violation
            self.note("world", f"BROKEN: {violation}")

    # ---- steps and faults ----------------------------------------------------

    async def contact(self, node: Node, kind: str) -> Fault | None:
        """A step, the look at the invariants after it, and the pause that it may bring."""
        fault = self.step(node, kind)
        self.check()
        if node.paused_until > self.loop.time():
            await asyncio.sleep(0)
        return fault

    def step(self, node: Node, kind: str) -> Fault | None:
        """Count a step and let its fault happen; call faults are returned to the caller."""
        if node.dead:
            raise Dead
        self.table.steps[kind] += 1
        self._steps += 1
        number = self._node_steps[node.name] = self._node_steps.get(node.name, 0) + 1
        if self.healed:
            return None
        if self._swarm is not None:
            fault = self._swarm.draw(node.name, number, kind)
        else:
            fault = self._planned.get((node.name, number))
        if fault is None:
            return None
        return self._befall(node, fault, kind)

    def _befall(self, node: Node, fault: Fault, kind: str) -> Fault | None:
        if kind not in APPLIES[fault.kind] or not self._can_befall(node, fault, kind):
            return None
        self.fired.append(fault)
        self.table.fired[fault.kind, kind] += 1
        self.note("FAULT", f"{describe(fault)} (at {kind})")
        now = self.loop.time()
        match fault.kind:
            case "crash":
                node.dead = True
                if fault.amount >= 0:
                    self.later(fault.amount, self._start, node.name)
                raise Dead
            case "pause":
                node.paused_until = now + fault.amount
            case "cut":
                node.cut_until = now + fault.amount
            case "outage":
                for other in self._nodes.values():
                    other.cut_until = max(other.cut_until, now + fault.amount)
            case "compact":
                self.store.compact(self.store.revision)
            case "twin":
                self.later(0.0, self._start, node.name, True)
            case "expire":
                for lease in sorted(node.leases):
                    self.protocol.taken.add(lease)
                    self.store.revoke(lease)
                node.leases.clear()
                self.changed()
            case "skew":
                node.rate = fault.amount
                node.offset = 1000.0 * (fault.amount - 1.0)
            case "full":
                self.files.full_until = now + fault.amount
            case "power":
                self._lose_power(fault)
                raise Dead
            case _:
                return fault
        return None

    def _lose_power(self, fault: Fault) -> None:
        """Everybody dies in the same moment; the ledger is elsewhere and goes on."""
        luck = random.Random(f"power {self.seed} {fault.node} {fault.step}")
        for node in self._everybody:
            node.dead = True
        for line in self.files.lose_power(luck):
            self.note("disk", line)
        self._dark_until = self.loop.time() + fault.amount
        for name in self._nodes:
            self.later(fault.amount + luck.uniform(0.0, 5.0), self._start, name)

    def _can_befall(self, node: Node, fault: Fault, kind: str) -> bool:
        """Whether the fault would make a difference; what makes none is not counted."""
        if fault.kind == "expire":
            node.leases.intersection_update(self.store.leases())
            return bool(node.leases)
        elsewhere = kind in STORE or kind in NET
        if fault.kind in ("lose_call", "lose_answer", "late", "repeat") and not elsewhere:
            return not node.is_cut()
        if fault.kind == "twin":
            living = [one for one in self._everybody if one.name == node.name and not one.dead]
            return len(living) < _TWINS_MAX
        return True

    # ---- the ledger ----------------------------------------------------------

    def changed(self) -> None:
        """Show every new transaction to the invariants, then wake the watches."""
        self._expire_later()
        if self.store.revision == self._seen:
            return
        batches = self.store.changes("/", self._seen + 1)
        self._seen = self.store.revision
        try:
            for batch in batches:
                if self.tracing:
                    self.note("ledger", _in_words(batch))
                self.protocol.observe(batch)
        except Violation as violation:
            self.fail(violation)
        for wake in self._watchers:
            wake()

    def _expire_later(self) -> None:
        """Leases end on time, also when nobody calls."""
        deadline = self.store.next_deadline()
        if deadline is not None and not self.loop.time() < self._expiry <= deadline:
            self._expiry = deadline
            self.loop.call_at(deadline, self._on_expiry, context=_OUTSIDE)

    def _on_expiry(self) -> None:
        self.store.expire(self.loop.time())
        self.changed()

    def check(self) -> None:
        """Let the protocol look at its processes after a step."""
        try:
            self.protocol.check()
        except Violation as violation:
            self.fail(violation)

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake` after every change."""
        self._watchers.append(wake)

    def unlisten(self, wake: Callable[[], None]) -> None:
        """Undo `listen`."""
        if wake in self._watchers:
            self._watchers.remove(wake)


def first_of(error: BaseException) -> BaseException:
    """An error; of several, that tasks that work together have raised, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _in_words(batch: Batch) -> str:
    parts = []
    for event in batch.events:
        if event.entry is None:
            parts.append(f"{event.key} deleted")
        else:
            lease = f" lease={event.entry.lease}" if event.entry.lease else ""
            parts.append(f"{event.key} = {event.entry.value.decode(errors='replace')}{lease}")
    return f"revision {batch.revision}: " + "; ".join(parts)


def _close(coroutine: Any) -> None:
    """End a coroutine of a dead process. Its clean-up code finds that it no longer exists."""
    with contextlib.suppress(BaseException):
        coroutine.close()
