"""One retry policy: how often, how far apart, until when, and who is asked before.

Invariants:

- At most `attempts` attempts. None begins, and no wait ends, behind the deadline
  (`deadline_s` after the call began): a wait that would pass it is not begun. A running
  attempt is not cut short, because a cancelled call may have taken effect.
- Whoever gives up raises the *original* last error, with a note that says at which
  attempt and why. KeyboardInterrupt and CancelledError always pass.
- *Verified retry*: with `verify`, an authority must say True before a call is sent again.
  It is asked right after the failure, so that what is gone fails at once, and once more
  after the wait if its answer is by then older than `FRESH_S`. A no, an error, silence
  beyond the limit, or any other answer raises the original error at once.
- *Subset retry*: only keys that failed are sent again, and every key ends as a value or
  as a failure.
- *Insisting* has no number of attempts: for what does no harm when it is done twice, and must
  be done. `UnknownOutcome` is tried again there, too. `Pauses` are the waits of it, for what is
  no single call: a stream that breaks and begins again.

There is one loop, an asynchronous one; the synchronous calls run it with a clock that
blocks, so that it never suspends. Time and randomness come from a `Clock` only.

Not built on tenacity: its deadline reads `time.monotonic` by itself, so it would wait for
real time under a virtual clock, and it has no place to ask an authority before the wait.
"""

import asyncio
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from holdfast import errors
from holdfast.errors import HoldfastError, Mistake, Retriable
from holdfast.text import several

__all__ = ["AGAIN", "Attempt", "Clock", "Partial", "Pauses", "Policy", "delay_s", "insist"]

AGAIN: tuple[type[Exception], ...] = (Retriable, errors.UnknownOutcome)
"""What `insist` tries again: also what may have taken effect."""

FRESH_S = 1.0
MAX_S = 86_400.0
_NAMED_KEYS = 10
_REASON_CHARS = 200

_NOTHING: Any = object()

T = TypeVar("T")
On = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]
Verdict = Literal[
    "retry", "recovered", "permanent", "exhausted", "deadline", "refused", "unverified"
]
Verify = Callable[[Exception, int], bool | Awaitable[bool]]
Keys = Iterable[str]
BatchCall = Callable[[list[str]], Mapping[str, T | Exception]]
AsyncBatchCall = Callable[[list[str]], Awaitable[Mapping[str, T | Exception]]]


class Clock(Protocol):
    """The world of a retry. `sleep` blocks, or is awaited in the asynchronous calls."""

    @property
    def random(self) -> random.Random: ...  # noqa: D102
    def now(self) -> float: ...  # noqa: D102
    def sleep(self, s: float, /) -> Any: ...  # noqa: D102


class _System:
    random = random.SystemRandom()  # no state that processes could share after a fork
    now = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)


class _Blocking:
    """What the synchronous calls run on: a clock whose waits block."""

    def __init__(self, clock: Clock | None) -> None:
        world = _System() if clock is None else clock
        self.random, self.now = world.random, world.now
        self._sleep = time.sleep if clock is None else clock.sleep

    async def sleep(self, s: float) -> None:
        self._sleep(s)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One decision, as the `on_attempt` hook sees it.

    `delay_s` is the wait decided on, or the one that would have passed the deadline.
    `error` is None only for "recovered": a success after failures.
    """

    attempt: int
    attempts: int
    delay_s: float
    error: Exception | None
    verdict: Verdict
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Partial(Generic[T]):
    """A value or a failure for every key of a batch, in the order of the keys."""

    values: dict[str, T]
    failures: dict[str, Exception]


class How(TypedDict, total=False):
    """The keywords of every call; `Policy.acall` says what they mean."""

    on: On
    verify: Verify | None
    verify_timeout_s: float
    on_attempt: Callable[[Attempt], None] | None
    clock: Clock | None


@dataclass(frozen=True, slots=True)
class Policy:
    """How often, how far apart and until when. Immutable, free to share.

    The wait after the n-th failure is `base_s * factor**(n-1)`, at most `max_s`, less a
    random part of it of up to `jitter`. If the error carries `retry_after_s`, the wish of
    the other side, the wait is at least that long; if that passes the deadline, it ends.
    """

    attempts: int = 5
    base_s: float = 0.1
    factor: float = 2.0
    max_s: float = 5.0
    jitter: float = 0.5
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or not 1 <= self.attempts <= 10_000:
            raise Mistake(f"attempts is a whole number from 1 to 10000, not {self.attempts!r}")
        _check("max_s", self.max_s, 0.0, MAX_S)
        _check("base_s", self.base_s, 0.0, self.max_s)
        _check("factor", self.factor, 1.0, 1000.0)
        _check("jitter", self.jitter, 0.0, 1.0)
        _check("deadline_s", self.deadline_s, 0.0, MAX_S)

    def call(self, fn: Callable[[], T], **how: Unpack[How]) -> T:
        """Call `fn` until it succeeds and return its value. Keywords as for `acall`."""

        async def once() -> T:
            return _not_async(fn())

        return _finish(self.acall(once, **_blocking(how)))

    async def acall(
        self,
        fn: Callable[[], Awaitable[T]],
        *,
        on: On = Retriable,
        verify: Verify | None = None,
        verify_timeout_s: float = 5.0,
        on_attempt: Callable[[Attempt], None] | None = None,
        clock: Clock | None = None,
    ) -> T:
        """Call `fn` until it succeeds and return its value.

        `on` says what is tried again: exception classes, or a function of the error. No
        class but `UnknownOutcome` itself covers `UnknownOutcome`. `verify(error, attempt)`
        is the authority; an awaited answer has `verify_timeout_s`, a synchronous authority
        must bound itself. `on_attempt` sees every decision.
        """
        clock = _System() if clock is None else clock
        _check("verify_timeout_s", verify_timeout_s, 0.0, MAX_S)
        deadline = clock.now() + self.deadline_s

        async def ask() -> tuple[Verdict, str]:
            limit_s = min(verify_timeout_s, deadline - clock.now())
            return await _consult(verify, error, attempt, limit_s, clock)

        def tell(failure: Exception | None) -> None:
            if on_attempt is not None:
                on_attempt(Attempt(attempt, self.attempts, delay, failure, verdict, detail))

        verdict: Verdict
        attempt, delay, detail = 0, 0.0, ""
        while True:
            attempt += 1
            try:
                value = await fn()
            except Exception as failure:  # noqa: BLE001 -- raised below unless tried again
                error = failure
            else:
                if attempt > 1:
                    delay, verdict, detail = 0.0, "recovered", ""
                    tell(None)
                return value
            failed_at = clock.now()
            delay, verdict = 0.0, _judge(self, error, attempt, on)
            if verdict == "retry":
                own = delay_s(self, attempt, clock.random.random())
                delay = max(own, _retry_after_s(error))
                if failed_at + delay > deadline:
                    verdict = "deadline"
                elif verify is not None:
                    verdict, detail = await ask()
            tell(error)
            if verdict == "retry":
                # The wait counts from the failure; asking has used up a part of it.
                rest = min(delay, failed_at + delay - clock.now())
                if rest > 0:
                    await clock.sleep(rest)
                now = clock.now()
                if verify is not None and now <= deadline and now - failed_at > FRESH_S:
                    verdict, detail = await ask()
                if verdict == "retry" and clock.now() <= deadline:
                    continue
                verdict = "deadline" if verdict == "retry" else verdict
                tell(error)
            _note(error, f"attempt {attempt} of {self.attempts}: {verdict} {detail}".rstrip())
            if isinstance(error, HoldfastError):
                error.attempt = attempt
            try:
                raise error
            finally:
                del error  # or the error would hold itself, and what `fn` has, by its traceback

    @overload
    def subset(self, keys: Keys, call: BatchCall[T], **how: Unpack[How]) -> dict[str, T]: ...
    @overload
    def subset(
        self, keys: Keys, call: BatchCall[T], *, partial: Literal[True], **how: Unpack[How]
    ) -> Partial[T]: ...
    def subset(
        self, keys: Keys, call: BatchCall[T], *, partial: bool = False, **how: Unpack[How]
    ) -> dict[str, T] | Partial[T]:
        """Do what `asubset` does, with a synchronous `call`."""

        async def once(pending: list[str]) -> Mapping[str, T | Exception]:
            return _not_async(call(pending))

        batch = _finish(self._batch(keys, once, partial, _blocking(how)))
        return batch if partial else batch.values

    @overload
    async def asubset(
        self, keys: Keys, call: AsyncBatchCall[T], **how: Unpack[How]
    ) -> dict[str, T]: ...
    @overload
    async def asubset(
        self, keys: Keys, call: AsyncBatchCall[T], *, partial: Literal[True], **how: Unpack[How]
    ) -> Partial[T]: ...
    async def asubset(
        self, keys: Keys, call: AsyncBatchCall[T], *, partial: bool = False, **how: Unpack[How]
    ) -> dict[str, T] | Partial[T]:
        """Call with all keys, then again with those that failed and may be tried again.

        `call` answers with a value or an exception for each key it is given. A key without
        an answer has failed (`Unavailable`); a key that was not asked for is a `Mistake`.
        What `call` itself raises counts for all its keys if `on` would try it again, and
        is raised as it is otherwise. A key given twice is asked for once. The values come
        back in the order of the keys. If any key failed, `BatchFailed` is raised; with
        `partial`, a `Partial` is returned instead.
        """
        batch = await self._batch(keys, call, partial, how)
        return batch if partial else batch.values

    async def _batch(
        self, keys: Keys, call: AsyncBatchCall[T], partial: bool, how: How
    ) -> Partial[T]:
        batch: _Batch[T] = _Batch(keys, how.get("on", Retriable))
        how["on"] = batch.unfinished

        async def once() -> None:
            try:
                answer = await call(list(batch.pending))
            except Exception as error:  # noqa: BLE001 -- sorted, and raised unless retriable
                answer = batch.blame(error)
            batch.take(answer)

        try:
            if batch.pending:
                await self.acall(once, **how)
        except errors.BatchFailed as error:
            if not partial or error is not batch.error:
                raise
        return batch.result()


async def insist(
    clock: Clock,
    call: Callable[[], Awaitable[T]],
    *,
    on: On = AGAIN,
    until: float = math.inf,
    pace: Policy | None = None,
    failed: Callable[[Exception], None] | None = None,
) -> T:
    """Call until it succeeds, for as long as it takes: the ledger may be away for an hour.

    Only for a call that does no harm when it is made twice: a reading, or a transaction whose
    comparison no longer holds once it has taken effect. `until` is a time of `clock`: the error
    of a call that fails later than that is raised. `pace` says how long the waits are (0.05 s at
    first, then up to 2 s); its `attempts` and its `deadline_s` do not count here. `failed` sees
    every failure that is tried again, and raises what ends it: a lease that is lost, a seat that
    is another's.
    """
    pauses = Pauses(clock, pace)
    while True:
        try:
            return await call()
        except Exception as error:
            if not _covered(error, on):
                raise
            if failed is not None:
                failed(error)
            if (left_s := until - clock.now()) <= 0:
                raise
            wait_s = min(pauses.next_s(error), left_s)
        await clock.sleep(wait_s)


class Pauses:
    """The growing waits of something that is begun again and again, for as long as it takes.

    `await pauses.wait(error)` after a failure; `reset()` when it has got somewhere. The default
    `pace` is that of `insist`.
    """

    def __init__(self, clock: Clock | None = None, pace: Policy | None = None) -> None:
        self._clock = _System() if clock is None else clock
        self._pace = pace or Policy(base_s=0.05, max_s=2.0)
        self._failures = 0

    def reset(self) -> None:
        """The next wait is as short as the first one."""
        self._failures = 0

    def next_s(self, error: Exception | None = None) -> float:
        """Count one more failure; return how long to wait after it."""
        self._failures += 1
        own_s = delay_s(self._pace, self._failures, self._clock.random.random())
        return max(own_s, _retry_after_s(error))

    async def wait(self, error: Exception | None = None) -> None:
        """Count one more failure, and wait."""
        await self._clock.sleep(self.next_s(error))


def delay_s(policy: Policy, failures: int, unit: float) -> float:
    """How long to wait after so many failures; `unit` (0 to 1) is how much of the jitter."""
    try:
        full = min(policy.max_s, policy.base_s * policy.factor ** (failures - 1))
    except OverflowError:
        full = policy.max_s if policy.base_s else 0.0
    return full * (1.0 - policy.jitter * unit)


def _judge(policy: Policy, error: Exception, attempt: int, on: On) -> Verdict:
    if not _covered(error, on):
        return "permanent"
    return "exhausted" if attempt >= policy.attempts else "retry"


def _covered(error: Exception, on: On) -> bool:
    if not isinstance(on, type | tuple):
        return on(error)
    kinds = on if isinstance(on, tuple) else (on,)
    if isinstance(error, errors.UnknownOutcome):
        kinds = tuple(kind for kind in kinds if issubclass(kind, errors.UnknownOutcome))
    return isinstance(error, kinds)


def _retry_after_s(error: Exception | None) -> float:
    wish = getattr(error, "retry_after_s", None)
    if isinstance(wish, int | float) and math.isfinite(wish):
        return max(0.0, float(wish))
    return 0.0  # nothing asked for, or nonsense


async def _consult(
    verify: Verify | None, error: Exception, attempt: int, limit_s: float, clock: Clock
) -> tuple[Verdict, str]:
    """Ask the authority. Whatever it does, the original error is the one that counts."""
    assert verify is not None
    try:
        answer: object = verify(error, attempt)
        if inspect.isawaitable(answer):
            answer = await _within(limit_s, answer, clock)
    except Exception as broken:  # noqa: BLE001 -- told in the note of the original error
        return "unverified", f"(the authority failed: {_brief(broken)})"
    if answer is True:
        return "retry", ""
    if answer is False:
        return "refused", "(the authority says that trying again makes no sense)"
    return "unverified", f"(the authority said neither True nor False: {_brief(answer)})"


async def _within(limit_s: float, answer: Awaitable[T], clock: Clock) -> T:
    """Await, but not longer than `limit_s` of the runtime's time."""
    asked = asyncio.ensure_future(answer)
    bound = asyncio.ensure_future(clock.sleep(limit_s))
    # An answer that comes too late is taken note of, so that nobody logs it as forgotten.
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        await asyncio.wait((asked, bound), return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise errors.TimedOut(f"no answer within {limit_s:.3g} s")
    finally:
        asked.cancel()  # not awaited: it may refuse to end
        bound.cancel()


class _Batch(Generic[T]):
    """The bookkeeping of a subset retry: which keys have what, and which go again."""

    def __init__(self, keys: Keys, on: On) -> None:
        if isinstance(keys, str):
            raise Mistake(f"keys must be several keys, not the one text {_brief(keys)}")
        self.pending = list(dict.fromkeys(keys))
        if odd := [key for key in self.pending if type(key) is not str]:
            raise Mistake(f"a key is text, not {_brief(odd[0])}")
        self.error: errors.BatchFailed | None = None
        self._keys, self._on = tuple(self.pending), on
        self._values: dict[str, T] = {}
        self._failures: dict[str, Exception] = {}

    def unfinished(self, error: Exception) -> bool:
        """Whether the loop must go on: `error` is ours, and some keys may be tried again."""
        return error is self.error and bool(self.pending)

    def blame(self, error: Exception) -> dict[str, T | Exception]:
        """Give every pending key the error that the call raised, or raise it again."""
        if not _covered(error, self._on):
            _note(error, f"the call was for {several(self.pending, _NAMED_KEYS)}")
            raise error
        return dict.fromkeys(self.pending, error)

    def take(self, answer: Mapping[str, T | Exception]) -> None:
        """Sort an answer. Raises `BatchFailed` while there are failures."""
        if not isinstance(answer, Mapping):
            raise Mistake(f"a batch is answered with a mapping by key, not {_brief(answer)}")
        if extra := sorted(map(str, answer.keys() - set(self.pending))):
            named = several(extra, _NAMED_KEYS)
            raise Mistake(f"the answer has keys nobody asked for: {named}")
        for key in self.pending:
            outcome = answer.get(key, _NOTHING)
            if outcome is _NOTHING:
                outcome = errors.Unavailable(
                    f"the answer says nothing about {_brief(key)}", key=key
                )
            if isinstance(outcome, Exception):
                self._failures[key] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome  # a cancellation that was collected is still one
            else:
                self._failures.pop(key, None)
                self._values[key] = outcome
        again = {k: self._failures[k] for k in self.pending if k in self._failures}
        self.pending = [key for key, error in again.items() if _covered(error, self._on)]
        if self._failures:
            wish = max((_retry_after_s(again[key]) for key in self.pending), default=0.0)
            result = self.result()
            reasons = [f"{_brief(k)}: {_brief(e)}" for k, e in result.failures.items()]
            named = several(reasons, _NAMED_KEYS)
            self.error = errors.BatchFailed(
                f"{len(reasons)} of {len(self._keys)} keys failed: {named}",
                failures=result.failures,
                values=result.values,
            )
            self.error.retry_after_s = wish
            raise self.error

    def result(self) -> Partial[T]:
        """What there is so far, in the order of the keys."""
        return Partial(
            {key: self._values[key] for key in self._keys if key in self._values},
            {key: self._failures[key] for key in self._keys if key in self._failures},
        )


def _finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks instead of suspending."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a synchronous retry never suspends")


def _blocking(how: How) -> How:
    """Make synchronous keywords fit the loop."""
    how["clock"] = _Blocking(how.get("clock"))
    if verify := how.get("verify"):
        how["verify"] = lambda error, attempt: _not_async(verify(error, attempt))
    return how


def _not_async(value: T) -> T:
    if inspect.iscoroutine(value):
        value.close()
        raise Mistake("an asynchronous function was given: use `await policy.acall` or `asubset`")
    return value


def _check(name: str, value: float, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # false for NaN, too
        raise Mistake(f"{name} is a number from {low:g} to {high:g}, not {value!r}")


def _note(error: Exception, text: str) -> None:
    error.add_note(f"retry: {text}")


def _brief(thing: object) -> str:
    text = f"{type(thing).__name__}: {thing}" if isinstance(thing, Exception) else repr(thing)
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."
