"""A tiny random Qwen2 and its tokenizer, made on the spot.

The folders look like those of the weights channel without its manifest: safetensors,
`config.json` and the tokenizer's files. The same seed makes the same bytes.
"""

from pathlib import Path

import torch

# Neither is in the environment that types are checked in.
from tokenizers import (  # type: ignore[import-not-found,unused-ignore]
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

__all__ = ["greedy", "make_model"]

_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;+-*/=()!?"
_SPECIAL = ("<pad>", "<s>", "</s>")


def make_model(
    folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, tie: bool = False
) -> Path:
    """Write a model whose weights are a function of `seed` and return its folder.

    It has several shards, and so an index.
    """
    tokenizer = _tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        torch_dtype=dtype,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = Qwen2ForCausalLM(config)
        # The usual 0.02 makes every answer the same token. These spread the logits out so far
        # that two ways of adding up agree on the largest.
        for parameter in model.parameters():
            norm = parameter.dim() == 1 and parameter.data[0] == 1
            torch.nn.init.normal_(parameter, mean=float(norm), std=0.1 if norm else 0.3)
    finally:
        torch.random.set_rng_state(state)
    model.to(dtype).save_pretrained(folder, max_shard_size=500_000)
    tokenizer.save_pretrained(folder)
    return folder


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that transformers finds most likely after `prompt`."""
    model = Qwen2ForCausalLM.from_pretrained(folder).eval()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {letter: number for number, letter in enumerate((*_SPECIAL, *_LETTERS))}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
