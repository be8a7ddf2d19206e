"""The process of a trainer: what the control plane starts, one per incarnation.

    HOLDFAST_LEDGER=sqlite:///run.db HOLDFAST_RUN=r HOLDFAST_JOB=acme/one HOLDFAST_EPOCH=1 \
        PORT=8001 python -m holdfast.trainer --folder trainers --model NAME=DIRECTORY

`holdfast serve --trainer holdfast` does this. Under `holdfast launch` (or torchrun) there are
several ranks: rank 0 serves, all of them compute. It ends with code 5 when somebody newer has
taken over, and with code 1 when something went wrong: whoever is started next goes on.
"""

import asyncio
import contextlib
import os
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import msgspec
import xxhash

from holdfast import cycle, events, ledger, transfer
from holdfast.errors import HoldfastError, Mistake
from holdfast.files import private_folder
from holdfast.jobs.fence import JOB_RUN, Fence, Incarnation
from holdfast.ledger.runtime import LiveRuntime
from holdfast.proc import die_with_parent, preload
from holdfast.proc.forkserver import turn_into
from holdfast.rendezvous.address import LOOPBACK
from holdfast.trainer import nodes as nodes_of

if TYPE_CHECKING:
    from holdfast.trainer.compute import TorchCompute
    from holdfast.trainer.machine import Machine
    from holdfast.trainer.ranks import Ranks

__all__ = ["main"]

_NAME_CHARS = 100
TINY = "holdfast/tiny"
"""The model that is there without any being given."""


class Spec(msgspec.Struct, frozen=True):
    """What a job may ask of its trainer, below `holdfast` in its specification."""

    policy: dict[str, object] = msgspec.field(default_factory=dict)


@dataclass(frozen=True)
class Computing:
    """What is computed with, on this rank."""

    models: dict[str, Path]
    device: str
    threads: int
    exact: bool
    fsdp: bool

    def begin(self, run: str) -> "tuple[Machine, Ranks]":
        """Load torch, and meet the other ranks."""
        from holdfast.engine.determinism import settle
        from holdfast.trainer.machine import Machine
        from holdfast.trainer.ranks import from_env

        settle(self.threads)
        if self.fsdp:
            from holdfast.trainer.sharded import ShardedMachine, meet

            ranks, device = meet(self.device)
            return ShardedMachine(self.models, run, ranks, device=device), ranks
        ranks = from_env()
        return Machine(self.models, run, ranks, device=self.device, exact=self.exact), ranks


@click.command()
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    envvar="HOLDFAST_FOLDER",
    required=True,
    help="Where journal, checkpoints and saved weights lie; the same for every incarnation.",
)
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=DIRECTORY",
    help=f"A Hugging Face model directory that may be trained [default: {TINY}, made here].",
)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of torch per rank.")
@click.option("--fast", is_flag=True, help="Sum gradients in any order: faster, other bits.")
@click.option(
    "--ranks", default=1, show_default=True, help="Processes that compute, under holdfast launch."
)
@click.option(
    "--fsdp", is_flag=True, help="Every rank holds a part of the weights: for what does not fit."
)
@click.option(
    "--spares", default=0, show_default=True, help="Nodes that wait to take a dead one's rank."
)
@click.option(
    "--store", default="", help="Where batches by reference are fetched from: shm://NAME, …"
)
@click.option("--host", envvar="HOST", default="127.0.0.1", show_default=True)
@click.option("--port", envvar="PORT", type=int, required=True)
def main(
    folder: Path,
    models: tuple[str, ...],
    device: str,
    threads: int,
    fast: bool,
    ranks: int,
    fsdp: bool,
    spares: int,
    store: str,
    host: str,
    port: int,
) -> None:
    """Be one incarnation of a job's trainer."""
    is_worker = bool(cycle.number())
    if not is_worker:
        die_with_parent(os.getppid())
    try:
        if fsdp and max(ranks, int(os.environ.get("WORLD_SIZE", "1"))) < 2:
            raise Mistake("--fsdp spreads models over ranks: give --ranks 2 or more with it")
        if (ranks > 1 or spares) and not is_worker:
            _launch(ranks, spares, folder, fsdp=fsdp)
        computing = Computing(_models(models, folder), device, threads, not fast, fsdp)
        _serve(folder, computing, store, host, port)
    except HoldfastError as error:
        click.echo(f"holdfast: {type(error).__name__}: {error}", err=True)
        sys.exit(error.exit_code)


def _launch(ranks: int, spares: int, folder: Path, *, fsdp: bool) -> NoReturn:
    """Become the agent of several ranks, or, with spares, who looks after one agent each.

    The ranks are this program again, one process each.

    An agent's records are named by the epoch: nothing of an older incarnation counts. How
    often ranks may fail is not its business: the control plane has a budget.
    """
    who = Incarnation.from_env()
    os.environ[JOB_RUN] = who.run
    name = launch_name(who)
    logs = folder / who.account / who.job / "launch"
    given = ["--run", name, "--grace", "3", "--log-dir", str(logs)]
    given += ["--max-restarts", "1000", "--last-call", "0", "--local-addr", LOOPBACK]
    modules = (*preload.RANK, "holdfast.trainer.sharded") if fsdp else preload.RANK
    given += [word for module in modules for word in ("--preload", module)]
    program = ["-m", "holdfast.trainer", *sys.argv[1:]]
    start = [sys.executable, "-m", "holdfast", "launch", *given]
    if not spares:
        turn_into([*start, "--nproc-per-node", str(ranks), *program])
    most = ranks + spares
    start += ["--nnodes", f"{ranks}:{most}", "--spares", str(spares), "--lease", "2"]
    nodes = [[*start, "--node-name", f"n{at}", *program] for at in range(most)]
    sys.exit(nodes_of.keep(nodes))


def launch_name(who: Incarnation) -> str:
    """A name of a run for `launch`, which takes 128 characters: a longer one is cut and hashed."""
    name = f"{who.run}.{who.account}.{who.job}"
    if len(name) > _NAME_CHARS:
        name = f"{name[: _NAME_CHARS - 33]}.{xxhash.xxh3_128_hexdigest(name.encode())}"
    return f"{name}.{who.epoch}"


def _models(given: tuple[str, ...], folder: Path) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for one in given:
        name, equals, path = one.partition("=")
        if not equals or not name or not path:
            raise Mistake(f"--model {one!r}: say NAME=DIRECTORY")
        models[name] = Path(path).absolute()
    if not models:
        from holdfast.engine.tiny import make_tiny

        bases = folder / "bases"
        bases.mkdir(parents=True, exist_ok=True)
        models[TINY] = make_tiny(bases / "tiny").absolute()
    return models


def _serve(folder: Path, computing: Computing, store: str, host: str, port: int) -> None:
    who = Incarnation.from_env()
    rank = int(os.environ.get("RANK", "0"))
    log = folder / who.account / who.job / "events"
    private_folder(log)
    life = f"e{who.epoch}-c{cycle.number()}-r{rank}-{os.getpid()}"
    events.configure(log / f"{life}.jsonl", process=f"{who.name} {life}")
    if rank:
        from holdfast.trainer.orders import follow

        follow(*computing.begin(who.run))
        return
    from holdfast.trainer.compute import TorchCompute

    compute = TorchCompute(computing.models, lambda: computing.begin(who.run))
    asyncio.run(_run(who, compute, folder, store, host, port))


async def _run(
    who: Incarnation, compute: "TorchCompute", folder: Path, store: str, host: str, port: int
) -> None:
    from holdfast.trainer.live import Life

    url = os.environ["HOLDFAST_LEDGER"]
    spec = _spec(os.environ.get("HOLDFAST_SPEC", "{}"))
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(ledger.open(url))
        life = Life(
            LiveRuntime(opened, seed=secrets.randbits(64)),
            who,
            compute,
            folder,
            guards=[cycle.guard()] if cycle.number() else [],
            policy=spec.policy,
            cycle=cycle.number(),
            sync=_must_sync(url),
            store=stack.enter_context(transfer.connect(store)) if store else None,
        )
        await life.begin(f"{os.getpid()}-{secrets.token_hex(8)}")
        await life.serve(host, port, lambda app: Fence(app, who))


def _spec(text: str) -> Spec:
    wish = msgspec.json.decode(text).get("holdfast") or {}
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(wish, Spec)
    raise Mistake(f"the field 'holdfast' of the job is not understood: {str(wish)[:200]}")


def _must_sync(url: str) -> bool:
    """Whether the ledger survives a loss of power, and so the journal's files must, too."""
    return not url.startswith("sqlite:") or "sync=full" in url
