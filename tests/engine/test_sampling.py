"""Drawing tokens: the right distribution, decided by the numbers given, and stable streams."""

import math

import numpy as np
import pytest
import torch

from holdfast.engine.noise import seed_of, uniform
from holdfast.engine.sampling import Shape, Stream, draw, top_logprobs
from holdfast.errors import Mistake

LOGITS = [2.0, -1.0, 0.5, 0.5, 3.0, -4.0, 1.0, 0.0]
SHAPES = [
    Shape(),
    Shape(temperature=0.5),
    Shape(temperature=3.0),
    Shape(top_k=3),
    Shape(top_p=0.9),
    Shape(top_p=0.05),
    Shape(temperature=1.7, top_k=5, top_p=0.8),
]


def expected(shape: Shape) -> list[float]:
    """The definition, token by token, in plain Python."""
    weights = [math.exp(value / shape.temperature) for value in LOGITS]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = order[: shape.top_k] if shape.top_k > 0 else order
    kept, total = [], sum(weights[token] for token in order)
    for token in order:
        kept.append(token)
        if sum(weights[token] for token in kept) >= shape.top_p * total:
            break
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(weights))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_number_decides(shape: Shape) -> None:
    """Numbers from 0 to just below 1 go through the tokens in order, and each token gets the
    share of them that the definition says, but for one number at either end of it."""
    count = 4000
    numbers = torch.linspace(0, 1 - 2**-53, count, dtype=torch.float64)
    tokens = draw(torch.tensor([LOGITS]).expand(count, -1), numbers, shape).tolist()
    assert tokens == sorted(tokens)
    found = np.bincount(tokens, minlength=len(LOGITS))
    np.testing.assert_allclose(found, np.array(expected(shape)) * count, rtol=0, atol=2)


def test_greedy() -> None:
    """Temperature 0 takes the likeliest, the first of equals, whatever the number."""
    rows = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 5.0]])
    for number in (0.0, 0.5, 1 - 2**-53):
        numbers = torch.full((2,), number, dtype=torch.float64)
        assert draw(rows, numbers, Shape(temperature=0.0)).tolist() == [1, 0]


def test_edges() -> None:
    """Huge logits, impossible tokens and tiny temperatures do not break the draw."""
    half = torch.tensor([0.5], dtype=torch.float64)
    assert draw(torch.tensor([[-math.inf, 1e30, -1e30]]), half, Shape()).item() == 1
    assert draw(torch.tensor([[1.0, 1.001]]), half, Shape(temperature=1e-6)).item() == 1
    assert draw(torch.tensor([[0.0, 0.0]]), half, Shape(top_k=100)).item() == 1
    last = torch.tensor([1 - 2**-53], dtype=torch.float64)
    assert draw(torch.tensor([[0.0, 0.0, -800.0]]), last, Shape()).item() == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_weights_are_told(bad: float) -> None:
    """Logits that are not numbers are an error, never a token."""
    with pytest.raises(Mistake, match="diverged"):
        draw(torch.tensor([[0.0, bad]]), torch.zeros(1, dtype=torch.float64), Shape())


def test_top_logprobs() -> None:
    """The likeliest in order, the lower token first among equals."""
    tokens, values = top_logprobs(torch.tensor([[-3.0, -1.0, -2.0, -1.0]]), 3)
    assert (tokens.tolist(), values.tolist()) == ([[1, 3, 2]], [[-1.0, -1.0, -2.0]])


def test_streams_are_stable_and_apart() -> None:
    """The numbers of a sequence are those they have always been; no two sequences share them."""
    stream = Stream(1, 0)
    assert [stream.next() for _ in range(2)] == [0.17455807707035909, 0.4110034665206501]
    firsts = {Stream(seed, index).next() for seed in range(-20, 20) for index in range(50)}
    assert len(firsts) == 2000
    assert Stream(0, 0).next() != Stream(2**32, 0).next()


def test_hash_of_words() -> None:
    """Where one word ends and the next begins counts; so does their order."""
    assert len({seed_of("a", "bc"), seed_of("ab", "c"), seed_of("bc", "a"), seed_of("abc")}) == 4
    values = uniform((1000, 50), 0.5, "x", 3)
    assert values.dtype == np.float32
    assert -0.5 <= values.min() < -0.499 < 0.499 < values.max() < 0.5
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 0.5 / 3**0.5) < 0.005
