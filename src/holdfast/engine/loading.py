"""Loads a Hugging Face model directory that `directory` has looked at, and only all of it.

Every weight must be in the files: transformers would fill the gaps with random numbers. Nothing
is asked of a network. Whatever transformers raises is told in one line.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.directory import TOKENIZERS, read_config
from holdfast.engine.quiet import quiet, transformers
from holdfast.errors import Corrupt, HoldfastError, Mistake

__all__ = ["DTYPES", "carried", "load_model", "load_tokenizer", "one_error", "stored"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CARRIED = (
    *TOKENIZERS,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_ALIGNMENT = 64


def load_model(folder: Path, device: str, dtype: str) -> Any:
    """The model, frozen, without dropout, on the device. Call `read_config` first."""
    with one_error(folder, f"transformers cannot load {folder}"), quiet():
        model, info = transformers().AutoModelForCausalLM.from_pretrained(
            str(folder.absolute()),
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    absent = sorted({*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])})
    if absent:
        raise Mistake(
            f"the weights in {folder} are not those of its config.json: {len(absent)} tensors "
            f"are not there or have another shape, {absent[0]} among them"
        )
    with one_error(folder, f"{folder} cannot be put on {device}"):
        model = model.to(device)
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
    read_config(folder)
    with one_error(folder, f"the tokenizer in {folder} is not usable"), quiet():
        return transformers().AutoTokenizer.from_pretrained(
            str(folder.absolute()), trust_remote_code=False, local_files_only=True
        )


def stored(folder: Path) -> dict[str, Path]:
    """Which tensors are in the files of a directory, and in which."""
    from safetensors import safe_open

    where: dict[str, Path] = {}
    with one_error(folder):
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                where.update(dict.fromkeys(file.keys(), path))
    return where


def carried(folder: Path) -> dict[str, bytes]:
    """The files beside weights and config that a loadable copy of the directory needs."""
    return {name: (folder / name).read_bytes() for name in _CARRIED if (folder / name).is_file()}


@contextlib.contextmanager
def one_error(folder: Path, what: str = "") -> Iterator[None]:
    """Whatever a foreign library raises about a directory is one line, with its cause last."""
    from safetensors import SafetensorError

    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        if isinstance(error, SafetensorError) or not what:
            raise Corrupt(f"the weights in {folder} cannot be read: {cause}") from error
        raise Mistake(f"{what}: {cause}") from error
