"""A rendezvous for people: who holds which rank, who waits, and what went wrong."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.errors import NotFound
from holdfast.ledger.base import Ledger
from holdfast.rendezvous.board import Board
from holdfast.rendezvous.records import Cycle, Keys
from holdfast.text import age, clean, plural, table

__all__ = ["Overview", "lines", "look", "parked_line", "say", "used_name"]

_STATES = ("active", "finished", "spare", "parked", "ready", "stopping", "drained", "gone")


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it stands."""

    name: str
    rank: int | None
    state: str
    """active, finished, spare, parked, stopping, drained or gone"""
    address: str = ""
    slots: int = 0
    domain: str = ""
    release: str = ""
    parked: str = ""
    """Why it comes after all other nodes; empty: it does not."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A run's membership at one revision."""

    run: str
    cycle: Cycle
    nodes: tuple[NodeView, ...]
    revision: int

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


async def look(ledger: Ledger, run: str) -> Overview:
    """Read a run's membership, at one revision."""
    keys = Keys(run)
    found = await ledger.range(keys.root)
    board = Board(keys, found.entries)
    view = board.view()
    if view is None:
        raise NotFound(f"there is no run {run!r} in this ledger", key=keys.cycle)
    cycle = view.cycle
    seen: dict[str, NodeView] = {}
    for rank, member in enumerate(cycle.members):
        there = view.nodes.get(member.name)
        alive = there is not None and there[0] == member.life
        state = "gone"
        if alive and there is not None:
            state = "active" if cycle.state == "running" else _waiting(there[1].cycle, cycle)
        if rank in view.ends and cycle.state != "open":
            state = "finished"
        seen[member.name] = NodeView(
            name=member.name,
            rank=rank,
            state=state,
            address=member.address,
            slots=member.slots,
            domain=member.domain,
            release=there[1].release if there else "",
            parked=_parked(cycle, member.name, member.life) if alive else "",
        )
    for name, (life, node) in sorted(view.nodes.items()):
        if name in seen and seen[name].state != "gone":
            continue
        parked = _parked(cycle, name, life)
        state = "parked" if parked else _waiting(node.cycle, cycle)
        seen[f"{name}/{life}"] = NodeView(
            name=name,
            rank=None,
            state="drained" if name in view.drained else state,
            address=node.address,
            slots=node.slots,
            domain=node.domain,
            release=node.release,
            parked=parked,
        )
    return Overview(run=run, cycle=cycle, nodes=tuple(seen.values()), revision=found.revision)


def say(text: str) -> None:
    """Tell the user of this node, whatever logging is set to."""
    with contextlib.suppress(OSError, ValueError):  # a terminal that has gone away ends no node
        sys.stderr.write(f"holdfast: {text}\n")
        sys.stderr.flush()


def used_name(run: str, cycle: Cycle, flag: str) -> str:
    """What a node hears that was started under the name of a run that had ended before."""
    when = ""
    if cycle.ended_at:
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(cycle.ended_at))
        when = f" {age(time.time() - cycle.ended_at)} ago ({at})"
    why = f". Why it failed: {cycle.cause}" if cycle.state == "failed" else ""
    return (
        f"NOTHING WAS STARTED: the run {run!r} {cycle.state}{when} after "
        f"{plural(cycle.number, 'cycle')}, and a run that has ended stays ended. To run again, "
        f"give another name: {flag} NAME{why}"
    )


def parked_line(reason: str) -> str:
    """What a node hears that comes after all others from now on."""
    return f"this node comes after all spares from now on, until it is started again: {reason}"


def _parked(cycle: Cycle, name: str, life: int) -> str:
    mark = cycle.mark(name, life)
    return "" if mark is None else mark.reason or mark.kind


def _waiting(ready_for: int, cycle: Cycle) -> str:
    if ready_for != cycle.number:
        return "stopping"
    return "ready" if cycle.state == "open" else "spare"


def lines(view: Overview) -> list[str]:
    """The overview as text."""
    cycle = view.cycle
    now = time.time()
    counts: Mapping[str, int] = {
        state: sum(node.state == state for node in view.nodes) for state in _STATES
    }
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    rules = cycle.rules
    budget = f"{len(cycle.restarts)} of {rules.max_restarts} restarts used"
    out = [
        f"{clean(view.run)}: cycle {cycle.number} {cycle.state}; {told or 'nobody is there'}",
        f"{rules.minimum} to {rules.maximum} nodes, {plural(rules.spares, 'spare')}; {budget}",
    ]
    if view.nodes:
        out.append("")
        rows = [
            (
                "" if node.rank is None else str(node.rank),
                clean(node.name),
                node.state,
                clean(node.address),
                str(node.slots),
                clean(node.domain),
            )
            for node in view.nodes
        ]
        heads = ("RANK", "NODE", "STATE", "ADDRESS", "WORKERS", "DOMAIN")
        out += table(heads, rows, right="r   r")
    parked = [node for node in view.nodes if node.parked]
    if parked:
        out += ["", "behind all other nodes, until they are started again:"]
        out += [f"  {clean(node.name)}: {clean(node.parked)}" for node in parked]
    if cycle.history:
        out += ["", "last failures:"]
        out += [
            f"  cycle {cause.cycle}, {age(max(0.0, now - cause.at))} ago: {clean(str(cause))}"
            for cause in cycle.history[-5:]
        ]
    return out
