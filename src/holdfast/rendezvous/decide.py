"""What is to become of a cycle: the rules of a rendezvous as one pure function.

`decide` looks at everything below a run's rendezvous at one revision and says what the cycle's
record should be next, or how long to wait. Whoever looks (the closer, for speed; anybody may)
commits that under compare-and-set on the record it read, so it does not matter how many look, or
how late.

- A node counts for a cycle only if its record names that cycle.
- A running cycle ends when a member is no longer there (its record went with its lease, or
  belongs to another life of the node), unless that member had finished; when a member asked for
  it (`restart`); or when more nodes are there than it has, and the rules want them.
- It succeeds when every member has finished. That is recorded before anybody leaves.
- The run fails when the restarts are used up, or when too few nodes come.
- A run that has grown before grows again only when its cycle has lasted for a while, longer each
  time: a node that comes and goes, or answers too late, cannot keep the others from their work.
"""

from collections.abc import Mapping, Set

import msgspec

from holdfast.rendezvous.ranks import Ready, Seating, assign
from holdfast.rendezvous.records import Cause, Cycle, Node, Rules

__all__ = ["Clock", "View", "Wait", "begin", "decide", "restart", "seating"]

_HISTORY_MAX = 20
_DETAIL_CHARS = 2000
_GROW_AGAIN_S = 10.0
_GROW_AGAIN_MAX_S = 1280.0


class View(msgspec.Struct, frozen=True):
    """A rendezvous at one revision."""

    cycle: Cycle
    nodes: Mapping[str, tuple[int, Node]]
    """The living nodes: life and record."""
    ends: Set[int] = frozenset()
    """Ranks that have finished this cycle."""
    drained: Set[str] = frozenset()


class Clock(msgspec.Struct, frozen=True):
    """How long the closer, by its own clock, has seen it so."""

    open_s: float = 0.0
    """since the cycle is open"""
    enough_s: float = 0.0
    """since enough nodes are ready"""
    unix_s: float = 0.0
    """The time of day, for people and for the budget of restarts."""


class Wait(msgspec.Struct, frozen=True):
    """Nothing to do before something changes or `seconds` have passed (None: no limit)."""

    seconds: float | None = None
    missing: str = ""


def begin(rules: Rules) -> Cycle:
    """The record of a run that has just begun."""
    return Cycle(number=1, state="open", rules=rules)


def seating(view: View) -> Seating | None:
    """The membership that is possible now."""
    ready = [
        Ready(name, life, node)
        for name, (life, node) in view.nodes.items()
        if node.cycle == view.cycle.number and name not in view.drained
    ]
    return assign(ready, view.cycle.members, view.cycle.rules)


def decide(view: View, clock: Clock) -> Cycle | Wait:
    """The cycle's next record, or how long to wait."""
    if view.cycle.state == "open":
        return _decide_open(view, clock)
    if view.cycle.state == "running":
        return _decide_running(view, clock)
    return Wait()


def restart(cycle: Cycle, cause: Cause) -> Cycle:
    """The record after a cycle was ended for `cause`: the next cycle, or the end of the run."""
    if cycle.final:
        return cycle
    detail = cause.detail[:_DETAIL_CHARS].encode(errors="replace").decode()  # it may be anything
    cause = msgspec.structs.replace(cause, cycle=cycle.number, detail=detail)
    history = (*cycle.history, cause)[-_HISTORY_MAX:]
    restarts = cycle.restarts
    if cause.kind in ("failed", "hung"):
        window_s = cycle.rules.restart_window_s
        recent = [at for at in restarts if not window_s or cause.at - at < window_s]
        if len(recent) >= cycle.rules.max_restarts:
            return _replace(cycle, state="failed", cause=cause, history=history)
        restarts = (*recent, cause.at)
    return Cycle(
        number=cycle.number + 1,
        state="open",
        rules=cycle.rules,
        members=cycle.members,
        cause=cause,
        history=history,
        restarts=restarts,
    )


def _replace(cycle: Cycle, **changes: object) -> Cycle:
    changed: Cycle = msgspec.structs.replace(cycle, **changes)
    return changed


def _decide_open(view: View, clock: Clock) -> Cycle | Wait:
    cycle, rules = view.cycle, view.cycle.rules
    possible = seating(view)
    if possible is None:
        ready = sum(
            node.cycle == cycle.number and name not in view.drained
            for name, (_, node) in view.nodes.items()
        )
        missing = f"{ready} of at least {rules.lowest} nodes are ready"
        if ready >= rules.lowest:
            missing += f", too few of them in segments of {rules.segment} of one domain"
        if clock.open_s < rules.join_s:
            return Wait(rules.join_s - clock.open_s, missing)
        cause = Cause(
            kind="lost", detail=f"{missing} after {rules.join_s:g} s", cycle=cycle.number
        )
        cause = msgspec.structs.replace(cause, at=clock.unix_s)
        return _replace(cycle, state="failed", cause=cause)
    wait_s = _wait_s(view, clock, possible)
    if wait_s > 0:
        return Wait(wait_s, "more nodes may come")
    return _replace(cycle, state="running", members=possible.members)


def _wait_s(view: View, clock: Clock, possible: Seating) -> float:
    """How much longer an open cycle that could be closed waits for others."""
    cycle, rules = view.cycle, view.cycle.rules
    if not cycle.members:  # nobody knows yet who will come
        everybody = len(possible.members) + len(possible.spares) >= rules.maximum
        return 0.0 if everybody else rules.last_call_s - clock.enough_s
    full = len(possible.members) >= rules.highest
    held = {member.name for member in cycle.members}
    wait_s = 0.0
    for name, (_, node) in view.nodes.items():
        if node.cycle == cycle.number or name in view.drained or (full and name not in held):
            continue
        patience_s = rules.stop_s if node.heard == cycle.number else rules.settle_s
        wait_s = max(wait_s, patience_s - clock.open_s)
    return wait_s


def _decide_running(view: View, clock: Clock) -> Cycle | Wait:
    cycle = view.cycle
    if view.ends >= set(range(len(cycle.members))):
        return _replace(cycle, state="succeeded", succeeded_at=clock.unix_s)
    for rank, member in enumerate(cycle.members):
        there = view.nodes.get(member.name)
        if rank not in view.ends and (there is None or there[0] != member.life):
            detail = f"rank {rank} is no longer there" + (", it came back" if there else "")
            return restart(
                cycle, Cause(kind="lost", node=member.name, detail=detail, at=clock.unix_s)
            )
    possible = seating(view) if not view.ends else None
    if possible is not None and len(possible.members) > len(cycle.members):
        if (wait_s := _calm_s(cycle) - clock.open_s) > 0:
            return Wait(wait_s)
        detail = f"from {len(cycle.members)} to {len(possible.members)} nodes"
        return restart(cycle, Cause(kind="grew", detail=detail, at=clock.unix_s))
    return Wait()


def _calm_s(cycle: Cycle) -> float:
    """How long a cycle lasts before it may end for the sake of more nodes."""
    times = sum(cause.kind == "grew" for cause in cycle.history)
    return min(_GROW_AGAIN_S * 2 ** (times - 1), _GROW_AGAIN_MAX_S) if times else 0.0
