"""A Hugging Face model directory, looked at before anything loads it.

`read_config` is the one door: the engine, the trainer, the rollout replicas (ours and vLLM's),
`holdfast run` and `holdfast serve` all go through it. A directory may come from anywhere, so:

- Only files in the directory are read. A link that leads out of it is refused, except the links
  of Hugging Face's cache (`snapshots/<revision>/x` -> `blobs/<hash>` of the same repository).
- Only data is read: no pickle, no code that comes with the model (`auto_map`), no kernel from a
  hub (`attn_implementation`), no adapter that names another model.
- What is wrong is one error that says which file, which field, and what to do. A config may be
  nested or mistyped in any way.

Not here: whether the tensors fit the config (`loading`). Nothing of torch is imported, so that
`serve` answers at once.
"""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import Corrupt, Mistake, NotFound

__all__ = ["CONTEXT_LENGTHS", "TOKENIZERS", "end_tokens", "read_config"]

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length")
"""The fields of a config that say how many tokens a text may have."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = ".safetensors.index.json"
_TEMPLATES = "additional_chat_templates"
"""The only folder in a model directory of which transformers reads files by itself."""
_CONFIGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_MAX_BYTES = 256 * 2**20
_MAX_DEPTH = 32
_IMPLEMENTATIONS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
"""What comes with torch. transformers fetches others from a hub, or may."""
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", *CONTEXT_LENGTHS), 2**31),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 2**16),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2**12),
}
"""Fields that are positive numbers, and the most that they may be: a model of a billion layers
is refused before its layers are made."""


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json, once the directory is known to be a model that may be loaded."""
    if not folder.is_dir():
        raise NotFound(f"there is no model directory {folder}: give one with config.json in it")
    names = _names(folder)
    configs = {name: _read_json(folder / name) for name in _CONFIGS if name in names}
    if "config.json" not in configs:
        raise Mistake(
            f"{folder} is not a model directory: it has no config.json. Give the folder that "
            "holds config.json, the tokenizer and *.safetensors"
        )
    if "adapter_config.json" in names:
        raise Mistake(
            f"{folder} has an adapter_config.json: loading it would load the model that the "
            "adapter names. Give a directory with the merged model"
        )
    for name, fields in configs.items():
        _check_fields(folder / name, fields)
    _check_weights(folder, names, configs["config.json"])
    if not any(name in names for name in TOKENIZERS):
        raise Mistake(
            f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the "
            "model into it"
        )
    _check_kind(folder, configs["config.json"])
    return configs["config.json"]


def end_tokens(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """The tokens that end a text: of the generation config or else the config, and of the
    tokenizer, which is read as data because loading it takes seconds.
    """
    source = folder / "generation_config.json"
    stated = (_read_json(source) if source.is_file() else {}).get("eos_token_id")
    if stated is None:
        source, stated = folder / "config.json", config.get("eos_token_id")
    ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
    if not all(_is_number(end) for end in ends):
        raise Mistake(f"{source}: eos_token_id={_short(stated)} is not the number of a token")
    return frozenset({*ends, *_end_of_tokenizer(folder)})


def _end_of_tokenizer(folder: Path) -> Iterator[int]:
    about, whole = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not about.is_file() or not whole.is_file():
        return
    text = _read_json(about).get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    tokens = _read_json(whole).get("added_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(one, dict) for one in tokens):
        raise Mistake(f"{whole}: added_tokens is not a list of objects")
    for token in tokens:
        if text is not None and token.get("content") == text:
            if not _is_number(token.get("id")):
                raise Mistake(f"{whole}: the token {_short(text)} has no number as its id")
            yield token["id"]


# ---- files -------------------------------------------------------------------------


def _names(folder: Path) -> set[str]:
    """What the directory holds, after a look at where its links lead."""
    real = folder.resolve()
    names = _entries(folder, real)
    if _TEMPLATES in names:
        _entries(folder / _TEMPLATES, real)
    return names


def _entries(folder: Path, model: Path) -> set[str]:
    try:
        found = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise Mistake(f"the model directory {folder} cannot be read: {error.strerror}") from error
    for entry in found:
        path = Path(entry.path)
        try:
            target, mode = path.resolve(strict=True), path.stat().st_mode
        except (OSError, RuntimeError) as error:
            raise Mistake(f"{path} is a link that leads nowhere: remove it") from error
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise Mistake(f"{path} is not a regular file: a model is read from regular files only")
        if entry.is_symlink() and not _is_inside(target, model):
            raise Mistake(
                f"{path} is a link to {target}, which is outside the model directory: "
                "copy the file into it"
            )
    return {entry.name for entry in found}


def _is_inside(target: Path, model: Path) -> bool:
    """Whether a file is in the model's directory, or is a blob of its cached repository."""
    if target.is_relative_to(model):
        return True
    repository = model.parent.parent
    return model.parent.name == "snapshots" and target.parent == repository / "blobs"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise Corrupt(f"{path} has more than {_MAX_BYTES >> 20} MiB: it is not a config")
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise _too_deep(path) from None
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read: {_short(error)}") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{path} is not a JSON object")
    return value


def _check_weights(folder: Path, names: set[str], config: dict[str, Any]) -> None:
    if not any(name.endswith(".safetensors") for name in names):
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        if pickles:
            raise Mistake(
                f"{folder} has its weights in {pickles[0]}, a pickle, which is never loaded: "
                "save them as safetensors (save_pretrained of transformers does)"
            )
        raise Mistake(f"{folder} has no weights: there is no *.safetensors in it")
    if config.get("transformers_weights") is not None:
        _check_shard(folder / "config.json", config["transformers_weights"], names)
    for name in sorted(names):
        if name.endswith(_INDEX):
            _check_index(folder / name, names)


def _check_index(path: Path, names: set[str]) -> None:
    """An index maps tensors to files. transformers opens whatever it names."""
    index = _read_json(path)
    shards, about = index.get("weight_map"), index.get("metadata", {})
    if not isinstance(shards, dict) or not shards or not isinstance(about, dict):
        raise Mistake(f"{path} is not an index: its weight_map must map tensors to files")
    for shard in shards.values():
        _check_shard(path, shard, names)


def _check_shard(path: Path, shard: Any, names: set[str]) -> None:
    if isinstance(shard, str) and shard in names and shard.endswith((".safetensors", _INDEX)):
        return
    if isinstance(shard, str) and shard.endswith(_PICKLES):
        why = "a pickle, which is never loaded: save the weights as safetensors"
    elif isinstance(shard, str) and "/" not in shard and shard.endswith(".safetensors"):
        why = "which is not there: copy it into the directory"
    else:
        why = "which is not a *.safetensors file of the directory"
    raise Mistake(f"{path} names {_short(shard)}, {why}")


# ---- fields ------------------------------------------------------------------------


def _check_fields(path: Path, fields: dict[str, Any]) -> None:
    """Refuse what would run code, fetch or read elsewhere, and what is not of its type."""
    for key, value in _every_field(path, fields):
        what = f"{path}: {key}={_short(value)}"
        if key == "auto_map" and value:
            raise Mistake(f"{what} needs code that comes with the model, which is never run")
        if key == "quantization_config" and value is not None:
            raise Mistake(f"{what} is quantized: give the model in float32, bfloat16 or float16")
        if key in ("configuration_files", "fast_tokenizer_files") and value:
            raise Mistake(f"{what} names other files to read in its place: remove the field")
        if path.name == "tokenizer_config.json":
            _check_file_field(what, key, value)
        known = _IMPLEMENTATIONS.get(key.removeprefix("_").removesuffix("_internal"))
        for one in value.values() if isinstance(value, dict) else [value]:
            if known is not None and one is not None and one not in known:
                raise Mistake(
                    f"{what} is not one of {', '.join(known)}: it may be fetched from a hub, "
                    "which is never done. Remove the field"
                )


def _check_file_field(what: str, key: str, value: Any) -> None:
    """A tokenizer opens the files that its config names; the map of special tokens it does not."""
    if not key.endswith("_file") or key == "special_tokens_map_file" or value is None:
        return
    if not isinstance(value, str) or "/" in value or "\\" in value:
        raise Mistake(f"{what} is not a file of the model directory: remove the field")


def _check_kind(folder: Path, config: dict[str, Any]) -> None:
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise Mistake(f"{folder}/config.json: text_config={_short(text)} is not an object")
    for fields in (config, text or {}):
        for key in _SIZES.keys() & fields.keys():
            if fields[key] is not None and not _is_size(fields[key], _SIZES[key]):
                raise Mistake(
                    f"{folder}/config.json: {key}={_short(fields[key])} is not a whole number "
                    f"from 1 to {_SIZES[key]}"
                )
    kinds = config.get("architectures") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise Mistake(f"{folder}/config.json: architectures={_short(kinds)} is no list of names")
    if not any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds):
        raise Mistake(
            f"{folder} is not a causal language model: config.json has architectures={kinds}"
        )


def _every_field(path: Path, fields: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every named value, however deep."""
    level: list[Any] = [fields]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                yield from one.items()
                below += one.values()
            elif isinstance(one, list):
                below += one
        level = below
    if level:
        raise _too_deep(path)


def _too_deep(path: Path) -> Corrupt:
    return Corrupt(f"{path} is nested more than {_MAX_DEPTH} deep: it is not a config")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any, most: int) -> bool:
    return _is_number(value) and 1 <= value <= most


def _short(value: object) -> str:
    """A value in a message: one line, and not the whole of it."""
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
