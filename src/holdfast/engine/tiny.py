"""A small causal language model with its tokenizer, made on the spot: no download, no torch.

`make_tiny` writes a Hugging Face directory of a Llama-type model, about 0.4 million float32
parameters with the default sizes, that transformers and vLLM load like any other. With
`positions="learned"` it is of the GPT-2 type, which has an embedding for each place: what
depends on places (reversing a text) it learns from scratch in a tenth of the steps.

- The same arguments give the same bytes on every machine: the files are written here, not by
  whichever version of transformers is installed.
- A process that is killed leaves nothing or everything under the folder's name. What it left
  beside it is removed by the next call. Two processes may make the same model at once.
- A folder that holds something else is never touched.

The embeddings are not tied: the two matrices are 3 % of the weights each, and an adapter on the
output layer then belongs to one tensor with one name, for every program that loads it.

The tokenizer has one token per character: printable ASCII, tab and newline. Other characters
become the token for "unknown". Encoding adds nothing. The names of the special tokens contain
characters that are not ASCII, so no such text can be taken for one of them, and all of it
comes back from `decode` as it was.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from holdfast.engine.folder import put_folder
from holdfast.engine.noise import uniform
from holdfast.errors import Mistake

__all__ = ["BOS", "CHARACTERS", "EOS", "PAD", "SPECIALS", "UNKNOWN", "make_tiny"]

PAD, BOS, EOS, UNKNOWN = 0, 1, 2, 3
"""The numbers of the special tokens."""
SPECIALS = ("⟨pad⟩", "⟨bos⟩", "⟨eos⟩", "⟨unknown⟩")
CHARACTERS = "\t\n" + "".join(map(chr, range(0x20, 0x7F)))

_Array = npt.NDArray[np.float32]

_STD = 0.02
_THETA = 10_000.0
_MAX_PARAMETERS = 200_000_000


def make_tiny(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    context: int = 512,
    positions: Literal["rotary", "learned"] = "rotary",
) -> Path:
    """Make the model in `folder`, unless just this one is there already; return the folder."""
    from safetensors.numpy import save

    _check(hidden, layers, heads, context)
    if positions == "learned":
        config = _gpt2_config(hidden, layers, heads, context)
        weights = _gpt2_weights(seed, hidden, layers, context)
    else:
        config = _config(hidden, layers, heads, context)
        weights = _weights(seed, hidden, layers)
    files = {
        "config.json": _json(config),
        "generation_config.json": _json(_TOKEN_IDS),
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        "tokenizer.json": _json(_tokenizer()),
        "tokenizer_config.json": _json(_tokenizer_config(context)),
    }
    put_folder(folder, files)
    return folder


# ---- what is in the files ------------------------------------------------------

_TOKEN_IDS: Mapping[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def _check(hidden: int, layers: int, heads: int, context: int) -> None:
    if min(hidden, layers, heads, context) < 1 or hidden % heads or hidden // heads % 2:
        raise Mistake(
            f"hidden={hidden}, layers={layers}, heads={heads}, context={context}: all must be at "
            "least 1, and hidden a multiple of twice the number of heads"
        )
    parameters = layers * (4 * hidden**2 + 3 * hidden * _intermediate(hidden))
    if parameters > _MAX_PARAMETERS:
        raise Mistake(f"{parameters} parameters are not tiny: take {_MAX_PARAMETERS} at most")


def _intermediate(hidden: int) -> int:
    """The width of the middle of an MLP: 8/3 of the model's, rounded up to a multiple of 8."""
    return -(-hidden // 3) * 8


def _config(hidden: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_TOKEN_IDS,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": _STD,
        "intermediate_size": _intermediate(hidden),
        "max_position_embeddings": context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": _THETA,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(SPECIALS) + len(CHARACTERS),
    }


def _weights(seed: int, hidden: int, layers: int) -> dict[str, _Array]:
    vocabulary, middle = len(SPECIALS) + len(CHARACTERS), _intermediate(hidden)
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}mlp.{name}.weight"] = (middle, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, middle)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    tensors = _drawn(shapes, seed)
    norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(layers)]
    norms += [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in range(layers)]
    for name in [*norms, "model.norm.weight"]:
        tensors[name] = np.ones(hidden, np.float32)
    return tensors


def _drawn(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, _Array]:
    """Weights of these shapes. Each depends on the seed and on its own name only."""
    bound = _STD * math.sqrt(3.0)  # of a uniform distribution with that deviation
    return {name: uniform(shape, bound, "tiny", seed, name) for name, shape in shapes.items()}


def _gpt2_config(hidden: int, layers: int, heads: int, context: int) -> dict[str, Any]:
    return {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        **_TOKEN_IDS,
        "embd_pdrop": 0.0,
        "initializer_range": _STD,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": 4 * hidden,
        "n_layer": layers,
        "n_positions": context,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(SPECIALS) + len(CHARACTERS),
    }


def _gpt2_weights(seed: int, hidden: int, layers: int, context: int) -> dict[str, _Array]:
    vocabulary = len(SPECIALS) + len(CHARACTERS)
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocabulary, hidden),
        "transformer.wpe.weight": (context, hidden),
        "lm_head.weight": (vocabulary, hidden),
    }
    ones, zeros = ["transformer.ln_f.weight"], {"transformer.ln_f.bias": hidden}
    for layer in range(layers):
        prefix = f"transformer.h.{layer}."
        for name, (rows, columns) in {
            "attn.c_attn": (hidden, 3 * hidden),
            "attn.c_proj": (hidden, hidden),
            "mlp.c_fc": (hidden, 4 * hidden),
            "mlp.c_proj": (4 * hidden, hidden),
        }.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            zeros[f"{prefix}{name}.bias"] = columns
        for name in ("ln_1", "ln_2"):
            ones.append(f"{prefix}{name}.weight")
            zeros[f"{prefix}{name}.bias"] = hidden
    tensors = _drawn(shapes, seed)
    tensors |= {name: np.ones(hidden, np.float32) for name in ones}
    tensors |= {name: np.zeros(size, np.float32) for name, size in zeros.items()}
    return tensors


def _tokenizer() -> dict[str, Any]:
    """A BPE without merges: every character stays by itself. "Fuse" puts them together again."""
    vocabulary = {text: number for number, text in enumerate([*SPECIALS, *CHARACTERS])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **plain, "special": True}
            for number, text in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": SPECIALS[UNKNOWN],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _tokenizer_config(context: int) -> dict[str, Any]:
    return {
        "bos_token": SPECIALS[BOS],
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIALS[EOS],
        "model_max_length": context,
        "pad_token": SPECIALS[PAD],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": SPECIALS[UNKNOWN],
    }


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
