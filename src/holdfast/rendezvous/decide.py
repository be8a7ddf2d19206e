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
- A node that keeps the others from their work is *parked*: a spare takes its rank, and it comes
  after all others. That is a node whose workers were the first to fail twice in a row, if a spare
  can take its place; a rank 0 that most of the other members do not reach; and a member that does
  not reach a rank 0 that others do reach. Which node failed first is decided by the ledger's
  order: the first report ends the cycle, all later ones find that it has ended.
- The run fails when the restarts are used up, or when too few nodes come. The failures for which
  a node is parked are not counted: each life of a node is parked at most once for each reason.
- A run that has grown before grows again only when its cycle has lasted for a while, longer each
  time: a node that comes and goes, or answers too late, cannot keep the others from their work.
"""

from collections.abc import Mapping, Set

import msgspec

from holdfast.rendezvous.ranks import UNREACHABLE, Ready, Seating, seat
from holdfast.rendezvous.records import Cause, Cycle, Member, Node, Parked, Rules

__all__ = [
    "Clock",
    "View",
    "Wait",
    "begin",
    "decide",
    "restart",
    "seating",
    "suspect",
    "unreached",
]

ISOLATED = "isolated"
_FAILURES = ("failed", "hung")
_REPORTS_S = 15.0
"""How long after the first member that does not reach rank 0 the others may report it, too."""

_HISTORY_MAX = 20
_DETAIL_CHARS = 2000
_GROW_AGAIN_S = 10.0
_GROW_AGAIN_MAX_S = 1280.0
"""How long a cycle lasts before the run grows once more: doubled each time, up to this."""


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
    unreached_s: float = 0.0
    """since a member has reported that it does not reach rank 0"""
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
    return seat(ready, view.cycle.members, view.cycle.rules, view.cycle.parked)


def unreached(view: View) -> tuple[str, ...]:
    """The members of the running cycle that have reported that they do not reach rank 0."""
    if view.cycle.state != "running":
        return ()
    return tuple(
        member.name
        for member in view.cycle.members[1:]
        if (there := view.nodes.get(member.name)) is not None
        and there[0] == member.life
        and there[1].unreached == view.cycle.number
    )


def suspect(cycle: Cycle, cause: Cause) -> bool:
    """Whether this failure is the second in a row of one node, which is not parked yet."""
    last = next((one for one in reversed(cycle.history) if one.kind in _FAILURES), None)
    member = _member(cycle, cause.node)
    if last is None or last.excused or last.node != cause.node:
        return False
    if member is None or cause.kind not in _FAILURES:
        return False
    mark = cycle.mark(member.name, member.life)
    return mark is None or mark.kind == UNREACHABLE


def decide(view: View, clock: Clock) -> Cycle | Wait:
    """The cycle's next record, or how long to wait."""
    if view.cycle.state == "open":
        return _decide_open(view, clock)
    if view.cycle.state == "running":
        return _decide_running(view, clock)
    return Wait()


def restart(cycle: Cycle, cause: Cause, view: View | None = None) -> Cycle:
    """The record after a cycle was ended for `cause`: the next cycle, or the end of the run.

    `view` is needed where a node may be parked: it shows whether a spare can take its rank.
    """
    if cycle.final:
        return cycle
    detail = cause.detail[:_DETAIL_CHARS].encode(errors="replace").decode()  # it may be anything
    cause = msgspec.structs.replace(cause, cycle=cycle.number, detail=detail)
    history = (*cycle.history, cause)[-_HISTORY_MAX:]
    restarts, parked = cycle.restarts, _park(cycle, cause, view)
    if parked != cycle.parked:
        restarts = _refund(cycle, cause)
    elif cause.kind in (*_FAILURES, UNREACHABLE, ISOLATED):
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
        parked=parked,
    )


def _member(cycle: Cycle, name: str) -> Member | None:
    return next((member for member in cycle.members if member.name == name), None)


def _park(cycle: Cycle, cause: Cause, view: View | None) -> tuple[Parked, ...]:
    """The parked nodes after a cycle ended for `cause`; the same when it parks none."""
    member = _member(cycle, cause.node)
    if member is None:
        return cycle.parked
    mark = cycle.mark(member.name, member.life)
    reason = cause.detail
    if cause.kind == UNREACHABLE:
        parks = mark is None
    elif cause.kind == ISOLATED:
        parks = mark is None or mark.kind == UNREACHABLE
    else:
        parks = view is not None and suspect(cycle, cause) and _replaceable(view, member)
        reason = f"its workers were the first to fail, twice in a row; the last time: {reason}"
    if not parks:
        return cycle.parked
    fresh = Parked(member.name, member.life, cause.kind, reason[:_DETAIL_CHARS])
    return (*(one for one in cycle.parked if one != mark), fresh)


def _replaceable(view: View, member: Member) -> bool:
    """Whether the run keeps its size without this node and without those that are parked."""
    cycle = view.cycle
    ready = [
        Ready(name, life, node)
        for name, (life, node) in view.nodes.items()
        if name != member.name
        and node.cycle == cycle.number
        and name not in view.drained
        and cycle.mark(name, life) is None
    ]
    possible = seat(ready, cycle.members, cycle.rules)
    return possible is not None and len(possible.members) >= len(cycle.members)


def _refund(cycle: Cycle, cause: Cause) -> tuple[float, ...]:
    """The budget without the first failure of a node that is parked for its second."""
    if cause.kind not in _FAILURES:
        return cycle.restarts
    last = next(one for one in reversed(cycle.history) if one.kind in _FAILURES)
    return tuple(at for at in cycle.restarts if at != last.at)


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
    there = {(name, life) for name, (life, _) in view.nodes.items()}
    parked = tuple(one for one in cycle.parked if (one.name, one.life) in there)
    closed = _replace(cycle, state="running", members=possible.members, parked=parked)
    return _excuse(closed, view)


def _excuse(closed: Cycle, view: View) -> Cycle:
    """Take the blame from a node whose peers did not come back: their loss made its workers fail.

    A dead node is missed when its lease ends. The workers of the others fail before.
    """
    cause, number = closed.cause, closed.number
    if cause is None or cause.kind not in _FAILURES:
        return closed
    ready = {(name, life) for name, (life, node) in view.nodes.items() if node.cycle == number}
    peers = [one for one in view.cycle.members if one.name != cause.node]
    if all((peer.name, peer.life) in ready for peer in peers):
        return closed
    excused = msgspec.structs.replace(cause, excused=True)
    return _replace(closed, cause=excused, history=(*closed.history[:-1], excused))


def _wait_s(view: View, clock: Clock, possible: Seating) -> float:
    """How much longer an open cycle that could be closed waits for others."""
    cycle, rules = view.cycle, view.cycle.rules
    if not cycle.members:  # nobody knows yet who will come
        everybody = len(possible.members) + len(possible.spares) >= rules.maximum
        return 0.0 if everybody else rules.last_call_s - clock.enough_s
    marks = [mark for one in possible.members if (mark := cycle.mark(one.name, one.life))]
    full = len(possible.members) >= rules.highest and not marks
    # A spare that is slow to hear of the cycle is better than a node whose workers always fail.
    patient = any(mark.kind in _FAILURES for mark in marks)
    held = {member.name for member in cycle.members}
    wait_s = 0.0
    for name, (life, node) in view.nodes.items():
        if node.cycle == cycle.number or name in view.drained or (full and name not in held):
            continue
        mark = cycle.mark(name, life)
        if mark is not None and (full or mark.kind != UNREACHABLE):
            continue  # it is not needed
        is_coming = node.heard == cycle.number or (patient and mark is None)
        patience_s = rules.stop_s if is_coming else rules.settle_s
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
    if reports := unreached(view):
        return _end_unreached(view, reports, clock)
    possible = seating(view) if not view.ends else None
    if possible is not None and len(possible.members) > len(cycle.members):
        if (wait_s := _calm_s(cycle) - clock.open_s) > 0:
            return Wait(wait_s)
        detail = f"from {len(cycle.members)} to {len(possible.members)} nodes"
        return restart(cycle, Cause(kind="grew", detail=detail, at=clock.unix_s))
    return Wait()


def _end_unreached(view: View, reports: tuple[str, ...], clock: Clock) -> Cycle | Wait:
    """What becomes of a cycle in which members do not reach rank 0.

    If most do not, rank 0 is at fault; otherwise those few are, once the others had time to say
    the same.
    """
    cycle = view.cycle
    first, others = cycle.members[0], len(cycle.members) - 1
    told = ", ".join(reports[:5]) + (", …" if len(reports) > 5 else "")
    if 2 * len(reports) > others:
        detail = f"{len(reports)} of {others} other nodes do not reach it at {first.address}"
        cause = Cause(kind=UNREACHABLE, node=first.name, detail=f"{detail}: {told}")
    elif clock.unreached_s < _REPORTS_S:
        return Wait(_REPORTS_S - clock.unreached_s)
    else:
        detail = f"it does not reach rank 0, {first.name} at {first.address}, though others do"
        cause = Cause(kind=ISOLATED, node=reports[0], detail=detail)
    return restart(cycle, msgspec.structs.replace(cause, at=clock.unix_s), view)


def _calm_s(cycle: Cycle) -> float:
    """How long a cycle lasts before it may end for the sake of more nodes."""
    times = sum(cause.kind == "grew" for cause in cycle.history)
    return min(_GROW_AGAIN_S * 2 ** (times - 1), _GROW_AGAIN_MAX_S) if times else 0.0
