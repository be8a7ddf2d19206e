"""What a run is told: frozen models, unknown keys refused, defaults that need no file.

    [rollout]
    groups = 16

`load` reads a TOML file and lays `key=value` pairs over it (`--set rollout.groups=8`).
"""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.errors import Mistake

__all__ = ["Config", "load"]

MAX_LAG = 8
"""More versions than that are kept by the trainer for those who come late."""
_VLLM_TEMPERATURE_MAX = 2.0


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Model):
    """What is trained."""

    directory: str = Field(default="", description="A Hugging Face model; empty: a small one.")
    lora_rank: int = Field(default=0, ge=0, le=512, description="0: all the weights.")


class EnvironmentConfig(_Model):
    """What it is trained on."""

    name: str = Field(default="reverse", description="reverse, copy, …, or module:attribute")
    options: dict[str, Any] = Field(default_factory=dict)
    limit_s: float = Field(default=10.0, gt=0, le=600, description="For one score.")


class VllmConfig(_Model):
    """How each replica of vLLM starts its server."""

    command: str = Field(default="vllm serve", description="Of any environment.")
    arguments: str = Field(default="--enforce-eager", description="After ours: they win.")
    env: dict[str, str] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    start_s: float = Field(default=600.0, gt=0, le=86_400)


class RolloutConfig(_Model):
    """Who makes samples, and how many."""

    kind: Literal["holdfast", "vllm"] = Field(default="holdfast", description="Of replica.")
    vllm: VllmConfig = VllmConfig()
    replicas: int = Field(default=2, ge=1, le=64)
    groups: int = Field(default=16, ge=1, le=1024, description="Prompts per step.")
    samples: int = Field(default=16, ge=2, le=256, description="Samples per prompt.")
    temperature: float = Field(default=1.0, gt=0, le=10)
    lag: int = Field(default=1, ge=0, le=MAX_LAG, description="Steps that run ahead.")
    max_tokens: int = Field(default=0, ge=0, le=4096, description="0: as the environment says.")
    patience_s: float = Field(default=3.0, gt=0, le=3600, description="Then ask another, too.")


class TrainConfig(_Model):
    """How it is trained."""

    ranks: int = Field(default=2, ge=1, le=64)
    spares: int = Field(default=1, ge=0, le=8, description="Nodes that wait to step in.")
    loss: Literal["importance_sampling", "ppo", "cispo"] = "importance_sampling"
    loss_config: dict[str, float] = Field(default_factory=dict)
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    learning_rate: float = Field(default=1e-3, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=1.0, ge=0, description="0: no limit.")
    checkpoint_s: float = Field(
        default=0.5,
        gt=0,
        description="Of computing, between two; longer where a checkpoint costs more than 10 %.",
    )


class EvaluateConfig(_Model):
    """How it is tried on held-out prompts."""

    every: int = Field(default=10, ge=0, description="Steps; 0: only at the end.")
    prompts: int = Field(default=64, ge=1, le=4096)
    target: float = Field(default=0.95, ge=0, le=1, description="What the run is to reach.")


class Config(_Model):
    """A run."""

    steps: int = Field(default=100, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**53)
    ledger: str = Field(default="", description="Empty: a file in the run's folder.")
    store: str = Field(default="", description="Empty: shared memory of this machine.")
    model: ModelConfig = ModelConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if self.rollout.groups * self.rollout.samples > 16_384:
            raise ValueError("rollout.groups × rollout.samples is at most 16384")
        if self.rollout.kind == "vllm" and self.model.lora_rank:
            raise ValueError("replicas of vLLM take all the weights: set model.lora_rank=0")
        if self.rollout.kind == "vllm" and self.rollout.temperature > _VLLM_TEMPERATURE_MAX:
            raise ValueError("vLLM takes a rollout.temperature of 2 at most")
        return self


def load(path: Path | None, settings: Iterable[str] = ()) -> Config:
    """Read a file, lay settings over it, and check everything at once."""
    given: dict[str, Any] = {}
    if path is not None:
        try:
            given = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise Mistake(f"there is no file {path}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Mistake(f"{path} is not TOML: {error}") from None
    for text in settings:
        _lay(given, text)
    try:
        return Config.model_validate(given)
    except ValidationError as error:
        raise Mistake("\n".join(map(_told, error.errors()))) from None


def _lay(given: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Mistake(f"--set {text!r}: say key=value, for example rollout.groups=8")
    *parents, last = key.strip().split(".")
    place = given
    for part in parents:
        place = place.setdefault(part, {})
        if not isinstance(place, dict):
            raise Mistake(f"--set {text!r}: {part} is not a table")
    try:
        place[last] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        place[last] = value  # a plain word needs no quotes


def _told(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        known = sorted(_keys(Config))
        near = difflib.get_close_matches(where, known, n=1, cutoff=0.5)
        near = near or [one for one in known if one.endswith("." + where.split(".")[-1])][:1]
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
        return f"{where} is not known: {hint}"
    return f"{where}: {problem['msg']}, not {problem['input']!r}"


def _keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += _keys(kind, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found
