"""Tenants: none changes another; what is published loads elsewhere; padding changes nothing."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from holdfast.engine.base import Base, Lora, Tenant, load_base
from holdfast.engine.quiet import peft, quiet, transformers
from holdfast.engine.scoring import token_logprobs
from holdfast.errors import Exists, Gone, Mistake

TOKENS = torch.arange(4, 34).reshape(2, 15)
ONES = torch.ones_like(TOKENS)


def logits(tenant: Tenant) -> torch.Tensor:
    with torch.no_grad():
        return tenant.logits(TOKENS, ONES)


def disturb(tenant: Tenant, seed: int = 3) -> None:
    """Change everything that can be trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tenant.parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def publish(tenant: Tenant, folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in tenant.carried_files().items():
        (folder / name).write_bytes(data)
    save_file(tenant.state(), folder / tenant.weights_file, metadata={"format": "pt"})
    return folder


def plain(folder: Path, adapter: Path | None = None) -> Any:
    """What transformers and peft make of a folder, without any of our code."""
    with quiet():
        model = transformers().AutoModelForCausalLM.from_pretrained(folder)
        if adapter is not None:
            model = peft().PeftModel.from_pretrained(model, adapter)
    return model.eval()


@pytest.fixture
def lora(base: Base) -> Any:
    """Makes adapters that are gone after the test."""
    made: list[Tenant] = []

    def make(name: str, **fields: Any) -> Tenant:
        made.append(base.lora(Lora(**{"rank": 4, **fields}), name))
        return made[-1]

    yield make
    for tenant in made:
        base.drop(tenant)


def test_a_new_adapter_changes_nothing(base: Base, lora: Callable[..., Tenant]) -> None:
    """With a new adapter the model says what the base says, bit for bit."""
    assert torch.equal(logits(lora("new")), logits(base.frozen()))


# ---- adapters ------------------------------------------------------------------


def test_tenants_do_not_touch_each_other(base: Base, lora: Callable[..., Tenant]) -> None:
    """Training one tenant changes neither the base nor any other, whatever was made when."""
    first, second, full = lora("first"), lora("second"), base.full()
    before = logits(base.frozen())
    disturb(first)
    changed = logits(first)
    assert not torch.equal(changed, before)
    late = lora("late")
    for other in (second, full, late, base.frozen()):
        assert torch.equal(logits(other), before)
    disturb(full)
    disturb(second, seed=4)
    assert torch.equal(logits(base.frozen()), before)
    assert torch.equal(logits(first), changed)
    assert not torch.equal(logits(second), changed)


def test_gradients_reach_only_what_is_trained(base: Base, lora: Callable[..., Tenant]) -> None:
    """A backward pass fills the tenant's gradients, between other tenants' passes, and no more."""
    first, second = lora("first"), lora("second")
    disturb(first)
    loss = -token_logprobs(first.logits(TOKENS, ONES)[:, :-1], TOKENS[:, 1:]).mean()
    logits(second)
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and bool(p.grad.any()) for p in first.parameters().values())
    assert all(p.grad is None for p in second.parameters().values())
    trained = {id(p) for p in first.parameters().values()}
    for parameter in first.model().parameters():
        assert parameter.requires_grad == (id(parameter) in trained)


def test_first_weights_are_a_function_of_the_seed(
    base: Base, tiny: Path, lora: Callable[..., Tenant]
) -> None:
    """Not of global generators, other adapters, other layers, or the process's past."""
    torch.manual_seed(1)
    one = copy.deepcopy(lora("one", seed=5).state())
    torch.manual_seed(2)
    state = torch.get_rng_state()
    two = lora("two", seed=5).state()
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert all(torch.equal(one[name], two[name]) for name in one)
    fresh = load_base("another", tiny).lora(Lora(rank=4, seed=5), "three").state()
    assert all(torch.equal(one[name], fresh[name]) for name in one)
    part = lora("part", seed=5, train_mlp=False).state()
    assert 0 < len(part) < len(one)
    assert all(torch.equal(one[name], tensor) for name, tensor in part.items())
    other = lora("other", seed=6).state()
    changed = {name for name in one if not torch.equal(one[name], other[name])}
    assert changed == {name for name in one if ".lora_A." in name}
    for name in changed:
        assert float(one[name].abs().max()) <= one[name].shape[1] ** -0.5
    assert len({tensor.numpy().tobytes() for name, tensor in one.items() if name in changed}) == 15


@pytest.mark.parametrize(
    ("choice", "modules"),
    [
        ({"train_mlp": False, "train_unembed": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False, "train_unembed": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False}, {"lm_head"}),
    ],
)
def test_choice_of_layers(
    lora: Callable[..., Tenant], choice: dict[str, bool], modules: set[str]
) -> None:
    """train_attn, train_mlp and train_unembed choose just these layers."""
    tenant = lora("choice", **choice)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in tenant.parameters()}
    assert names == modules
    config = json.loads(tenant.carried_files()["adapter_config.json"])
    assert set(config["target_modules"]) == modules


def test_bad_adapters(base: Base, lora: Callable[..., Tenant]) -> None:
    """No rank, no layers, or a name twice: mistakes. A dropped tenant's name is free again."""
    for rank in (0, 10**6):
        with pytest.raises(Mistake, match="rank between 1 and"):
            Lora(rank=rank)
    with pytest.raises(Mistake, match="at least one of"):
        Lora(rank=1, train_attn=False, train_mlp=False, train_unembed=False)
    tenant = lora("name")
    with pytest.raises(Exists, match="has a tenant name already"):
        base.lora(Lora(rank=1), "name")
    base.drop(tenant)
    base.drop(tenant)
    with pytest.raises(Gone, match="has been dropped"):
        tenant.logits(TOKENS, ONES)
    assert len(lora("name").parameters()) == 30


def test_published_full_weights_load_with_transformers(base: Base, tmp_path: Path) -> None:
    """The folder alone gives plain transformers the same model and tokenizer."""
    tenant = base.full()
    disturb(tenant)
    folder = publish(tenant, tmp_path / "full")
    assert torch.equal(plain(folder)(TOKENS).logits, logits(tenant))
    again = load_base("again", folder)
    assert torch.equal(logits(again.frozen()), logits(tenant))
    assert again.tokenizer.decode(again.tokenizer.encode("1 + 1")) == "1 + 1"


def test_published_adapter_loads_with_peft(
    tiny: Path, tmp_path: Path, lora: Callable[..., Tenant]
) -> None:
    """The adapter's folder on the base's gives plain peft the same model, with its own names."""
    tenant = lora("published")
    disturb(tenant)
    folder = publish(tenant, tmp_path / "adapter")
    model = plain(tiny, folder)
    with quiet():
        names = set(peft().get_peft_model_state_dict(model, save_embedding_layers=False))
    assert names == set(tenant.state())
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits(tenant), rtol=0, atol=1e-6)
    assert tiny.as_posix() not in str(tenant.carried_files())


# ---- what is published ---------------------------------------------------------


def test_tied_embeddings(tiny: Path, tmp_path: Path) -> None:
    """A base whose embeddings are one tensor: published once, trained once, adapted apart."""
    folder = tmp_path / "tied"
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    source = load_base("source", tiny).full().state()
    state = {name: tensor for name, tensor in source.items() if name != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    tied = load_base("tied", folder)
    full = tied.full()
    assert set(full.state()) == set(full.parameters()) == set(state)
    disturb(full)
    published = publish(full, tmp_path / "published")
    assert torch.equal(plain(published)(TOKENS).logits, logits(full))
    before = logits(tied.frozen())
    adapter = tied.lora(Lora(rank=2, train_attn=False, train_mlp=False), "head")
    assert torch.equal(logits(adapter), before)
    disturb(adapter)
    assert torch.equal(logits(tied.frozen()), before)
    with torch.no_grad():
        loaded = plain(folder, publish(adapter, tmp_path / "head"))(TOKENS).logits
    torch.testing.assert_close(loaded, logits(adapter), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model.norm.weight"), r"not given: model\.norm\.weight"),
        (lambda s: s.update(extra=torch.zeros(1)), "not of this model: extra"),
        (lambda s: s.update({"lm_head.weight": torch.zeros(3)}), r"lm_head\.weight \[3\], not"),
        (
            lambda s: s.update({"model.norm.weight": torch.zeros(128, dtype=torch.int64)}),
            r"of another kind: model\.norm\.weight torch\.int64",
        ),
        (lambda s: s.clear(), r"lm_head\.weight, .* and 18 more"),
    ],
)
def test_wrong_state_changes_nothing(
    base: Base, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    """Names or shapes that do not fit are told, and not one weight is changed."""
    tenant = base.full()
    before = logits(tenant)
    state = {name: torch.zeros_like(tensor) for name, tensor in tenant.state().items()}
    change(state)
    with pytest.raises(Mistake, match=words):
        tenant.load_state(state)
    assert torch.equal(logits(tenant), before)


# ---- padding and other rows ----------------------------------------------------


def test_padding_changes_no_more_than_noise(lively: Tenant) -> None:
    """A row gives the same numbers alone and padded, whatever stands in the padding."""
    row = torch.tensor([[5, 9, 13, 40, 41, 42, 43]])
    alone = lively.logits(row, torch.ones_like(row))
    for filler in (0, 17, -100, 10**6):
        padded = torch.cat([row, torch.full((1, 20), filler)], dim=1)
        mask = torch.arange(27)[None] < 7
        torch.testing.assert_close(lively.logits(padded, mask)[:, :7], alone, rtol=0, atol=1e-5)


def test_a_row_does_not_know_the_others(lively: Tenant) -> None:
    """In batches of one shape a row has the same bits, whatever the other rows hold."""
    generator = torch.Generator().manual_seed(11)
    results = set()
    for lengths in ((15, 15, 15), (15, 1, 7), (15, 15, 0)):
        tokens = torch.randint(4, 101, (3, 15), generator=generator)
        tokens[0] = TOKENS[0]
        mask = torch.arange(15)[None] < torch.tensor(lengths)[:, None]
        results.add(lively.logits(tokens, mask)[0].detach().numpy().tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    ("tokens", "mask", "words"),
    [
        ([[5, 101]], [[1, 1]], "token 101 is not in the vocabulary of tiny, which has 101"),
        ([[5, -1]], [[1, 1]], "token -1 is not"),
        ([[5, 6]], [[0, 1]], "end of a row"),
        ([[5, 6, 7]], [[1, 0, 1]], "end of a row"),
        ([5, 6], [1, 1], "one shape"),
        ([[5, 6]], [[1]], "one shape"),
        ([[]], [[]], "one shape"),
        ([[5.0]], [[1]], "integers"),
        ([[5] * 513], [[1] * 513], "513 tokens are more than the 512"),
    ],
)
def test_bad_batches(base: Base, tokens: Any, mask: Any, words: str) -> None:
    """Tokens out of the vocabulary, gaps and shapes that do not fit are mistakes, not crashes."""
    with pytest.raises(Mistake, match=words):
        base.frozen().logits(torch.tensor(tokens), torch.tensor(mask))
