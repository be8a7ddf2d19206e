"""Loading: all of a model and nothing but data, quietly, or an error that says what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.engine.base import Base, load_base
from holdfast.errors import Corrupt, HoldfastError, Mistake, NotFound


def edit(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def lacks_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def bad_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (shutil.rmtree, NotFound, "there is no model directory"),
        (without("config.json"), Mistake, "has no config.json"),
        (without("model.safetensors"), Mistake, "has no weights"),
        (pickle_only, Mistake, "pytorch_model.bin, a pickle, which is never loaded"),
        (no_tokenizer, Mistake, "has no tokenizer: copy tokenizer.json"),
        (edit(architectures=["BertForMaskedLM"]), Mistake, "not a causal language model"),
        (edit(architectures=None), Mistake, "not a causal language model"),
        (edit(model_type="no_such_type"), Mistake, "no_such_type"),
        (edit(auto_map={"AutoModelForCausalLM": "evil.Model"}), Mistake, "never run"),
        (edit(quantization_config={"quant_method": "fp8"}), Mistake, "is quantized"),
        (edit(hidden_size=64), Mistake, "transformers cannot load|another shape"),
        (lacks_a_tensor, Mistake, r"1 tensors are not there .*layers\.1\.mlp\.up_proj"),
        (truncated, Corrupt, "cannot be read"),
        (bad_json, Corrupt, "config.json cannot be read"),
    ],
)
def test_bad_directories(
    tiny: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    kind: type[HoldfastError],
    words: str,
) -> None:
    """A directory that is not a whole model is refused, and the error says what is wrong."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    change(folder)
    with pytest.raises(kind, match=words):
        load_base("bad", folder)


def test_bad_arguments(tiny: Path) -> None:
    """A dtype or a device that there is not is a mistake of the caller."""
    with pytest.raises(Mistake, match="dtype='int8'"):
        load_base("tiny", tiny, dtype="int8")
    with pytest.raises(Mistake, match="cannot be put on"):
        load_base("tiny", tiny, device="cuda:77")


def test_quiet(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Loading writes nothing to the terminal, and leaves the settings of transformers alone."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    loaded = load_base("tiny", tiny)
    assert loaded.tokenizer.encode("a")
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bars)


def test_what_a_base_says(base: Base, tiny: Path, tmp_path: Path) -> None:
    """Vocabulary, context, end of text and architecture come from the directory."""
    assert (base.vocabulary_size, base.context_length) == (101, 512)
    assert base.architecture == "LlamaForCausalLM"
    assert base.eos_tokens == {2}
    folder = tmp_path / "more-ends"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert load_base("more", folder).eos_tokens == {2, 7, 9}


def test_weights_are_aligned(base: Base) -> None:
    """Every weight lies where a fresh copy would: kernels then take the same path for both."""
    for tenant in (base.frozen(), base.full()):
        assert {p.data_ptr() % 64 for p in tenant.model().parameters()} == {0}


def test_bfloat16(tiny: Path) -> None:
    """The dtype asked for is the one computed in, and the one that is published."""
    tenant = load_base("tiny", tiny, dtype="bfloat16").full()
    assert {tensor.dtype for tensor in tenant.state().values()} == {torch.bfloat16}
    assert json.loads(tenant.carried_files()["config.json"])["torch_dtype"] == "bfloat16"
    tokens = torch.tensor([[5, 6, 7]])
    assert tenant.logits(tokens, torch.ones_like(tokens)).dtype == torch.bfloat16
