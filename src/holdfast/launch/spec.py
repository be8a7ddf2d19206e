"""What a worker runs, its place in a cycle, and the environment that follows. Pure.

Responsible for: torchrun's variables, the split of a worker's environment into what is
known before a place is given (`base`) and what the place adds (`PER_SEAT`), and the order
that a waiting interpreter gets.

Invariants:

- **`base` holds no variable of `PER_SEAT`**, also when the launcher itself runs inside another
  launcher; so an interpreter that was started with `base` has seen no stale rank.
- **An interpreter that was started early serves an order only if the two environments differ
  in nothing but `PER_SEAT`** (`import_time_differences`). This is a list of what may differ, not
  of what may not: any other variable may have been read when Python, numpy or torch was
  imported (torch alone reads about 300). A test looks that importing torch reads none of
  `PER_SEAT`.

Not done here: starting anything, files, paths.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from holdfast.errors import Mistake, TooLarge

__all__ = ["MAX_ORDER_BYTES", "PER_SEAT", "Kind", "Order", "Seat", "Spec", "arguments", "base"]
__all__ += ["encode", "environment", "import_time_differences"]

Kind = Literal["script", "module", "program"]

MAX_ORDER_BYTES = 1 << 23
MAX_SLOTS = 1024
ROLE = "default"

PER_SEAT = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "HOLDFAST_RUN",
        "HOLDFAST_CYCLE",
        "HOLDFAST_CYCLE_REVISION",
        "HOLDFAST_LEDGER",
        "HOLDFAST_NODE",
        "HOLDFAST_BEAT",
    }
)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What every worker of this node runs, in every cycle.

    `entry` is a script's path, a module's name or a program, by `kind`; in `args`
    `${local_rank}` stands for the slot. `env` is the whole environment that workers start
    from, not an addition to ours.
    """

    entry: str
    kind: Kind = "script"
    args: tuple[str, ...] = ()
    slots: int = 1
    env: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.entry:
            raise Mistake("there is nothing to run: name a script, a module (-m) or a program")
        if not 1 <= self.slots <= MAX_SLOTS:
            raise Mistake(f"a node has 1 to {MAX_SLOTS} workers, not {self.slots}")


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this node in one cycle.

    `first_rank` is the global rank of slot 0; `restarts` is the number of cycles before this
    one that ended in failure, and is the same on every node.
    """

    run: str
    cycle: int
    node: str
    node_rank: int
    node_count: int
    first_rank: int
    world_size: int
    slots: int
    master_addr: str
    master_port: int
    restarts: int = 0
    max_restarts: int = 0
    ledger_url: str = ""
    cycle_revision: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.node_count:
            raise Mistake(f"node rank {self.node_rank} is not below {self.node_count} nodes")
        if self.slots < 1 or not 0 <= self.first_rank <= self.world_size - self.slots:
            raise Mistake(
                f"{self.slots} slots from rank {self.first_rank} on do not fit a world of "
                f"{self.world_size}"
            )

    def rank(self, slot: int) -> int:
        """The global rank of a slot."""
        return self.first_rank + slot


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a waiting interpreter is told, once.

    `env` is its whole environment. A stream without a file stays where it is.
    """

    entry: str
    kind: Kind
    args: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stdout: str = ""
    stderr: str = ""
    stacks: str = ""


def base(spec: Spec) -> dict[str, str]:
    """The part of a worker's environment that is known before it has a place."""
    env = {name: value for name, value in spec.env.items() if name not in PER_SEAT}
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if spec.slots > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def environment(
    spec: Spec, seat: Seat, slot: int, *, error_file: str = "", beat: str = ""
) -> dict[str, str]:
    """The whole environment of the worker in `slot`: torchrun's variables and ours."""
    if not 0 <= slot < seat.slots:
        raise Mistake(f"slot {slot} is not one of {seat.slots}")
    env = base(spec) | {
        "RANK": str(seat.rank(slot)),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(seat.node_rank),
        "ROLE_RANK": str(seat.rank(slot)),
        "ROLE_NAME": ROLE,
        "WORLD_SIZE": str(seat.world_size),
        "LOCAL_WORLD_SIZE": str(seat.slots),
        "GROUP_WORLD_SIZE": str(seat.node_count),
        "ROLE_WORLD_SIZE": str(seat.world_size),
        "MASTER_ADDR": seat.master_addr,
        "MASTER_PORT": str(seat.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(seat.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(seat.max_restarts),
        "TORCHELASTIC_RUN_ID": seat.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "HOLDFAST_RUN": seat.run,
        "HOLDFAST_CYCLE": str(seat.cycle),
        "HOLDFAST_CYCLE_REVISION": str(seat.cycle_revision),
        "HOLDFAST_LEDGER": seat.ledger_url,
        "HOLDFAST_NODE": seat.node,
    }
    if error_file:
        env["TORCHELASTIC_ERROR_FILE"] = error_file
    if beat:
        env["HOLDFAST_BEAT"] = beat
    return env


def arguments(spec: Spec, slot: int) -> tuple[str, ...]:
    """The arguments of the worker in `slot`."""
    return tuple(arg.replace("${local_rank}", str(slot)) for arg in spec.args)


def import_time_differences(
    started: Mapping[str, str], ordered: Mapping[str, str]
) -> tuple[str, ...]:
    """The variables in which two environments differ and may not, in order."""
    names: Iterable[str] = started.keys() | ordered.keys()
    return tuple(
        sorted(n for n in names if n not in PER_SEAT and started.get(n) != ordered.get(n))
    )


def encode(order: Order) -> bytes:
    """An order as it goes over the wire: a length of 4 bytes, then JSON.

    JSON, because a variable or an argument may hold bytes that are not UTF-8 (Python keeps
    them as lone surrogates, which JSON can escape and msgpack cannot carry), and because the
    interpreter that reads it must not import anything for it that is not Python's own.
    """
    data = json.dumps(msgspec.structs.asdict(order) | {"env": dict(order.env)}).encode("ascii")
    if len(data) > MAX_ORDER_BYTES:
        raise TooLarge(
            f"environment and arguments of a worker have {len(data)} bytes: "
            f"at most {MAX_ORDER_BYTES} are allowed"
        )
    return len(data).to_bytes(4, "big") + data
