"""What `torchrun`'s flags say about a node and its run.

    torchrun --rdzv-backend holdfast --rdzv-endpoint etcd://a:2379,b:2379 --rdzv-id my-run \\
        --nnodes 2:3 --rdzv-conf spares=1,lease=10 ...

The endpoint is a ledger's URL, which torch hands on as it is. What `--rdzv-conf` may hold is in
`_Conf`; anything else is refused, so that an option for another back end is not silently without
effect. The defaults are those of `holdfast launch`, except where torch's agent has a number of
its own:

- torch's agent counts restarts itself (`--max-restarts`, per agent), so ours are without limit:
  the agent that has used up its own ends the run;
- a join that takes too long is an error of the node that waits (`RendezvousTimeoutError`) and
  closes nothing, so an open cycle waits for the minimum without end;
- it gives workers 30 s to stop, so an open cycle waits longer than that for a node that is
  stopping its workers.
"""

import os
import secrets
import socket
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast import machine
from holdfast.errors import Mistake
from holdfast.ledger.types import join
from holdfast.rendezvous.address import own
from holdfast.rendezvous.records import Node, Rules
from holdfast.timeouts import DEFAULTS

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["Options", "parse"]

_NO_LIMIT = 1_000_000
_RESTART_WINDOW_S = 1.0
_NO_END_S = 1e9
_TORCH_STOP_S = 30.0
_UNNAMED = ("", "none")


class _Conf(BaseModel):
    """The options of `--rdzv-conf`; all arrive as text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    spares: int = 0
    segment: int = 1
    last_call_timeout: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    join_timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    settle_timeout: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    stop_timeout: float = Field(default=_TORCH_STOP_S + 10.0, ge=0, allow_inf_nan=False)
    lease: float = Field(default=DEFAULTS.node_lease_s, gt=0, allow_inf_nan=False)
    domain: str = ""
    infra_rank: int | None = Field(default=None, ge=0)
    node_name: str = ""
    is_host: str = ""
    """Which node hosts c10d's store. Taken because scripts give it to every back end; here rank 0
    of each cycle hosts that cycle's store."""
    timeout: float = 0.0
    """Set by torch in every case, for an older interface; means nothing here."""


class Options(BaseModel):
    """One node, and the run that it takes part in."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    url: str
    run: str
    name: str
    node: Node
    rules: Rules
    lease_s: float
    join_s: float
    """How long this node waits in an open cycle, and for a ledger that is away."""


def parse(params: "RendezvousParameters") -> Options:
    """Read torchrun's parameters. Raises `Mistake` with what to change."""
    if params.run_id in _UNNAMED:
        raise Mistake("give every node the same --rdzv-id NAME: it names the run in the ledger")
    join("runs", params.run_id)  # refuses what cannot be part of a key
    conf = _conf(params.config)
    rules = Rules(
        minimum=params.min_nodes,
        maximum=params.max_nodes,
        spares=conf.spares,
        segment=conf.segment,
        last_call_s=conf.last_call_timeout,
        join_s=_NO_END_S,
        settle_s=conf.settle_timeout,
        stop_s=conf.stop_timeout,
        max_restarts=_NO_LIMIT,
        restart_window_s=_RESTART_WINDOW_S,
    )
    rules.check()
    node = Node(
        cycle=0,
        address=own(params.local_addr, params.endpoint),
        port=0,
        slots=1,  # torch tells its workers' number to nobody before ranks are given
        infra_rank=conf.infra_rank,
        domain=conf.domain,
        host=machine.place(),
        pid=os.getpid(),
    )
    return Options(
        url=params.endpoint,
        run=params.run_id,
        name=conf.node_name or f"{socket.gethostname()}-{secrets.token_hex(3)}",
        node=node,
        rules=rules,
        lease_s=conf.lease,
        join_s=conf.join_timeout,
    )


def _conf(given: dict[str, object]) -> _Conf:
    try:
        return _Conf.model_validate(given)
    except ValidationError as error:
        reasons = []
        for one in error.errors():
            name = ".".join(map(str, one["loc"]))
            known = ", ".join(sorted(set(_Conf.model_fields) - {"timeout", "is_host"}))
            unknown = f"there is no such option; there are {known}"
            reasons.append(
                f"{name}: {unknown if one['type'] == 'extra_forbidden' else one['msg']}"
            )
        raise Mistake("--rdzv-conf " + "; ".join(reasons)) from None
