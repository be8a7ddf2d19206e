"""Sampling through the client: the same weights, the same numbers, whatever is asked for."""

from typing import Any

import numpy as np
import pytest

from trainer.house import House
from trainer.sdk.programs import run

TOOLS = """
def ask(sampler, prompt, n=1, **params):
    extra = {name: params.pop(name) for name in list(params)
             if "logprobs" in name or "prompt" in name}
    return sampler.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=n,
        sampling_params=types.SamplingParams(**params), **extra).result()
def rows(found):
    return [[list(one.tokens), list(one.logprobs), one.stop_reason] for one in found.sequences]
PROMPT = [1, *encode("begin:")]
base = service.create_sampling_client(base_model=BASE)
"""

SCORED = """
client = lora()
for _ in range(8):
    step(client, "begin:abcabc", rate=1e-2)
sampler = client.save_weights_and_get_sampling_client()
found = ask(sampler, PROMPT, n=3, max_tokens=10, seed=5, stop=[], include_prompt_logprobs=True)
for one in found.sequences:
    ids = [*PROMPT, *one.tokens]
    scored = client.forward([types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:]})], "cross_entropy").result()
    known = scored.loss_fn_outputs[0]["logprobs"].tolist()
    say(sampled=[*found.prompt_logprobs[1:], *one.logprobs], scored=known,
        first=found.prompt_logprobs[0], alone=sampler.compute_logprobs(
            types.ModelInput.from_ints(PROMPT)).result())
"""


def test_what_is_sampled_is_scored_the_same(there: House) -> None:
    """The log probabilities of sample and of the prompt are those that forward gives: 1e-4."""
    for one in run(there, TOOLS + SCORED):
        assert one["first"] is None
        np.testing.assert_allclose(one["sampled"], one["scored"], atol=1e-4, rtol=0)
        assert one["alone"][0] is None
        np.testing.assert_allclose(one["alone"][1:], one["scored"][:6], atol=1e-4, rtol=0)


DRAWN = """
say(greedy=[rows(ask(base, PROMPT, n=2, max_tokens=8, temperature=0.0)) for _ in range(2)],
    seeded=[rows(ask(base, PROMPT, n=4, max_tokens=8, seed=11, stop=[])) for _ in range(2)],
    other_seed=rows(ask(base, PROMPT, n=4, max_tokens=8, seed=12, stop=[])),
    unseeded=[rows(ask(base, PROMPT, n=4, max_tokens=8, stop=[])) for _ in range(2)],
    few=rows(ask(base, PROMPT, n=64, max_tokens=1, seed=1, top_k=3, top_p=0.999, stop=[])),
    likeliest=ask(base, PROMPT, max_tokens=1, topk_sample_logprobs=3).sequences[0].topk_logprobs)
def tensor(one):
    return [one.shape, one.data, one.sparse_crow_indices, one.sparse_col_indices]
top = ask(base, PROMPT, max_tokens=1, topk_prompt_logprobs=2)
cells = [[5, -1], [PROMPT[2], 9], *[[-1, -1]] * 3, [PROMPT[6], 0]]
dense = types.TensorData(data=[one for row in cells for one in row], dtype="int64", shape=[6, 2])
sparse = types.TensorData(data=[PROMPT[2], 9, 0], dtype="int64", shape=[6, 2],
    sparse_crow_indices=[0, 0, 2, 2, 2, 2, 3], sparse_col_indices=[0, 1, 1])
scored = [ask(base, PROMPT, max_tokens=1, target_prompt_logprobs=one, prompt_alt_tokens_k=3,
              seed=1, prompt_logprobs_last_n=1, include_prompt_logprobs=True)
          for one in (dense, sparse)]
whole = ask(base, PROMPT, max_tokens=1, topk_prompt_logprobs=101, include_prompt_logprobs=True)
say(top=top.prompt_logprobs, targets=[tensor(one.target_prompt_logprobs) for one in scored],
    drawn=[[tensor(one.prompt_alt_tokens.tokens), tensor(one.prompt_alt_tokens.logprobs)]
           for one in scored],
    last=scored[0].prompt_logprobs, known=whole.topk_prompt_logprobs, whole=whole.prompt_logprobs)
"""


@pytest.fixture(scope="module")
def drawn(there: House) -> list[dict[str, Any]]:
    """Many samples of the base."""
    return run(there, TOOLS + DRAWN)


def test_the_same_is_drawn_again(drawn: list[dict[str, Any]]) -> None:
    """Greedy and seeded samples repeat bit for bit; samples differ from each other otherwise."""
    said = drawn[0]
    assert said["greedy"][0] == said["greedy"][1]
    one, other = said["greedy"][0][:2]  # rows of one batch: on some processors a bit may differ
    assert one[0] == other[0]
    assert one[1] == pytest.approx(other[1], abs=1e-5)
    assert said["seeded"][0] == said["seeded"][1]
    assert len({tuple(ids) for ids, _, _ in said["seeded"][0]}) == 4
    assert said["other_seed"] != said["seeded"][0]
    assert said["unseeded"][0] != said["unseeded"][1]


def test_only_the_likeliest_are_drawn(drawn: list[dict[str, Any]]) -> None:
    """top_k: never anything else than the likeliest, which are told."""
    (likeliest,) = drawn[0]["likeliest"]
    assert {ids[0] for ids, _, _ in drawn[0]["few"]} == {token for token, _ in likeliest}


def test_the_prompts_own_tokens_come_with_the_likeliest(drawn: list[dict[str, Any]]) -> None:
    """topk_prompt_logprobs alone gives the log probabilities of the prompt's tokens, too;
    prompt_logprobs_last_n only those of its end."""
    top, last, whole = (drawn[1][name] for name in ("top", "last", "whole"))
    assert top[0] is None
    np.testing.assert_allclose(top[1:], whole[1:], atol=1e-5)
    assert last[:6] == [None] * 6
    assert last[6] == pytest.approx(whole[6], abs=1e-5)


def test_any_token_is_scored_along_the_prompt(drawn: list[dict[str, Any]]) -> None:
    """target_prompt_logprobs: the model's own numbers, dense or sparse as they were asked for."""
    known = [dict(map(tuple, place or [])) for place in drawn[1]["known"]]
    whole = drawn[1]["whole"]
    (shape, dense, *none), (sparse_shape, sparse, *layout) = drawn[1]["targets"]
    assert shape == sparse_shape == [6, 2]
    assert none == [None, None]
    assert layout == [[0, 0, 2, 2, 2, 2, 3], [0, 1, 1]]
    want = [known[1][5], 0.0, whole[2], known[2][9], *[0.0] * 6, whole[6], known[6][0]]
    np.testing.assert_allclose(dense, want, atol=1e-5)
    np.testing.assert_allclose(sparse, [whole[2], known[2][9], known[6][0]], atol=1e-5)


def test_alternatives_are_drawn_along_the_prompt(drawn: list[dict[str, Any]]) -> None:
    """prompt_alt_tokens_k: k draws per place, the same with the same seed, and their numbers."""
    known = [dict(map(tuple, place or [])) for place in drawn[1]["known"]]
    first, second = drawn[1]["drawn"]
    assert first == second
    (shape, ids, *_), (same, logprobs, *_) = first
    assert shape == same == [6, 3]
    want = [known[1 + at // 3][token] for at, token in enumerate(ids)]
    np.testing.assert_allclose(logprobs, want, atol=1e-5)
    assert len(set(ids)) > 6


VERSIONS = """
client = lora()
def best(sampler):
    return rows(ask(sampler, PROMPT, max_tokens=6, temperature=0.0, stop=[]))
unnamed, named, at_once = [], [], []
for text in ("aaa", "bbb", "ccc"):
    for _ in range(3):
        step(client, "begin:" + text, rate=1e-2)
    unnamed.append(client.save_weights_and_get_sampling_client())
    at_once.append(best(unnamed[-1]))
    named.append(published(client, text))
state = client.save_state("state").result().path
paths = [service.create_sampling_client(model_path=path) for path in named]
futures = [
    sampler.sample(prompt=types.ModelInput.from_ints(PROMPT), num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=6, temperature=0.0, stop=[]))
    for sampler in [*unnamed, *paths] * 3]
say(at_once=at_once, mixed=[rows(future.result()) for future in futures],
    state=best(service.create_sampling_client(model_path=state)),
    base=[best(base), best(service.create_sampling_client(base_model=BASE))],
    about=[base.get_base_model(), paths[0].get_base_model()])
"""


def test_versions_are_sampled_side_by_side(there: House) -> None:
    """A sampling client keeps its version while the model goes on; by name, too, and by state."""
    (said,) = run(there, TOOLS + VERSIONS)
    assert len({str(one) for one in said["at_once"]}) == 3
    assert said["mixed"] == [*said["at_once"], *said["at_once"]] * 3
    assert said["state"] == said["at_once"][-1]
    assert said["base"][0] == said["base"][1]
    assert said["base"][0] not in said["at_once"]
    assert said["about"] == ["holdfast/tiny", "holdfast/tiny"]


MANY = """
client = lora()
old = client.save_weights_and_get_sampling_client()
first = rows(ask(old, PROMPT, max_tokens=4, temperature=0.0, stop=[]))
others = []
for number in range(10):
    step(client, "begin:" + chr(97 + number), rate=1e-2)
    others.append(client.save_weights_and_get_sampling_client())
told = [rows(ask(one, PROMPT, max_tokens=4, temperature=0.0, stop=[])) for one in others]
again = [rows(ask(one, PROMPT, max_tokens=4, temperature=0.0, stop=[])) for one in others]
say(first=first, later=rows(ask(old, PROMPT, max_tokens=4, temperature=0.0, stop=[])),
    told=told, again=again)
"""


@pytest.mark.long
def test_more_versions_than_fit_into_memory(there: House) -> None:
    """Eleven samplers, eight at a time in memory: those that had to go come back as they were."""
    (said,) = run(there, TOOLS + MANY)
    assert said["later"] == said["first"]
    assert said["again"] == said["told"]


LARGE = """
found = ask(base, PROMPT, n=64, max_tokens=120, seed=3, stop=[], topk_sample_logprobs=20)
say(lengths=[len(one.tokens) for one in found.sequences],
    shapes=[list(one.topk_logprobs_np.logprobs.shape) for one in found.sequences],
    best=all(max(pair[1] for pair in place) == place[0][1]
        for one in found.sequences for place in one.topk_logprobs))
"""


@pytest.mark.long
def test_a_large_result_comes_whole(there: House) -> None:
    """More than a megabyte: announced first, then fetched."""
    (said,) = run(there, TOOLS + LARGE)
    assert said["lengths"] == [120] * 64
    assert said["shapes"] == [[120, 20]] * 64
    assert said["best"]
