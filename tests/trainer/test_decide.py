"""The core's rules, without a journal: what arrives, what is answered, what always holds."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.errors import Exists, Gone, Mistake, NotFound, Unavailable
from holdfast.jobs.policy import Policy
from holdfast.trainer import ops
from holdfast.trainer.decide import MAX_AHEAD, CoreState, read_promise
from holdfast.trainer.line import Arrival
from holdfast.trainer.records import Content, Entry, Model, Sampler, Session
from holdfast.trainer.state import State

NUMBERS = st.integers(0, 5)
IDENTITIES = st.sampled_from(["a", "b"])


def entry(identity: str = "a", kind: str = "optim_step") -> Entry:
    return Entry(kind=kind, identity=identity, term=1, at=0.0, content=Content(inline=b"x"))


def begun(**policy: int) -> CoreState:
    """A session with one model and one sampling session."""
    known = CoreState(Policy(**policy))
    known.add_session("s", Session(created_at=0.0, seen_at=0.0), 0.0)
    known.begin_model("s", 0, ops.CreateModel(session="s", base="b"), None, 0.0)
    known.add_sampler("s-s0", Sampler(session="s", base="b"))
    known.validate()
    return known


def arrive(known: CoreState, line: str, number: int, identity: str = "a") -> Arrival:
    return known.arrive(line, number, "optim_step", identity, 0.0)


def settle(known: CoreState, state: State, number: int) -> None:
    made = known.make_result(
        state.line.entries[number], Content(inline=b"r"), failed=False, term=1, wall=float(number)
    )
    known.settled(state, number, made)


class Lines(RuleBasedStateMachine):
    """Any order of sends, writes, computing, results and trims."""

    def __init__(self) -> None:
        super().__init__()
        self.known = begun()
        self.promised: dict[tuple[str, int], str] = {}
        """What a client was told yes to."""

    def lines(self) -> list[State]:
        return list(self.known.lines.values())

    @rule(line=st.sampled_from(["s-0", "s-s0"]), number=NUMBERS, identity=IDENTITIES)
    def send(self, line: str, number: int, identity: str) -> None:
        """A number that was promised means that operation for ever."""
        before = self.promised.get((line, number))
        try:
            arrival = arrive(self.known, line, number, identity)
        except Exists:
            assert before not in (None, identity)
            return
        assert before is None or before == identity or arrival is Arrival.DUPLICATE
        self.promised.setdefault((line, number), identity)
        if arrival is Arrival.NEW:
            assert before is None
            self.known.lines[line].pending[number] = ("optim_step", identity)

    @precondition(lambda self: any(one.pending for one in self.lines()))
    @rule()
    def written(self) -> None:
        state = next(one for one in self.lines() if one.pending)
        number, (_, identity) = state.pending.popitem()
        self.known.added(state, number, entry(identity))

    @rule()
    def carried_out(self) -> None:
        state = self.known.next_line()
        if state is not None:
            number = state.line.next()
            assert number is not None
            self.known.use(state)
            state.line.finish(number)
            settle(self.known, state, number)

    @rule()
    def trimmed(self) -> None:
        line = self.known.lines["s-0"].line
        line.trim(line.done)

    @invariant()
    def holds(self) -> None:
        """Whatever was promised has a result, or will have one."""
        self.known.validate()
        for line, number in self.promised:
            self.known.result(self.known.lines[line], number)


Lines.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLines = Lines.TestCase


def test_what_is_refused() -> None:
    """Numbers far ahead, too much that waits, lines that never were or have ended."""
    known = begun(max_waiting=1)
    with pytest.raises(Mistake, match="far ahead"):
        arrive(known, "s-0", MAX_AHEAD)
    known.added(known.lines["s-0"], 0, entry())
    with pytest.raises(Unavailable, match="operations waiting"):
        arrive(known, "s-0", 1)
    for name, error in [("s-7", NotFound), ("s-0-p3", NotFound), ("x", NotFound)]:
        with pytest.raises(error):
            arrive(known, name, 0)
    with pytest.raises(NotFound, match="never promised"):
        read_promise("s-0:x")
    known.lines["s-0"].model = Model(session="s", base="b", ended=True)
    with pytest.raises(Gone, match="unloaded"):
        arrive(known, "s-0", 1)


def test_unloading_is_the_last_number_and_is_asked_once() -> None:
    """A second request gets the number of the first, written or not."""
    known = begun()
    state = known.lines["s-0"]
    known.added(state, 0, entry())
    assert known.unload_number("s-0", 0.0) == 1
    state.pending[1] = ("unload_model", "")
    assert known.unload_number("s-0", 0.0) == 1
    del state.pending[1]
    known.added(state, 1, entry(kind="unload_model"))
    assert known.unload_number("s-0", 0.0) == 1


def test_lines_take_turns() -> None:
    """None waits for ever because another one has much to do."""
    known = begun()
    for number, line in itertools.product(range(3), known.lines.values()):
        known.added(line, number, entry())
    turns = []
    while (state := known.next_line()) is not None:
        turns.append(state.name)
        state.line.finish(state.line.next() or 0)
    assert turns == ["s-0", "s-s0"] * 3


@pytest.mark.parametrize("what", ["order", "both", "seen"])
def test_validate_tells_what_is_wrong(what: str) -> None:
    """A state that cannot be is found."""
    known = begun()
    state = known.lines["s-0"]
    if what == "order":
        state.line.trimmed = 3
    elif what == "both":
        known.added(state, 0, entry())
        state.pending[0] = ("optim_step", "a")
    else:
        known.seen["nobody"] = 0.0
    with pytest.raises(AssertionError):
        known.validate()
