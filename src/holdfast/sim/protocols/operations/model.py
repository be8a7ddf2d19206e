"""Trainers die, wake up and overlap; clients repeat, reorder and give up: promise 2.

n0 and n1 are trainers of one job: each takes over from time to time, whether the other one
lives or not. n2 and n3 are clients, each with a model of its own: it sends operations under
numbers, some of them in the wrong order, some never, all of them again and again until they
are promised, and asks until it has the result. A trainer has room for one of the two models in
memory, and puts the other one aside. Invariants, looked at in what the ledger
recorded and in what clients heard:

1. an operation under a number never changes, and a result never changes;
2. a result shows exactly the operations before it, each once, in order, and none that was
   given up or failed;
3. what was promised is in the ledger, and its result is not forgotten while it is young;
4. entries go only when a checkpoint covers them and their results are there.

At the end every client has a result for everything that it sent.
"""

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import Exists, Gone, HoldfastError, NotFound, Unavailable
from holdfast.ledger import Batch
from holdfast.ledger.records import decode
from holdfast.retry import insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols.operations.script import Script
from holdfast.sim.protocols.operations.taking_over import HASTY, Handler, Trainers
from holdfast.sim.protocols.operations.toy import (
    LOADED,
    ToyCompute,
    ToySegments,
    ToyVault,
    digest,
    event,
)
from holdfast.sim.times import TIMES
from holdfast.sim.world import Node
from holdfast.trainer import ops
from holdfast.trainer.core import Core
from holdfast.trainer.records import Entry, Keys, Model, Result, number_of
from holdfast.trainer.segments import read_content
from holdfast.trainer.state import Pending
from holdfast.trainer.trainer import Trainer

__all__ = ["OperationsProtocol"]

KEYS = Keys("r", "x", "j")
TRAINERS = {"n0": "t0", "n1": "t1"}
CLIENTS = ("n2", "n3")
POLICY = HASTY.model_copy(update={"gap_s": 60.0, "max_models": 1})
WAYS = ("sent", "answered")


Call = Callable[[Core], Awaitable[object]]
"""A request: what its caller wants of a trainer."""
NO = (Gone, NotFound, Exists)
"""Answers that asking again does not change."""


class OperationsProtocol(Protocol):
    """The sound protocol, with the trainer that it is given."""

    nodes = 4
    steps = 500
    net = True
    never = frozenset(
        # Nobody holds a lease here.
        ("expire", step)
        for step in (
            "timer",
            *(f"{call}.{way}" for call in ("get", "range", "txn", "net") for way in WAYS),
        )
    )

    def __init__(self, trainer: Callable[..., Trainer] = Trainer, *, guarded: bool = True) -> None:
        self._trainers = Trainers(trainer, KEYS, ToyCompute, ToyVault, POLICY, guarded)
        self._entries: dict[str, dict[int, Entry]] = {}
        self._results: dict[str, dict[int, Result]] = {}
        self._trimmed: dict[str, int] = {}
        self._scripts: dict[str, Script] = {}

    def prepare(self, seed: int) -> None:
        """What clients do differs from schedule to schedule."""
        self._scripts = {name: Script(f"{seed} {name}") for name in CLIENTS}

    async def run(self, runtime: Node, name: str) -> None:
        """One process, by its name."""
        if name in TRAINERS:
            await self._trainers.take_over(runtime, TRAINERS[name], self._answers)
        else:
            await self._use(runtime, self._scripts[name])

    def _answers(self, _: Node, trainer: Trainer) -> Handler:
        async def answer(call: Call) -> object:
            try:
                return await call(trainer.core)
            except NO as error:
                return error
            except HoldfastError as error:
                return Unavailable(str(error))

        return answer

    # ---- a client ----------------------------------------------------------------

    async def _use(self, node: Node, script: Script) -> None:
        while not script.session:
            script.begin(session=await self._ask(node, lambda core: core.create_session()))
        op = ops.CreateModel(session=script.session, base="b")
        while not script.model:
            with contextlib.suppress(*NO):  # by a trainer that has been replaced
                _, model = await self._ask(
                    node, lambda core: core.create_model(script.session, 0, op)
                )
                script.begin(model=model)
        tasks = [
            node.spawn(self._one(node, script, number), name=f"op {number}")
            for number in script.order()
            if number not in script.results
        ]
        for task in tasks:
            await task

    async def _one(self, node: Node, script: Script, number: int) -> None:
        await node.sleep(script.delay_s(number, node.random))
        request, op = f"{script.model}:{number}", script.op(number, node.random)
        try:
            await self._ask(node, lambda core: core.submit(script.model, number, op))
            self._must_be_recorded(script.model, number)
            while True:
                got = await self._ask(node, lambda core: core.retrieve(request, TIMES.poll_hold_s))
                if not isinstance(got, Pending):
                    script.hear(number, ops.encode(got))
                    # Some hear a thing, and forget that they did.
                    if node.random.random() < 0.9:
                        return
        except NO as error:
            if not isinstance(error, Gone) or number not in script.results:
                raise Violation(f"{request} was refused, or forgotten: {error}") from error

    async def _ask(self, node: Node, call: Call) -> Any:
        """Ask whichever trainer is there, again and again."""

        async def ask() -> object:
            address = node.random.choice(sorted(TRAINERS.values()))
            return await node.net.call(address, call, TIMES.client_call_s)

        return await insist(node, ask)

    # ---- the invariants ------------------------------------------------------------

    def observe(self, batch: Batch) -> None:
        """Look at every operation, result and model that was recorded."""
        for one in batch.events:
            if one.key.startswith(KEYS.ops):
                line, number = number_of(one.key)
                if one.entry is None:
                    self._see_trim(line, number)
                else:
                    self._see_entry(line, number, decode(Entry, one.entry))
            elif one.key.startswith(KEYS.results):
                line, number = number_of(one.key)
                if one.entry is not None:
                    self._see_result(line, number, decode(Result, one.entry))
            elif one.key.startswith(KEYS.models) and one.entry is not None:
                self._see_model(one.key.rpartition("/")[2], decode(Model, one.entry))

    def _must_be_recorded(self, line: str, number: int) -> None:
        known = number in self._entries.get(line, {}) or number <= self._trimmed.get(line, -1)
        if not known:
            raise Violation(f"{line}:{number} was promised, and is not in the ledger")

    def _see_entry(self, line: str, number: int, entry: Entry) -> None:
        known = self._entries.setdefault(line, {}).setdefault(number, entry)
        if (known.identity, known.skip) != (entry.identity, entry.skip):
            raise Violation(f"operation {number} of {line} was replaced by another one")

    def _see_result(self, line: str, number: int, result: Result) -> None:
        known = self._results.setdefault(line, {}).setdefault(number, result)
        if known != result:
            raise Violation(f"the result of {line}:{number} has changed")
        if "-s" in line:
            return
        if number not in self._entries.get(line, {}):
            raise Violation(f"{line}:{number} has a result, and was never recorded")
        outcome = ops.decode_outcome(self._read(result.content))
        if isinstance(outcome, ops.Stepped):
            told, true = outcome.metrics["digest"], digest(self._history(line, number))
            if told != true:
                raise Violation(
                    f"{line}:{number} was carried out on a model that has not had exactly the "
                    f"operations before it: {self._history(line, number)}"
                )

    def _history(self, line: str, until: int) -> list[str]:
        """What a model's history is, by the operations on record."""
        history = ["b"]
        saved: dict[str, list[str]] = {}
        for number in range(1, until + 1):
            entry = self._entries[line].get(number)
            if entry is None:
                raise Violation(f"{line}:{until} has a result, and {number} never came")
            result = self._results[line].get(number)
            if entry.skip or (result is not None and result.failed):
                continue
            op = ops.decode_op(self._read(entry.content))
            match op:
                case ops.ForwardBackward(backward=True) | ops.OptimStep():
                    history.append(event(number, ops.identity(op)))
                case ops.SaveWeights():
                    saved[op.name or ""] = list(history)
                case ops.LoadWeights():
                    history = [*saved[op.path.rpartition("/")[2]], LOADED]
        return history

    def _read(self, content: Any) -> bytes:
        return read_content(content, ToySegments(self._trainers.files, 0))

    def _see_trim(self, line: str, number: int) -> None:
        if "-s" not in line and number > self._trimmed.get(line, -1):
            raise Violation(f"the entry {line}:{number} was removed before it was trimmed")

    def _see_model(self, name: str, model: Model) -> None:
        if model.trimmed < self._trimmed.get(name, -1):
            raise Violation(f"{name} was trimmed to {self._trimmed[name]} and is {model.trimmed}")
        self._trimmed[name] = model.trimmed
        lacking = [
            number
            for number in range(model.trimmed + 1)
            if number not in self._results.get(name, {})
        ]
        if lacking and lacking != [model.trimmed]:
            raise Violation(f"{name} is trimmed to {model.trimmed}; no result: {lacking}")

    def settled(self) -> bool:
        """Every client has the results of everything that it sent."""
        return self.world.healed and all(script.complete() for script in self._scripts.values())
