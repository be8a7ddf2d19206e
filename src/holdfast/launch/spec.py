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
from collections.abc import Mapping
from typing import Literal

import msgspec

from holdfast.errors import Mistake, TooLarge
from holdfast.rendezvous.records import Place

__all__ = ["MAX_ORDER_BYTES", "PER_SEAT", "Kind", "Order", "Seat", "Spec", "arguments", "base"]
__all__ += ["encode", "environment", "import_time_differences"]

Kind = Literal["script", "module", "program"]

MAX_ORDER_BYTES = 1 << 23
MAX_SLOTS = 1024
ROLE = "default"


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
    """The place of this node in one cycle, and what else its workers are told."""

    run: str
    node: str
    place: Place
    max_restarts: int = 0
    ledger_url: str = ""

    def rank(self, slot: int) -> int:
        """The global rank of a slot."""
        return self.place.first_rank + slot


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
    spec: Spec, seat: Seat, slot: int, *, error_file: str, beat: str
) -> dict[str, str]:
    """The whole environment of the worker in `slot`: torchrun's variables and ours."""
    return base(spec) | _of_seat(seat, slot, error_file, beat)


def _of_seat(seat: Seat, slot: int, error_file: str, beat: str) -> dict[str, str]:
    """What a seat adds to the environment of the worker in `slot`."""
    place = seat.place
    return {
        "RANK": str(seat.rank(slot)),
        "LOCAL_RANK": str(slot),
        "GROUP_RANK": str(place.rank),
        "ROLE_RANK": str(seat.rank(slot)),
        "ROLE_NAME": ROLE,
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.slots),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RESTART_COUNT": str(place.cycle - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(seat.max_restarts),
        "TORCHELASTIC_RUN_ID": seat.run,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "HOLDFAST_RUN": seat.run,
        "HOLDFAST_CYCLE": str(place.cycle),
        "HOLDFAST_CYCLE_REVISION": str(place.revision),
        "HOLDFAST_LEDGER": seat.ledger_url,
        "HOLDFAST_NODE": seat.node,
        "HOLDFAST_BEAT": beat,
    }


_ANY = Seat(run="", node="", place=Place(1, 0, 0, 1, 0, 1, 1, "", 0))
PER_SEAT = frozenset(_of_seat(_ANY, 0, "", ""))
"""The variables that any seat adds: these may be set after an interpreter was started."""


def arguments(spec: Spec, slot: int) -> tuple[str, ...]:
    """The arguments of the worker in `slot`."""
    return tuple(arg.replace("${local_rank}", str(slot)) for arg in spec.args)


def import_time_differences(
    started: Mapping[str, str], ordered: Mapping[str, str]
) -> tuple[str, ...]:
    """The variables in which two environments differ and may not, in order."""
    names = (started.keys() | ordered.keys()) - PER_SEAT
    return tuple(sorted(name for name in names if started.get(name) != ordered.get(name)))


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
