"""A vLLM server as the weights protocol uses it: pause, reload, check, label, resume.

`VllmServer` is one server, spoken to over HTTP. `expected` computes from tensors what the
server's weight checker must answer, and `compare` says where it does not. The decisions
(which version, when to give a replica up) are made elsewhere.

Invariants: every call is bounded in time and in the size of its answer; nothing is sent
twice by itself; `reload` is refused unless the server is paused.

What was seen to be true of vLLM 0.32.0 (CPU, one rank), and what follows:

- The calls exist only with `VLLM_SERVER_DEV_MODE=1` (else 404). `--api-key` guards `/v1` and
  `/inference`, none of these: whoever reaches the port can change the weights.
- `/pause` takes no new requests; they wait for `/resume` and are answered by what is loaded
  then. `wait` lets running requests finish (the call takes that long; given up and called
  again it goes on waiting), `abort` ends them with status 200, the tokens so far and
  `finish_reason` "abort", `keep` freezes them: **their answers are begun by the old weights
  and finished by the new**. Every mode empties the prefix cache when nothing runs any more.
  `/is_paused` is true from the beginning of a pause, also while requests still run.
- A reload without a pause leaves the prefix cache: answers mix old and new weights.
- A reload that fails (no such folder, cut file, missing shard, unknown tensor, wrong shape)
  answers 500. `/health` stays 200, the checker answers 500, and the next generation ends the
  engine: `/health` 503 at first, then the process exits with code 0. **One good reload** before
  any generation heals it or fails as well, because vLLM keeps the pieces that it had read.
  If it fails, restart the server: a second one was seen to answer 200 with the wrong weights.
- A reload of folders with *missing tensors or overwritten bytes* answers 200 and serves the
  wrong model; a tensor that is missing keeps its old value. Verify the files before.
- A path that is not a folder is taken for the name of a model on a hub.
- The checker answers `{"dp0:pp0:pcp0:tp0:<parameter>": sha256}` over the bytes of each
  parameter as the server holds it: in the server's dtype (a float32 model is served as
  bfloat16 unless `--dtype` says otherwise), q, k and v as one `qkv_proj`, gate and up as one
  `gate_up_proj`, vocabularies padded with zero rows to a multiple of 64, tied heads left out.
- **On a CPU the checker can be blind**: where oneDNN takes over a projection (always with
  float32) the parameter is left empty and the answer is the hash of nothing, whatever was
  loaded. `compare` names these. They can only be checked by what they generate.
- The version label is only a label. A reload does not change it.
"""

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np

from holdfast.errors import (
    Corrupt,
    Denied,
    MissingPackage,
    Mistake,
    TimedOut,
    Unavailable,
    UnknownOutcome,
)
from holdfast.tensors import Source, size, sources
from holdfast.text import several
from holdfast.timeouts import DEFAULTS

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Comparison", "PauseMode", "VllmServer", "compare", "expected"]

PauseMode = Literal["wait", "abort"]

ANSWER_BYTES_MAX = 64 * 1024
CHECKSUM_BYTES_MAX = 32 * 1024 * 1024
_MESSAGE_CHARS_MAX = 300
_PAD_ROWS = 64
_PREFIX = "dp0:pp0:pcp0:tp0:"
_NOTHING = hashlib.sha256().hexdigest()
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_PADDED = ("embed_tokens.weight", "lm_head.weight")
_HEAD = "lm_head.weight"
_PART = re.compile(r"(.*\.)([a-z]+_proj)\.(weight|bias)")


# ---- what the checker must answer ----------------------------------------------


def expected(
    tensors: Mapping[str, object] | Iterable[Source], *, dtype: str, tied: bool = False
) -> dict[str, str]:
    """What the weight checker must answer when exactly these tensors are loaded.

    `dtype` is the one that the server runs with (a safetensors code such as "BF16"), `tied`
    whether the model uses its embedding as its head too. For dense models with the names of
    Qwen2 and Llama on one rank. For others record `checksum()` after a load that is known
    to be good, and compare with that.
    """
    given = sources(tensors) if isinstance(tensors, Mapping) else list(tensors)
    groups: dict[str, dict[int, Source]] = {}
    for source in given:
        if tied and source.name == _HEAD:
            continue
        name, place = _parameter(source.name)
        groups.setdefault(name, {})[place] = source
    return {_PREFIX + name: _digest(name, parts, dtype) for name, parts in sorted(groups.items())}


class Comparison(msgspec.Struct, frozen=True):
    """How an answer of the checker differs from what was wanted; names are parameters."""

    wrong: tuple[str, ...] = ()
    """Other bytes than wanted."""
    blind: tuple[str, ...] = ()
    """The checker saw nothing: right or wrong, it cannot tell."""
    unknown: tuple[str, ...] = ()
    """Only on one of the two sides."""


def compare(wanted: Mapping[str, str], answered: Mapping[str, str]) -> Comparison:
    """Compare what the checker answered with what was computed or recorded."""
    wrong, blind = [], []
    for name in sorted(wanted.keys() & answered.keys()):
        if answered[name] == _NOTHING:
            # Nothing on both sides proves nothing either, unless the recording was blind
            # because the parameter really has no elements, which no model has.
            blind.append(name)
        elif answered[name] != wanted[name]:
            wrong.append(name)
    unknown = sorted(wanted.keys() ^ answered.keys())
    return Comparison(tuple(wrong), tuple(blind), tuple(unknown))


def _parameter(name: str) -> tuple[str, int]:
    """The parameter that a tensor becomes a part of, and its place there."""
    match = _PART.fullmatch(name)
    if match is None or match[2] not in _FUSED:
        return name, 0
    fused, place = _FUSED[match[2]]
    return f"{match[1]}{fused}.{match[3]}", place


def _digest(name: str, parts: Mapping[int, Source], dtype: str) -> str:
    fused = name.rsplit(".", 2)[-2] if name.count(".") >= 2 else ""
    if len(parts) != _PARTS.get(fused, 1):
        raise Mistake(
            f"vLLM's {name} is made of {_PARTS.get(fused, 1)} tensors and only "
            f"{', '.join(part.name for part in parts.values())} is there",
            key=name,
        )
    digest = hashlib.sha256()
    for _, part in sorted(parts.items()):
        digest.update(_cast(part, dtype))
        if part.name.endswith(_PADDED) and len(part.shape) == 2:
            row = size(dtype, part.shape[1:])
            digest.update(bytes(-part.shape[0] % _PAD_ROWS * row))
    return digest.hexdigest()


def _cast(source: Source, dtype: str) -> memoryview:
    """The tensor's bytes in another dtype, rounded to the nearest, ties to even."""
    if source.dtype == dtype:
        return source.data
    way = (source.dtype, dtype)
    if way == ("F32", "BF16"):
        bits = np.frombuffer(source.data, np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8).data
    if way == ("BF16", "F32"):
        wide = np.frombuffer(source.data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.uint8).data
    if way == ("F32", "F16"):
        with np.errstate(over="ignore"):  # too large is infinite, as on the server
            return np.frombuffer(source.data, np.float32).astype(np.float16).view(np.uint8).data
    if way == ("F16", "F32"):
        return np.frombuffer(source.data, np.float16).astype(np.float32).view(np.uint8).data
    raise Mistake(
        f"tensor {source.name} is {source.dtype} and the server runs {dtype}: publish in the "
        "server's dtype, or compare with a recorded checksum",
        key=source.name,
    )


# ---- the server ------------------------------------------------------------------


class VllmServer:
    """One vLLM server. Belongs to one event loop; close it, or use `async with`.

    Every call raises `Unavailable` when the server is not reached or its engine is dead,
    `TimedOut` after `call_s` (all but `reload` may simply be called again), and `Mistake`
    when the server is something else or not in dev mode.
    """

    def __init__(self, url: str, *, api_key: str | None = None, call_s: float = 60.0) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingPackage(
                "aiohttp is not installed: pip install 'holdfast-rl[vllm]'"
            ) from error
        if not re.fullmatch(r"https?://[^/?#\s@]+", url.rstrip("/")):
            raise Mistake(f"{url!r} is not the address of a server: use http://HOST:PORT")
        if call_s <= 0:
            raise Mistake(f"the time limit must be more than 0 s, not {call_s}")
        self.url = url.rstrip("/")
        self.call_s = call_s
        self._aiohttp = aiohttp
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    # ---- calls -------------------------------------------------------------------

    async def healthy(self) -> bool:
        """Whether the server is reached and its engine runs. Says nothing about its weights."""
        try:
            status, _ = await self.ask("GET", "/health")
        except (Unavailable, TimedOut):
            return False
        return status == 200

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Take no new requests, end those that run, and empty the caches.

        With "wait", the default, the call lasts until the last running request has ended. On
        `TimedOut` the server takes no new requests already: call again, or with "abort". vLLM's
        "keep" is not to be had: it makes answers of two versions, see the top.
        """
        await self._call("POST", f"/pause?mode={mode}", says={"status": "paused"})

    async def resume(self) -> None:
        """Take requests again. Only after a load that succeeded and was checked."""
        await self._call("POST", "/resume", says={"status": "resumed"})

    async def paused(self) -> bool:
        """Whether new requests have to wait. Old ones may still run: see the top."""
        answer = await self._call("GET", "/is_paused")
        if not isinstance(answer.get("is_paused"), bool):
            raise self._stranger("/is_paused", msgspec.json.encode(answer))
        return bool(answer["is_paused"])

    async def reload(self, path: str) -> None:
        """Load the weights in the folder `path`, which the server must see under that name.

        `Corrupt` when the server refused them and `UnknownOutcome` when it did not answer:
        then it must not be resumed before another `reload` has succeeded; if that one fails
        too, restart the server.
        Success does not mean that the right weights were loaded: compare the checksum.
        """
        if not path.startswith("/"):
            raise Mistake(f"{path!r} must be an absolute path: vLLM takes others for hub names")
        if not await self.paused():
            raise Mistake("pause the server first: its prefix cache would outlive the weights")
        request = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        try:
            status, data = await self.ask("POST", "/collective_rpc", body=request, once=True)
        except TimedOut as error:
            raise UnknownOutcome(f"{error}: it may have loaded {path}, or half of it") from None
        if status == 500 and await self.healthy():
            raise Corrupt(
                f"vLLM at {self.url} could not load {path} and holds no usable weights now "
                f"({_message(data)}): reload a good version before anything is generated",
                key=path,
            )
        self._check(status, data, "/collective_rpc")

    async def checksum(self) -> dict[str, str]:
        """The SHA-256 of every parameter, by the names that vLLM gives them.

        `Corrupt` when the last load failed: there are no weights to look at then.
        """
        body = {"action": "checksum"}
        status, data = await self.ask(
            "POST", "/weight_checker", body=body, limit=CHECKSUM_BYTES_MAX
        )
        if status == 500 and await self.healthy():
            raise Corrupt(f"vLLM at {self.url} holds no complete weights ({_message(data)})")
        answer = self._check(status, data, "/weight_checker").get("checksums")
        try:
            return msgspec.convert(answer, dict[str, str])
        except msgspec.ValidationError:
            raise self._stranger("/weight_checker", data) from None

    async def verify(self, wanted: Mapping[str, str]) -> tuple[str, ...]:
        """Raise `Corrupt` unless the checker agrees; return the parameters it cannot see.

        `Mistake` when the names differ: then `wanted` was made for another model, or some of
        its tensors are missing.
        """
        found = compare(wanted, await self.checksum())
        if found.wrong:
            raise Corrupt(
                f"vLLM at {self.url} serves other weights than were published: "
                f"{several(found.wrong, 3)}: reload, and do not resume before this passes"
            )
        if found.unknown:
            raise Mistake(
                f"the parameters of vLLM at {self.url} are not those that were expected: "
                f"{several(found.unknown, 3)}"
            )
        return found.blind

    async def set_version(self, version: int) -> None:
        """Label what is loaded: answers of `/inference/v1/generate` carry the label."""
        label = {"new_version": str(version)}
        await self._call("POST", "/update_weight_version", body=label, says=label)

    async def version(self) -> int | None:
        """The number that `set_version` gave last; None if the server has another label."""
        label = str((await self._call("GET", "/weight_info")).get("weight_version", ""))
        return int(label) if re.fullmatch(r"0|[1-9][0-9]{0,17}", label) else None

    async def close(self) -> None:
        """Drop all connections. The server goes on as it is."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- HTTP --------------------------------------------------------------------

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        says: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The answer, which must say these things."""
        status, data = await self.ask(method, path, body=body)
        answer = self._check(status, data, path)
        if any(answer.get(name) != value for name, value in (says or {}).items()):
            raise self._stranger(path, data)
        return answer

    async def ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        limit: int = ANSWER_BYTES_MAX,
        limit_s: float | None = None,
        once: bool = False,
    ) -> tuple[int, bytes]:
        """Send one request; the status and the body of the answer, of at most `limit` bytes.

        With `once`, an answer that broke off is `UnknownOutcome`. `limit_s` is for this request
        in the place of `call_s`.
        """
        session = self._open()
        limit_s = self.call_s if limit_s is None else limit_s
        connect_s = min(DEFAULTS.client_connect_s, limit_s * 0.8)
        limits = self._aiohttp.ClientTimeout(total=None, connect=connect_s, ceil_threshold=1e9)
        try:
            async with (
                asyncio.timeout(limit_s),
                session.request(
                    method,
                    self.url + path,
                    data=msgspec.json.encode(body) if body is not None else None,
                    headers={**self._headers, "Content-Type": "application/json"},
                    timeout=limits,
                    allow_redirects=False,
                ) as response,
            ):
                data = bytearray()
                async for chunk in response.content.iter_any():
                    data += chunk
                    if len(data) > limit:
                        raise self._stranger(path, bytes(data))
                return response.status, bytes(data)
        except (self._aiohttp.ClientConnectorError, self._aiohttp.ConnectionTimeoutError) as error:
            raise Unavailable(f"vLLM at {self.url} was not reached: {_line(error)}") from None
        except TimeoutError:
            raise TimedOut(
                f"vLLM at {self.url} did not answer {path} within {limit_s:g} s"
            ) from None
        except (self._aiohttp.ClientError, OSError) as error:
            told = f"vLLM at {self.url} broke off its answer to {path}: {_line(error)}"
            raise (UnknownOutcome if once else Unavailable)(told) from None

    def _open(self) -> "aiohttp.ClientSession":
        if self._closed:
            raise Mistake(f"this connection to vLLM at {self.url} is closed")
        if self._session is None:
            # The server drops idle connections after some seconds: one that is used again may
            # break at that moment, and then nobody knows whether the request was seen.
            connector = self._aiohttp.TCPConnector(force_close=True, limit=8)
            self._session = self._aiohttp.ClientSession(connector=connector)
        return self._session

    def _check(self, status: int, data: bytes, path: str) -> dict[str, Any]:
        """The answer as an object, or the error that the status stands for."""
        if status == 404:
            raise Mistake(
                f"vLLM at {self.url} has no {path}: start it with VLLM_SERVER_DEV_MODE=1"
            )
        if status in (401, 403):
            raise Denied(f"vLLM at {self.url} refused {path}: {_message(data)}")
        if 400 <= status < 500 and status not in (408, 429):
            raise Mistake(f"vLLM at {self.url} does not accept {path}: {_message(data)}")
        if status != 200:
            raise Unavailable(
                f"vLLM at {self.url} answered {path} with {status}: {_message(data)}"
            )
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise self._stranger(path, data) from None

    def _stranger(self, path: str, data: bytes) -> Mistake:
        return Mistake(
            f"{self.url} answers {path}, but not like vLLM ({_message(data)}): check the address"
        )


def _message(data: bytes) -> str:
    """What an answer says in short, whatever it is."""
    text = data[: 8 * _MESSAGE_CHARS_MAX].decode(errors="replace")
    with contextlib.suppress(msgspec.MsgspecError, KeyError, TypeError):
        text = str(msgspec.json.decode(data)["error"]["message"])
    text = " ".join(text.split())
    cut = len(text) > _MESSAGE_CHARS_MAX
    return (text[:_MESSAGE_CHARS_MAX] + "…" if cut else text) or "no words"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:_MESSAGE_CHARS_MAX] or type(error).__name__
