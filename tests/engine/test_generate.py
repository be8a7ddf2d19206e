"""Generation: what the cache gives is what a whole pass gives, and the same bits every time."""

import hashlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.engine.base import Base, Lora, Tenant
from holdfast.engine.generate import ABSENT, Continuation, Generation, Settings, generate
from holdfast.engine.scoring import token_logprobs
from holdfast.errors import Mistake
from holdfast.proc import spawn

SRC = str(Path(holdfast.__file__).parents[1])
PROMPT = [20, 30, 40, 50, 60]


def whole(tenant: Tenant, tokens: list[int]) -> torch.Tensor:
    """Log probabilities [T, V] after each token, in one pass without a cache."""
    row = torch.tensor([tokens])
    with torch.no_grad():
        return torch.log_softmax(tenant.logits(row, torch.ones_like(row))[0].float(), dim=-1)


def bits(generation: Generation) -> str:
    digest = hashlib.sha256()
    for one in generation.continuations:
        digest.update(one.tokens.tobytes() + one.logprobs.tobytes() + one.stop_reason.encode())
        if one.topk is not None:
            digest.update(one.topk.tokens.tobytes() + one.topk.logprobs.tobytes())
    if generation.about.logprobs is not None:
        digest.update(generation.about.logprobs.tobytes())
    return digest.hexdigest()


# ---- the numbers ---------------------------------------------------------------


def test_greedy_equals_generation_without_a_cache(lively: Tenant) -> None:
    """Greedy tokens are those of whole passes over the growing text, for every sample."""
    tokens = list(PROMPT)
    for _ in range(30):
        tokens.append(int(whole(lively, tokens)[-1].argmax()))
    settings = Settings(max_tokens=30, temperature=0.0, stop_tokens=[])
    generation = generate(lively, PROMPT, settings, num_samples=3, seed=0)
    for one in generation.continuations:
        assert one.tokens.tolist() == tokens[len(PROMPT) :]
    assert len(set(tokens)) > 5, "a model that repeats one token shows nothing"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_the_models(lively: Tenant, temperature: float) -> None:
    """Returned log probabilities are those of a whole pass at temperature 1, nothing cut off."""
    settings = Settings(
        max_tokens=40, temperature=temperature, top_k=20, stop_tokens=[], topk_sample_logprobs=3
    )
    for one in generate(lively, PROMPT, settings, num_samples=4, seed=3).continuations:
        tokens = one.tokens.tolist()
        scored = whole(lively, PROMPT + tokens)[len(PROMPT) - 1 : -1]
        wanted = scored[range(40), tokens].numpy()
        np.testing.assert_allclose(one.logprobs, wanted, rtol=0, atol=1e-5)
        assert one.topk is not None
        best = scored.topk(3)
        np.testing.assert_allclose(one.topk.logprobs, best.values.numpy(), rtol=0, atol=1e-5)
        assert (one.topk.tokens == best.indices.numpy()).mean() > 0.99


def test_token_logprobs() -> None:
    """A float32 log-softmax, also of bfloat16 logits, gathered at the targets."""
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 100.0]]).bfloat16()
    found = token_logprobs(logits, torch.tensor([2, 0]))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), [-0.40760597, -100.0], rtol=1e-6)


@pytest.mark.parametrize(("last", "given"), [(0, 0), (2, 2), (4, 4), (5, 4), (99, 4), (None, 4)])
def test_about_the_prompt(lively: Tenant, last: int | None, given: int) -> None:
    """The model's numbers for the prompt's tokens, and the likeliest beside them: of the last n
    places, of all but the first, which has none; the rest is blank."""
    settings = Settings(
        max_tokens=0, prompt_logprobs=True, prompt_logprobs_last_n=last, topk_prompt_logprobs=2
    )
    generation = generate(lively, PROMPT, settings, num_samples=1, seed=0)
    found, topk = generation.about.logprobs, generation.about.topk
    assert found is not None
    assert topk is not None
    blank, told = 5 - given, slice(5 - given, 5)
    assert np.isnan(found[:blank]).all()
    assert topk.tokens[:blank].tolist() == [[0, 0]] * blank
    assert topk.logprobs[:blank].tolist() == [[ABSENT, ABSENT]] * blank
    scored = whole(lively, PROMPT)[blank - 1 : 4]
    np.testing.assert_allclose(found[told], scored[range(given), PROMPT[told]].numpy(), atol=1e-5)
    assert topk.tokens[told].tolist() == scored.topk(2).indices.tolist()
    one = generation.continuations[0]
    assert (one.tokens.size, one.logprobs.size, one.stop_reason) == (0, 0, "length")


def test_more_than_the_vocabulary(base: Base) -> None:
    """Top-k beyond the vocabulary is filled up with blanks."""
    settings = Settings(max_tokens=1, topk_sample_logprobs=120, topk_prompt_logprobs=120)
    generation = generate(base.frozen(), PROMPT, settings, num_samples=1, seed=0)
    for topk in (generation.continuations[0].topk, generation.about.topk):
        assert topk is not None
        assert (topk.logprobs[-1] == ABSENT).tolist() == [False] * 101 + [True] * 19


# ---- the same bits -------------------------------------------------------------

RICH = Settings(max_tokens=24, top_p=0.95, prompt_logprobs=True, topk_sample_logprobs=2)


def trained(base: Base) -> Tenant:
    """An adapter that does something, the same in every process."""
    tenant = base.lora(Lora(rank=4, seed=2), "trained")
    with torch.no_grad():
        for name, parameter in tenant.parameters().items():
            if ".lora_B." in name:
                parameter.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).reshape_as(parameter))
    return tenant


CHILD = """
import sys
from pathlib import Path
from tests.engine.test_generate import PROMPT, RICH, bits, trained
from holdfast.engine.base import load_base
from holdfast.engine.determinism import settle
from holdfast.engine.generate import generate
settle()
tenant = trained(load_base("elsewhere", Path(sys.argv[1])))
result = bits(generate(tenant, PROMPT, RICH, num_samples=5, seed=8))
Path(sys.argv[2]).write_text(result)
"""


def test_same_bits_twice_and_in_a_fresh_process(base: Base, tiny: Path, tmp_path: Path) -> None:
    """Same weights, prompt, settings, number and seed: same bits, wherever; in silence."""
    tenant = trained(base)
    try:
        first = bits(generate(tenant, PROMPT, RICH, num_samples=5, seed=8))
        torch.manual_seed(99)
        torch.rand(7)
        assert bits(generate(tenant, PROMPT, RICH, num_samples=5, seed=8)) == first
        assert bits(generate(tenant, PROMPT, RICH, num_samples=5, seed=9)) != first
    finally:
        base.drop(tenant)
    env = {"PYTHONPATH": f"{SRC}:{Path(__file__).parents[2]}", "HF_HUB_OFFLINE": "1"}
    env["PYTHONWARNINGS"] = "error"
    log, result = tmp_path / "log", tmp_path / "result"
    argv = [sys.executable, "-c", CHILD, str(tiny), str(result)]
    with spawn(argv, env=env, log=log) as child:
        assert child.wait(60) == 0, child.tail()
    assert result.read_text() == first
    assert log.read_text() == ""


def test_a_sample_does_not_know_when_others_end(lively: Tenant) -> None:
    """A sequence has the same bits whether the others go on or have stopped."""
    free = Settings(max_tokens=40, temperature=1.5, stop_tokens=[])
    long = generate(lively, PROMPT, free, num_samples=6, seed=4).continuations
    stop = int(long[2].tokens[5])
    settings = Settings(max_tokens=40, temperature=1.5, stop_tokens=[stop])
    reasons = set()
    for one, other in zip(
        generate(lively, PROMPT, settings, num_samples=6, seed=4).continuations, long, strict=True
    ):
        count = len(one.tokens)
        reasons.add((one.stop_reason, count == 40))
        assert one.tokens.tobytes() == other.tokens[:count].tobytes()
        assert one.logprobs.tobytes() == other.logprobs[:count].tobytes()
        assert stop not in one.tokens[:-1]
        assert (one.stop_reason == "stop") == (one.tokens[-1] == stop)
    assert reasons >= {("stop", False), ("length", True)}, "both must be among the samples"


def test_asking_about_the_prompt_changes_no_sample(lively: Tenant) -> None:
    """What is told beside the samples does not change them."""
    plain = Settings(max_tokens=12)
    asked = Settings(max_tokens=12, prompt_logprobs=True, topk_prompt_logprobs=3)
    first = generate(lively, PROMPT, plain, num_samples=3, seed=1).continuations
    second = generate(lively, PROMPT, asked, num_samples=3, seed=1).continuations
    for one, other in zip(first, second, strict=True):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.logprobs.tobytes() == other.logprobs.tobytes()


# ---- ends and bounds -----------------------------------------------------------


def greedy(tenant: Tenant, **fields: object) -> Continuation:
    settings = Settings(**{"max_tokens": 30, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    return generate(tenant, PROMPT, settings, num_samples=1, seed=0).continuations[0]


def test_stop_string_in_a_generation(lively: Tenant) -> None:
    """It ends with the token that completes the string, which is kept, as are its numbers."""
    free = greedy(lively, stop_strings=[])
    decode = lively.base.tokenizer.decode
    text = decode(free.tokens.tolist())
    string = text[10:13]
    one = greedy(lively, stop_strings=["not in it", string])
    assert one.stop_reason == "stop"
    assert decode(one.tokens.tolist()) == text[: text.index(string) + 3]
    assert one.logprobs.tobytes() == free.logprobs[: len(one.tokens)].tobytes()


def test_end_of_text(lively: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing said: end of text stops and is kept. An empty list of either kind: it does not."""
    free = greedy(lively, stop_tokens=[])
    end = int(free.tokens[7])
    first = free.tokens.tolist().index(end)
    monkeypatch.setattr(lively.base, "eos_tokens", frozenset({end}))
    one = greedy(lively)
    assert (one.stop_reason, one.tokens.tolist()) == ("stop", free.tokens[: first + 1].tolist())
    for kind in ("stop_tokens", "stop_strings"):
        one = greedy(lively, **{kind: []})
        assert (one.stop_reason, one.tokens.tolist()) == ("length", free.tokens.tolist())


def test_context_length(base: Base) -> None:
    """A continuation ends where the context does; the last token that fits is given."""
    for length, room, most in ((508, 4, None), (511, 1, None), (508, 4, 100), (508, 2, 2)):
        settings = Settings(temperature=0.0, stop_tokens=[], max_tokens=most)
        prompt = [5 + n % 90 for n in range(length)]
        generation = generate(base.frozen(), prompt, settings, num_samples=2, seed=0)
        assert [len(one.tokens) for one in generation.continuations] == [room, room]
        assert generation.continuations[0].stop_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "fields", "samples", "words"),
    [
        ([], {}, 1, "at least one token"),
        ([5, 101], {}, 1, "token 101 is not in the vocabulary"),
        ([5, -1], {}, 1, "token -1 is not in the vocabulary"),
        ([5, 2**70], {}, 1, "is not in the vocabulary"),
        ([5] * 512, {}, 1, "leaves no room"),
        ([5] * 513, {"max_tokens": 0}, 1, "leaves no room"),
        ([5], {}, 0, "num_samples=0"),
        ([5], {}, 10**6, "num_samples"),
        ([5], {"stop_tokens": [500]}, 1, "token 500"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_requests_out_of_bounds(
    base: Base, prompt: list[int], fields: dict[str, object], samples: int, words: str
) -> None:
    """What cannot be done is a mistake that says why."""
    settings = Settings(**fields)  # type: ignore[arg-type]
    with pytest.raises(Mistake, match=words):
        generate(base.frozen(), prompt, settings, num_samples=samples, seed=0)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": -1},
        {"prompt_logprobs_last_n": -1},
        {"topk_prompt_logprobs": -1},
        {"topk_sample_logprobs": 10**6},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"top_k": -2},
    ],
    ids=str,
)
def test_settings_out_of_bounds(fields: dict[str, object]) -> None:
    """Settings without meaning are refused where they are made."""
    with pytest.raises(Mistake, match=str(next(iter(fields)))):
        Settings(**fields)  # type: ignore[arg-type]
