"""What all ranks do together: an order, told by rank 0 and carried out by each of them.

- What only reads is done by rank 0 alone, unless its machine has only a part of each model
  (`Machine.spread`); then every order is one for all.
- A state goes with its order. To a machine with parts only its form goes: the content follows
  tensor by tensor, so that no other rank ever has all of it.
"""

from typing import TypeAlias

import msgspec
import safetensors.torch
import torch

from holdfast import events
from holdfast.errors import Corrupt, Mistake
from holdfast.trainer import ops
from holdfast.trainer.machine import Machine
from holdfast.trainer.ops import Lora, Outcome
from holdfast.trainer.ranks import Ranks
from holdfast.trainer.seams import Snapshot

__all__ = ["END", "Order", "follow", "is_shared", "lead"]

END = "end"
_READS = ("capture", "export", "open_sampler", "sample", "probe")

Answer: TypeAlias = Outcome | Snapshot | None


class Form(msgspec.Struct, frozen=True):
    """A tensor without its content."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to do."""

    kind: str
    model: str = ""
    base: str = ""
    lora: Lora | None = None
    optimizer: bool = False
    op: bytes = b""
    key: str = ""
    line: str = ""
    number: int = 0
    state: bytes = b""
    forms: list[Form] = []
    facts: bytes = b""


class Followed(events.Event, frozen=True, tag="trainer.rank_ended"):
    """A rank has nothing more to do."""

    rank: int


def lead(machine: Machine, ranks: Ranks, order: Order, snapshot: Snapshot | None = None) -> Answer:
    """Be rank 0: tell everybody, then do it."""
    if is_shared(machine, ranks, order.kind):
        ranks.share(msgspec.msgpack.encode(_with(order, snapshot, forms=machine.spread)))
    return None if order.kind == END else _obey(machine, order, snapshot)


def is_shared(machine: Machine, ranks: Ranks, kind: str) -> bool:
    """Whether other ranks take part in such an order."""
    return ranks.size > 1 and (machine.spread or kind not in _READS)


def follow(machine: Machine, ranks: Ranks) -> None:
    """Be another rank: do what rank 0 says, until it says that this is the end."""
    while True:
        order = msgspec.msgpack.decode(ranks.share(None), type=Order)
        if order.kind == END:
            events.emit(Followed(rank=ranks.rank))
            return
        try:
            _obey(machine, order, _snapshot(order))
        except Mistake:
            continue  # rank 0 had the same, and tells it


def _obey(machine: Machine, order: Order, snapshot: Snapshot | None) -> Answer:
    match order.kind:
        case "create":
            machine.create(order.model, order.base, order.lora)
        case "load":
            assert snapshot is not None
            machine.load(order.model, snapshot, optimizer=order.optimizer)
        case "restore":
            assert snapshot is not None
            machine.restore(order.model, order.base, order.lora, snapshot)
        case "capture":
            return machine.capture(order.model)
        case "export":
            return machine.export(order.model)
        case "drop":
            machine.drop(order.model)
        case "open_sampler":
            machine.open_sampler(order.key, order.base, order.lora, snapshot)
        case "probe":
            machine.probe()
        case "apply" | "sample":
            return _carry_out(machine, order, ops.decode_op(order.op))
        case _:
            raise Corrupt(f"ranks do not know how to {order.kind}")
    return None


def _carry_out(machine: Machine, order: Order, op: ops.Op) -> Outcome:
    match op:
        case ops.ForwardBackward():
            return machine.forward_backward(order.model, op)
        case ops.OptimStep():
            return machine.optim_step(order.model, op)
        case ops.Sample():
            return machine.sample(order.key, order.line, order.number, op)
        case _:
            raise Corrupt(f"ranks do not know how to {ops.kind(op)}")


def _with(order: Order, snapshot: Snapshot | None, *, forms: bool) -> Order:
    """The order, with a state to go with it."""
    if snapshot is None:
        return order
    facts = msgspec.json.encode(snapshot.facts)
    if not forms:
        state = safetensors.torch.save(dict(snapshot.tensors))
        return msgspec.structs.replace(order, facts=facts, state=state)
    told = [
        Form(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in snapshot.tensors.items()
    ]
    return msgspec.structs.replace(order, facts=facts, forms=told)


def _snapshot(order: Order) -> Snapshot | None:
    """The state that goes with an order, or its form."""
    if not order.facts:
        return None
    tensors = safetensors.torch.load(order.state) if order.state else {}
    for form in order.forms:
        dtype = getattr(torch, form.dtype)
        tensors[form.name] = torch.empty(form.shape, dtype=dtype, device="meta")
    return Snapshot(tensors, msgspec.json.decode(order.facts, type=dict), {})
