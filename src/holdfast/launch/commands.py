"""`holdfast launch`, `holdfast status`, `holdfast nodes`."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from holdfast import events, ledger
from holdfast.errors import Exists, Mistake, NotFound, UnknownOutcome
from holdfast.launch import agent, flags, torch_flags
from holdfast.ledger.records import load, put
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Delete, unchanged
from holdfast.proc.forkserver import inherit
from holdfast.rendezvous.decide import restart
from holdfast.rendezvous.overview import Overview, lines, look
from holdfast.rendezvous.records import Cause, Cycle, Drain, Keys, put_cycle
from holdfast.timeouts import DEFAULTS

__all__ = ["launch", "nodes", "status"]

_ATTEMPTS = 5


def _ledger_option(command: click.decorators.FC) -> click.decorators.FC:
    return click.option(
        "--ledger",
        "url",
        envvar="HOLDFAST_LEDGER",
        default=None,
        help="Where the run's records are: sqlite:///file (one machine) or etcd://host:port,… "
        "[default: a file in your state folder]",
    )(command)


def _dashed(name: str) -> str:
    """torchrun takes --nproc_per_node as well as --nproc-per-node; so do we."""
    return name.replace("_", "-")


@click.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _dashed}
)
@click.argument("entry")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--nnodes", default="1", show_default=True, help="Nodes: N, or MIN:MAX.")
@click.option(
    "--nproc-per-node", default="1", show_default=True, help="Workers: N, gpu, cpu, auto."
)
@click.option("--run", "--rdzv-id", "run_name", help="The run's name, the same on every node.")
@_ledger_option
@click.option("--spares", default=0, show_default=True, help="Nodes of MAX to keep back.")
@click.option("--segment", default=1, show_default=True, help="Nodes that share a domain.")
@click.option("--domain", help="This node's domain (rack, switch). Slurm's topology by default.")
@click.option("--infra-rank", "--node-rank", type=int, help="This node's place in the order.")
@click.option("--node-name", help="This node's name; the host's, or the scheduler's, by default.")
@click.option("--local-addr", help="The address that other nodes reach this one at.")
@click.option("--max-restarts", default=3, show_default=True, help="How often workers may fail.")
@click.option(
    "--restart-window",
    default=0.0,
    show_default=True,
    help="Seconds after which a failure no longer counts; 0: all count.",
)
@click.option("--last-call", default=5.0, show_default=True, help="Wait for more than MIN: s.")
@click.option("--join-timeout", default=600.0, show_default=True, help="Wait for MIN nodes: s.")
@click.option(
    "--lease",
    default=DEFAULTS.node_lease_s,
    show_default=True,
    help="How long a dead node holds its rank: s.",
)
@click.option("--grace", default=10.0, show_default=True, help="From SIGTERM to SIGKILL: s.")
@click.option("--hang-after", type=float, help="A rank that beats no more for so long hangs: s.")
@click.option("--learn-limits", is_flag=True, help="Learn how long is too long from the run.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Where logs go.")
@click.option("-r", "--redirects", default="0", help="Streams to files only: 0, 1, 2, 3, 0:1,1:3.")
@click.option("-t", "--tee", default="3", help="Streams to files and the terminal.")
@click.option("-m", "--module", is_flag=True, help="ENTRY is a module, as with python -m.")
@click.option("--no-python", is_flag=True, help="ENTRY is a program.")
@click.option("--no-warm", is_flag=True, help="Start every worker from nothing.")
@click.option(
    "--preload",
    multiple=True,
    metavar="MODULE",
    help="What warm interpreters import; may be given again [default: torch, torch._dynamo].",
)
@torch_flags.hidden_options
@click.option("--rdzv-endpoint", hidden=True)
@click.option("--dry-run", is_flag=True, help="Print what was resolved, and end.")
def launch(entry: str, args: tuple[str, ...], **given: Any) -> None:
    """Run ENTRY with ARGS on several nodes; replace what dies; end together.

    \b
    One machine:      holdfast launch --nproc-per-node 4 train.py
    Several nodes:    holdfast launch --run r1 --ledger etcd://a:2379 --nnodes 3:4 --spares 1 \\
                          --nproc-per-node 8 train.py       (on every node)
    Slurm:            srun holdfast launch --ledger etcd://a:2379 --nnodes 4 train.py

    Takes torchrun's flags and PET_… variables, and sets torchrun's environment. Exit codes: 0 the
    run succeeded (spares and late comers too), 1 it failed, 2 bad call, 3 the ledger was away,
    10 this node is unhealthy, 130/143 this node was asked to leave.
    """
    for line in torch_flags.check(given):
        click.echo(f"holdfast: {line}", err=True)
    source = click.get_current_context().get_parameter_source("rdzv_endpoint")
    if source is ParameterSource.ENVIRONMENT and given["url"]:
        given["rdzv_endpoint"] = None  # job operators set PET_RDZV_ENDPOINT for every job
    plan = flags.resolve(entry, args, given)
    if given["dry_run"]:
        click.echo(flags.describe(plan))
        return
    forks = inherit()
    folder = plan.logs.folder / plan.run / "events"
    folder.mkdir(parents=True, exist_ok=True)
    _log_events(folder / f"{plan.node}.jsonl", plan.node)
    code = asyncio.run(agent.run(plan, forks))
    raise click.exceptions.Exit(code)


torch_flags.take_variables(launch)


def _log_events(path: Path, node: str) -> None:
    """Write this node's events; only a node of the same name writes to the same file."""
    try:
        events.configure(path, process=node[:100])
    except Exists as error:
        raise Mistake(
            f"a node named {node!r} already runs on this machine: end it, or give this node "
            f"another name: --node-name NAME ({error})"
        ) from None


@click.command()
@click.argument("run")
@_ledger_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", "follow", is_flag=True, help="Show it again whenever it changes.")
def status(run: str, url: str | None, as_json: bool, follow: bool) -> None:
    """Show a run's cycle, its members, spares and last failures."""
    asyncio.run(_status(run, ledger.lasting(url), as_json=as_json, again=follow))


async def _status(run: str, url: str, *, as_json: bool, again: bool) -> None:
    async with ledger.open(url) as opened:
        view = await look(opened, run)
        _show(view, as_json=as_json)
        if not again:
            return
        async with opened.watch(Keys(run).root, start=view.revision + 1) as watch:
            async for _ in watch:
                view = await look(opened, run)
                if not as_json:
                    click.echo()
                _show(view, as_json=as_json)
                if view.cycle.final:
                    return


def _show(view: Overview, *, as_json: bool) -> None:
    click.echo(json.dumps(view.as_json()) if as_json else "\n".join(lines(view)))


@click.group()
def nodes() -> None:
    """Move nodes of a run out, or back in."""


@nodes.command()
@click.argument("name")
@click.option("--run", required=True, help="The run's name.")
@_ledger_option
@click.option("--reason", default="", help="For whoever asks later.")
@click.option("--now", is_flag=True, help="Begin the next cycle at once.")
def drain(name: str, run: str, url: str | None, reason: str, now: bool) -> None:
    """Give NAME no rank from the next cycle on; it stays as a spare that is never chosen."""
    asyncio.run(_drain(name, run, ledger.lasting(url), reason, now=now))


async def _drain(name: str, run: str, url: str, reason: str, *, now: bool) -> None:
    keys = Keys(run)
    async with ledger.open(url) as opened:
        view = await look(opened, run)
        if name not in {node.name for node in view.nodes}:
            there = ", ".join(sorted({node.name for node in view.nodes})) or "none"
            raise NotFound(f"{run} has no node {name!r}: there are {there}")
        await opened.txn([], [put(keys.drain(name), Drain(reason=reason))])
        free = sum(node.state in ("active", "spare", "ready") for node in view.nodes) - 1
        if free < view.cycle.rules.lowest:
            click.echo(
                f"careful: without {name} only {free} nodes are left, and the next cycle "
                f"waits for {view.cycle.rules.lowest}",
                err=True,
            )
        if now and any(node.name == name and node.rank is not None for node in view.nodes):
            cause = Cause(kind="drained", node=name, detail=reason)
            await _next_cycle(LiveRuntime(opened), keys, view.cycle, cause)
    click.echo(f"{name} holds no rank from the next cycle on")


async def _next_cycle(runtime: LiveRuntime, keys: Keys, seen: Cycle, cause: Cause) -> None:
    """End the cycle that was seen, and no later one."""
    cause = msgspec.structs.replace(cause, at=time.time())
    for attempt in range(1, _ATTEMPTS + 1):
        stored = await load(runtime.ledger, keys.cycle, Cycle)
        there = (stored.record.state, stored.record.number) if stored else None
        if stored is None or there != ("running", seen.number):
            return
        op = put_cycle(keys.cycle, restart(stored.record, cause), over=stored.entry)
        try:
            await runtime.ledger.txn([unchanged(stored.entry)], [op])
        except UnknownOutcome:  # the next look tells
            if attempt == _ATTEMPTS:
                raise


@nodes.command()
@click.argument("name")
@click.option("--run", required=True, help="The run's name.")
@_ledger_option
def undrain(name: str, run: str, url: str | None) -> None:
    """Let NAME hold a rank again."""

    async def work() -> bool:
        async with ledger.open(ledger.lasting(url)) as opened:
            txn = await opened.txn([], [Delete(Keys(run).drain(name))])
            return txn.results[0] is not None

    if not asyncio.run(work()):
        raise NotFound(f"{name} was not drained in {run}")
    click.echo(f"{name} may hold a rank again")
