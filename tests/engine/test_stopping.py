"""What ends a continuation, and that what ended it is kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.base import Base, load_base
from holdfast.engine.stopping import Stop
from holdfast.engine.tiny import EOS, SPECIALS
from holdfast.errors import Mistake


@pytest.fixture(scope="module")
def coarse(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Some tokens are several characters: `~` became "ab", `}` "c\\n\\nUs" and `|` "er:x"."""
    folder = tmp_path_factory.mktemp("coarse") / "model"
    shutil.copytree(tiny, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    for old, new in (("~", "ab"), ("}", "c\n\nUs"), ("|", "er:x")):
        vocabulary[new] = vocabulary.pop(old)
    path.write_text(json.dumps(tokenizer))
    return load_base("coarse", folder)


def ended_after(stop: Stop, tokens: list[int]) -> int | None:
    """After how many tokens it stopped, asked as the generation asks."""
    return next((n for n in range(len(tokens) + 1) if stop.after(tokens[:n])), None)


@pytest.mark.parametrize(
    ("text", "how", "after"),
    [
        ("ab\n\nUser: c", {"strings": ["\n\nUser:"]}, 9),
        ("aaab", {"strings": ["aab"]}, 4),
        ("abcabc", {"strings": ["c", "b"]}, 2),
        ("abc", {"strings": ["abcd"]}, None),
        ("x" * 300 + "yz", {"strings": ["x" * 40 + "y"]}, 301),
        ("abc", {"strings": []}, None),
        ("a\x02b", {"strings": []}, None),
        ("a\x02b", {"tokens": []}, None),
        ("a\x02b", {}, 2),
        ("a\x02b", {"strings": ["b"]}, 3),
        ("a\x02b", {"tokens": [EOS]}, 2),
        ("a\x02b", {"strings": [SPECIALS[EOS]]}, 2),
        ("\x02", {}, 1),
        ("", {}, None),
    ],
    ids=str,
)
def test_table(base: Base, text: str, how: dict[str, Any], after: int | None) -> None:
    """It stops after the token that completes a stop, the first time. \\x02: end of text."""
    tokens = [token for part in text for token in base.tokenizer.encode(part)]
    tokens = [EOS if part == "\x02" else token for part, token in zip(text, tokens, strict=True)]
    assert ended_after(Stop(base, **how), tokens) == after


@pytest.mark.parametrize(
    ("text", "string", "after"),
    [
        ("x~y", "a", 2),  # in the middle of a token, which is kept whole
        ("x~y", "xa", 2),
        ("x~y", "by", 3),
        ("~}|~", "\n\nUser:", 3),
        ("}}|", "\n\nUser:", 3),
    ],
)
def test_strings_across_tokens(coarse: Base, text: str, string: str, after: int) -> None:
    """A stop string may begin and end inside tokens."""
    numbers = json.loads((coarse.folder / "tokenizer.json").read_text())["model"]["vocab"]
    names = {"~": "ab", "}": "c\n\nUs", "|": "er:x"}
    tokens = [numbers[names.get(part, part)] for part in text]
    assert ended_after(Stop(coarse, strings=[string]), tokens) == after


@pytest.mark.parametrize(
    "how",
    [
        {"strings": [""]},
        {"strings": "ab"},
        {"strings": ["a" * 1025]},
        {"strings": ["a"] * 65},
        {"tokens": [101]},
        {"tokens": [-1]},
        {"strings": [], "tokens": []},
    ],
    ids=str,
)
def test_stops_out_of_bounds(base: Base, how: dict[str, Any]) -> None:
    """Empty, too long, too many, not in the vocabulary, or of both kinds: refused."""
    with pytest.raises(Mistake):
        Stop(base, **how)
