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

import functools
from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.errors import Exists, Gone, HoldfastError, NotFound, Unavailable
from holdfast.jobs.policy import Policy
from holdfast.ledger import Batch
from holdfast.ledger.records import decode
from holdfast.retry import insist
from holdfast.sim.protocol import Protocol, Violation
from holdfast.sim.protocols.operations.script import Script
from holdfast.sim.protocols.operations.taking_over import Handler, incarnation, take_over
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
from holdfast.trainer.records import Entry, Keys, Model, Result, number_of
from holdfast.trainer.segments import read_content
from holdfast.trainer.state import Pending
from holdfast.trainer.trainer import Trainer

__all__ = ["Call", "OperationsProtocol", "Reply"]

KEYS = Keys("r", "x", "j")
TRAINERS = {"n0": "t0", "n1": "t1"}
CLIENTS = ("n2", "n3")
POLICY = Policy(
    gap_s=60.0,
    checkpoint_ops=3,
    checkpoint_s=4.0,
    keep_results=4,
    result_s=2000.0,
    upkeep_s=5.0,
    poison_deaths=50,
    max_models=1,
)
WAYS = ("sent", "answered")


class Call(msgspec.Struct, frozen=True):
    """A request."""

    kind: str
    line: str = ""
    number: int = 0
    op: bytes = b""


class Reply(msgspec.Struct, frozen=True):
    """Its answer."""

    kind: str
    value: str = ""
    outcome: bytes = b""


class OperationsProtocol(Protocol):
    """The sound protocol, with the trainer that it is given."""

    nodes = 4
    steps = 500
    net = True
    policy = POLICY
    never = frozenset(
        # Nobody holds a lease here.
        ("expire", step)
        for step in (
            "timer",
            *(f"{call}.{way}" for call in ("get", "range", "txn", "net") for way in WAYS),
        )
    )

    def __init__(self, trainer: Callable[..., Trainer] = Trainer, *, guarded: bool = True) -> None:
        self._trainer = trainer
        self._guarded = guarded
        self._files: dict[tuple[int, int], bytes] = {}
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
            await take_over(runtime, TRAINERS[name], self._begin)
        else:
            await self._use(runtime, self._scripts[name])

    # ---- a trainer ---------------------------------------------------------------

    async def _begin(self, node: Node, epoch: int) -> tuple[Trainer, Handler]:
        trainer = self._trainer(
            node,
            KEYS,
            incarnation(epoch) if self._guarded else [],
            compute=ToyCompute(node),
            segments=lambda term: ToySegments(self._files, term),
            vault=lambda journal: ToyVault(node, lambda: journal.guards),
            wall=lambda: 1e9 + node.now(),
            policy=self.policy,
        )
        await trainer.begin(epoch, by=f"{node.name} {node.random.random()}")
        return trainer, functools.partial(self._answer, trainer)

    async def _answer(self, trainer: Trainer, call: Call) -> Reply:
        core = trainer.core
        try:
            match call.kind:
                case "create_session":
                    return Reply("ok", await core.create_session())
                case "create_model":
                    op = ops.CreateModel(session=call.line, base="b")
                    _, model = await core.create_model(call.line, call.number, op)
                    return Reply("ok", model)
                case "submit":
                    op2 = ops.decode_op(call.op)
                    return Reply("ok", await core.submit(call.line, call.number, op2))
                case _:
                    got = await core.retrieve(call.line, TIMES.poll_hold_s)
                    if isinstance(got, Pending):
                        return Reply("pending", got.reason)
                    return Reply("ok", outcome=ops.encode(got))
        except Gone as error:
            return Reply("gone", str(error))
        except NotFound as error:
            return Reply("missing", str(error))
        except Exists as error:
            return Reply("clash", str(error))
        except HoldfastError as error:
            return Reply("again", str(error))

    # ---- a client ----------------------------------------------------------------

    async def _use(self, node: Node, script: Script) -> None:
        while not script.session:
            reply = await self._call(node, Call("create_session"))
            if reply.kind == "ok":
                script.begin(session=reply.value)
        while not script.model:
            reply = await self._call(node, Call("create_model", script.session, 0))
            if reply.kind == "ok":
                script.begin(model=reply.value)
        tasks = [
            node.spawn(self._one(node, script, number), name=f"op {number}")
            for number in script.order()
            if number not in script.results
        ]
        for task in tasks:
            await task

    async def _one(self, node: Node, script: Script, number: int) -> None:
        await node.sleep(script.delay_s(number, node.random))
        while True:
            call = Call("submit", script.model, number, script.op(number, node.random))
            reply = await self._call(node, call)
            if reply.kind == "ok":
                break
            if reply.kind != "gone" or number not in script.results:
                raise Violation(f"{script.model}:{number} was refused: {reply}")
            return
        if number not in self._entries.get(script.model, {}) and number > self._trimmed.get(
            script.model, -1
        ):
            raise Violation(f"{reply.value} was promised, and is not in the ledger")
        while True:
            reply = await self._call(node, Call("retrieve", f"{script.model}:{number}"))
            if reply.kind == "ok":
                script.hear(number, reply.outcome)
                # Some hear a thing, and forget that they did.
                if node.random.random() < 0.9:
                    return
            elif reply.kind != "pending":
                if reply.kind == "gone" and number in script.results:
                    return
                raise Violation(f"{script.model}:{number} was promised: {reply}")

    async def _call(self, node: Node, call: Call) -> Reply:
        """Ask whichever trainer is there, again and again."""

        async def ask() -> Reply:
            address = node.random.choice(sorted(TRAINERS.values()))
            reply: Reply = await node.net.call(address, call, TIMES.client_call_s)
            if reply.kind == "again":
                raise Unavailable(reply.value)
            return reply

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
        return read_content(content, ToySegments(self._files, 0))

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
