"""Drawing tokens: the right distribution, decided by the numbers given, and stable streams."""

import functools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from holdfast.engine.noise import seed_of, uniform
from holdfast.engine.sampling import Shape, Stream, distribution, draw, top_logprobs
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


@functools.cache
def first_numbers(seed: int, count: int) -> torch.Tensor:
    """The first number of each of many sequences."""
    return torch.tensor([Stream(seed, i).next() for i in range(count)], dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frequencies(shape: Shape) -> None:
    """Many sequences' first draws have the frequencies that the settings say (chi-square)."""
    count, seed = 10_000, 20
    numbers = first_numbers(seed, count)
    tokens = draw(torch.tensor([LOGITS]).expand(count, -1), numbers, shape)
    found = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    wanted = np.array(expected(shape)) * count
    assert not found[wanted == 0].any()
    likely = wanted > 0
    chi_square = float(((found - wanted)[likely] ** 2 / wanted[likely]).sum())
    assert chi_square < 30.0, f"seed {seed}: {found} instead of {wanted}"  # p < 1e-4 for 7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probabilities(shape: Shape) -> None:
    """The distribution is that of the definition, for every row by itself."""
    rows = torch.tensor([LOGITS, LOGITS[::-1]])
    found = distribution(rows, shape)
    np.testing.assert_allclose(found[0].numpy(), expected(shape), atol=1e-6)
    np.testing.assert_allclose(found.sum(-1).numpy(), 1.0, atol=1e-12)


def test_one_number_decides() -> None:
    """Numbers from 0 to just below 1 go through the tokens in order and miss none."""
    count = 4000
    numbers = torch.linspace(0, 1 - 2**-53, count, dtype=torch.float64)
    tokens = draw(torch.tensor([LOGITS]).expand(count, -1), numbers, Shape(top_k=4)).tolist()
    assert all(a <= b for a, b in pairwise(tokens))
    assert set(tokens) == {0, 2, 4, 6}, "the lower of two equals is kept"


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
