"""The trainer behind HTTP: each endpoint of Tinker's protocol is one method.

Requests become operations (`wire`), operations become promises (`core`); nothing is decided
here. A poll is held until its result is there, so that clients need not ask often. What a
client did wrong *in* an operation is the result of its promise, of category `user`, and uses
its number up; what is wrong with a request that has no number is a 4xx at once.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl

from holdfast import events
from holdfast.errors import (
    BatchFailed,
    HoldfastError,
    Mistake,
    NotFound,
    Retriable,
    Unavailable,
)
from holdfast.timeouts import DEFAULTS
from holdfast.trainer import listing, ops
from holdfast.trainer.core import Core
from holdfast.trainer.ops import Failed
from holdfast.trainer.paths import FOLDERS, STATE, unparse
from holdfast.trainer.state import Pending, State, saved_in
from holdfast.trainer.upkeep import Upkeep
from holdfast.trainer.wire import (
    answers,
    data,
    references,
    refused,
    requests,
    sampling,
    sessions,
)
from holdfast.trainer.wire.answers import Answer
from holdfast.trainer.wire.body import (
    DEFAULT_LIMITS,
    BadOp,
    Limits,
    Numbered,
    Share,
    decode,
    read_body,
)

if TYPE_CHECKING:
    from holdfast.transfer import Store

__all__ = ["Bases", "Request", "Service"]

PREFIX = "/api/v1/"
_MAX_QUERY = 4096


class Refused(events.Event, frozen=True, tag="trainer.refused"):
    """A request was not served."""

    labels = ("path", "status")

    path: str
    status: int
    reason: str


class Bases(Protocol):
    """What the service tells of base models."""

    def offers(self) -> list[answers.Offer]:
        """The bases that may be asked for."""

    def about(self, base: str) -> tuple[str, str]:
        """The architecture and the tokenizer of a base."""

    async def probe(self) -> None:
        """Compute something, or raise."""


@dataclass(frozen=True)
class Request:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    raw: bytes
    query_string: str = ""
    share: Share | None = None
    """What its body may hold of the memory for all bodies."""

    def body(self, limits: Limits) -> bytes:
        """The body, decompressed. `Unavailable` when all bodies together are too much."""
        coding = self.headers.get("content-encoding", "")
        plain = read_body(self.raw, self.content_type, coding, limits)
        if self.share is not None and plain is not self.raw:
            self.share.take(len(plain))
        return plain

    @property
    def query(self) -> dict[str, str]:
        """What stands behind the path."""
        return dict(parse_qsl(self.query_string[:_MAX_QUERY]))

    @property
    def content_type(self) -> str:
        """What the body is."""
        return self.headers.get("content-type", "")


Handler = Callable[[bytes, Request], Awaitable[Answer]]

NUMBERED: Mapping[str, Callable[[bytes], Numbered]] = {
    "optim_step": requests.optim_step,
    "save_weights": requests.save_weights,
    "save_weights_for_sampler": requests.save_weights_for_sampler,
    "publish_weights": requests.publish_weights,
    "load_adapter": requests.load_adapter,
}
"""Operations of a model that are read, checked and promised, and nothing else."""
WITH_DATA: Mapping[str, Callable[[bytes, str, Limits], Numbered]] = {
    "forward": data.forward,
    "forward_backward": data.forward_backward,
}
NOT_NEEDED: Mapping[str, Mapping[str, str]] = {
    "client/config": {},
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
}
"""What is not needed here, and is answered."""


class Service:
    """See the module. `answer` is all there is."""

    def __init__(
        self,
        core: Core,
        upkeep: Upkeep,
        bases: Bases,
        *,
        store: "Store | None" = None,
        hold_s: float = DEFAULTS.poll_hold_s,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._core = core
        self._upkeep = upkeep
        self._bases = bases
        self._store = store
        self._hold_s = hold_s
        self._limits = limits
        self._posts: dict[str, Handler] = {
            "probe": self._probe,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward_backward_references": self._by_reference,
            "load_weights": self._load_weights,
            "create_sampling_session": self._create_sampler,
            "join_sampling_session": self._join_sampler,
            "asample": self._asample,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_many,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
        }

    async def answer(self, request: Request) -> Answer:
        """Answer one request."""
        try:
            return await self._dispatch(request)
        except HoldfastError as error:
            return self.refusal(request.path, error)
        except Exception as error:  # noqa: BLE001 -- a bug is told, and is no reason to end
            reason = f"{type(error).__name__}: {error}"
            events.emit(Refused(path=request.path[:80], status=500, reason=reason))
            return answers.problem(500, "internal", f"the trainer has a bug: {reason}")

    def refusal(self, path: str, error: HoldfastError) -> Answer:
        """The answer to a request that is not served."""
        answer = answers.refusal(error)
        events.emit(Refused(path=path[:80], status=answer.status, reason=str(error)))
        return answer

    async def _dispatch(self, request: Request) -> Answer:
        if request.path.startswith("/inference/"):
            # Not as 404: that is a deployment on its way for whoever samples from one.
            raise Mistake(refused.NO_DEPLOYMENTS)
        if not request.path.startswith(PREFIX):
            raise NotFound(f"there is nothing at {request.path[:80]}: paths begin with {PREFIX}")
        name = request.path.removeprefix(PREFIX).rstrip("/")
        if request.method == "GET":
            return await self._look(name, request.query)
        if request.method not in ("POST", "PUT", "DELETE"):
            text = f"{request.method} is not known here"
            return answers.problem(405, "method", text, allow="GET, POST, PUT, DELETE")
        match name.split("/"):
            case ["training_runs", model, "checkpoints", *parts]:
                return await self._change(request, name, model, parts)
            case ["sessions", session, "finish"] if request.method == "POST":
                await self._upkeep.end_session(session)
                return answers.plain({})
        if request.method != "POST":
            raise NotFound(refused.why_not(request.method, name))
        body = request.raw
        try:
            body = request.body(self._limits)
            return await self._post(name, body, request)
        except BadOp as error:
            return await self._refuse(error)
        except Mistake as error:
            told = requests.number_of(body, request.content_type)
            if told is None or told[0] not in self._core.lines:
                raise
            return await self._refuse(BadOp(str(error), model=told[0], seq=told[1]))

    async def _post(self, name: str, body: bytes, request: Request) -> Answer:
        if name in NUMBERED:
            return await self._submit(NUMBERED[name](body))
        if name in WITH_DATA:
            return await self._submit(WITH_DATA[name](body, request.content_type, self._limits))
        if name in NOT_NEEDED:
            return answers.plain(NOT_NEEDED[name])
        if name not in self._posts:
            raise NotFound(refused.why_not("POST", name))
        return await self._posts[name](body, request)

    async def _refuse(self, error: BadOp) -> Answer:
        """Use the number of a bad operation up, so that those behind it need not wait.

        Whatever was wrong with it, and whether anything here knows such an operation or not.
        """
        failed = Failed(error=str(error))
        skip = ops.Skip(reason="refused")
        request = await self._core.submit(error.model, error.seq, skip, refused=failed)
        return answers.promise(request, model=error.model)

    # ---- looking ---------------------------------------------------------------

    async def _look(self, name: str, query: Mapping[str, str]) -> Answer:
        core = self._core
        match name.split("/"):
            case ["healthz"]:
                if self._core.journal.failure is not None:
                    return answers.problem(503, "ending", str(self._core.journal.failure))
                return answers.plain({"status": "ok", "models": core.known.census()})
            case ["get_server_capabilities"]:
                return answers.capabilities(self._bases.offers(), probe=PREFIX + "probe")
            case ["samplers", sampler]:
                state = self._core.find(sampler)
                if state.sampler is None:
                    raise NotFound(f"{sampler[:80]} is not a sampling session")
                where = saved_in(state.channel)
                path = None if where is None else unparse(*where)
                return answers.sampler_info(sampler, state.base, path)
            case ["training_runs"]:
                models = [state for state in core.lines.values() if state.model]
                shown, cursor = listing.page(models, query)
                runs = [listing.training_run(one, core.saves, core.owner) for one in shown]
                return answers.plain({"training_runs": runs, "cursor": cursor})
            case ["training_runs", model]:
                state = _a_model(core.find_any(model))
                return answers.plain(listing.training_run(state, core.saves, core.owner))
            case ["training_runs", model, "checkpoints"]:
                core.find_any(model)
                return answers.plain({"checkpoints": listing.checkpoints(core.saves, model)})
            case ["list_checkpoints"]:  # Fireworks' client
                names = {name for _, folder, name in core.saves if folder == STATE}
                return answers.plain({"checkpoints": sorted(names)})
            case ["checkpoints"]:
                shown, cursor = listing.page(listing.checkpoints(core.saves), query)
                return answers.plain({"checkpoints": shown, "cursor": cursor})
            case ["sessions"]:
                living = [name for name, one in core.known.sessions.items() if not one.ended]
                return answers.plain({"sessions": listing.page(living, query)[0]})
            case ["sessions", session]:
                if session not in core.known.sessions:
                    raise NotFound(f"there is no session {session[:80]!r}")
                return answers.plain(listing.session(session, core.lines.values()))
            case _:
                raise NotFound(refused.why_not("GET", name))

    async def _change(self, request: Request, name: str, model: str, parts: list[str]) -> Answer:
        """Delete, publish or unpublish a checkpoint, or say until when it is kept.

        Asked twice, the second time changes nothing: a client that heard no answer asks again.
        """
        saves = self._core.saves
        match request.method, parts:
            case "DELETE", [folder, saved] if folder in FOLDERS or saved != "publish":
                what, checkpoint = "delete", [folder, saved]
            case "DELETE", [saved]:
                what, checkpoint = "delete", [saved]
            case (("POST" | "DELETE"), [*checkpoint, "publish"]):
                what = "publish" if request.method == "POST" else "unpublish"
            case "PUT", [*checkpoint, "ttl"]:
                what = "ttl"
            case _:
                raise NotFound(refused.why_not(request.method, name))
        async with self._core.sure():
            where = saves.named(model, checkpoint)
            if what == "delete":
                await saves.delete(where)
            elif what == "ttl":
                ttl_s = requests.checkpoint_ttl(request.body(self._limits))
                expires_at = self._core.wall() + ttl_s if ttl_s else 0.0
                await saves.change(where, expires_at=expires_at)
            else:
                await saves.change(where, public=what == "publish")
        return answers.plain({})

    async def _probe(self, _body: bytes, _request: Request) -> Answer:
        """Do what training needs: read the ledger, and compute."""
        await self._core.journal.check()
        await self._bases.probe()
        return answers.typed("probe", computed=True)

    # ---- sessions and models ---------------------------------------------------

    async def _create_session(self, body: bytes, _request: Request) -> Answer:
        ask = sessions.create_session(body)
        session = await self._core.create_session(tuple(ask.tags))
        return answers.typed("create_session", session_id=session)

    async def _heartbeat(self, body: bytes, _request: Request) -> Answer:
        await self._core.heartbeat(decode(body, sessions.OfSession).session_id)
        return answers.typed("session_heartbeat")

    async def _create_model(self, body: bytes, _request: Request) -> Answer:
        return await self._new_model(requests.create_model(body))

    async def _new_model(self, new: requests.NewModel) -> Answer:
        request, model = await self._core.create_model(new.session, new.model_seq, new.op)
        return answers.promise(request, model=model)

    async def _get_info(self, body: bytes, _request: Request) -> Answer:
        model = decode(body, sessions.OfModel).model_id
        state = _a_model(self._core.find(model))
        arch, tokenizer = self._bases.about(state.base)
        rank = state.record.lora.rank if state.record.lora else None
        return answers.info(model, state.base, arch=arch, tokenizer=tokenizer, lora_rank=rank)

    async def _unload_model(self, body: bytes, _request: Request) -> Answer:
        model = decode(body, sessions.OfModel).model_id
        return answers.promise(await self._core.unload(model, ops.Unload()), model=model)

    # ---- operations ------------------------------------------------------------

    async def _submit(self, ask: Numbered) -> Answer:
        async with self._core.sure():
            state = self._core.find_any(ask.model)
        refused = None
        try:
            self._core.compute.check(state.base, ask.op)
        except Mistake as error:
            refused = Failed(error=str(error))
        request = await self._core.submit(ask.model, ask.seq, ask.op, refused=refused)
        return answers.promise(request, model=ask.model)

    async def _by_reference(self, body: bytes, _request: Request) -> Answer:
        ask = references.read(body, self._limits)
        if self._core.is_known(ask.model_id, ask.seq_id, ops.ForwardBackward):
            # Its values may be gone by now: they are in the journal.
            return answers.promise(f"{ask.model_id}:{ask.seq_id}", model=ask.model_id)
        if self._store is None:
            raise Mistake("there is no store to fetch from: start the trainer with --store URL")
        try:
            values = await self._store.aget(ask.refs())
        except BatchFailed as error:
            if all(isinstance(one, Retriable) for one in error.failures.values()):
                raise Unavailable(str(error)) from error
            # The number is not used up: the same step may be sent with other references. But one
            # who was replaced may not know that the operation was promised since.
            await self._core.journal.check()
            return answers.problem(424, "values_missing", str(error))
        op = references.filled(ask, values)
        return await self._submit(Numbered(ask.model_id, ask.seq_id, op))

    async def _load_weights(self, body: bytes, _request: Request) -> Answer:
        ask = requests.load_weights(body)
        if isinstance(ask, requests.NewModel):
            return await self._new_model(ask)
        return await self._submit(ask)

    async def _weights_info(self, body: bytes, _request: Request) -> Answer:
        _, save = self._core.saves.find(decode(body, sessions.OfWeights).tinker_path)
        return answers.weights_info(save.base, save.lora)

    # ---- sampling --------------------------------------------------------------

    async def _create_sampler(self, body: bytes, _request: Request) -> Answer:
        ask = sampling.create_sampling_session(body)
        if not ask.path:
            self._core.compute.check(ask.base or "", ops.CreateModel(session="", base=""))
        sampler = await self._core.create_sampler(
            ask.session, ask.sampler_seq, ask.base or "", ask.path or ""
        )
        return answers.typed("create_sampling_session", sampling_session_id=sampler)

    async def _join_sampler(self, body: bytes, _request: Request) -> Answer:
        count = await self._core.join_sampler(decode(body, sampling.OfSampler).sampling_session_id)
        return answers.typed("join_sampling_session", client_counter=count)

    async def _asample(self, body: bytes, _request: Request) -> Answer:
        ask = sampling.asample(body, self._limits)
        if ask.session is None or ask.seq is None:
            raise Mistake("`sampling_session_id` is missing: create a sampling session first")
        request = await self._core.submit(ask.session, ask.seq, ask.op)
        sequences = [f"{request}:{at}" for at in range(ask.op.num_samples)]
        return answers.promise(request, sequences=sequences)

    # ---- results ---------------------------------------------------------------

    async def _retrieve(self, body: bytes, request: Request) -> Answer:
        ask = decode(body, sampling.Poll)
        got = await self._core.retrieve(ask.request, self._hold_s)
        if isinstance(got, Pending):
            return answers.pending(ask.request, got.state, got.reason)
        accept = request.headers.get("accept", "")
        return answers.result(got, accept=accept, metadata_only=ask.metadata_only)

    async def _retrieve_many(self, body: bytes, _request: Request) -> Answer:
        ask = sampling.retrieve_futures(body)
        until = self._core.runtime.now() + min(ask.timeout_s or self._hold_s, self._hold_s)
        while True:
            state = self._core.find(ask.target.session)
            done, cursor = self._core.known.completions(state, ask.target.clone, ask.cursor)
            if done or self._core.runtime.now() >= until:
                return answers.completions(done, cursor)
            await asyncio.sleep(0.05)

    async def _cancel(self, body: bytes, _request: Request) -> Answer:
        decode(body, sampling.Poll)
        return answers.plain({})


def _a_model(state: State) -> State:
    if state.model is None:
        raise NotFound(f"{state.name} is not a model")
    return state
