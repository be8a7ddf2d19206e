"""The small model: one seed, one model; whole or not there; its tokenizer loses nothing."""

import hashlib
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.engine.base import Base
from holdfast.engine.tiny import BOS, CHARACTERS, EOS, PAD, SPECIALS, UNKNOWN, make_tiny
from holdfast.errors import Denied, Exists, Mistake
from holdfast.proc import Child, spawn
from patience import HANG_S

SRC = str(Path(holdfast.__file__).parents[1])
FILES = 5
DIGEST = "dc244f41b85b4c2027fb0de4667e47612f14dbff4d856a65a7e361b8ae979939"
PROGRAM = (
    "import sys; from pathlib import Path; from holdfast.engine.tiny import make_tiny; "
    "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; "
    "make_tiny(Path(sys.argv[1]))"
)


def child(folder: Path, plan: str = "") -> Child:
    env = {"PYTHONPATH": SRC, "HOLDFAST_FAULTS": plan}
    log = folder.with_name(f"{folder.name}-log") / f"{random.getrandbits(64):x}"
    return spawn([sys.executable, "-c", PROGRAM, str(folder)], env=env, log=log)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_one_seed_one_model(tiny: Path, tmp_path: Path) -> None:
    """The same seed gives the same bytes in every process, and those of when this was written:
    no library decides about them. Another seed gives other weights."""
    with child(tmp_path / "again") as again:
        assert again.wait(HANG_S) == 0, again.tail()
    assert contents(tmp_path / "again") == contents(tiny)
    assert len(contents(tiny)) == FILES
    assert contents(tiny)["model.safetensors"] == DIGEST
    other = contents(make_tiny(tmp_path / "other", seed=1))
    assert {name for name, value in other.items() if value != contents(tiny)[name]} == {
        "model.safetensors"
    }


def test_killed_at_any_file_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """A maker that is killed leaves no folder; the next one makes it and clears up."""
    folder = tmp_path / "models" / "tiny"
    plans = [f"engine.folder.file:kill@{n}" for n in range(1, FILES + 1)]
    for plan in [*plans, "engine.folder.before_rename:kill"]:
        with child(folder, plan) as maker:
            assert maker.wait(HANG_S) == -signal.SIGKILL, (plan, maker.tail())
        assert not folder.exists(), plan
        left = [path for path in folder.parent.iterdir() if path.name.startswith(".tiny.making-")]
        assert len(left) == 1, f"{plan}: the remains of the one before were not cleared up: {left}"
    make_tiny(folder)
    assert contents(folder) == contents(tiny)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny-log"]


def test_makers_at_once(tiny: Path, tmp_path: Path) -> None:
    """Several processes make the same model at once: all succeed, and nothing is left over."""
    folder = tmp_path / "models" / "tiny"
    makers = [child(folder, "engine.folder.before_rename:delay=1") for _ in range(3)]
    try:
        assert [maker.wait(HANG_S) for maker in makers] == [0, 0, 0], [m.tail() for m in makers]
    finally:
        for maker in makers:
            maker.kill_group()
    assert contents(folder) == contents(tiny)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny", "tiny-log"]


def test_what_is_there_is_not_touched(tiny: Path, tmp_path: Path) -> None:
    """The same model: not even a date changes. Another model, other files or a file in the place
    of the folder: refused, and kept."""
    before, dates = contents(tiny), [path.stat().st_mtime_ns for path in tiny.iterdir()]
    assert make_tiny(tiny) == tiny
    assert [path.stat().st_mtime_ns for path in tiny.iterdir()] == dates
    with pytest.raises(Exists, match=r"model\.safetensors"):
        make_tiny(tiny, seed=7)
    assert contents(tiny) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Exists):
        make_tiny(tmp_path / "file")
    with pytest.raises(Exists):
        make_tiny(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert contents(make_tiny(tmp_path / "empty")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    """A folder that may not be written to is told as such."""
    tmp_path.chmod(0o500)
    with pytest.raises(Denied):
        make_tiny(tmp_path / "tiny")


@pytest.mark.parametrize(
    "sizes", [{"hidden": 30}, {"heads": 0}, {"layers": 0}, {"context": 0}, {"hidden": 2**16}]
)
def test_sizes_that_do_not_fit(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Sizes that make no model are refused before anything is written."""
    with pytest.raises(Mistake):
        make_tiny(tmp_path / "tiny", **sizes)
    assert not list(tmp_path.iterdir())


def test_tokenizer_round_trip(base: Base) -> None:
    """Any printable ASCII text comes back as it was: spaces, punctuation, names of specials."""
    tokenizer = base.tokenizer
    assert len(tokenizer) == base.vocabulary_size == len(SPECIALS) + len(CHARACTERS)
    generator = random.Random(5)
    texts = [CHARACTERS, "", "  a . b , it 's n't ?  \n\n\t x ", "<eos></s><|endoftext|> <pad>"]
    texts += [
        "".join(generator.choices(CHARACTERS, k=generator.randrange(200))) for _ in range(50)
    ]
    for text in texts:
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text), text
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text
        assert all(token >= len(SPECIALS) for token in tokens)
    assert tokenizer.encode("é") == [UNKNOWN]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD,
        BOS,
        EOS,
    )
