"""`holdfast launch`, `holdfast status`, `holdfast nodes`."""

import asyncio
import json
import os
import re
import secrets
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from holdfast import events, ledger
from holdfast.errors import Mistake, NotFound
from holdfast.launch import agent, health
from holdfast.launch.crew import Settings
from holdfast.launch.hang import Learnt, Limits
from holdfast.launch.identity import identify
from holdfast.launch.logs import Logs, parse_streams
from holdfast.launch.spec import Kind, Spec
from holdfast.ledger.records import put, update
from holdfast.ledger.runtime import LiveRuntime
from holdfast.ledger.types import Delete
from holdfast.rendezvous.decide import restart
from holdfast.rendezvous.overview import lines, look
from holdfast.rendezvous.records import Cause, Cycle, Drain, Keys, Rules
from holdfast.timeouts import DEFAULTS

__all__ = ["launch", "nodes", "status"]

_RANGE = re.compile(r"(\d+)(?::(\d+))?")


def _state_dir() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "holdfast"


def _default_ledger() -> str:
    return f"sqlite:///{_state_dir() / 'ledger.db'}"


def _ledger_option(command: click.decorators.FC) -> click.decorators.FC:
    return click.option(
        "--ledger",
        "url",
        envvar="HOLDFAST_LEDGER",
        default=None,
        help="Where the run's records are: sqlite:///file (one machine) or etcd://host:port,… "
        "[default: a file in your state folder]",
    )(command)


def _open_ledger_url(url: str | None) -> str:
    """The URL to use, made independent of the folder we are in."""
    if url is None:
        _state_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
        url = _default_ledger()
    return url


class _TorchFlags(click.Command):
    """torchrun takes --nproc_per_node as well as --nproc-per-node; so do we."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        def dashed(arg: str) -> str:
            if not arg.startswith("--"):
                return arg
            flag, equals, value = arg.partition("=")
            return flag.replace("_", "-") + equals + value

        own: list[str] = []
        rest = list(args)
        valued = {
            name
            for param in self.params
            if isinstance(param, click.Option) and not param.is_flag
            for name in param.opts
        }
        while rest and rest[0].startswith("-") and rest[0] != "--":
            flag = dashed(rest.pop(0))
            own.append(flag)
            if flag in valued and rest:
                own.append(rest.pop(0))
        return super().parse_args(ctx, own + rest)


@click.command(cls=_TorchFlags, context_settings={"allow_interspersed_args": False})
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
@click.option("--lease", default=DEFAULTS.node_lease_s, show_default=True, help="Seconds.")
@click.option("--grace", default=10.0, show_default=True, help="From SIGTERM to SIGKILL: s.")
@click.option("--hang-after", type=float, help="A rank that beats no more for so long hangs: s.")
@click.option("--learn-limits", is_flag=True, help="Learn how long is too long from the run.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Where logs go.")
@click.option("-r", "--redirects", default="0", help="Streams to files only: 0, 1, 2, 3, 0:1,1:3.")
@click.option("-t", "--tee", default="3", help="Streams to files and the terminal.")
@click.option("-m", "--module", is_flag=True, help="ENTRY is a module, as with python -m.")
@click.option("--no-python", is_flag=True, help="ENTRY is a program.")
@click.option("--no-warm", is_flag=True, help="Start every worker from nothing.")
@click.option("--dry-run", is_flag=True, help="Print what was resolved, and end.")
def launch(entry: str, args: tuple[str, ...], **given: object) -> None:
    """Run ENTRY with ARGS on several nodes; replace what dies; end together.

    \b
    One machine:      holdfast launch --nproc-per-node 4 train.py
    Several nodes:    holdfast launch --run r1 --ledger etcd://a:2379 --nnodes 3:4 --spares 1 \\
                          --nproc-per-node 8 train.py       (on every node)
    Slurm:            srun holdfast launch --ledger etcd://a:2379 --nnodes 4 train.py

    Takes torchrun's flags and sets torchrun's environment. Exit codes: 0 the run succeeded (spares
    and late comers too), 1 it failed, 2 bad call, 3 the ledger was away, 10 this node is
    unhealthy, 130/143 this node was asked to leave.
    """
    plan = _plan(entry, args, given)
    if given["dry_run"]:
        click.echo(_describe(plan))
        return
    folder = plan.logs.folder / plan.settings.run / "events"
    folder.mkdir(parents=True, exist_ok=True)
    events.configure(folder / f"{plan.settings.node}.jsonl", process=plan.settings.node[:100])
    code = asyncio.run(agent.run(plan))
    raise click.exceptions.Exit(code)


def _plan(entry: str, args: tuple[str, ...], given: dict[str, object]) -> agent.Plan:
    """Everything an agent needs, from the flags and the environment."""
    if given["module"] and given["no_python"]:
        raise Mistake("-m and --no-python exclude each other: a program is not a module")
    kind: Kind = "module" if given["module"] else "program" if given["no_python"] else "script"
    minimum, maximum = _nnodes(str(given["nnodes"]))
    identity = identify(
        os.environ,
        hostname=socket.gethostname(),
        token=secrets.token_hex(3),
        name=_text(given["node_name"]),
        infra_rank=given["infra_rank"],  # type: ignore[arg-type]
        domain=_text(given["domain"]),
        run=_text(given["run_name"]),
    )
    run = identity.run
    if not run:
        if maximum > 1:
            raise Mistake(
                "several nodes find each other by the run's name: give every node the same "
                "--run NAME (Slurm and Kubernetes jobs have one by themselves)"
            )
        run = f"run-{secrets.token_hex(4)}"
    url = _open_ledger_url(_text(given["url"]))
    rules = Rules(
        minimum=minimum,
        maximum=maximum,
        spares=_int(given["spares"]),
        segment=_int(given["segment"]),
        last_call_s=_float(given["last_call"]),
        join_s=_float(given["join_timeout"]),
        stop_s=_float(given["grace"]) + 20.0,
        max_restarts=_int(given["max_restarts"]),
        restart_window_s=_float(given["restart_window"]),
    )
    rules.check()
    address = _text(given["local_addr"]) or _address(url)
    log_dir = given["log_dir"]
    folder = log_dir if isinstance(log_dir, Path) else _state_dir() / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    hang_after = given["hang_after"]
    settings = Settings(
        run=run,
        node=identity.name,
        address=address,
        ledger_url=url,
        max_restarts=rules.max_restarts,
        lease_s=_float(given["lease"]),
        grace_s=_float(given["grace"]),
        limits=Limits(
            beat_s=hang_after if isinstance(hang_after, float) else None,
            learnt=Learnt() if given["learn_limits"] else None,
        ),
        checks={**health.built_in(address, folder), **health.load()},
    )
    return agent.Plan(
        spec=Spec(
            entry=entry,
            kind=kind,
            args=args,
            slots=_slots(str(given["nproc_per_node"])),
            env=dict(os.environ),
        ),
        settings=settings,
        identity=identity,
        rules=rules,
        logs=Logs(
            folder=folder,
            redirects=parse_streams(str(given["redirects"])),
            tee=parse_streams(str(given["tee"])),
        ),
        warm=not given["no_warm"],
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def _nnodes(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise Mistake(f"--nnodes {text!r}: write N or MIN:MAX")
    return int(match[1]), int(match[2] or match[1])


def _slots(text: str) -> int:
    if text.isdecimal():
        return int(text)
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpus = len(os.sched_getaffinity(0))
    if text == "gpu" and not gpus:
        raise Mistake("--nproc-per-node gpu: this node has no GPU")
    found = {"gpu": gpus, "cpu": cpus, "auto": gpus or cpus}.get(text)
    if found is None:
        raise Mistake(f"--nproc-per-node {text!r}: write a number, gpu, cpu or auto")
    return found


def _address(url: str) -> str:
    """The address from which this node reaches the ledger; loopback when that is here."""
    if not url.startswith("etcd://"):
        return "127.0.0.1"
    first = urlsplit(url.split(",", maxsplit=1)[0])
    try:
        kind, *_, place = socket.getaddrinfo(first.hostname, first.port or 2379)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(place)  # sends nothing: asks for the route
            return str(sock.getsockname()[0])
    except OSError as error:
        raise Mistake(
            f"no way to the ledger at {first.hostname}: {error}; or give --local-addr"
        ) from None


def _describe(plan: agent.Plan) -> str:
    found = {
        "run": plan.settings.run,
        "node": plan.settings.node,
        "infra_rank": plan.identity.infra_rank,
        "domain": plan.identity.domain,
        "address": plan.settings.address,
        "ledger": ledger.without_password(plan.settings.ledger_url),
        "workers": plan.spec.slots,
        "entry": plan.spec.entry,
        "kind": plan.spec.kind,
        "args": list(plan.spec.args),
        "rules": {name: getattr(plan.rules, name) for name in plan.rules.__struct_fields__},
        "lease_s": plan.settings.lease_s,
        "grace_s": plan.settings.grace_s,
        "logs": str(plan.logs.folder),
        "warm": plan.warm,
    }
    return json.dumps(found, indent=2)


@click.command()
@click.argument("run")
@_ledger_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--watch", "follow", is_flag=True, help="Show it again whenever it changes.")
def status(run: str, url: str | None, as_json: bool, follow: bool) -> None:
    """Show a run's cycle, its members, spares and last failures."""
    asyncio.run(_status(run, _open_ledger_url(url), as_json=as_json, again=follow))


async def _status(run: str, url: str, *, as_json: bool, again: bool) -> None:
    async with ledger.open(url) as opened:
        view = await look(opened, run)
        click.echo(json.dumps(view.as_json()) if as_json else "\n".join(lines(view)))
        if not again:
            return
        async with opened.watch(Keys(run).root, start=view.revision + 1) as watch:
            async for _ in watch:
                view = await look(opened, run)
                text = json.dumps(view.as_json()) if as_json else "\n".join(["", *lines(view)])
                click.echo(text)
                sys.stdout.flush()
                if view.cycle.final:
                    return


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
    asyncio.run(_drain(name, run, _open_ledger_url(url), reason, now=now))


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
            await _next_cycle(LiveRuntime(opened), keys, name, reason)
    click.echo(f"{name} holds no rank from the next cycle on")


async def _next_cycle(runtime: LiveRuntime, keys: Keys, name: str, reason: str) -> None:
    cause = Cause(kind="drained", node=name, detail=reason)

    def decide(cycle: Cycle | None) -> Cycle:
        assert cycle is not None
        return restart(cycle, cause) if cycle.state == "running" else cycle

    await update(runtime, keys.cycle, Cycle, decide)


@nodes.command()
@click.argument("name")
@click.option("--run", required=True, help="The run's name.")
@_ledger_option
def undrain(name: str, run: str, url: str | None) -> None:
    """Let NAME hold a rank again."""

    async def work() -> bool:
        async with ledger.open(_open_ledger_url(url)) as opened:
            txn = await opened.txn([], [Delete(Keys(run).drain(name))])
            return txn.results[0] is not None

    if not asyncio.run(work()):
        raise NotFound(f"{name} was not drained in {run}")
    click.echo(f"{name} may hold a rank again")
