"""The agent of one node: joins, starts workers, replaces them, and leaves when the run has ended.

Exit codes, the same for active nodes and spares:

    0     the run has succeeded (also for a node that came when it was over)
    1     the run has failed: restarts used up, or too few nodes
    2     the call must be changed (rules that differ from the run's, a name that is taken)
    3     the ledger was away for too long
    10    this node is unhealthy and has left; the run goes on without it
    70    a bug, or this node cannot look after its workers
    130   interrupted, 143 terminated: this node has left; the run goes on without it
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from functools import partial

from holdfast import __version__, events, ledger, machine
from holdfast.errors import LeaseLost, Retriable, Unavailable, UnknownOutcome
from holdfast.launch.crew import UNHEALTHY, Leaving, NodeCrew, Plan
from holdfast.launch.health import examine
from holdfast.launch.warden import Warden
from holdfast.launch.warm import WarmPool
from holdfast.launch.workers import check
from holdfast.ledger.runtime import LiveRuntime
from holdfast.proc.forkserver import ForkServer
from holdfast.rendezvous.attend import attend
from holdfast.rendezvous.overview import say, used_name
from holdfast.rendezvous.probe import ProbeServer, is_alive
from holdfast.rendezvous.records import Cycle, Node
from holdfast.rendezvous.rendezvous import Rendezvous
from holdfast.retry import Pauses, Policy
from holdfast.text import plural

__all__ = ["run"]

_RENEWALS = 10
"""How often per lease the workers' deadline is renewed."""


class NodeLeft(events.Event, frozen=True, tag="launch.node.left"):
    """This node has left the run."""

    run: str
    node: str
    exit_code: int
    reason: str


async def run(plan: Plan, forks: ForkServer | None = None) -> int:
    """Be this node until the run has ended; returns the exit code."""
    check(plan.spec)
    wrong = await examine(plan.checks)
    if wrong is not None:
        say(f"this node is unhealthy and does not join: {wrong}")
        return UNHEALTHY
    warden = Warden()
    pool = WarmPool(plan.spec, preload=plan.preload, forks=forks) if plan.warm else None
    if pool is not None:
        pool.fill()
    crew = NodeCrew(plan, pool=pool, warden=warden)
    try:
        with _signals(crew):
            code, reason = await _take_part(plan, crew)
    finally:
        if pool is not None:
            await pool.close()
        await warden.close()
        if forks is not None:
            forks.close()
    events.emit(NodeLeft(run=plan.run, node=plan.node, exit_code=code, reason=reason))
    say(reason)
    return code


async def _take_part(plan: Plan, crew: NodeCrew) -> tuple[int, str]:
    """Enter the rendezvous, and again whenever the lease was lost."""
    away_since: float | None = None
    took_part = False
    pauses = Pauses(pace=Policy(base_s=min(1.0, plan.lease_s / 5), max_s=1.0))
    loop = asyncio.get_running_loop()
    async with (
        ledger.open(plan.ledger_url) as opened,
        ProbeServer(plan.address, plan.run, plan.node) as probes,
    ):
        runtime = LiveRuntime(opened)
        crew.on_leave = probes.close  # the next of this name waits for our end, and is not refused
        while True:
            try:
                async with _rendezvous(runtime, plan, crew.port(), probes.port) as rendezvous:
                    away_since = None
                    pauses.reset()
                    if rendezvous.head.record.final and not took_part:
                        over = rendezvous.head.record
                        told = used_name(plan.run, over, "--run")
                        return int(over.state != "succeeded"), told
                    took_part = True
                    crew.rendezvous = rendezvous
                    renewals = asyncio.ensure_future(_renew(crew, plan.lease_s))
                    try:
                        ended = await attend(runtime, rendezvous, crew)
                    finally:
                        renewals.cancel()
                return _verdict(plan.run, ended, crew)
            except (LeaseLost, Retriable, UnknownOutcome) as error:
                if crew.left is not None:
                    return _verdict(plan.run, None, crew)
                away_since = away_since or loop.time()
                if loop.time() - away_since > plan.rules.join_s:
                    raise Unavailable(f"the ledger was away for too long: {error}") from None
                say(f"this node lost its place ({error}) and joins again")
                await pauses.wait(error)


def _rendezvous(runtime: LiveRuntime, plan: Plan, port: int, probe_port: int) -> Rendezvous:
    node = Node(
        cycle=0,
        address=plan.address,
        port=port,
        slots=plan.spec.slots,
        infra_rank=plan.identity.infra_rank,
        domain=plan.identity.domain,
        host=machine.place(),
        pid=os.getpid(),
        release=__version__,
        probe_port=probe_port,
    )
    return Rendezvous(
        runtime,
        plan.run,
        plan.node,
        node,
        plan.rules,
        lease_s=plan.lease_s,
        is_alive=partial(is_alive, plan.run, plan.node),
    )


async def _renew(crew: NodeCrew, lease_s: float) -> None:
    while True:
        crew.renew()
        await asyncio.sleep(lease_s / _RENEWALS)


def _verdict(name: str, ended: Cycle | None, crew: NodeCrew) -> tuple[int, str]:
    if ended is None:
        assert crew.left is not None
        return crew.left.exit_code, f"this node has left {name}: {crew.left.reason}"
    cycles = plural(ended.number, "cycle")
    if ended.state == "succeeded":
        return 0, f"{name} has succeeded after {cycles}"
    return 1, f"{name} has failed after {cycles}: {ended.cause or 'no reason was recorded'}"


@contextlib.contextmanager
def _signals(crew: NodeCrew) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C lets the workers end in peace; the second does not."""
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        if crew.left is not None:
            say(f"{number.name} again: killing the workers")
            crew.kill()
            return
        say(f"{number.name}: leaving; once more to kill")
        crew.leave(Leaving(number.name, 128 + number))

    heard = (signal.SIGTERM, signal.SIGINT)
    for number in heard:
        loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
