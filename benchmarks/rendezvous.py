"""The figures of rendezvous and launch, beside torch elastic, NVRx and torchft, in one run.

`python -m benchmarks.rendezvous [--quick] [--peers .venv-peers-rdzv] [PART ...]`. Parts: ranks,
messages, recover, records. Peers have an environment of their own (`scripts/setup-peers
rendezvous`); without it their columns stay empty. About 12 minutes; `--quick` takes two, and shows
only that everything runs.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.rendezvous_join import (
    PROCESSES,
    ROOT,
    Contender,
    crowds,
    meet,
    messages,
    middle,
)
from benchmarks.rendezvous_records import at, read_all
from benchmarks.rendezvous_recover import (
    Ending,
    Holdfast,
    Launcher,
    Nvrx,
    Plugin,
    Recovery,
    Session,
    Torchrun,
    session,
)
from holdfast.servers import EtcdServer

PARTS = ("ranks", "messages", "recover", "records")
PARTICIPANTS = 10_000
C10D, NVRX, LIGHTHOUSE = "torch c10d", "NVRx 0.4.1", "torchft lighthouse"
SQLITE, ETCD = "Holdfast, sqlite", "Holdfast, etcd"
NEVER = float("inf")
_PEERS = """\
import importlib.metadata as m
print(", ".join(f"{n} {m.version(n)}" for n in ("torch", "nvidia-resiliency-ext", "torchft")))
"""


class Plan:
    """How much is measured."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.parts = given.parts or PARTS
        self.sizes = (8, 64) if given.quick else (8, 64, 256, 1000)
        self.turns = 1 if given.quick else 5
        self.sessions = 1 if given.quick else 3
        self.limit_s = 20.0 if given.quick else 60.0
        python = Path(given.peers) / "bin" / "python"
        self.peers = str(python.absolute()) if python.exists() else ""


def row(*cells: str) -> None:
    """One line of a table."""
    print("| " + " | ".join(cells) + " |", flush=True)


def table(*heads: str) -> None:
    """A table's head."""
    print()
    row(*heads)
    row(*("---" for _ in heads))


def seconds(times: Sequence[float]) -> str:
    """The median, and from where to where."""
    if not times or middle(times) == NEVER:
        return "never"
    most = "never" if max(times) == NEVER else f"{max(times):.3f}"
    return f"{middle(times):.3f} s ({min(times):.3f} to {most})"


def ratio(
    ours: Sequence[float] | None, theirs: Sequence[float] | None, limit_s: float = NEVER
) -> str:
    """That of the medians; None: not tried. Whoever passed the limit took at least that long."""
    if not ours or theirs is None or middle(ours) == NEVER:
        return "–"
    if middle(theirs) == NEVER:
        return f"< {middle(ours) / limit_s:.3f}" if limit_s < NEVER else "theirs: never"
    return f"{middle(ours) / middle(theirs):.2f}"


@contextlib.contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """Ledgers: on sqlite, and on one etcd member."""
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        EtcdServer(Path(folder)) as etcd,
    ):
        host, port = etcd.endpoint
        yield f"sqlite:///{folder}/ledger.db", f"etcd://{host}:{port}?timeout=30"


# ---- until everybody knows its rank ------------------------------------------------------------


def ranks(plan: Plan, folder: Path) -> None:
    """Times to meet, and messages per node."""
    with servers() as (sqlite, etcd), crowds(plan.peers, folder) as by_kind:
        ours = [
            Contender(SQLITE, "sqlite", sys.executable, sqlite, lease_s=5.0),
            # Eight processes that do the work of a thousand nodes renew late.
            Contender(ETCD, "etcd", sys.executable, etcd, lease_s=30.0),
        ]
        peers = [
            Contender(LIGHTHOUSE, "lighthouse", plan.peers),
            Contender(C10D, "c10d", plan.peers),
            Contender(NVRX, "nvrx", plan.peers),
        ]
        if "ranks" in plan.parts:
            contenders = [*ours, *(peers if plan.peers else ())]
            found = meet(contenders, by_kind, plan.sizes, plan.turns, plan.limit_s)
            _show_ranks(plan, found, [one.name for one in contenders])
        if "messages" in plan.parts:
            names = ", ".join(f"N = {nodes}" for nodes in plan.sizes)
            table(f"calls per node of the ledger, {names}", "median", "most but the closer")
            for one in ours:
                counted = [messages(one, by_kind[True], nodes) for nodes in plan.sizes]
                calls = " / ".join(str(each.total() - each["pushed"]) for each, _ in counted)
                heard = " / ".join(str(each["pushed"]) for each, _ in counted)
                most = " / ".join(str(top) for _, top in counted)
                row(one.name, f"{calls}, and hears {heard}", most)


def _show_ranks(
    plan: Plan, found: dict[str, dict[int, list[float]]], names: Sequence[str]
) -> None:
    heads = [f"N = {nodes}" for nodes in plan.sizes]
    table(f"until all N know their ranks, {PROCESSES} processes, median of {plan.turns}", *heads)
    for name in names:
        row(name, *(_cell(found[name], nodes) for nodes in plan.sizes))
    table("ratio of medians", *heads, "aim")
    for ours in (SQLITE, ETCD):
        for theirs, aim in ((NVRX, "≤ 0.3"), (LIGHTHOUSE, "≤ 1 at 256, 1000"), (C10D, "")):
            if theirs not in found:
                continue
            cells = (
                ratio(found[ours].get(nodes), found[theirs].get(nodes), plan.limit_s)
                for nodes in plan.sizes
            )
            row(f"{ours} to {theirs}", *cells, aim)


def _cell(times: dict[int, list[float]], nodes: int) -> str:
    return seconds(times[nodes]) if nodes in times else "not tried after “never”"


# ---- recovery ----------------------------------------------------------------------------------


def launchers(plan: Plan) -> list[Callable[[Path], Launcher]]:
    """Whoever is there."""
    makers: list[Callable[[Path], Launcher]] = [Holdfast]
    if plan.peers:
        makers += [lambda folder: Torchrun(folder, plan.peers)]
        makers += [lambda folder: Nvrx(folder, plan.peers)]
    if any(
        one.name == "holdfast"
        for one in importlib.metadata.entry_points(group="torchrun.handlers")
    ):
        makers += [lambda folder: Plugin(folder, sys.executable)]
    return makers


def recover(plan: Plan, folder: Path) -> None:
    """Kills and ends."""
    found: dict[str, list[Session]] = {}
    for turn in range(plan.sessions):
        for number, make in enumerate(launchers(plan)):
            launcher = make(folder / f"session-{turn}-{number}")
            shown = session(launcher, 1.5 * plan.limit_s)
            if shown.trouble:
                print(f"<!-- {launcher.name}: {shown.trouble} -->", flush=True)
            found.setdefault(launcher.name, []).append(shown)
    kills: tuple[tuple[str, str, Callable[[Session], Recovery | None]], ...] = (
        ("kill -9 of a worker", "≤ 0.25", lambda one: one.worker),
        ("kill -9 of a node, one spare", "≤ 0.3", lambda one: one.node),
    )
    table("sessions", "went through all of it", "what kept the others from it")
    for name, sessions in found.items():
        well = sum(not one.trouble for one in sessions)
        row(
            name,
            f"{well} of {len(sessions)}",
            "; ".join(filter(None, (s.trouble for s in sessions))),
        )
    for what, aim, pick in kills:
        _show_recovery(what, aim, {name: _all(pick, all) for name, all in found.items()})
    table("normal end with a spare", "last success to last exit", "exit codes", "aim")
    for name, sessions in found.items():
        endings = [one.ending or Ending(NEVER, ()) for one in sessions]
        codes = "; ".join(sorted({str(one.codes) for one in endings if one.codes}))
        row(name, seconds([one.took for one in endings]), codes, "≤ 1 s, all 0")


def _all(
    pick: Callable[[Session], Recovery | None], sessions: Sequence[Session]
) -> list[Recovery]:
    return [pick(one) or Recovery(NEVER, NEVER, NEVER) for one in sessions]


def _show_recovery(what: str, aim: str, found: dict[str, list[Recovery]]) -> None:
    table(what, "their code runs", "process group", "first all-reduce", "ratio", "aim")
    peers = [name for name in (Torchrun.name, Nvrx.name) if name in found]
    best = min((_reduced(found[name]) for name in peers), key=middle, default=[])
    for name, turns in found.items():
        cells = [_middle([one[index] for one in turns]) for index in range(2)]
        times = _reduced(turns)
        ours = name not in peers
        against = ratio(times, best) if ours and best else ""
        row(name, *cells, seconds(times), against, aim if name == Holdfast.name else "")


def _reduced(turns: Sequence[Recovery]) -> list[float]:
    return [one.reduced for one in turns]


def _middle(times: Sequence[float]) -> str:
    return "never" if middle(times) == NEVER else f"{middle(times):.2f} s"


# ---- reading everybody -------------------------------------------------------------------------


def records(plan: Plan) -> None:
    """One reading of all participants."""
    turns = 3 if plan.turns == 1 else 11
    with servers() as (sqlite, etcd):
        urls = {SQLITE: at(Path(sqlite.removeprefix("sqlite:///")).parent), ETCD: etcd}
        found = asyncio.run(read_all(urls, PARTICIPANTS, turns))
    table(
        f"reading {PARTICIPANTS:,} participants, median of {turns}",
        "time",
        "to TCPStore, libuv",
        "to TCPStore, legacy",
        "aim",
    )
    for name, times in found.items():
        ours = name in urls
        stores = ("TCPStore, libuv", "TCPStore, legacy")
        cells = [ratio(times, found[store]) if ours else "" for store in stores]
        shown = (
            f"{1e3 * statistics.median(times):.0f} ms "
            f"({1e3 * min(times):.0f} to {1e3 * max(times):.0f})"
        )
        row(name, shown, *cells, "≤ 0.3" if ours else "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rendezvous")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="only show that it runs")
    parser.add_argument(
        "--peers", default=str(ROOT / ".venv-peers-rdzv"), help="their environment"
    )
    plan = Plan(parser.parse_args())
    versions = "no peers: run scripts/setup-peers rendezvous"
    if plan.peers:
        told = subprocess.run(
            [plan.peers, "-c", _PEERS], capture_output=True, text=True, check=True
        )
        versions = f"peers: {told.stdout.strip()}"
    print(
        f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}, "
        f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        if {"ranks", "messages"} & set(plan.parts):
            ranks(plan, Path(folder))
        if "recover" in plan.parts:
            recover(plan, Path(folder))
        if "records" in plan.parts:
            records(plan)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
