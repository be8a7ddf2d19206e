"""What can be told of a base model without loading it: clients need not wait for torch."""

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Mistake, NotFound

__all__ = ["Facts", "find", "read_facts"]

_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length")


@dataclass(frozen=True, slots=True)
class Facts:
    """A model directory, as its config.json describes it."""

    name: str
    folder: Path
    architecture: str
    vocabulary_size: int
    context_length: int


def read_facts(name: str, folder: Path) -> Facts:
    """Read a model directory's config.json, or `Mistake`."""
    try:
        config = json.loads((folder / "config.json").read_text())
        text = config.get("text_config") or config
        length = next(text[field] for field in _LENGTHS if field in text)
        architecture = str((config.get("architectures") or ["unknown"])[0])
        return Facts(name, folder, architecture, int(text["vocab_size"]), int(length))
    except FileNotFoundError:
        raise Mistake(
            f"{folder} is not a model directory (it has no config.json): give --model "
            f"{name}=DIRECTORY with a Hugging Face model in it"
        ) from None
    except (ValueError, TypeError, AttributeError, KeyError, StopIteration) as error:
        raise Mistake(
            f"{folder}/config.json does not say vocab_size and max_position_embeddings: {error}"
        ) from error


def find(bases: dict[str, Facts], name: str) -> Facts:
    """A base by its name. Names from outside are looked up, never made into paths."""
    if name not in bases:
        known = ", ".join(sorted(bases))
        raise NotFound(f"there is no base model {name[:100]!r} here; there are: {known}")
    return bases[name]
