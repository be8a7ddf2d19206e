"""Reads a Hugging Face model directory: only data, never code, and only all of it.

Weights come from safetensors files. Pickles are refused, because loading one runs whatever is
in it; so is code that came with a model. Every weight must be in the files: transformers would
fill the gaps with random numbers. Nothing is asked of a network.
"""

import json
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.quiet import quiet, transformers
from holdfast.errors import Corrupt, Mistake, NotFound

__all__ = ["DTYPES", "carried", "end_tokens", "load_model", "load_tokenizer", "read_config"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_CARRIED = (
    *_TOKENIZERS,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_ALIGNMENT = 64


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of config.json, after a look at whether this is a model that can be loaded."""
    if not folder.is_dir():
        raise NotFound(f"there is no model directory {folder}: give one with config.json in it")
    config = _read_json(folder / "config.json")
    if config is None:
        raise Mistake(
            f"{folder} is not a model directory: it has no config.json. Give the folder that "
            "holds config.json, the tokenizer and *.safetensors"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if pickles:
            raise Mistake(
                f"{folder} has its weights in {pickles[0]}, a pickle, which is never loaded: "
                "save them as safetensors (save_pretrained of transformers does)"
            )
        raise Mistake(f"{folder} has no weights: there is no *.safetensors in it")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise Mistake(
            f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the "
            "model into it"
        )
    if "auto_map" in config:
        raise Mistake(f"{folder} needs code that comes with the model, which is never run")
    if "quantization_config" in config:
        raise Mistake(f"{folder} is quantized: give the model in float32, bfloat16 or float16")
    names = config.get("architectures") or []
    if not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise Mistake(
            f"{folder} is not a causal language model: config.json has architectures={names}"
        )
    return config


def load_model(folder: Path, device: str, dtype: str) -> Any:
    """The model, frozen, without dropout, on the device. Call `read_config` first."""
    from safetensors import SafetensorError

    try:
        with quiet():
            model, info = transformers().AutoModelForCausalLM.from_pretrained(
                str(folder.absolute()),
                dtype=DTYPES[dtype],
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
    except SafetensorError as error:
        raise Corrupt(f"the weights in {folder} cannot be read: {error}") from error
    except (ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        raise Mistake(f"transformers cannot load {folder}: {_first_line(error)}") from error
    absent = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if absent:
        raise Mistake(
            f"the weights in {folder} are not those of its config.json: {len(absent)} tensors "
            f"are not there or have another shape, {absent[0]} among them"
        )
    try:
        model = model.to(device)
    except (AssertionError, RuntimeError) as error:
        raise Mistake(f"{folder} cannot be put on {device}: {_first_line(error)}") from error
    return _settled(model)


def _settled(model: Any) -> Any:
    """Frozen, in evaluation mode, and with every weight at an address that kernels like.

    A file's tensors lie anywhere; products of a matrix that is not aligned may differ in the
    last bit from those of its copy, and so a trainer's from a replica's.
    """
    model.eval()
    model.config.pad_token_id = None  # no mask is given on purpose (`tenant`): no advice on it
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.data_ptr() % _ALIGNMENT:
            parameter.data = parameter.data.clone()
    return model


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the directory."""
    try:
        with quiet():
            return transformers().AutoTokenizer.from_pretrained(
                str(folder.absolute()), trust_remote_code=False, local_files_only=True
            )
    except (ImportError, KeyError, OSError, TypeError, ValueError) as error:
        raise Mistake(f"the tokenizer in {folder} is not usable: {_first_line(error)}") from error


def carried(folder: Path) -> dict[str, bytes]:
    """The files beside weights and config that a loadable copy of the directory needs."""
    return {name: (folder / name).read_bytes() for name in _CARRIED if (folder / name).is_file()}


def end_tokens(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """The tokens that end a text: of the generation config or else the config, and of the
    tokenizer, which is read as data because loading it takes seconds.
    """
    stated = (_read_json(folder / "generation_config.json") or {}).get("eos_token_id")
    stated = config.get("eos_token_id") if stated is None else stated
    ends = set(stated) if isinstance(stated, list) else {stated}
    text = (_read_json(folder / "tokenizer_config.json") or {}).get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    for token in (_read_json(folder / "tokenizer.json") or {}).get("added_tokens", []):
        if text is not None and token.get("content") == text:
            ends.add(token["id"])
    return frozenset(end for end in ends if isinstance(end, int))


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise Corrupt(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{path} is not a JSON object")
    return value


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
