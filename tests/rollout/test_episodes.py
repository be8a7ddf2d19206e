"""Episodes: who speaks when, with which seed, and what is written down."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.engine.generate import Continuation, Generation
from holdfast.engine.noise import seed_of
from holdfast.engine.tiny import make_tiny
from holdfast.errors import Mistake
from holdfast.rollout import own_sampler
from holdfast.rollout.environments import Judge, Task
from holdfast.rollout.episodes import Episode, Said, Say, play

TASK = Task("00 to 99?", "50")


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


class Script:
    """Says what it is told to, and writes down what it was asked."""

    def __init__(self, *said: Sequence[str]) -> None:
        self.said = list(said)
        self.asked: list[tuple[str, int, int]] = []

    async def __call__(self, tokens: Sequence[int], count: int, seed: int) -> list[Said]:
        self.asked.append((decode(tokens), count, seed))
        return [sample(text, place) for place, text in enumerate(self.said.pop(0))]


def sample(text: str, place: int = 0) -> Said:
    tokens = np.array(encode(text), np.int32)
    return tokens, -np.arange(1, len(text) + 1, dtype=np.float32) - place, "length"


async def played(name: str, say: Say, **more: int) -> list[Episode]:
    settings: Any = {"count": 3, "max_turns": 7, "seed": 5, **more}
    return await play(Judge(name, {}), TASK, say=say, encode=encode, decode=decode, **settings)


async def test_one_turn_is_one_batch() -> None:
    """A group of one turn is one call for all its samples, with the seed that was given."""
    script = Script(["12", "", "5"])
    episodes = await played("reverse", script, max_turns=1)
    assert script.asked == [("00 to 99?", 3, 5)]
    assert [decode(episode.tokens.tolist()) for episode in episodes] == [
        "00 to 99?12",
        "00 to 99?",
        "00 to 99?5",
    ]
    first = episodes[0]
    kinds = [str(each.dtype) for each in (first.tokens, first.made, first.logprobs)]
    assert kinds == ["int32", "bool", "float32"]
    assert first.made.tolist() == [False] * 9 + [True] * 2
    assert first.logprobs.tolist() == [0.0] * 9 + [-1.0, -2.0]
    assert (first.turns, first.pieces, first.ended) == (["12"], ["1", "2"], "length")
    assert (episodes[1].turns, episodes[1].pieces) == ([""], [])


async def test_several_turns() -> None:
    """Later turns are one sample each, with a seed of its own; who is done is left out."""
    script = Script(["40", "50", "60"], ["50"], ["45"], ["50"])
    episodes = await played("guess", script)
    assert script.asked == [
        ("00 to 99?", 3, 5),
        ("00 to 99?40 higher?", 1, seed_of(5, 1, 0)),
        ("00 to 99?60 lower?", 1, seed_of(5, 1, 2)),
        ("00 to 99?60 lower?45 higher?", 1, seed_of(5, 2, 2)),
    ]
    last = episodes[2]
    assert last.turns == ["60", "45", "50"]
    assert last.pieces == list("604550")
    assert decode(last.tokens[last.made].tolist()) == "604550"
    assert decode(last.tokens.tolist()) == "00 to 99?60 lower?45 higher?50"
    assert last.logprobs[last.made].tolist() == [-3.0, -4.0, -1.0, -2.0, -1.0, -2.0]
    assert not last.logprobs[~last.made].any()
    assert episodes[1].turns == ["50"]


async def test_the_last_turn_is_the_last() -> None:
    """After `max_turns` nobody is asked any more, whatever the environment wants to say."""
    script = Script(["40"], ["41"])
    (episode,) = await played("guess", script, count=1, max_turns=2)
    assert episode.turns == ["40", "41"]
    assert script.said == []


async def test_speaking_has_its_own_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never runs in the event loop's thread, but in the sampler's."""
    threads: set[str] = set()

    def generate(*_: object, **__: object) -> Generation:
        threads.add(threading.current_thread().name)
        return Generation([Continuation(*sample("1")[:2], "length")])

    monkeypatch.setattr(own_sampler, "generate", generate)
    async with own_sampler.OwnSampler(make_tiny(tmp_path, context=64)) as engine:
        engine._load(1, engine._base.full().state())
        await played("reverse", engine.say(1, 1.0, 8), count=1)
    assert threads == {"engine_0"}


WRONG: dict[str, list[Said]] = {
    "0 samples where 1": [],
    "2 samples where 1": [sample("a"), sample("b")],
    "1 tokens, 2 log": [(np.array([1], np.int32), np.zeros(2, np.float32), "stop")],
    "'tired'": [(np.array([1], np.int32), np.zeros(1, np.float32), "tired")],
}


@pytest.mark.parametrize("told", WRONG)
async def test_what_is_not_said_is_not_written(told: str) -> None:
    """An engine that gives something else than it was asked for is a mistake, not a sample."""

    async def say(*_: object) -> list[Said]:
        return WRONG[told]

    with pytest.raises(Mistake, match=told):
        await played("reverse", say, count=1)
    with pytest.raises(Mistake, match="count is 0"):
        await played("reverse", say, count=0)
