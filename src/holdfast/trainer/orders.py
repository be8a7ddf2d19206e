"""What all ranks do together: an order, told by rank 0 and carried out by each of them."""

import msgspec
import safetensors.torch

from holdfast import events
from holdfast.errors import Corrupt, Mistake
from holdfast.trainer import ops
from holdfast.trainer.machine import Machine
from holdfast.trainer.ops import Lora, Outcome
from holdfast.trainer.ranks import Ranks
from holdfast.trainer.seams import Snapshot

__all__ = ["Order", "follow", "lead", "with_snapshot"]

END = "end"


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to do."""

    kind: str
    model: str = ""
    base: str = ""
    lora: Lora | None = None
    optimizer: bool = False
    op: bytes = b""
    state: bytes = b""
    facts: bytes = b""


class Followed(events.Event, frozen=True, tag="trainer.rank_ended"):
    """A rank has nothing more to do."""

    rank: int


def with_snapshot(order: Order, snapshot: Snapshot) -> Order:
    """The order, with a state to go with it."""
    return msgspec.structs.replace(
        order,
        state=safetensors.torch.save(dict(snapshot.tensors)),
        facts=msgspec.json.encode(snapshot.facts),
    )


def lead(machine: Machine, ranks: Ranks, order: Order) -> Outcome | None:
    """Be rank 0: tell everybody, then do it."""
    if ranks.size > 1:
        ranks.share(msgspec.msgpack.encode(order))
    return None if order.kind == END else _obey(machine, order)


def follow(machine: Machine, ranks: Ranks) -> None:
    """Be another rank: do what rank 0 says, until it says that this is the end."""
    while True:
        order = msgspec.msgpack.decode(ranks.share(None), type=Order)
        if order.kind == END:
            events.emit(Followed(rank=ranks.rank))
            return
        try:
            _obey(machine, order)
        except Mistake:
            continue  # rank 0 had the same, and tells it


def _obey(machine: Machine, order: Order) -> Outcome | None:
    match order.kind:
        case "create":
            machine.create(order.model, order.base, order.lora)
        case "load":
            machine.load(order.model, _snapshot(order), optimizer=order.optimizer)
        case "restore":
            machine.restore(order.model, order.base, order.lora, _snapshot(order))
        case "drop":
            machine.drop(order.model)
        case "apply":
            op = ops.decode_op(order.op)
            if isinstance(op, ops.ForwardBackward):
                return machine.forward_backward(order.model, op)
            if isinstance(op, ops.OptimStep):
                return machine.optim_step(order.model, op)
            raise Corrupt(f"ranks do not know how to {ops.kind(op)}")
        case _:
            raise Corrupt(f"ranks do not know how to {order.kind}")
    return None


def _snapshot(order: Order) -> Snapshot:
    tensors = safetensors.torch.load(order.state)
    return Snapshot(tensors, msgspec.json.decode(order.facts, type=dict), {})
