"""What can be told of a base model without loading it: clients need not wait for torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.engine.directory import CONTEXT_LENGTHS, read_config
from holdfast.errors import Mistake, NotFound

__all__ = ["Facts", "find", "read_facts"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Facts:
    """A model directory, as its config.json describes it."""

    name: str
    folder: Path
    architecture: str
    vocabulary_size: int
    context_length: int


def read_facts(name: str, folder: Path) -> Facts:
    """What a model directory's config.json says, or `Mistake`."""
    config = read_config(folder)
    text = config.get("text_config") or config
    length = next((text[key] for key in CONTEXT_LENGTHS if text.get(key) is not None), None)
    if length is None or text.get("vocab_size") is None:
        raise Mistake(
            f"{folder}/config.json does not say vocab_size and max_position_embeddings: add them"
        )
    return Facts(name, folder, config["architectures"][0], text["vocab_size"], length)


def find(bases: Mapping[str, T], name: str) -> T:
    """A base by its name. Names from outside are looked up, never made into paths."""
    if name not in bases:
        known = ", ".join(sorted(bases))
        raise NotFound(f"there is no base model {name[:100]!r} here; there are: {known}")
    return bases[name]
