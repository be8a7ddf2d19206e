"""A replica: keeps one engine in step with its fleet's target.

    replica = Replica(subscriber, ModuleEngine(model))
    async with replica:                    # follows the target in the background
        async with replica.admit() as version:
            answer(...)                    # served by `version`, and by nothing else

Rules that it keeps:

- It serves only what it has acknowledged, only while the target allows it, and only while
  its own lease should still count. A replica that was cut off stops serving by itself.
- What is served is changed only while nobody is being served: pause → switch → acknowledge
  → resume. A replica that could not acknowledge stays paused.
- It lets callers in only by a target that it has read after its present seat in the ledger
  was told what it serves: from then on a round that forbids this version waits for it.
- A version is staged (loaded aside, verified) before it is switched to. A failure is
  reported, what was served is served on, and it is tried again.
- What an engine has lost is not served: nobody is let in from that moment on, and when
  everybody is out the acknowledgement is taken back. Then it is loaded and acknowledged anew.
"""

import abc
import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Self

import msgspec

from holdfast import events
from holdfast.contrib.fleets.follower import Follower
from holdfast.contrib.fleets.plan import servable
from holdfast.contrib.fleets.standing import Standing, Step, goal
from holdfast.errors import LeaseLost, Retriable, Unavailable, UnknownOutcome
from holdfast.ledger import Runtime
from holdfast.retry import AGAIN, Pauses
from holdfast.timeouts import DEFAULTS
from holdfast.weights.pin import Pin
from holdfast.weights.records import Keys, Told
from holdfast.weights.subscriber import Subscriber

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "ModuleEngine", "Replica"]


class _OfAVersion(events.Event, frozen=True):
    replica: str
    version: int


class Staged(_OfAVersion, frozen=True, tag="weights.staged"):
    """A replica has loaded a version aside."""


class Switched(_OfAVersion, frozen=True, tag="weights.switched"):
    """A replica serves another version."""


class Failed(_OfAVersion, frozen=True, tag="weights.failed"):
    """A replica could not load a version."""

    problem: str


class Withdrawn(_OfAVersion, frozen=True, tag="weights.withdrawn"):
    """A replica's engine has lost what it served; the replica has taken back that it serves it."""


class Troubled(events.Event, frozen=True, tag="weights.troubled"):
    """A part of a replica failed with something unexpected; it is tried again."""

    replica: str
    problem: str


class Engine(abc.ABC):
    """What serves. The replica calls these one at a time.

    An engine whose contents can go while the replica lives (another process, a server) calls
    `lose` when they have gone. What has been lost comes back through `revive`, `stage` and
    `switch`.
    """

    losses = 0
    """How often everything that it held, served or staged, has been lost."""

    @functools.cached_property
    def _losing(self) -> asyncio.Event:
        return asyncio.Event()

    def lose(self) -> None:
        """Tell that nothing that was staged or served is there any more."""
        self.losses += 1
        self._losing.set()

    async def lost(self, seen: int) -> None:
        """Wait until `losses` is above `seen`; for ever where nothing can be lost."""
        while self.losses <= seen:
            self._losing.clear()
            await self._losing.wait()

    async def revive(self) -> None:  # noqa: B027 -- what lives in this process is always there
        """Make sure that there is something to load into. Called before a version is staged.

        Raises a `Retriable` when there is not, yet: a round does not wait for that, and it is
        tried again.
        """

    @abc.abstractmethod
    async def stage(self, pin: Pin) -> None:
        """Load a verified version aside. What is served must not change."""

    @abc.abstractmethod
    async def switch(self, pin: Pin) -> None:
        """Serve the staged version from now on. Called only while paused.

        When it raises, the engine may hold anything: the replica goes back with `restore`.
        """

    async def restore(self, pin: Pin) -> None:
        """Go back to a version that was served before."""
        await self.stage(pin)
        await self.switch(pin)

    async def pause(self) -> None:  # noqa: B027 -- an engine behind `admit` needs nothing more
        """Stop answering; what is being answered is finished first. May be called twice.

        Raises when it was lost: whoever waits here keeps others from taking note of that.
        """

    async def resume(self) -> None:  # noqa: B027 -- as above
        """Answer again."""


class ModuleEngine(Engine):
    """A torch module in this process. Staging keeps the pin open; switching copies."""

    def __init__(self, module: "torch.nn.Module") -> None:
        self.module = module

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`: whether everything fits is found out here."""
        pin.fits(self.module.state_dict())

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`: in a thread, because the lease must be renewed meanwhile."""
        await asyncio.to_thread(pin.load_into, self.module.state_dict())


class Replica:
    """Follows the target; `admit` is the door for callers."""

    def __init__(
        self,
        subscriber: Subscriber,
        engine: Engine,
        *,
        follower: Callable[[Runtime, Keys], Follower] = Follower,
    ) -> None:
        self._subscriber = subscriber
        self._engine = engine
        self._runtime = subscriber.channel.runtime
        self._follower = follower(self._runtime, subscriber.channel.keys)
        self._tasks: list[asyncio.Task[None]] = []
        # What the engine holds, and what is loaded aside, each with the losses that it had when
        # it took it.
        self._holds: tuple[int | None, int] = None, 0
        self._aside: tuple[Pin, contextlib.AsyncExitStack] | None = None
        self._aside_losses = 0
        self._minded = engine.losses
        # The door.
        self._open = False
        self._paused = False
        self._seat = ""
        self._door = asyncio.Lock()
        self._inside = 0
        self._changed = asyncio.Event()
        # What the fleet is to know besides the acknowledgement, and what was told, by whom.
        self._telling = asyncio.Lock()
        self._told: tuple[str, Told | None] = "", None
        self._held = 0
        self._failed: int | None = None
        self._problem = ""

    @property
    def name(self) -> str:
        """The consumer's name."""
        return self._subscriber.name

    async def __aenter__(self) -> Self:
        self._tasks = [
            self._runtime.spawn(self._forever(self._follow), name=f"{self.name} follows"),
            self._runtime.spawn(self._forever(self._guard), name=f"{self.name} guards"),
            self._runtime.spawn(self._forever(self._load), name=f"{self.name} loads"),
            self._runtime.spawn(self._forever(self._mind), name=f"{self.name} minds"),
            self._runtime.spawn(self._forever(self._follower.drive), name=f"{self.name} drives"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._open = False
        await self._drop(tell=False)

    async def _follow(self) -> None:
        try:
            await self._follower.run()
        finally:  # who does not know the target serves nothing
            self._follower.forget()

    async def _forever(self, step: Callable[[], Awaitable[None]]) -> None:
        """Do a step whenever the fleet has moved, and again while it fails."""
        pauses = Pauses(self._runtime)
        while True:
            seen = self._follower.count
            try:
                await step()
            except Exception as error:  # noqa: BLE001 -- the end of a task: it is recorded
                if not isinstance(error, (*AGAIN, LeaseLost)):
                    problem = f"{type(error).__name__}: {error}"
                    events.emit(Troubled(replica=self.name, problem=problem))
                await pauses.wait(error)
            else:
                pauses.reset()
                await self._follower.moved(seen)

    @property
    def _loaded(self) -> int | None:
        """What the engine holds: nothing from the moment when that was lost."""
        version, losses = self._holds
        return version if losses == self._engine.losses else None

    @_loaded.setter
    def _loaded(self, version: int | None) -> None:
        self._holds = version, self._engine.losses

    # ---- the door ------------------------------------------------------------

    def serving(self) -> int | None:
        """The version that may be served at this moment, or None."""
        return self.standing().serving(self._follower.target)

    def standing(self) -> Standing:
        """Where it stands now."""
        aside = self._aside[0] if self._aside is not None else None
        return Standing(
            acknowledged=self._subscriber.acknowledged,
            loaded=self._loaded,
            aside=aside.number if aside else None,
            whole=not (aside and aside.lost) and self._aside_losses == self._engine.losses,
            failed=self._failed,
            open=self._open,
            paused=self._paused,
            counts=self._counts(),
        )

    def _counts(self) -> bool:
        """Whether the seat that the door was opened under is ours and should still count."""
        return self._seat == self._subscriber.seat_id and self._subscriber.believes()

    @contextlib.asynccontextmanager
    async def admit(self, timeout_s: float = 30.0) -> AsyncIterator[int]:
        """Wait until something may be served; yields its version, which stays until the end."""
        deadline_s = self._runtime.now() + timeout_s
        while (version := self.serving()) is None:
            if self._runtime.now() >= deadline_s:
                raise Unavailable(f"{self.name} serves nothing now: ask another replica")
            await self._moved(min(DEFAULTS.fleet_door_s, timeout_s))
        self._inside += 1
        try:
            yield version
        finally:
            self._inside -= 1
            self._changed.set()

    async def _close_door(self, still: Callable[[], bool] = lambda: True) -> bool:
        """Let nobody in, and wait until everybody is out, as long as there is need to."""
        self._open = False
        if not self._paused:
            await self._engine.pause()
            self._paused = True
        return await self._emptied(still)

    async def _emptied(self, still: Callable[[], bool] = lambda: True) -> bool:
        """Wait until nobody is inside, as long as there is need to."""
        while self._inside and still():
            await self._moved(DEFAULTS.fleet_door_s)
        return not self._inside

    async def _moved(self, limit_s: float) -> None:
        """Wait until something moved at the door, or it is time to look again."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                self._changed.clear()
                await self._changed.wait()

    async def _open_door(self) -> None:
        """Let callers in, if the target allows it: read now, under the seat that we have now.

        What we heard of the target before this seat was known to serve our version says
        nothing: nobody waited for us then.
        """
        seat, version = self._subscriber.seat_id, self._subscriber.acknowledged
        if version is None or version != self._loaded or self._told[0] != seat:
            return
        if version in servable(await self._follower.read()):
            self._paused = False  # whatever becomes of this call
            await self._engine.resume()
            self._open, self._seat = True, seat
            self._changed.set()

    async def _guard(self) -> None:
        """Stop and begin serving as the target says. Never waits for a version to load."""
        target, standing = self._follower.target, self.standing()
        if standing.open and not standing.counts:
            async with self._door:
                await self._close_door(lambda: False)
        if standing.must_shut(target):
            async with self._door:  # nobody else is about to open it
                if self._subscriber.acknowledged != standing.acknowledged:
                    return  # it was switched meanwhile
                out = await self._close_door(lambda: self._follower.target == target)
            if out and target.phase == "holding":
                self._held = target.round
        if self._told != (self._subscriber.seat_id, self._report()):
            await self._tell()
        if self.standing().may_open(target) and not self._door.locked():
            async with self._door:
                await self._open_door()

    async def _mind(self) -> None:
        """When the engine has lost what it held, take back that we serve it."""
        while True:
            await self._engine.lost(self._minded)
            losses = self._engine.losses
            async with self._door:
                version = self._subscriber.acknowledged
                # Unless it was loaded again before it was our turn.
                if self._loaded is None and version is not None:
                    self._open = False
                    await self._emptied()
                    await self._tell(withdraw=True)
                    events.emit(Withdrawn(replica=self.name, version=version))
            self._minded = losses

    # ---- loading -------------------------------------------------------------

    async def _load(self) -> None:
        """Stage what is to be staged, switch to what is to be served."""
        target = self._follower.target
        while (step := self.standing().loading(target)) is not None:
            if step is Step.DROP:
                await self._drop()
            elif step is Step.FORGIVE:
                self._failed, self._problem = None, ""
                await self._tell()
            else:
                wanted = goal(target)
                assert wanted is not None
                await self._try(self._stage if step is Step.STAGE else self._switch, wanted)

    async def _try(self, load: Callable[[int], Awaitable[None]], version: int) -> None:
        try:
            await load(version)
        except (Retriable, UnknownOutcome, LeaseLost):
            raise
        except Exception as error:
            await self._drop()
            await self._fail(version, error)
            again = Unavailable(self._problem, retry_after_s=DEFAULTS.fleet_retry_s)
            raise again from error  # tried again

    async def _fail(self, version: int, error: Exception) -> None:
        """Tell that a version cannot be loaded now, so that nobody waits for us."""
        self._failed, self._problem = version, f"{type(error).__name__}: {error}"
        events.emit(Failed(replica=self.name, version=version, problem=self._problem))
        await self._tell()

    async def _stage(self, version: int) -> None:
        try:  # before the version's bytes are compared, which takes long
            await self._engine.revive()
        except Retriable as error:
            if self._failed != version:
                await self._fail(version, error)
            raise
        losses = self._engine.losses
        async with contextlib.AsyncExitStack() as stack:
            pin = await stack.enter_async_context(self._subscriber.pin(version))
            await self._engine.stage(pin)
            self._aside, self._aside_losses = (pin, stack.pop_all()), losses
        if self._failed == version:
            self._failed, self._problem = None, ""
        events.emit(Staged(replica=self.name, version=version))
        await self._tell()

    async def _switch(self, version: int) -> None:
        assert self._aside is not None
        async with self._door:
            await self._close_door()
            if self._loaded != version:
                last = self._loaded
                try:
                    await self._into_engine(self._engine.switch, self._aside[0])
                except Exception:
                    await self._go_back(last)
                    raise
            await self._tell(acknowledge=version)
            await self._drop(tell=False)
            events.emit(Switched(replica=self.name, version=version))
            await self._open_door()

    async def _go_back(self, version: int | None) -> None:
        """The engine may hold anything now: load what it held before, which we still serve."""
        if version is None:
            return
        await self._engine.revive()
        async with self._subscriber.pin(version) as pin:
            await self._into_engine(self._engine.restore, pin)

    async def _into_engine(self, load: Callable[[Pin], Awaitable[None]], pin: Pin) -> None:
        """Have the engine hold a version, if it is not lost meanwhile."""
        self._loaded, losses = None, self._engine.losses
        await load(pin)
        if losses != self._engine.losses:
            raise Unavailable(f"the engine of {self.name} was lost while it took {pin.number}")
        self._loaded = pin.number

    async def _drop(self, *, tell: bool = True) -> None:
        """Forget what is loaded aside."""
        if self._aside is not None:
            _, stack = self._aside
            self._aside = None
            try:
                if tell:
                    await self._tell()
            finally:
                await stack.aclose()

    def _report(self) -> Told:
        """Where we are."""
        staged = self._aside[0].number if self._aside else None
        return Told(staged=staged, problem=self._problem, failed=self._failed, held=self._held)

    async def _tell(self, acknowledge: int | None = None, *, withdraw: bool = False) -> None:
        """Report where we are. Raises `LeaseLost` when we got another seat meanwhile."""
        async with self._telling:
            seat, report = self._subscriber.seat_id, self._report()
            if report.staged == acknowledge:
                report = msgspec.structs.replace(report, staged=None)
            told = msgspec.structs.replace(report, acknowledged=acknowledge)
            await self._subscriber.report(told, withdraw=withdraw)
            if seat != self._subscriber.seat_id:
                raise LeaseLost(f"{self.name} has a new seat, which is to be told too")
            self._told = seat, report
