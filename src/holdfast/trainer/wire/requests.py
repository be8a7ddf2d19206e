"""Models and their operations: the body of a request → what it asks for.

One function per endpoint, all of them pure; those that carry data are in `data.py`, those about
sampling and futures in `sampling.py`, the others in `sessions.py`. The bodies come from
`read_body`; what is wrong with one is a `Mistake`, or a `BadOp` where its number can be used up.
What a client may ask for but we cannot do is refused by name, never ignored. Fields that are not
known are ignored.
"""

from typing import Annotated, Any

import msgspec
from google.protobuf.message import DecodeError

from holdfast.errors import Mistake
from holdfast.trainer.ops import (
    CreateModel,
    LoadWeights,
    Lora,
    OptimStep,
    Publish,
    SaveForSampler,
    SaveWeights,
)
from holdfast.trainer.records import check_name
from holdfast.trainer.wire.body import (
    PROTOBUF,
    BadOp,
    Id,
    Index,
    Numbered,
    Path,
    blaming,
    decode,
    number,
    numbered,
)
from holdfast.trainer.wire.schema import ForwardBackwardRequest
from holdfast.trainer.wire.sessions import metadata

__all__ = [
    "NewModel",
    "checkpoint_ttl",
    "create_model",
    "load_adapter",
    "load_weights",
    "number_of",
    "optim_step",
    "publish_weights",
    "save_weights",
    "save_weights_for_sampler",
]

# What the protocol fixes, and Fireworks' client sends along.
LORA_ALPHA = 32

_Ttl = Annotated[int, msgspec.Meta(ge=1, le=100 * 366 * 86400)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Below1 = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class NewModel(msgspec.Struct, frozen=True):
    """The first operation of a model that does not exist yet: number `model_seq` of a session."""

    session: str
    model_seq: int
    op: CreateModel


class _Lora(msgspec.Struct):
    rank: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True
    alpha: float | None = None
    init_method: str | None = None


class _Optimizer(msgspec.Struct):
    type: str = "adamw"


class _CreateModel(msgspec.Struct):
    session_id: Id
    model_seq_id: Index
    base_model: Id
    lora_config: _Lora | None = None
    optimizer_config: _Optimizer | None = None
    user_metadata: dict[str, Any] | None = None
    projection_head_dim: int | None = None


class _Adam(msgspec.Struct):
    learning_rate: _NotNegative = 1e-4
    beta1: _Below1 = 0.9
    beta2: _Below1 = 0.95
    eps: _Positive = 1e-12
    weight_decay: _NotNegative = 0.0
    grad_clip_norm: _NotNegative = 0.0


class _OptimStep(msgspec.Struct):
    adam_params: _Adam | None = None
    optimizer_params: _Optimizer | None = None
    grad_accumulation_normalization: str | None = None


class _Save(msgspec.Struct):
    path: str | None = None
    ttl_seconds: _Ttl | None = None
    overwrite: bool = False
    sampling_session_seq_id: Index | None = None
    user_metadata: dict[str, Any] | None = None


class _KeepFor(msgspec.Struct):
    ttl_seconds: _Ttl | None


class _LoadAdapter(msgspec.Struct):
    adapter_path: Path


class _Publish(msgspec.Struct):
    version: Index


class _Load(msgspec.Struct):
    path: Path
    optimizer: bool
    optimizer_config: _Optimizer | None = None


class _Addresses(msgspec.Struct):
    model_id: str | None = None
    session_id: str | None = None


class _LoadNew(_Load):
    session_id: Id = msgspec.field(default="")
    model_seq_id: Index | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None


# ---- models --------------------------------------------------------------------------


def create_model(body: bytes) -> NewModel:
    """A request to `create_model`. Rank 0 is how Fireworks' client asks for all the weights."""
    ask = decode(body, _CreateModel)
    _only_adam(ask.optimizer_config)
    if ask.projection_head_dim:
        raise Mistake("`projection_head_dim` is not supported")
    op = CreateModel(
        session=ask.session_id,
        base=ask.base_model,
        lora=_lora(ask.lora_config),
        metadata=metadata(ask.user_metadata),
    )
    return NewModel(ask.session_id, ask.model_seq_id, op)


def _lora(given: _Lora | None) -> Lora | None:
    if given is None or given.rank == 0:
        return None
    if given.alpha not in (None, LORA_ALPHA):
        raise Mistake(f"`lora_config.alpha` is always {LORA_ALPHA} here, not {given.alpha:g}")
    if given.init_method is not None:
        raise Mistake("`lora_config.init_method` cannot be chosen")
    if not (given.train_attn or given.train_mlp or given.train_unembed):
        raise Mistake("`lora_config` trains nothing: set one of its train_* to true")
    parts = {part: getattr(given, part) for part in ("train_attn", "train_mlp", "train_unembed")}
    return Lora(rank=given.rank, seed=given.seed or 0, **parts)


def _only_adam(given: _Optimizer | None) -> None:
    if given is not None and given.type != "adamw":
        raise Mistake(f"the optimizer {given.type[:40]!r} is not supported: adamw is")


# ---- numbered operations ----------------------------------------------------------


def optim_step(body: bytes) -> Numbered:
    """A request to `optim_step`."""
    model, seq, ask = numbered(body, _OptimStep)
    with blaming(model, seq):
        if ask.optimizer_params is not None:
            _only_adam(ask.optimizer_params)
        if ask.adam_params is None:
            raise Mistake("`adam_params` is missing")
        if ask.grad_accumulation_normalization not in (None, "none"):
            raise Mistake(
                "`grad_accumulation_normalization` is not supported: losses are sums, "
                "so divide `weights` or `advantages` instead"
            )
    return Numbered(model, seq, OptimStep(**msgspec.structs.asdict(ask.adam_params)))


def save_weights(body: bytes) -> Numbered:
    """A request to `save_weights`."""
    model, seq, ask, named = _saving(body)
    return Numbered(model, seq, SaveWeights(overwrite=ask.overwrite, **named))


def save_weights_for_sampler(body: bytes) -> Numbered:
    """A request to `save_weights_for_sampler`: a name, or a new sampling session."""
    model, seq, ask, named = _saving(body)
    with blaming(model, seq):
        if ask.path is not None and ask.sampling_session_seq_id is not None:
            raise Mistake("`path` and `sampling_session_seq_id` exclude each other")
    return Numbered(model, seq, SaveForSampler(session_seq=ask.sampling_session_seq_id, **named))


def _saving(body: bytes) -> tuple[str, int, _Save, dict[str, Any]]:
    """What both ask: under which name, for how long, with which notes."""
    model, seq, ask = numbered(body, _Save)
    with blaming(model, seq):
        # A name that is safe as one part of a path, on any file system.
        name = None if ask.path is None else check_name("checkpoint (`path`)", ask.path)
        notes = metadata(ask.user_metadata)
    return model, seq, ask, {"name": name, "ttl_s": ask.ttl_seconds, "metadata": notes}


def publish_weights(body: bytes) -> Numbered:
    """A request to `publish_weights`, which is Holdfast's own."""
    model, seq, ask = numbered(body, _Publish)
    return Numbered(model, seq, Publish(version=ask.version))


def load_weights(body: bytes) -> Numbered | NewModel:
    """A request to `load_weights`: into a model, or to begin a new one with.

    A new one is as the weights were saved: `lora` is None, `base` is empty unless it is given.
    """
    where = decode(body, _Addresses)
    if where.session_id is None:
        model, seq, ask = numbered(body, _Load)
        with blaming(model, seq):
            _only_adam(ask.optimizer_config)
        return Numbered(model, seq, LoadWeights(path=ask.path, optimizer=ask.optimizer))
    if where.model_id is not None:
        raise Mistake("`model_id` and `session_id` exclude each other")
    new = decode(body, _LoadNew)
    if new.model_seq_id is None:
        raise Mistake("`model_seq_id` is missing; it belongs to `session_id`")
    _only_adam(new.optimizer_config)
    op = CreateModel(
        session=new.session_id,
        base=new.base_model or "",
        load=LoadWeights(path=new.path, optimizer=new.optimizer),
        metadata=metadata(new.user_metadata),
    )
    return NewModel(new.session_id, new.model_seq_id, op)


def load_adapter(body: bytes) -> Numbered:
    """A request to `load_adapter`, which is Fireworks' client's."""
    model, seq, ask = numbered(body, _LoadAdapter)
    return Numbered(model, seq, LoadWeights(path=ask.adapter_path, adapter=True))


def checkpoint_ttl(body: bytes) -> int | None:
    """How many seconds a checkpoint is kept from now on; None: for ever."""
    return decode(body, _KeepFor).ttl_seconds


def number_of(body: bytes, content_type: str) -> tuple[str, int] | None:
    """The model and the number of a request that is about an operation, whatever it asks for.

    In protobuf every operation has them where `forward_backward` has them.
    """
    try:
        if content_type.partition(";")[0].strip().lower() == PROTOBUF:
            message = ForwardBackwardRequest.FromString(body)
            return number({"model_id": message.model_id, "seq_id": message.seq_id})
        return numbered(body, dict[str, Any])[:2]
    except BadOp as error:
        return error.model, error.seq
    except (Mistake, DecodeError):
        return None
