"""A sampler that asks a vLLM server of its own: tokens in, tokens and log probabilities out.

The server is started here, started again when it has ended, and ends with this process
(`ServerProcess`). It has one version at a time: who asks for another waits until that one is
loaded, and a replica makes one group at a time, so nobody is asking meanwhile.

Invariants:

- An answer counts only if it names, for each of its tokens, the version that was asked for. A
  version is named only after it was loaded into the server's present life and compared.
- Nothing is loaded into, or asked of, a server that is not ours: it serves the model under a name
  that nobody else knows.
- A load that failed, or an answer that did not come, costs the server its life: it is killed
  and started again. While it starts, whoever asks is told to ask somebody else.
- What stops a text is told to it: the same tokens that stop our own engine.

Where this ends: the same question may have an answer with other bits. On a CPU vLLM's checker
sees only a part of what was loaded; the pin has compared every byte of the files before.
"""

import asyncio
import contextlib
import secrets
import shlex
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np

from holdfast import events
from holdfast.contrib.vllm.client import VllmServer, compare, expected
from holdfast.contrib.vllm.process import ServerProcess
from holdfast.engine.noise import seed_of
from holdfast.errors import Corrupt, HoldfastError, Mistake, TimedOut, Unavailable
from holdfast.proc import HeldPort
from holdfast.rollout.episodes import Said, Say
from holdfast.rollout.sampler import Sampler
from holdfast.servers import HOST
from holdfast.timeouts import DEFAULTS

if TYPE_CHECKING:
    from holdfast.weights.pin import Pin

__all__ = ["VllmSampler", "VllmSettings"]

AT_ONCE = 64
"""Samples of one request: vLLM takes at most as many as it computes at a time."""
TOKEN_BYTES_MAX = 1024
"""What one token of an answer may take, with its log probability; and the rest beside them."""
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_KNOWN = ("llama", "qwen2")
"""Types of models of which every parameter can be compared."""
_NONE = -9999.0
"""What vLLM says where it has no log probability."""
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": HOST,
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the server is started."""

    command: str = "vllm serve"
    arguments: str = "--enforce-eager"
    env: dict[str, str] = {}
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    start_s: float = 600.0


class ServerReady(events.Event, frozen=True, tag="rollout.server_ready"):
    """A replica's server has started, and can be loaded."""

    url: str
    seconds: float


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs
    weight_versions: list[_Span]


class _Generated(msgspec.Struct):
    choices: list[_Choice]


class VllmSampler(Sampler):
    """Speaks with vLLM. `async with` starts the server and waits until it is there."""

    exact = False

    def __init__(self, directory: Path, settings: VllmSettings, log: Path) -> None:
        from holdfast.engine.directory import end_tokens, read_config
        from holdfast.engine.loading import load_tokenizer

        super().__init__(load_tokenizer(directory))
        config = read_config(directory)
        self._tied = bool(config.get("tie_word_embeddings", False))
        self._known = config.get("model_type") in _KNOWN
        self._stops = sorted(end_tokens(directory, config))
        self._settings = settings
        self._log = log
        self._name = f"policy-{secrets.token_hex(8)}"
        self._held = HeldPort(HOST)
        port = self._held.port
        self.url = f"http://{HOST}:{port}"
        argv = [*shlex.split(settings.command), "--model", str(directory)]
        argv += ["--served-model-name", self._name, "--host", HOST, "--port", str(port)]
        argv += ["--dtype", settings.dtype, "--enable-scale-out", *shlex.split(settings.arguments)]
        self._process = ServerProcess(argv, env={**_ENVIRONMENT, **settings.env}, log=log)
        self._server = VllmServer(self.url, call_s=DEFAULTS.vllm_load_s)
        self._stack = contextlib.AsyncExitStack()
        # Of the server's present life: whether it answers, and what it holds.
        self._life = 0
        self._began = 0.0
        self._up = False
        self._loaded: int | None = None
        self._context = 0

    async def __aenter__(self) -> Self:
        self._began = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._held.close)
            stack.push_async_callback(self._server.close)
            await stack.enter_async_context(self._process.running(self._ended))
            await self._begin()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    # ---- the server ------------------------------------------------------------

    def _ended(self) -> None:
        """Take note that the server's life is over. The next one begins after this."""
        self._life += 1
        self._began = time.monotonic()
        self._up, self._loaded = False, None

    def _end_life(self, life: int) -> None:
        """Kill the server, unless that life of it is over already."""
        if life == self._life:
            self._up, self._loaded = False, None
            self._process.end()

    async def _begin(self) -> None:
        """Wait for the first server; one that cannot start is a reason to give up."""
        while not await self._ready():
            if self._life:
                raise Unavailable(f"vLLM ended before it was ready: {self._last_words()}")
            if time.monotonic() - self._began > self._settings.start_s:
                raise TimedOut(
                    f"vLLM was not ready after {self._settings.start_s:g} s (start_s): "
                    f"{self._last_words()}"
                )
            await asyncio.sleep(DEFAULTS.vllm_look_s)

    async def _hold(self) -> None:
        """Wait for a server that is there, for a while."""
        until = time.monotonic() + DEFAULTS.vllm_hold_s
        while not await self._ready():
            if time.monotonic() > until:
                raise Unavailable(f"vLLM at {self.url} is starting: ask another replica")
            await asyncio.sleep(DEFAULTS.vllm_look_s)

    async def _ready(self) -> bool:
        """Whether the server is there, and ours."""
        if self._up:
            return True
        life = self._life
        if not await self._server.healthy():
            return False
        context = await self._ask_context()
        if context and life == self._life:
            self._up, self._context = True, context
            seconds = round(time.monotonic() - self._began, 3)
            events.emit(ServerReady(url=self.url, seconds=seconds))
        return self._up

    async def _ask_context(self) -> int:
        """How long a text may be, as the server says; 0 if it is not ours."""
        try:
            _, data = await self._server.ask("GET", "/v1/models")
            models = msgspec.json.decode(data)["data"]
            (found,) = [one for one in models if one["id"] == self._name]
            return int(found["max_model_len"])
        except (HoldfastError, ValueError, LookupError, TypeError):
            return 0

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_bytes()[-2000:].decode(errors="replace").splitlines()
            return f"{' | '.join(lines[-3:])} ({self._log})"
        return f"see {self._log}"

    # ---- loading ---------------------------------------------------------------

    def has(self, version: int) -> bool:
        """Whether the server holds just this version."""
        return self._loaded == version

    async def load(self, pin: "Pin") -> None:
        """Load a version in the place of the one that is there."""
        if pin.manifest.kind != "model":
            raise Mistake(f"version {pin.number} is no whole model: vLLM cannot be given it here")
        await self._hold()
        life, self._loaded = self._life, None
        wanted = await asyncio.to_thread(self._wanted, pin)
        path = await pin.stage()
        try:
            await self._server.pause("abort")  # what is left of a question that was given up
            await self._server.reload(path)
            await self._compare(wanted)
            self._require(life)  # what begins a life of its own has not been compared
            await self._server.set_version(pin.number)
            await self._server.resume()
            self._require(life)
        except HoldfastError as error:
            self._end_life(life)
            raise Unavailable(
                f"vLLM could not be given version {pin.number}, and is started again: {error}"
            ) from error
        self._loaded = pin.number

    def _require(self, life: int) -> None:
        if life != self._life:
            raise Unavailable("it ended meanwhile")

    def _wanted(self, pin: "Pin") -> dict[str, str]:
        """What the server's checker must say: of every parameter, or of the vectors, which all
        types of models have as they are in the files.
        """
        tensors = [one for one in pin.sources() if self._known or len(one.shape) == 1]
        return expected(tensors, dtype=_CODES[self._settings.dtype], tied=self._tied)

    async def _compare(self, wanted: dict[str, str]) -> None:
        found = compare(wanted, await self._server.checksum())
        wrong = found.wrong + (found.unknown if self._known else ())
        if wrong:
            raise Corrupt(f"it holds other weights than were published: {', '.join(wrong[:3])}")

    # ---- speaking --------------------------------------------------------------

    def say(self, version: int, temperature: float, max_tokens: int) -> Say:
        """What continues prompts with the version that is loaded."""

        async def say(prompt: Sequence[int], count: int, seed: int) -> list[Said]:
            room = self._context - len(prompt)
            if room < 1:
                raise Mistake(
                    f"a prompt of {len(prompt)} tokens leaves no room in the {self._context} that "
                    "vLLM can take: shorten it"
                )
            params = {
                "max_tokens": min(max_tokens, room),
                "temperature": temperature,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
                "stop_token_ids": self._stops,
            }
            # The likeliest answer is one, however many ask for it; vLLM refuses to give more.
            different = count if temperature else 1
            said: list[Said] = []
            for begin in range(0, different, AT_ONCE):
                some = {"n": min(AT_ONCE, different - begin), "seed": seed_of("vllm", seed, begin)}
                body = {
                    "model": self._name,
                    "token_ids": list(prompt),
                    "sampling_params": {**params, **some},
                }
                said += self._read(await self._post(body), version, some["n"])
            return said if temperature else said * count

        return say

    async def _post(self, body: dict[str, Any]) -> bytes:
        life, params = self._life, body["sampling_params"]
        try:
            status, data = await self._server.ask(
                "POST",
                "/inference/v1/generate",
                body=body,
                limit=TOKEN_BYTES_MAX * (64 + params["n"] * params["max_tokens"]),
                limit_s=DEFAULTS.vllm_answer_s,
            )
        except TimedOut as error:
            self._end_life(life)
            raise TimedOut(f"{error}: it is started again") from None
        if status == HTTPStatus.OK:
            return data
        text = f"vLLM answers {status}: {data[:300].decode(errors='replace')}"
        if status == HTTPStatus.BAD_REQUEST:
            raise Mistake(text)
        self._end_life(life)
        raise Unavailable(f"{text}: it is started again")

    def _read(self, data: bytes, version: int, count: int) -> list[Said]:
        """The samples of an answer, if every token of it is the version's."""
        try:
            choices = msgspec.json.decode(data, type=_Generated).choices
        except msgspec.MsgspecError as error:
            raise Unavailable(f"vLLM at {self.url} does not answer like vLLM: {error}") from None
        choices.sort(key=lambda one: one.index)
        if [one.index for one in choices] != list(range(count)):
            raise Unavailable(f"vLLM gave {len(choices)} samples where {count} were asked for")
        for one in choices:
            whole = [_Span(str(version), 0, len(one.token_ids))]
            if not one.token_ids or one.weight_versions != whole:
                self._loaded = None
                told = ", ".join(span.version for span in one.weight_versions) or "no version"
                raise Unavailable(f"vLLM answered with {told}, not with version {version}")
        return [_said(one) for one in choices]


def _said(choice: _Choice) -> Said:
    tokens = choice.token_ids
    scored = choice.logprobs.content
    if choice.finish_reason not in ("stop", "length"):
        raise Unavailable(f"vLLM ended an answer with {choice.finish_reason!r}")
    if [one.token_id for one in scored] != tokens or any(one.logprob <= _NONE for one in scored):
        raise Corrupt("vLLM gave no log probabilities for some of its tokens")
    logprobs = np.array([one.logprob for one in scored], np.float32)
    return np.array(tokens, np.int32), logprobs, choice.finish_reason
