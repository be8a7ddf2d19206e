"""A vLLM server as a replica of a fleet.

    await serve_vllm(root, ledger, "policy", "r0", "http://10.0.0.7:8000")

`VllmEngine` is the `Engine` that a `Replica` drives; `serve_vllm` puts the two together with
a subscriber and keeps them going while servers restart, and starts the server itself if told
to (`process.py`). Callers ask the server itself, at the address that `Fleet.addresses`
gives, so what keeps them out is that it is *paused*. `Replica(subscriber, VllmEngine(url))`
alone withdraws and reloads a server that was lost as well, but two such processes would fight.

Rules:

- The server is resumed only when it holds what this engine loaded into it, in the life that
  it has now, compared parameter by parameter.
- **The server's label says what it holds**, so it is known whoever dies. Before a load it is
  `LOADING`, after a load that was checked the version's number; a server that was started
  again has another one. Who finds `LOADING`, or a load that failed, may heal it with one good
  load under the label `HEALING`. Who finds `HEALING` knows that this was tried: the server is
  lost until it is started again. It stays paused, and its replica leaves the fleet.
- One process at a time drives a server: the one that leads `/servers/<address>`. That lease
  is half as long as the replica's, so a process that is cut off from the ledger pauses its
  server before the fleet goes on without it. Give a server one address, always the same.
- `watch_s` is how soon a restart is noticed. A server that does not answer for `away_s`
  leaves the fleet: vLLM takes longer than that to start, and so is never offered with the
  weights that it was started with.

Where this ends: vLLM cannot start paused, and goes on when whoever drives it is killed. Who
kept an address from before may be answered by start-up weights for `watch_s`, or by the last
version until the next process has taken over; the label in the answer tells. On a CPU the
checker may be blind to projections (`blind` names them): what protects these is that the
pin compared every byte before.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Self

import msgspec

from holdfast import events
from holdfast.contrib.fleets.replica import Engine, Replica
from holdfast.contrib.vllm.client import VllmServer, expected
from holdfast.contrib.vllm.process import ServerProcess
from holdfast.errors import (
    Corrupt,
    LeaseLost,
    Mistake,
    Retriable,
    TimedOut,
    Unavailable,
    UnknownOutcome,
)
from holdfast.ledger import Election, Ledger, LiveRuntime, join
from holdfast.retry import Pauses
from holdfast.text import several
from holdfast.weights.layout import MAX_VERSION
from holdfast.weights.pin import Pin
from holdfast.weights.subscriber import LEASE_S, Subscriber

__all__ = ["HEALING", "LOADING", "VllmEngine", "serve_vllm"]

LOADING = 10**17
"""The label of a server that is being loaded. No version has such a number."""
HEALING = 2 * 10**17
"""The label of a server that is being loaded after a load that failed."""

Shapes = dict[str, tuple[int, ...]]


class ServerLost(events.Event, frozen=True, tag="weights.server_lost"):
    """A server cannot be used as it is, and is not offered to callers any more."""

    url: str
    problem: str


class ServerFound(events.Event, frozen=True, tag="weights.server_found"):
    """A server answers and is paused, ready to be loaded."""

    url: str


class _Staged(msgspec.Struct, frozen=True):
    """A version that lies ready for the server."""

    pin: Pin
    path: str
    wanted: dict[str, str]
    shapes: Shapes


class VllmEngine(Engine):
    """Drives one vLLM server. Use `async with`; it watches the server meanwhile.

    `dtype` is the one that the server runs with (a safetensors code), `tied` whether its head
    is its embedding (None: found out). `drain_s` is how long running requests may take to end
    before they are aborted; it should be less than the fleet's `hold_s`. `load_s` bounds a
    load, `away_s` everything else. The server must see the channel's folder under the path
    that we see it under.
    """

    def __init__(
        self,
        url: str,
        *,
        dtype: str = "BF16",
        tied: bool | None = None,
        api_key: str | None = None,
        load_s: float = 300.0,
        drain_s: float = 20.0,
        watch_s: float = 0.5,
        away_s: float = 5.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.may: Callable[[], bool] = lambda: True
        """Whether the server is still ours, by our own clock."""
        self.problem = ""
        """Why the server cannot be used as it is; empty while it can."""
        self.restart: Callable[[], None] = lambda: None
        """Called when only a restart of the server helps."""
        self.blind: tuple[str, ...] = ()
        """The parameters that the server's checker could not see after the last load."""
        # What may take long (a load, its comparison), and what must not.
        self._server = VllmServer(url, api_key=api_key, call_s=load_s)
        self._quick = VllmServer(url, api_key=api_key, call_s=away_s)
        self._dtype, self._tied = dtype, tied
        self._drain_s, self._watch_s, self._away_s = drain_s, watch_s, away_s
        self._turn = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._staged: _Staged | None = None
        # What we know of the server's present life.
        self._met = self._retired = False
        self._loaded: int | None = None
        self._open = False
        self._names: frozenset[str] | None = None
        self._shapes: Shapes | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name=f"watches {self.url}")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._server.close()
        await self._quick.close()

    # ---- beginning and end ---------------------------------------------------------

    async def found(self) -> None:
        """Wait until the server answers and may be loaded: it is paused then.

        `Unavailable` when it is no longer ours.
        """
        self._retired = False
        pauses = Pauses()
        while True:
            try:
                async with self._turn:
                    await self._meet()
            except (Retriable, UnknownOutcome) as error:
                if not self.may():
                    raise
                self._give_up(str(error))
                await pauses.wait(error)
            else:
                return

    async def _meet(self) -> None:
        """Pause a server of which nothing is known, and find out whether it can be loaded."""
        self._met, self._open, self._loaded = False, False, None
        self._names = self._shapes = None
        self._require_right()
        await self._stop()
        label = await self._quick.version()
        if label == HEALING:
            raise self._give_up(
                f"vLLM at {self.url} could not be healed after a load that failed: restart it",
                broken=True,
            )
        try:
            self._names = frozenset(await self._server.checksum())
        except Corrupt:
            if label != LOADING:
                await self._quick.set_version(LOADING)
        self._met = True
        self.problem = ""
        events.emit(ServerFound(url=self.url))

    def ended(self) -> None:
        """Take note that the server's process has ended, before it is missed."""
        self._give_up(f"vLLM at {self.url} has ended")

    async def retire(self) -> None:
        """Pause the server, if it can be done soon, and resume it no more before `found`."""
        self._retired, self._met, self._open = True, False, False
        with contextlib.suppress(Retriable, UnknownOutcome, TimeoutError):
            async with asyncio.timeout(self._away_s), self._turn:
                await self._server.pause("wait")

    # ---- what the replica calls ------------------------------------------------------

    async def revive(self) -> None:
        """See `Engine.revive`: the server is paused then, whatever it holds."""
        if not self._met:
            async with self._turn:
                await self._meet()

    async def stage(self, pin: Pin) -> None:
        """See `Engine.stage`. A version that does not fit the server's model is a `Mistake`."""
        self._staged = None
        await self.revive()
        if pin.manifest.kind != "model":
            raise Mistake(f"version {pin.number} is no model: vLLM cannot be switched to it")
        tensors = pin.sources()
        shapes = {one.name: one.shape for one in tensors}
        # A wrong shape breaks the server beyond healing, and missing tensors it does not notice.
        self._compare(pin.number, shapes)
        wanted = await asyncio.to_thread(
            expected, tensors, dtype=self._dtype, tied=self._is_tied(pin)
        )
        if self._names is not None:
            _same_names(pin.number, frozenset(wanted), self._names)
        path = await pin.stage()
        self._staged = _Staged(pin, path, wanted, shapes)

    async def switch(self, pin: Pin) -> None:
        """See `Engine.switch`."""
        if self._staged is None or self._staged.pin is not pin:
            await self.stage(pin)
        assert self._staged is not None
        async with self._turn:
            if not self._met:
                raise Unavailable(f"vLLM at {self.url} is not ready to be loaded: {self.problem}")
            self._open = False
            await self._stop()  # before the first load nobody has paused it for us
            await self._load(self._staged)

    async def pause(self) -> None:
        """See `Engine.pause`. A server that cannot be paused for `away_s` is lost."""
        self._open = False
        begun_s, pauses = time.monotonic(), Pauses()
        while True:
            try:
                async with self._turn:
                    await self._stop()
                return
            except (Retriable, UnknownOutcome) as error:
                if not self._met:
                    raise
                if time.monotonic() - begun_s > self._away_s:
                    raise self._give_up(f"vLLM at {self.url} cannot be paused: {error}") from error
                await pauses.wait(error)

    async def resume(self) -> None:
        """See `Engine.resume`; `Unavailable` when the server does not hold what we loaded."""
        async with self._turn:
            if not self._met or self._loaded is None:
                raise Unavailable(f"vLLM at {self.url} holds nothing to serve: {self.problem}")
            self._require_right()
            await self._require_label()
            await self._quick.resume()
            await self._require_label()  # it may have been started again just before
            self._open = True

    # ---- loading ---------------------------------------------------------------------

    async def _load(self, staged: _Staged) -> None:
        """Load and compare, with notes for whoever comes after us; see the top."""
        label = await self._quick.version()
        if label == HEALING:
            raise self._give_up(f"vLLM at {self.url} could not be healed: restart it", broken=True)
        if self._loaded is not None and label != self._loaded:
            raise self._give_up(f"vLLM at {self.url} was started again, or loaded by others")
        await staged.pin.check()  # its folder goes with its lease, and a failed load costs a heal
        self._require_right()
        self._loaded = None
        note = HEALING if label == LOADING else LOADING
        await self._quick.set_version(note)
        try:
            await self._server.reload(staged.path)
            self.blind = await self._server.verify(staged.wanted)
        except (Corrupt, Mistake, UnknownOutcome) as error:
            if note == LOADING:
                raise
            raise self._give_up(
                f"vLLM at {self.url} could not be healed with version {staged.pin.number}: "
                f"restart it ({error})",
                broken=True,
            ) from error
        await self._quick.set_version(staged.pin.number)
        self._loaded = staged.pin.number
        self._names, self._shapes = frozenset(staged.wanted), staged.shapes

    async def _stop(self) -> None:
        """Take no new requests; let those that run end, and abort them when it takes too long."""
        try:
            async with asyncio.timeout(self._drain_s):
                await self._server.pause("wait")
        except (TimeoutError, TimedOut):
            await self._quick.pause("abort")

    async def _require_label(self) -> None:
        label = await self._quick.version()
        if label != self._loaded:
            with contextlib.suppress(Retriable):
                await self._quick.pause("abort")
            raise self._give_up(
                f"vLLM at {self.url} holds {_said(label)} and not version {self._loaded}: it was "
                "started again, or loaded by others"
            )

    def _require_right(self) -> None:
        if self._retired:
            raise Unavailable(f"vLLM at {self.url} is being left")
        if not self.may():
            raise self._give_up(
                f"we may not drive vLLM at {self.url} any more: our lease has ended"
            )

    def _give_up(self, problem: str, *, broken: bool = False) -> Unavailable:
        """Give the server up as it is; returns the error for whoever wanted something of it."""
        self._met, self._open, self._loaded = False, False, None
        self.lose()
        if broken:
            self.restart()
        if problem != self.problem:
            self.problem = problem
            events.emit(ServerLost(url=self.url, problem=problem))
        return Unavailable(problem)

    def _compare(self, version: int, shapes: Shapes) -> None:
        """Refuse tensors that are not those of the version that the server took before."""
        if self._shapes is None or shapes == self._shapes:
            return
        names = {name for name, _ in shapes.items() ^ self._shapes.items()}
        raise Mistake(
            f"version {version} has other tensors or shapes than what vLLM holds: {_some(names)}",
            version=version,
        )

    def _is_tied(self, pin: Pin) -> bool:
        if self._tied is not None:
            return self._tied
        if self._names is not None:
            return not any(name.endswith(":lm_head.weight") for name in self._names)
        with contextlib.suppress(Mistake, msgspec.MsgspecError, AttributeError):
            config = msgspec.json.decode(pin.carried("config.json"))
            return bool(config.get("tie_word_embeddings", False))
        return False

    # ---- watching --------------------------------------------------------------------

    async def _watch(self) -> None:
        """Notice a server that was started again, has gone, or is no longer ours."""
        heard_s = time.monotonic()
        while True:
            await asyncio.sleep(self._watch_s)
            if not self._met or self._turn.locked():
                heard_s = time.monotonic()  # calls that are under way have limits of their own
                continue
            try:
                async with asyncio.timeout(self._away_s), self._turn:
                    await self._look()
            except (Retriable, UnknownOutcome, TimeoutError) as error:
                if time.monotonic() - heard_s > self._away_s:
                    self._give_up(f"vLLM at {self.url} does not answer: {error}")
            except Mistake as error:
                self._give_up(str(error))
            else:
                heard_s = time.monotonic()

    async def _look(self) -> None:
        opened = self._open
        try:
            self._require_right()
        except Unavailable:
            if opened:
                await self._server.pause("wait")
            raise
        if self._loaded is not None:
            await self._require_label()
        paused = await self._quick.paused()
        if paused and self._open:
            # By whoever drove it before us, and was slow to notice that it is ours now.
            await self._quick.resume()
        elif not paused and not self._open:
            await self._server.pause("wait")


async def serve_vllm(
    root: str | Path,
    ledger: Ledger,
    channel: str,
    name: str,
    url: str,
    *,
    run: str = "default",
    lease_s: float = LEASE_S,
    engine: VllmEngine | None = None,
    process: ServerProcess | None = None,
) -> None:
    """Keep one vLLM server in step with its fleet, until cancelled.

    Whenever the server cannot be used as it is (gone, started again, beyond healing) its
    replica leaves the fleet, and joins it again when the server can be loaded. A server that
    is left stays paused. `Mistake` when there is something else at `url`. Give an `engine` for a
    server that is not like the usual one.

    With `process` the server is ours: it is started here, started again when it has ended or
    is beyond healing, and ends with us. Otherwise somebody else looks after it.
    """
    runtime = LiveRuntime(ledger)
    pauses = Pauses(runtime)
    engine = engine or VllmEngine(url)
    place = join("servers", re.sub(r"[^A-Za-z0-9.]+", "-", engine.url))
    election = Election(runtime, place, name, ttl_s=lease_s / 2)
    async with engine, contextlib.AsyncExitStack() as stack:
        if process is not None:
            engine.restart = process.end
            await stack.enter_async_context(process.running(engine.ended))
        while True:
            try:
                async with election.lead() as leadership:
                    engine.may = leadership.believes
                    await engine.found()
                    subscriber = Subscriber(
                        root,
                        ledger,
                        channel,
                        name,
                        needs="latest",
                        address=engine.url,
                        run=run,
                        lease_s=lease_s,
                    )
                    losses = engine.losses
                    async with subscriber, Replica(subscriber, engine):
                        try:
                            await engine.lost(losses)
                        finally:  # nobody keeps it in step once its replica has left
                            await engine.retire()
                    pauses.reset()
            except (Retriable, UnknownOutcome, LeaseLost) as error:
                await pauses.wait(error)


def _same_names(version: int, wanted: frozenset[str], there: frozenset[str]) -> None:
    for what, names in (
        ("lacks what the model of vLLM has", there - wanted),
        ("has what the model of vLLM has not", wanted - there),
    ):
        if names:
            raise Mistake(f"version {version} {what}: {_some(names)}", version=version)


def _said(label: int | None) -> str:
    if label is None:
        return "no version"
    return f"version {label}" if label <= MAX_VERSION else "an unfinished load"


def _some(names: Iterable[str]) -> str:
    return several([name.rpartition(":")[2] for name in sorted(names)], 3)
