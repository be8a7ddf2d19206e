"""Loading: all of a model, quietly. What is refused: `test_directory.py`."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from holdfast.engine.base import Base, load_base
from holdfast.errors import Mistake


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
