"""The retry policy: bounds, verified retry, subset retry. Sync and async alike.

Time is virtual throughout, so that the waits which are asserted are exact.
"""

import asyncio
import contextlib
import gc
import math
import random
import weakref
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import (
    BatchFailed,
    Fenced,
    Gone,
    HoldfastError,
    Mistake,
    NotFound,
    Retriable,
    Unavailable,
    UnknownOutcome,
)
from holdfast.retry import FRESH_S, Attempt, Policy, delay_s, insist
from patience import HANG_S

STEADY = Policy(attempts=5, base_s=2.0, factor=2.0, max_s=8.0, jitter=0.0, deadline_s=100.0)


class Blocking:
    """Virtual time for synchronous calls: a wait moves it and returns."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.time = 1000.0
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time

    def sleep(self, s: float) -> Any:
        self.waits.append(s)
        self.time += s


class Virtual(Blocking):
    """Virtual time for asynchronous calls: it moves when nobody has anything else to do."""

    _IDLE_PASSES = 20

    async def sleep(self, s: float) -> None:
        due = self.time + s
        for _ in range(self._IDLE_PASSES):
            await asyncio.sleep(0)
        self.time = max(self.time, due)
        self.waits.append(s)  # a wait that was cancelled, such as a time limit, is none


def suspending(fn: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    """The same function, asynchronous."""

    async def afn(*args: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args)

    return afn


class World:
    """One way of calling: `call` and `subset` with plain functions, whatever the kind."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.asynchronous = kind == "async"
        self.clock = Virtual(seed) if self.asynchronous else Blocking(seed)
        self.heard: list[Attempt] = []

    @property
    def verdicts(self) -> list[str]:
        return [one.verdict for one in self.heard]

    def call(self, policy: Policy, fn: Callable[[], Any], **how: Any) -> Any:
        return self._run(policy.call, policy.acall, fn, how)

    def subset(self, policy: Policy, keys: Any, fn: Callable[[list[str]], Any], **how: Any) -> Any:
        return self._run(partial(policy.subset, keys), partial(policy.asubset, keys), fn, how)

    def _run(
        self,
        blocking: Callable[..., Any],
        awaited: Callable[..., Any],
        fn: Callable[..., Any],
        how: dict[str, Any],
    ) -> Any:
        how = {"clock": self.clock, "on_attempt": self.heard.append, **how}
        if not self.asynchronous:
            return blocking(fn, **how)
        if "verify" in how:
            how["verify"] = suspending(how["verify"])
        return asyncio.run(awaited(suspending(fn), **how))


@pytest.fixture(params=["sync", "async"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


class Failing:
    """Raises the given errors one after another, then returns "done"."""

    def __init__(self, *errors: BaseException, took_s: float = 0.0, clock: Any = None) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.took_s, self.clock = took_s, clock

    def __call__(self) -> str:
        self.calls += 1
        if self.clock is not None:
            self.clock.time += self.took_s
        if self.errors:
            raise self.errors.pop(0)
        return "done"

    async def later(self) -> str:
        return self()


class Authority:
    """A control plane that knows whether the job runs, and notes when it was asked."""

    def __init__(self, world: World, *answers: Any, took_s: float = 0.0) -> None:
        self.world, self.answers, self.took_s = world, list(answers), took_s
        self.asked: list[tuple[float, int]] = []

    def __call__(self, error: Exception, attempt: int) -> Any:
        self.asked.append((self.world.clock.time - 1000.0, attempt))
        self.world.clock.time += self.took_s
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def down(count: int) -> list[Unavailable]:
    return [Unavailable(f"down {i}") for i in range(1, count + 1)]


def lost(count: int) -> list[NotFound]:
    return [NotFound(f"404 {i}") for i in range(1, count + 1)]


def busy(retry_after_s: Any) -> Unavailable:
    """An error by which the other side says when to come back."""
    return Unavailable("busy", retry_after_s=retry_after_s)


# ---- the pure delay ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "failures", "unit", "expected"),
    [
        (Policy(base_s=0.1, factor=2, max_s=5, jitter=0), 1, 0.9, 0.1),
        (Policy(base_s=0.1, factor=2, max_s=5, jitter=0), 6, 0.9, 3.2),
        (Policy(base_s=0.1, factor=2, max_s=5, jitter=0), 7, 0.9, 5.0),
        (Policy(base_s=0.1, factor=2, max_s=5, jitter=0), 10_000, 0.9, 5.0),
        (Policy(base_s=1, factor=1, max_s=5, jitter=0), 9, 0.9, 1.0),
        (Policy(base_s=1, factor=2, max_s=5, jitter=0.5), 1, 1.0, 0.5),
        (Policy(base_s=0, factor=2, max_s=5, jitter=0.5), 10_000, 0.5, 0.0),
    ],
)
def test_delay_table(policy: Policy, failures: int, unit: float, expected: float) -> None:
    """The wait grows by the factor, stops at max_s, and jitter only makes it shorter."""
    assert delay_s(policy, failures, unit) == pytest.approx(expected)


policies = st.builds(
    Policy,
    attempts=st.integers(1, 20),
    max_s=st.floats(1.0, 100.0),
    base_s=st.floats(0.0, 1.0),
    factor=st.floats(1.0, 10.0),
    jitter=st.floats(0.0, 1.0),
    deadline_s=st.floats(0.0, 300.0),
)


@given(policies, st.integers(1, 10_000), st.floats(0.0, 1.0))
def test_delay_stays_within_the_jitter(policy: Policy, failures: int, unit: float) -> None:
    """A delay lies between (1 - jitter) of the full wait and the full wait, below max_s."""
    full = delay_s(policy, failures, 0.0)
    delay = delay_s(policy, failures, unit)
    assert 0.0 <= full <= policy.max_s
    assert full * (1.0 - policy.jitter) - 1e-9 <= delay <= full


@given(
    policies,
    st.sampled_from(["sync", "async"]),
    st.integers(0, 25),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 7.0]),
    st.none() | st.floats(0.0, 400.0),
)
def test_bounds_hold_for_every_policy(
    policy: Policy, kind: str, failures: int, seed: int, took_s: float, wish: float | None
) -> None:
    """Never more attempts than allowed; no wait ends, no attempt begins past the deadline."""
    world = World(kind, seed)
    begin = world.clock.time
    began: list[float] = []
    errors = down(failures)
    if wish is not None and errors:
        errors[0].retry_after_s = wish
    fn = Failing(*errors, took_s=took_s, clock=world.clock)

    def watched() -> str:
        began.append(world.clock.time)
        return fn()

    try:
        assert world.call(policy, watched) == "done"
        assert fn.calls == failures + 1
    except Unavailable as error:
        assert error.attempt == fn.calls  # noqa: PT017 -- it may also succeed
        assert world.heard[-1].verdict in ("exhausted", "deadline")
        assert (fn.calls == policy.attempts) == (world.heard[-1].verdict == "exhausted")
    assert fn.calls <= policy.attempts
    assert all(at <= begin + policy.deadline_s + 1e-9 for at in began)
    assert sum(world.clock.waits) <= policy.deadline_s + 1e-9
    own = [wait for wait in world.clock.waits if wish is None or abs(wait - wish) > 1e-9]
    assert all(wait <= policy.max_s for wait in own)


BAD: dict[str, list[Any]] = {
    "attempts": [0, 10_001, 2.5, True],
    "base_s": [-1.0, 6.0, math.nan],
    "factor": [0.5, math.inf],
    "max_s": [math.inf, "5"],
    "jitter": [1.5, False],
    "deadline_s": [math.inf, -0.1],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, bad in BAD.items() for v in bad])
def test_a_bad_policy_is_refused(name: str, value: Any) -> None:
    """Every number has bounds, and the error names the number."""
    with pytest.raises(Mistake, match=name):
        Policy(**{name: value})


# ---- plain retry -------------------------------------------------------------------


def test_recovers_and_tells_every_decision(world: World) -> None:
    """The hook sees each failure with its wait, and the recovery."""
    errors = down(2)
    assert world.call(STEADY, Failing(*errors)) == "done"
    assert world.clock.waits == [2.0, 4.0]
    assert world.heard == [
        Attempt(1, 5, 2.0, errors[0], "retry"),
        Attempt(2, 5, 4.0, errors[1], "retry"),
        Attempt(3, 5, 0.0, None, "recovered"),
    ]


def test_exhausted_raises_the_last_error_itself(world: World) -> None:
    """The very object that was raised last comes out, with its attempt and a note; the authority
    is not asked when there is no attempt left to ask for."""
    errors, authority = down(9), Authority(world, True)
    with pytest.raises(Unavailable) as caught:
        world.call(STEADY, Failing(*errors), verify=authority)
    assert caught.value is errors[4]
    assert caught.value.attempt == 5
    assert caught.value.__notes__ == ["retry: attempt 5 of 5: exhausted"]
    assert caught.value.__context__ is None
    assert world.verdicts == ["retry"] * 4 + ["exhausted"]
    assert max(attempt for _, attempt in authority.asked) == 4


@pytest.mark.parametrize(
    ("on", "error", "again"),
    [
        (Retriable, Fenced("x"), False),
        (Retriable, UnknownOutcome("x"), False),
        (ValueError, ValueError("x"), True),
        ((ValueError, KeyError), KeyError("x"), True),
        (ValueError, Unavailable("x"), False),
        (HoldfastError, Unavailable("x"), True),
        (HoldfastError, UnknownOutcome("x"), False),
        (Exception, UnknownOutcome("x"), False),
        ((), Unavailable("x"), False),
        ((HoldfastError, UnknownOutcome), UnknownOutcome("x"), True),
        (lambda error: "again" in str(error), ValueError("again"), True),
        (lambda error: "again" in str(error), Unavailable("no"), False),
    ],
)
def test_what_is_tried_again_can_be_chosen(
    world: World, on: Any, error: Exception, again: bool
) -> None:
    """Classes or a function decide; a broad class never covers `UnknownOutcome`. What is not
    tried again passes at once as it is, and no authority is asked about it."""
    fn, authority = Failing(error), Authority(world, True)
    how = {} if on is Retriable else {"on": on}  # the default
    if again:
        assert world.call(STEADY, fn, verify=authority, **how) == "done"
    else:
        with pytest.raises(type(error)) as caught:
            world.call(STEADY, fn, verify=authority, **how)
        assert caught.value is error
        assert (world.clock.waits, world.verdicts) == ([], ["permanent"])
    assert fn.calls == 1 + again
    assert bool(authority.asked) == again


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
def test_interruptions_pass(error: BaseException) -> None:
    """What is not an Exception is never caught, whatever `on` says."""
    fn = Failing(error)
    with pytest.raises(type(error)):
        Policy(base_s=0.0).call(fn, on=lambda _: True)
    assert fn.calls == 1


@pytest.mark.parametrize("asking", [False, True])
async def test_cancelling_ends_it_at_once(asking: bool) -> None:
    """A cancelled caller is out of its wait, or of its question, which is cancelled with it; the
    call is not made again."""
    fn, reached, ended = Failing(*lost(9)), asyncio.Event(), asyncio.Event()

    async def silent(error: Exception, attempt: int) -> bool:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return True

    policy = Policy(base_s=60.0, max_s=60.0, deadline_s=600.0)
    how: Any = {"verify": silent} if asking else {"on_attempt": lambda _: reached.set()}
    task = asyncio.ensure_future(policy.acall(fn.later, on=NotFound, **how))
    await asyncio.wait_for(reached.wait(), HANG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, HANG_S)
    assert fn.calls == 1
    if asking:
        await asyncio.wait_for(ended.wait(), HANG_S)


@pytest.mark.parametrize(
    ("errors", "waits", "delay"),
    [(down(9), [2.0, 4.0], 8.0), ([busy(3600.0)], [], 3600.0)],
)
def test_no_wait_that_would_pass_the_deadline(
    world: World, errors: list[Unavailable], waits: list[float], delay: float
) -> None:
    """A wait that would end too late is not begun, the other side's wish or not: the error comes
    at once."""
    policy = Policy(attempts=9, base_s=2.0, factor=2.0, max_s=60.0, jitter=0.0, deadline_s=7.0)
    with pytest.raises(Unavailable) as caught:
        world.call(policy, Failing(*errors))
    assert caught.value is errors[len(waits)]
    assert world.clock.waits == waits
    assert (world.heard[-1].verdict, world.heard[-1].delay_s) == ("deadline", delay)
    assert caught.value.__notes__[-1] == f"retry: attempt {len(waits) + 1} of 9: deadline"


@pytest.mark.parametrize(
    ("wish", "wait"), [(5, 5.0), (0.5, 2.0), (-3.0, 2.0), (math.nan, 2.0), (math.inf, 2.0)]
)
def test_the_other_side_may_ask_for_a_longer_wait(world: World, wish: Any, wait: float) -> None:
    """`retry_after_s` makes the wait longer, never shorter; nonsense is not heard."""
    assert world.call(STEADY, Failing(busy(wish))) == "done"
    assert world.clock.waits == [wait]


def test_an_asynchronous_function_is_refused_by_call() -> None:
    """A coroutine is not taken for a value, nor a coroutine's truth for a yes."""
    yes: Any = suspending(lambda error, attempt: True)
    with pytest.raises(Mistake, match="acall"):
        _ = STEADY.call(Failing().later)
    fn = Failing(*down(1))
    with pytest.raises(Unavailable) as caught:
        STEADY.call(fn, verify=yes, clock=Blocking())
    assert fn.calls == 1
    assert "acall" in caught.value.__notes__[0]


def test_real_time_works_too() -> None:
    """With no clock given, both kinds wait in real time."""
    policy, yes = Policy(base_s=0.001), suspending(lambda error, attempt: True)
    assert policy.call(Failing(*down(2))) == "done"
    call = policy.acall(Failing(*down(2)).later, verify=yes)
    assert asyncio.run(call) == "done"


def test_what_a_failed_call_held_is_freed_with_its_error() -> None:
    """The error does not refer to itself: nothing waits for the collector of cycles."""

    class Large:
        pass

    kept: list[weakref.ref[Large]] = []

    def call() -> None:
        large = Large()
        kept.append(weakref.ref(large))
        raise Unavailable("not now")

    gc.disable()
    try:
        with contextlib.suppress(Unavailable):
            Policy(attempts=2, base_s=0.0).call(call)
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


# ---- verified retry ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        # Asked at the failure (0, 2) and, the answers being old by then, before sending (2, 6).
        (STEADY, [(0.0, 1), (2.0, 1), (2.0, 2), (6.0, 2)]),
        # After a short wait the first answer still counts.
        (Policy(base_s=FRESH_S, factor=1.0, max_s=FRESH_S, jitter=0.0), [(0.0, 1), (FRESH_S, 2)]),
    ],
)
def test_verified_recovers_while_running(
    world: World, policy: Policy, asked: list[tuple[float, int]]
) -> None:
    """A 404 is retried while the authority says that the job runs."""
    authority = Authority(world, True)
    assert world.call(policy, Failing(*lost(2)), on=NotFound, verify=authority) == "done"
    assert authority.asked == asked


@pytest.mark.parametrize(
    ("answers", "verdicts", "note"),
    [
        ([False], ["refused"], "the authority says"),
        ([True, False], ["retry", "refused"], "the authority says"),
        ([OSError("no route")], ["unverified"], "OSError: no route"),
        ([None], ["unverified"], "neither True nor False"),
        (["RUNNING"], ["unverified"], "neither True nor False"),
        ([1], ["unverified"], "neither True nor False"),
        ([0], ["unverified"], "neither True nor False"),
    ],
)
def test_without_a_yes_the_original_error_comes_at_once(
    world: World, answers: list[Any], verdicts: list[str], note: str
) -> None:
    """A no, at the failure or after the wait, an error of the authority, and anything that is
    neither True nor False: no second call, and the reason is a note of the first error."""
    errors = lost(9)
    fn = Failing(*errors)
    with pytest.raises(NotFound) as caught:
        world.call(STEADY, fn, on=NotFound, verify=Authority(world, *answers))
    assert caught.value is errors[0]
    assert note in errors[0].__notes__[0]
    assert errors[0].__context__ is None
    assert (fn.calls, world.verdicts) == (1, verdicts)
    assert world.clock.waits == [2.0] * (len(answers) - 1)


def test_asking_uses_up_the_wait(world: World) -> None:
    """The wait counts from the failure, so that a slow authority does not add to it."""
    slow = Authority(world, True, took_s=0.75)
    assert world.call(STEADY, Failing(*lost(1)), on=NotFound, verify=slow) == "done"
    assert world.clock.waits == [1.25]


def test_a_slow_authority_cannot_stretch_the_deadline(world: World) -> None:
    """An answer that comes after the deadline sends nothing."""
    fn, slow = Failing(*lost(9)), Authority(world, True, took_s=1000.0)
    with pytest.raises(NotFound, match="404 1"):
        world.call(STEADY, fn, on=NotFound, verify=slow)
    assert (fn.calls, world.verdicts) == (1, ["retry", "deadline"])


@pytest.mark.parametrize(
    ("stubborn", "timeout_s", "limit_s"), [(False, 3.0, 3.0), (True, 3.0, 3.0), (False, 99.0, 9.0)]
)
def test_silence_of_the_authority_raises_the_original(
    stubborn: bool, timeout_s: float, limit_s: float
) -> None:
    """No answer within the limit, or by the deadline: the original error, even if the asking
    will not end."""
    policy = Policy(base_s=2.0, jitter=0.0, deadline_s=9.0)
    clock, errors = Virtual(), lost(9)
    fn = Failing(*errors)

    async def main() -> None:
        release = asyncio.Event()

        async def silent(error: Exception, attempt: int) -> bool:
            try:
                await release.wait()
            except asyncio.CancelledError:
                if not stubborn:
                    raise
                await asyncio.wait_for(release.wait(), HANG_S)
            raise AssertionError("an answer that nobody waits for")

        how: Any = {"verify": silent, "verify_timeout_s": timeout_s, "clock": clock}
        with pytest.raises(NotFound) as caught:
            await policy.acall(fn.later, on=NotFound, **how)
        assert caught.value is errors[0]
        assert f"no answer within {limit_s:g} s" in errors[0].__notes__[0]
        release.set()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert (fn.calls, clock.time) == (1, 1000.0 + limit_s)


# ---- subset retry ------------------------------------------------------------------


class Store:
    """Answers from a script: for each key, what it gives on the 1st, 2nd, ... asking; then None,
    which is a value like any other."""

    def __init__(self, script: Mapping[str, list[Any]]) -> None:
        self.script = {key: list(outcomes) for key, outcomes in script.items()}
        self.asked: list[list[str]] = []

    def __call__(self, pending: list[str]) -> dict[str, Any]:
        self.asked.append(list(pending))
        answer = {}
        for key in reversed(pending):  # the order of the answer does not matter
            outcome = self.script[key].pop(0) if self.script[key] else None
            if outcome is not ...:
                answer[key] = outcome
        return answer


def test_subset_that_is_exhausted_names_keys_and_reasons(world: World) -> None:
    """The message names ten keys and counts the rest; the error has every one of them, also one
    that no answer said anything about."""
    keys = [f"k{i:02}" for i in range(25)]
    script: dict[str, list[Any]] = {key: [Unavailable(f"no {key}")] * 9 for key in keys}
    store = Store(script | {"k07": [7], "k08": [...] * 9})
    with pytest.raises(BatchFailed) as caught:
        world.subset(STEADY, keys, store)
    error = caught.value
    assert list(error.failures) == [key for key in keys if key != "k07"]
    assert error.values == {"k07": 7}
    assert getattr(error.failures["k08"], "key", None) == "k08"
    assert str(error).startswith("24 of 25 keys failed: 'k00': Unavailable: no k00, 'k01': ")
    assert str(error).endswith("'k10': Unavailable: no k10 and 14 more")
    assert error.attempt == 5
    assert error.__context__ is None


def test_subset_message_is_bounded(world: World) -> None:
    """Long keys and long reasons are cut."""
    keys = [f"{i}" * 5000 for i in range(10, 40)]
    with pytest.raises(BatchFailed) as caught:
        world.subset(STEADY, keys, lambda pending: {k: Gone("y" * 10_000) for k in pending})
    assert len(str(caught.value)) < 10 * 2 * 210 + 100


def test_subset_call_that_raises_counts_for_all_its_keys(world: World) -> None:
    """A retriable error of the call is one for each pending key, and none that was got."""
    raising = [None, Unavailable("cut off"), None]
    store = Store({"a": [1], "b": [Unavailable("x"), 2], "c": [Unavailable("x"), 3]})

    def call(pending: list[str]) -> dict[str, Any]:
        error = raising.pop(0)
        if error is not None:
            store.asked.append(list(pending))
            raise error
        return store(pending)

    assert world.subset(STEADY, ["a", "b", "c"], call) == {"a": 1, "b": 2, "c": 3}
    assert store.asked == [["a", "b", "c"], ["b", "c"], ["b", "c"]]


@pytest.mark.parametrize("error", [Fenced("stop"), UnknownOutcome("?"), TypeError("bug")])
@pytest.mark.parametrize("partial", [False, True])
def test_subset_call_that_raises_otherwise_passes(
    world: World, error: Exception, partial: bool
) -> None:
    """What is no matter of a key is raised as it is, also with `partial`."""

    def call(pending: list[str]) -> dict[str, Any]:
        raise error

    with pytest.raises(type(error)) as caught:
        world.subset(STEADY, ["a", "b"], call, partial=partial)
    assert caught.value is error
    assert error.__notes__[0] == "retry: the call was for a, b"


@pytest.mark.parametrize(
    ("keys", "answer", "word"),
    [
        (["a"], {"a": 1, "z": 2}, "nobody asked for: z"),
        (["a"], {"a": 1, 5: 2}, "nobody asked for: 5"),
        (["a"], [1], "mapping"),
        (["a"], None, "mapping"),
        ("abc", {}, "several keys"),
        ([b"a"], {}, "a key is text"),
    ],
)
def test_subset_mistakes(world: World, keys: Any, answer: Any, word: str) -> None:
    """A wrong answer or wrong keys are mistakes, at once."""
    with pytest.raises(Mistake, match=word):
        world.subset(STEADY, keys, lambda _: answer)
    assert world.clock.waits == []


def test_subset_of_nothing_and_of_duplicates(world: World) -> None:
    """No keys: no call. A key given twice is asked for once."""
    store = Store({"a": [1], "b": [2]})
    assert world.subset(STEADY, [], store) == {}
    assert world.subset(STEADY, iter("baba"), store) == {"b": 2, "a": 1}
    assert store.asked == [["b", "a"]]


def test_subset_hears_the_longest_wish(world: World) -> None:
    """The longest `retry_after_s` of the keys that go again decides."""
    gone = Gone("x", retry_after_s=50.0)
    store = Store({"a": [Unavailable("x"), 1], "b": [busy(6.0), 2], "c": [gone]})
    got = world.subset(STEADY, ["a", "b", "c"], store, partial=True)
    assert got.values == {"a": 1, "b": 2}
    assert world.clock.waits == [6.0]


def test_subset_can_be_verified(world: World) -> None:
    """The authority is asked about the whole batch, and its no ends it with what there is."""
    store = Store({"a": [1], "b": [Unavailable("x")] * 9})
    with pytest.raises(BatchFailed) as caught:
        world.subset(STEADY, ["a", "b"], store, verify=Authority(world, False))
    assert caught.value.values == {"a": 1}
    assert len(store.asked) == 1
    assert world.verdicts == ["refused"]


def test_subset_lets_a_collected_cancellation_pass(world: World) -> None:
    """A CancelledError that was gathered as an outcome is not taken for a value."""
    with pytest.raises(asyncio.CancelledError):
        world.subset(STEADY, ["a"], lambda _: {"a": asyncio.CancelledError()})


@given(
    st.sampled_from(["sync", "async"]),
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3),
        st.lists(st.sampled_from(["ok", "away", "gone", "missing"]), max_size=7),
        max_size=8,
    ),
    st.integers(1, 5),
)
def test_subset_against_a_model(kind: str, script: dict[str, list[str]], attempts: int) -> None:
    """Every key ends as exactly what its own script says, whatever the others do."""
    outcomes: dict[str, Any] = {"away": Unavailable("x"), "gone": Gone("x"), "missing": ...}
    world = World(kind)
    store = Store({k: [outcomes.get(word, word) for word in words] for k, words in script.items()})
    policy = Policy(attempts=attempts, base_s=0.0)
    got = world.subset(policy, script, store, partial=True)
    for key, words in script.items():
        tries = [*words, "ok", *["ok"] * attempts][:attempts]
        end = next((word for word in tries if word in ("ok", "gone")), "failed")
        asked = sum(key in pending for pending in store.asked)
        assert (key in got.values) == (end == "ok")
        assert (key in got.failures) == (end != "ok")
        assert asked == (tries.index(end) + 1 if end != "failed" else attempts)
    assert [*got.values, *got.failures] == [
        *(key for key in script if key in got.values),
        *(key for key in script if key in got.failures),
    ]


# ---- insisting --------------------------------------------------------------------


@pytest.fixture
def clock() -> Virtual:
    return Virtual()


def insisting(fn: Failing, clock: Virtual, **how: Any) -> Any:
    return asyncio.run(insist(clock, fn.later, **how))


def test_insisting_outlasts_every_number_of_attempts(clock: Virtual) -> None:
    """An unknown outcome is tried again, too, and the other side's wish is heard."""
    fn = Failing(*down(500), UnknownOutcome("perhaps"), busy(30.0))
    assert insisting(fn, clock, pace=STEADY) == "done"
    assert clock.waits[:4] == [2.0, 4.0, 8.0, 8.0]
    assert clock.waits[500:] == [8.0, 30.0]


def test_insisting_ends_at_its_time_with_the_last_error(clock: Virtual) -> None:
    """The last wait is cut: one more try at the very end."""
    failures = down(10)
    with pytest.raises(Unavailable) as caught:
        insisting(Failing(*failures), clock, pace=STEADY, until=clock.now() + 7.0)
    assert caught.value is failures[3]
    assert clock.waits == [2.0, 4.0, 1.0]


def test_insisting_passes_what_it_is_not_for(clock: Virtual) -> None:
    """By default, and where `on` says what it is for."""
    with pytest.raises(Fenced):
        insisting(Failing(Fenced("replaced")), clock)
    with pytest.raises(UnknownOutcome):
        insisting(Failing(UnknownOutcome("perhaps")), clock, on=Unavailable)
    assert clock.waits == []


def test_insisting_is_ended_by_whoever_sees_the_failures(clock: Virtual) -> None:
    """What `failed` raises is raised at once, without another wait."""
    seen: list[Exception] = []

    def failed(error: Exception) -> None:
        seen.append(error)
        if len(seen) == 3:
            raise Gone("the lease has ended")

    with pytest.raises(Gone):
        insisting(Failing(*down(5)), clock, failed=failed)
    assert len(seen) == 3
    assert len(clock.waits) == 2
