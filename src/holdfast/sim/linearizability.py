"""Was this concurrent history possible? A linearizability checker for ledgers.

`check` decides whether every completed operation of a recorded history can be given one
moment between its invocation and its return so that the answers are those of a plain map
of keys. An operation whose outcome is unknown (`returned=None`) may take effect at any
moment after its invocation, or never. `check_revisions` holds revisions against real
time. The nouns are those of `holdfast.sim.history`, offered here again, with `save` and
`load`; `python -m holdfast.sim.linearizability FILE...` checks saved histories.

The search is that of Wing and Gong with Lowe's memory of what has been tried, once per
group of keys that operations tie together (linearizability is local). Invariants:

- A verdict is never a guess: when the budget of states is spent it is "undecided".
- Two operations are ordered only if one returned *before* the other was invoked; equal
  times count as overlapping.

Nothing here records a history; clocks and processes are the recorder's business.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter

import msgspec

from holdfast.errors import HoldfastError, Mistake
from holdfast.sim.history import (
    Cas,
    Multi,
    Operation,
    Read,
    Remove,
    Value,
    Verdict,
    Write,
    keys_of,
    listed,
    load,
    save,
    wrote,
)

__all__ = ["Cas", "Multi", "Operation", "Read", "Remove", "Verdict", "Write"]
__all__ += ["check", "check_revisions", "load", "main", "save"]

BUDGET_STATES = 1_000_000
_CHEAPER_MAX = 16
_NEVER = float("inf")


def check(history: Iterable[Operation], *, budget_states: int = BUDGET_STATES) -> Verdict:
    """Decide whether the history is linearizable, beginning with no keys at all."""
    explored, undecided = 0, []
    for keys, operations in _components(list(history)):
        verdict = _search(keys, operations, budget_states - explored)
        explored += verdict.explored
        if verdict.outcome == "violated":
            return msgspec.structs.replace(verdict, explored=explored)
        if verdict.outcome == "undecided":
            undecided += keys
    if undecided:
        reason = f"the budget of {budget_states} states was spent on {listed(undecided)}"
        return Verdict("undecided", explored, reason, tuple(undecided))
    return Verdict("linearizable", explored)


def check_revisions(history: Iterable[Operation]) -> Verdict:
    """Hold revisions against real time; operations without a revision are left out.

    No two writes share one; what returned before another was invoked has no higher one,
    and a lower one if the later operation wrote.
    """
    stamped = [one for one in history if one.revision and one.returned is not None]
    writer: dict[int, Operation] = {}
    for one in filter(wrote, stamped):
        if (other := writer.setdefault(one.revision, one)) is not one:
            return _disorder("two writes share a revision", other, one, len(stamped))
    ended = sorted(stamped, key=attrgetter("returned"))
    newest, at = None, 0
    for one in sorted(stamped, key=attrgetter("invoked")):
        while ended[at].returned < one.invoked:  # type: ignore[operator]  # none is unknown
            if newest is None or ended[at].revision > newest.revision:
                newest = ended[at]
            at += 1
        if newest is not None and newest.revision + wrote(one) > one.revision:
            return _disorder("revisions go against real time", newest, one, len(stamped))
    return Verdict("linearizable", len(stamped))


class _Step(msgspec.Struct, frozen=True):
    """An operation compiled against numbered keys: possible iff `must` holds and `fails` not."""

    source: Operation
    invoked: int
    ended: float
    must: tuple[tuple[int, Value | None], ...] = ()
    fails: tuple[tuple[int, Value | None], ...] | None = None
    writes: tuple[tuple[int, Value | None], ...] = ()

    def apply(self, state: "_State") -> "_State | None":
        for i, value in self.must:
            if state[i] != value:
                return None
        if self.fails is not None and all(state[i] == value for i, value in self.fails):
            return None
        if not self.writes:
            return state
        after = list(state)
        for i, value in self.writes:
            after[i] = value
        return tuple(after)


_State = tuple[Value | None, ...]
_Trail = tuple[Operation, "_Trail"] | None  # the newest first, shared between branches
_Node = tuple[int, int, int, _State]
_Visit = tuple[_Node, _State | None, _Trail]


def _search(keys: list[str], operations: list[Operation], budget_states: int) -> Verdict:
    """Depth first over what may come next, never twice from the same node.

    A node is: all completed operations before `base` and those in the bit set `bits`
    behind it are placed, of the unknown ones those in `used`; the keys say `state`. An order
    with the fewest unknown operations is enough, so a node is left out when the same was
    reached with fewer of them (`spent`; remembering some of these does no harm).
    """
    steps = [_compile(one, keys) for one in sorted(operations, key=attrgetter("invoked"))]
    known = [step for step in steps if step.ended < _NEVER]
    unknown = [step for step in steps if step.ended == _NEVER and step.writes]
    prefix: _Trail = None
    stuck: list[int] = []
    longest = -1
    seen: set[_Node] = set()
    spent: dict[tuple[int, int, _State], list[int]] = {}
    stack: list[_Visit] = [((0, 0, 0, (None,) * len(keys)), None, None)]
    while stack:
        node, before, trail = stack.pop()
        base, bits, used, state = node
        cheaper = spent.setdefault((base, bits, state), [])
        if node in seen or any(less & used == less != used for less in cheaper):
            continue
        if base == len(known) or len(seen) >= budget_states:
            return Verdict("linearizable" if base == len(known) else "undecided", len(seen))
        seen.add(node)
        if len(cheaper) < _CHEAPER_MAX:
            cheaper.append(used)
        window, bound = _window(known, base, bits)
        if base + bits.bit_count() > longest:
            longest, prefix, stuck = base + bits.bit_count(), trail, window
        children = _children(node, before, known, window, unknown, bound)
        stack.extend((child, then, (one, trail)) for child, then, one in reversed(children))
    return Verdict(
        "violated",
        len(seen),
        f"not linearizable: {listed(keys)}",
        tuple(keys),
        tuple(_unwind(prefix)),
        tuple(known[i].source for i in stuck),
    )


def _window(known: list[_Step], base: int, bits: int) -> tuple[list[int], float]:
    """The completed operations that may come next, and the first of their returns.

    `known` is in the order of invocation, so nothing behind the window can be earlier.
    """
    window, bound = [], _NEVER
    for i in range(base, len(known)):
        step = known[i]
        if step.invoked > bound:
            break
        if not bits >> (i - base) & 1:
            window.append(i)
            bound = min(bound, step.ended)
    return window, bound


def _children(
    node: _Node,
    before: _State | None,
    known: list[_Step],
    window: list[int],
    unknown: list[_Step],
    bound: float,
) -> list[tuple[_Node, _State | None, Operation]]:
    """The nodes one operation further, each with the state before it if it was unknown.

    Three things keep them few and lose no order with the fewest unknown operations: what
    writes nothing and fits is placed at once, for no later place is better; an unknown
    operation is placed only where it changes something, and not right before one that fits
    without it too and leads to the same state.
    """
    base, bits, used, state = node
    children: list[tuple[_Node, _State | None, Operation]] = []
    for i in window:
        step = known[i]
        after = step.apply(state)
        if after is None or (before is not None and step.apply(before) == after):
            continue
        at, placed = base, bits | 1 << (i - base)
        while placed & 1:
            at, placed = at + 1, placed >> 1
        child = ((at, placed, used, after), None, step.source)
        if not step.writes:
            return [child]
        children.append(child)
    for i, step in enumerate(unknown):
        if step.invoked > bound:
            break
        if used >> i & 1 or (after := step.apply(state)) is None or after == state:
            continue
        if before is None or step.apply(before) != after:
            children.append(((base, bits, used | 1 << i, after), state, step.source))
    return children


def _compile(one: Operation, keys: list[str]) -> _Step:
    """State what must have been true for this call to get this answer."""
    call, answer, index = one.call, one.answer, keys.index
    known = one.returned is not None
    step = partial(_Step, one, one.invoked, _NEVER if one.returned is None else one.returned)
    match call:
        case Read(key):
            return step(must=((index(key), answer),)) if known else step()  # type: ignore[arg-type]
        case Write(key, value):
            return step(writes=((index(key), value),))
        case Remove(key):
            gone = ((index(key), None),)
            if known and answer is False:
                return step(must=gone)
            return step(fails=gone if known and answer is True else None, writes=gone)
        case Cas(key, expected, value):
            call = Multi(writes={key: value}, expect={key: expected})
            answer = () if answer is True else answer
    expect = tuple((index(key), value) for key, value in call.expect.items())
    if known and answer is False:
        return step(fails=expect)
    read: tuple[tuple[int, Value | None], ...] = ()
    if known:
        if not isinstance(answer, tuple) or len(answer) != len(call.reads):
            raise Mistake(f"an answer that such a call cannot have: {one}")
        read = tuple(zip(map(index, call.reads), answer, strict=True))
    writes = tuple((index(key), value) for key, value in call.writes.items())
    return step(must=expect + read, writes=writes)


def _components(history: list[Operation]) -> Iterator[tuple[list[str], list[Operation]]]:
    """Split a history into groups whose keys no operation ties together."""
    parent: dict[str, str] = {}

    def root(key: str) -> str:
        while parent.setdefault(key, key) != key:
            parent[key] = key = parent[parent[key]]
        return key

    for one in history:
        first, *others = [root(key) for key in keys_of(one.call)] or [""]
        for other in others:
            parent[root(other)] = root(first)
    groups: dict[str, list[Operation]] = {}
    for one in history:
        groups.setdefault(root((keys_of(one.call) or [""])[0]), []).append(one)
    for operations in groups.values():
        yield sorted({key for one in operations for key in keys_of(one.call)}), operations


def _disorder(what: str, first: Operation, second: Operation, explored: int) -> Verdict:
    keys = tuple(sorted({*keys_of(first.call), *keys_of(second.call)}))
    return Verdict("violated", explored, f"{what}: {listed(keys)}", keys, (first,), (second,))


def _unwind(trail: _Trail) -> list[Operation]:
    found = []
    while trail is not None:
        found.append(trail[0])
        trail = trail[1]
    return found[::-1]


def main(paths: Sequence[str]) -> int:
    """Check saved histories and tell; 1 when one is rejected, 2 when one cannot be decided."""
    if not paths or paths[0].startswith("-"):
        sys.stderr.write("usage: python -m holdfast.sim.linearizability FILE...\n")
        return 2
    outcomes = set()
    for path in paths:
        try:
            history = load(path)
            verdicts = [check_revisions(history), check(history)]
        except (OSError, HoldfastError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
        verdict = verdicts[0] if not verdicts[0].ok else verdicts[1]
        sys.stdout.write(f"{path}: {verdict}\n")
        outcomes.add(verdict.outcome)
    return 1 if "violated" in outcomes else 2 if "undecided" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
