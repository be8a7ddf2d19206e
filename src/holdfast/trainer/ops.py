"""What a trainer is asked to do, and what comes of it: one form, whoever asked and however.

Requests (protobuf or JSON) become an `Op`, which is what the journal keeps, what the ranks
compute and what a duplicate is compared by. What comes of it is an `Outcome`, which becomes
an answer of whichever kind the asker reads. Neither knows of HTTP, of a ledger or of torch.

- Arrays are little-endian bytes: `int32` tokens, `float32` and `int64` tensors.
- `encode` is canonical: equal operations have equal bytes (keys are sorted), so `identity`
  tells duplicates from numbers that were used twice. What a client may change between two
  sends of one operation is left out of it.
"""

from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import Corrupt

__all__ = [
    "Cells",
    "CreateModel",
    "Created",
    "Datum",
    "Done",
    "Failed",
    "ForwardBackward",
    "LoadWeights",
    "Loaded",
    "Lora",
    "Op",
    "OptimStep",
    "Outcome",
    "Output",
    "Publish",
    "Published",
    "Sample",
    "Sampled",
    "SamplerSaved",
    "SaveForSampler",
    "SaveWeights",
    "Saved",
    "Sequence",
    "Skip",
    "Stepped",
    "Tensor",
    "TopK",
    "Unload",
    "decode_op",
    "decode_outcome",
    "encode",
    "identity",
    "kind",
]

Category = Literal["unknown", "server", "user"]
DType = Literal["float32", "int64"]
T = TypeVar("T")
_NUMPY: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "int64": np.dtype("<i8")}


class _Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What all of these have in common."""


class Tensor(_Struct, frozen=True):
    """A dense array of one datum: `data` has the product of `shape` many elements."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: npt.NDArray[Any]) -> "Tensor":
        """An array of integers or numbers, of whatever width."""
        kind: DType = "int64" if array.dtype.kind == "i" else "float32"
        data = array.astype(_NUMPY[kind], copy=False).tobytes()
        return cls(dtype=kind, shape=tuple(array.shape), data=data)

    def array(self) -> npt.NDArray[Any]:
        """What it holds, in its shape. The memory is that of `data`: read it, or copy it."""
        return np.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape)


class Cells(_Struct, frozen=True):
    """Elements of a matrix: all of them, or those that `crow` and `col` name (int64, CSR)."""

    shape: tuple[int, int]
    values: bytes
    crow: bytes | None = None
    col: bytes | None = None


class Datum(_Struct, frozen=True):
    """One sequence: its input tokens, and what the loss needs for each of them."""

    tokens: bytes
    inputs: dict[str, Tensor] = {}


class Lora(_Struct, frozen=True):
    """An adapter of low rank instead of all the weights."""

    rank: int
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


# ---- operations ----------------------------------------------------------------


class CreateModel(_Struct, frozen=True, tag="create_model"):
    """A new model on a base. Number 0 of the model; `load` begins it with saved weights.

    With `load`, an empty `base` means the one that the weights were saved on.
    """

    session: str
    base: str
    lora: Lora | None = None
    load: "LoadWeights | None" = None
    metadata: dict[str, str] = {}


class ForwardBackward(_Struct, frozen=True, tag="forward_backward"):
    """The loss of some data and, with `backward`, its gradients, added to those there are."""

    data: list[Datum]
    loss: str
    config: dict[str, float | str] = {}
    backward: bool = True


class OptimStep(_Struct, frozen=True, tag="optim_step"):
    """One step of Adam with the gradients there are, which are gone after it."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class SaveWeights(_Struct, frozen=True, tag="save_weights"):
    """Keep weights and optimizer under a name, or under one made from the number."""

    name: str | None = None
    overwrite: bool = False
    ttl_s: int | None = None
    metadata: dict[str, str] = {}


class LoadWeights(_Struct, frozen=True, tag="load_weights"):
    """Go on from what was saved: `tinker://MODEL/weights/NAME`; with `adapter`, of one only."""

    path: str
    optimizer: bool = False
    adapter: bool = False


class SaveForSampler(_Struct, frozen=True, tag="save_weights_for_sampler"):
    """Publish the weights for sampling: under a name, or for one new sampling session.

    `session_seq` changes between two sends of one operation.
    """

    name: str | None = None
    session_seq: int | None = None
    ttl_s: int | None = None
    metadata: dict[str, str] = {}


class Publish(_Struct, frozen=True, tag="publish_weights"):
    """Publish the weights as a version of the model's channel: for replicas that subscribe."""

    version: int


class Unload(_Struct, frozen=True, tag="unload_model"):
    """Forget the model; what was saved of it stays."""


class Skip(_Struct, frozen=True, tag="skip"):
    """A number that is not used: nobody may use it later."""

    reason: str


class Sample(_Struct, frozen=True, tag="sample"):
    """Continue a prompt. Lists of stop strings and stop tokens exclude each other.

    `stop` None: the tokenizer's end of text stops; an empty list: nothing stops but length.
    """

    prompt: bytes
    num_samples: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    stop_strings: list[str] | None = None
    stop_tokens: list[int] | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt: Cells | None = None
    """int64 tokens to score: row i belongs to place i + 1 of the prompt; -1 asks for nothing."""
    prompt_alternatives: int = 0
    """How many tokens to draw for every place of the prompt but the first."""


Op = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | SaveWeights
    | LoadWeights
    | SaveForSampler
    | Publish
    | Unload
    | Skip
    | Sample
)


# ---- outcomes ------------------------------------------------------------------


class Created(_Struct, frozen=True, tag="create_model"):
    """The model is there; `path` is what it began with, if it was loaded."""

    model: str
    path: str = ""


class Output(_Struct, frozen=True, tag="forward_backward"):
    """Per datum, the fields that the loss gives back; metrics are named `name:reduction`."""

    outputs: list[dict[str, Tensor]]
    metrics: dict[str, float] = {}


class Stepped(_Struct, frozen=True, tag="optim_step"):
    """The weights have changed."""

    metrics: dict[str, float] = {}


class Saved(_Struct, frozen=True, tag="save_weights"):
    """What was saved, and where."""

    path: str


class Loaded(_Struct, frozen=True, tag="load_weights"):
    """What was loaded; `adapter_of` is the model, if an adapter was asked for."""

    path: str
    adapter_of: str = ""


class SamplerSaved(_Struct, frozen=True, tag="save_weights_for_sampler"):
    """Where samplers find it: a path, or a sampling session that was made for it."""

    path: str | None = None
    sampling_session: str | None = None


class Published(_Struct, frozen=True, tag="publish_weights"):
    """A version is there: in which channel, and the hash of what is in it."""

    channel: str
    version: int
    content: str


class Done(_Struct, frozen=True, tag="done"):
    """Something without a result has been done; `what` is the name of the operation."""

    what: str
    model: str


class TopK(_Struct, frozen=True):
    """The `k` likeliest tokens at `length` places: int32 ids and float32 log probabilities."""

    k: int
    length: int
    tokens: bytes
    logprobs: bytes


class Sequence(_Struct, frozen=True):
    """One continuation: int32 tokens, and the float32 log probability of each."""

    stop_reason: Literal["stop", "length"]
    tokens: bytes
    logprobs: bytes
    topk: TopK | None = None


class Sampled(_Struct, frozen=True, tag="sample"):
    """Continuations, and what was asked about the prompt (NaN: not scored)."""

    sequences: list[Sequence]
    prompt_logprobs: bytes | None = None
    topk_prompt: TopK | None = None
    target_prompt: Cells | None = None
    """float32, in the layout in which they were asked for; 0 where nothing was asked for."""
    alternatives: TopK | None = None
    """Drawn tokens: row i belongs to place i + 1 of the prompt."""


class Failed(_Struct, frozen=True, tag="failed"):
    """It could not be done, had no effect, and will not be tried again."""

    error: str
    category: Category = "user"


Outcome = (
    Created
    | Output
    | Stepped
    | Saved
    | Loaded
    | SamplerSaved
    | Published
    | Done
    | Sampled
    | Failed
)

_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_OPS: msgspec.msgpack.Decoder[Op] = msgspec.msgpack.Decoder(Op)
_OUTCOMES: msgspec.msgpack.Decoder[Outcome] = msgspec.msgpack.Decoder(Outcome)


def encode(value: Op | Outcome) -> bytes:
    """The canonical bytes of an operation or an outcome."""
    return _ENCODER.encode(value)


def decode_op(data: bytes) -> Op:
    """The operation that `encode` wrote."""
    return _decode(_OPS, data, "an operation")


def decode_outcome(data: bytes) -> Outcome:
    """The outcome that `encode` wrote."""
    return _decode(_OUTCOMES, data, "a result")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupt(f"{what} in the journal cannot be read: {error}") from error


def kind(op: Op) -> str:
    """The name of the operation, as the endpoint has it."""
    return str(type(op).__struct_config__.tag)


def identity(op: Op) -> str:
    """Equal for two sends of one operation; different for two operations, as far as is known."""
    if isinstance(op, SaveForSampler):
        op = msgspec.structs.replace(op, session_seq=None if op.session_seq is None else 0)
    return xxhash.xxh3_128_hexdigest(encode(op))
