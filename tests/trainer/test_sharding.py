"""Models that no rank has whole, on real process groups: the numbers of a machine that has."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner

from holdfast.cli import cli
from holdfast.engine.determinism import settle
from holdfast.engine.tiny import make_tiny
from holdfast.errors import Mistake
from holdfast.proc import HeldPort
from holdfast.trainer import ops
from holdfast.trainer.compute import TorchCompute
from holdfast.trainer.gradients import BATCH_TOKENS
from holdfast.trainer.machine import Machine
from holdfast.trainer.orders import END, Answer, Order, lead
from holdfast.trainer.ranks import Ranks, from_env
from holdfast.trainer.seams import Snapshot
from holdfast.trainer.sharded import ShardedMachine
from holdfast.trainer.sharding import ShardedTenant
from listening import beyond_loopback, listeners
from patience import HANG_S
from trainer.other_rank import IDLE_S, STEP, batch, datum, held, never_pickle


class Led:
    """A machine, and the ranks that follow it."""

    def __init__(self, machine: Machine, ranks: Ranks, notes: Path) -> None:
        self.machine = machine
        self.ranks = ranks
        self.notes = notes
        self.other_pid = 0
        self.before: set[tuple[str, int]] = set()

    def do(self, kind: str, snapshot: Snapshot | None = None, **details: Any) -> Answer:
        return lead(self.machine, self.ranks, Order(kind=kind, **details), snapshot)

    def apply(self, model: str, op: bytes) -> Any:
        return self.do("apply", model=model, op=op)

    def train(self, model: str, *what: int | bytes) -> None:
        """Batches by their number, and steps."""
        for one in what:
            self.apply(model, one if isinstance(one, bytes) else batch(one))

    def begin(self, model: str, *what: int | bytes, base: str = "tiny") -> None:
        """A new model, and what is done to it."""
        self.do("create", model=model, base=base)
        self.train(model, *what)

    def capture(self, model: str) -> Snapshot:
        found = self.do("capture", model=model)
        assert isinstance(found, Snapshot)
        return found

    def other(self) -> dict[str, Any]:
        """What rank 1 holds."""
        self.do("probe")
        found: dict[str, Any] = json.loads(self.notes.read_text())
        return found


@contextlib.contextmanager
def rank(
    number: int, size: int, port: int, folders: dict[str, Path], **more: str
) -> Iterator[Any]:
    """A rank in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **group(number, size, port),
        **more,
    }
    words = [f"{name}={path}" for name, path in folders.items()]
    child = subprocess.Popen([sys.executable, "-m", "trainer.other_rank", *words], env=env)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def group(number: int, size: int, port: int) -> dict[str, str]:
    """torchrun's environment."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "RANK": str(number),
        "HF_HUB_OFFLINE": "1",
    }


def tied(tiny: Path, folder: Path) -> Path:
    """The same model with one matrix for the first and the last layer."""
    shutil.copytree(tiny, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bases: of two types, and with weights in two places."""
    root = tmp_path_factory.mktemp("bases")
    tiny = make_tiny(root / "tiny")
    learned = make_tiny(root / "learned", positions="learned")
    narrow = make_tiny(root / "narrow", hidden=4, heads=2, layers=1)
    return {
        "tiny": tiny,
        "learned": learned,
        "narrow": narrow,
        "tied": tied(tiny, root / "tied"),
    }


@pytest.fixture(scope="module")
def pair(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Led]:
    """Two ranks; this process is rank 0. Of two bases, one of them has nothing."""
    notes = tmp_path_factory.mktemp("notes") / "held.json"
    nowhere, threads = notes.parent / "nowhere", torch.get_num_threads()
    theirs = {**folders, "mine": nowhere, "theirs": folders["tiny"]}
    ours = {**folders, "mine": folders["tiny"], "theirs": nowhere}
    with (
        pytest.MonkeyPatch.context() as patch,
        HeldPort() as port,
        rank(1, 2, port, theirs, HELD=str(notes)) as child,
    ):
        for name, value in group(0, 2, port).items():
            patch.setenv(name, value)
        settle()
        never_pickle(patch)
        before = listeners()
        ranks = from_env(IDLE_S)
        led = Led(ShardedMachine(ours, "run", ranks), ranks, notes)
        led.other_pid, led.before = child.pid, before
        yield led
        led.do(END)
        assert child.wait(HANG_S) == 0
        ranks.close()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Led:
    """One that has everything."""
    return Led(Machine(folders, "run"), Ranks(), tmp_path_factory.mktemp("plain") / "none")


def close(a: Snapshot, b: Snapshot, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    """About the same, after steps of Adam, which divides small numbers by small ones."""
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype
        torch.testing.assert_close(tensor, b.tensors[name], rtol=rtol, atol=atol)


def same(a: Snapshot, b: Snapshot) -> bool:
    """Equal names, forms and bits."""
    return a.tensors.keys() == b.tensors.keys() and all(
        safetensors.torch.save({"": one}) == safetensors.torch.save({"": b.tensors[name]})
        for name, one in a.tensors.items()
    )


def values(output: Any) -> list[Any]:
    return [np.frombuffer(one["logprobs"].data, "<f4") for one in output.outputs]


@pytest.mark.parametrize("base", ["tiny", "learned", "tied"])
def test_the_numbers_are_those_of_a_whole_model(pair: Led, plain: Led, base: str) -> None:
    """Losses, outputs, gradients, norms, weights and samples, of all kinds of models."""
    for one in (pair, plain):
        one.begin("m", base=base)
    close(pair.capture("m"), plain.capture("m"), rtol=0, atol=0)
    # One datum: rank 0 has nothing to compute. Two batches: rank 1 may have one more.
    for step, count in enumerate([5, 1, 8, 2]):
        ours, theirs = (one.apply("m", batch(step, count)) for one in (pair, plain))
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
        assert len(ours.outputs) == count
        for mine, other in zip(values(ours), values(theirs), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-4)
        close(pair.capture("m"), plain.capture("m"))  # with the gradients
        ours, theirs = (one.apply("m", STEP) for one in (pair, plain))
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    close(pair.capture("m"), plain.capture("m"))


def test_ranks_with_fewer_batches_take_part(pair: Led, plain: Led) -> None:
    """Rank 0's piece is one batch, that of rank 1 two: both ends of the data count."""
    long = datum(1, *range(10, 90), *range(10, 90), *range(10, 90), *range(10, 90))
    count = BATCH_TOKENS // 320 + 1
    op = ops.ForwardBackward(data=[datum(1, 2)] * count + [long] * count, loss="cross_entropy")
    for one in (pair, plain):
        one.begin("u")
    ours, theirs = (one.apply("u", ops.encode(op)) for one in (pair, plain))
    assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-4)
    found = pair.capture("u")
    largest = float(found.tensors["grads.lm_head.weight"].abs().max())
    close(found, plain.capture("u"), rtol=1e-3, atol=1e-5 * largest)
    for one in (pair, plain):
        one.do("drop", model="u")


def test_samples_are_those_of_a_whole_model(pair: Led, plain: Led) -> None:
    """Of weights that were trained, and of the base's own."""
    op = ops.Sample(
        prompt=np.array([1, 10, 11, 12], "<i4").tobytes(),
        num_samples=3, max_tokens=12, seed=7, prompt_logprobs=True, topk_sample_logprobs=2,
    )  # fmt: skip
    for one in (pair, plain):
        one.begin("s", 0, STEP)
    weights = pair.do("export", model="s")
    assert isinstance(weights, Snapshot)
    assert set(weights.files) >= {"config.json", "tokenizer.json"}
    for key, snapshot in (("trained", weights), ("tiny", None)):
        found = []
        for one in (pair, plain):
            one.do("open_sampler", snapshot, key=key, base="tiny")
            assert one.machine.has_sampler(key)
            found.append(one.do("sample", key=key, line="l", number=1, op=ops.encode(op)))
        ours, theirs = found
        assert isinstance(ours, ops.Sampled)
        assert isinstance(theirs, ops.Sampled)
        assert [s.tokens for s in ours.sequences] == [s.tokens for s in theirs.sequences]
        a, b = (
            [np.frombuffer(one.logprobs, "<f4") for one in it.sequences]
            + [np.frombuffer(it.prompt_logprobs or b"", "<f4")]
            for it in (ours, theirs)
        )
        assert len(b[-1]) == 4
        np.testing.assert_allclose(np.concatenate(a), np.concatenate(b), rtol=1e-4, atol=1e-5)


def test_a_rank_holds_only_its_part(pair: Led, plain: Led) -> None:
    """Of weights, moments and gradients; and there is nothing else that is large."""
    before, other_before = held(pair.machine)["bytes"], pair.other()["bytes"]
    pair.begin("part", 0, STEP, 1, STEP, 2)
    sizes = {
        name.removeprefix("weights."): (one.numel(), one[0].numel())
        for name, one in pair.capture("part").tensors.items()
        if name.startswith("weights.")
    }
    other = pair.other()
    ours, theirs = held(pair.machine)["models"]["part"], other["models"]["part"]
    for name, (size, row) in sizes.items():
        mine, rest = ours["numbers"][name], theirs["numbers"][name]
        assert mine + rest == size
        assert mine - rest in (0, row)
    for one in (ours, theirs):
        count = sum(one["numbers"].values())
        assert (one["moments"], one["grads"]) == (2 * count, count)
    # Four times its part: weights, two moments, gradients.
    limit = 4 * 4 * sum(size for size, _ in sizes.values()) * 0.55
    assert held(pair.machine)["bytes"] - before < limit
    assert other["bytes"] - other_before < limit
    pair.do("drop", model="part")
    assert pair.other()["bytes"] <= other_before * 1.01


def test_a_state_goes_from_one_kind_to_the_other(pair: Led, plain: Led) -> None:
    """Bit for bit, with moments and gradients; and both go on from it."""
    for one in (pair, plain):
        one.begin("x", 0, STEP, 1)
    for source, target in ((pair, plain), (plain, pair)):
        state = source.capture("x")
        copy = Snapshot({name: one.clone() for name, one in state.tensors.items()}, {}, {})
        target.do("restore", state, model="y", base="tiny")
        assert same(target.capture("y"), state)
        for model, one in (("x", source), ("y", target)):
            one.apply(model, STEP)
        close(target.capture("y"), source.capture("x"))
        assert any(name.startswith("grads.") for name in state.tensors)
        assert same(state, copy)
        target.do("load", state, model="y", optimizer=False)
        assert {name.split(".")[0] for name in target.capture("y").tensors} == {"weights"}


@pytest.mark.long
def test_a_state_goes_to_another_number_of_ranks(
    pair: Led, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Three ranks go on from what two have made; some have nothing of a tensor of four rows."""
    pair.begin("z", 0, STEP, 1, base="narrow")
    safetensors.torch.save_file(dict(pair.capture("z").tensors), tmp_path / "state")
    pair.train("z", 2, STEP)
    more = {"STATE": str(tmp_path / "state"), "AFTER": str(tmp_path / "after")}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(HeldPort())
        base = {"narrow": folders["narrow"]}
        three = [stack.enter_context(rank(at, 3, port, base, **more)) for at in range(3)]
        assert [one.wait(60) for one in three] == [0, 0, 0]
    after = Snapshot(safetensors.torch.load_file(tmp_path / "after"), {}, {})
    close(after, pair.capture("z"))


def test_ranks_of_one_machine_listen_on_loopback_only(pair: Led) -> None:
    """Nothing that ranks meet or speak by has a password: another machine must not reach it."""
    pair.do("probe")
    assert ("127.0.0.1", int(os.environ["MASTER_PORT"])) in listeners()
    assert not beyond_loopback() - pair.before
    assert listeners(pair.other_pid)
    assert not beyond_loopback(pair.other_pid)


def test_the_bits_are_the_same_in_every_life(pair: Led) -> None:
    """The same operations from the beginning, or from a state in the middle."""
    found = []
    for model in ("first", "second"):
        pair.begin(model, 0, STEP, 1, STEP)
        pair.do("restore", pair.capture(model), model="middle", base="tiny")
        pair.train(model, 2, STEP, 3, STEP)
        found.append(pair.capture(model))
    pair.train("middle", 2, STEP, 3, STEP)
    assert same(found[0], found[1])
    assert same(found[0], pair.capture("middle"))


def spoil(state: Snapshot, name: str, row: int) -> Snapshot:
    """A state with a number that is none."""
    bad = state.tensors[name].clone()
    bad[row] = float("nan")
    return Snapshot({**state.tensors, name: bad}, state.facts, {})


def test_bad_numbers_change_nothing_on_any_rank(pair: Led) -> None:
    """Wherever they come up: all ranks say the same, and have what they had."""
    pair.begin("b", 0)
    state, other = pair.capture("b"), pair.other()["models"]["b"]
    good, never, steep = datum(1, 10, 11), datum(1, 10, weight=3e38), datum(1, 10, weight=3e37)
    for bad, why in ((never, "loss is"), (steep, "gradients are not finite")):
        for data in ([bad, good], [good, bad]):  # the first is rank 0's
            op = ops.ForwardBackward(data=data, loss="cross_entropy")
            with pytest.raises(Mistake, match=why):
                pair.apply("b", ops.encode(op))
            assert same(pair.capture("b"), state)
            assert pair.other()["models"]["b"] == other
    for row in (0, -1):
        spoilt = spoil(state, "grads.lm_head.weight", row)
        pair.do("restore", spoilt, model="b", base="tiny")
        with pytest.raises(Mistake, match="not finite"):
            pair.apply("b", STEP)
        assert same(pair.capture("b"), spoilt)
    empty = ops.encode(ops.ForwardBackward(data=[], loss="cross_entropy"))
    with pytest.raises(Mistake, match="empty"):
        pair.apply("b", empty)
    pair.do("restore", state, model="b", base="tiny")
    pair.apply("b", STEP)


def test_what_one_rank_finds_counts_for_all(pair: Led, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is bad in one rank's part only is added by none."""
    pair.begin("o", 0)
    before = pair.other()["models"]["o"]
    take = ShardedTenant.take_gradients

    def spoilt(tenant: ShardedTenant) -> torch.Tensor:
        found = take(tenant)
        found[5] = torch.inf
        return found

    with monkeypatch.context() as patch:
        patch.setattr(ShardedTenant, "take_gradients", spoilt)
        with pytest.raises(Mistake, match="gradients are not finite"):
            pair.apply("o", batch(1))
    assert pair.other()["models"]["o"] == before
    pair.apply("o", STEP)


def test_states_of_another_form_are_refused(pair: Led) -> None:
    """Before anything of them is taken over."""
    pair.begin("f", 0, STEP)
    state = pair.capture("f")
    short = {k: v for k, v in state.tensors.items() if k != "weights.lm_head.weight"}
    lone = {k: v for k, v in state.tensors.items() if k != "adam.m/lm_head.weight"}
    large = {**state.tensors, "adam.m/lm_head.weight": torch.zeros(3, 3)}
    for tensors, why in ((short, "not given"), (lone, "not whole"), (large, "not of this model")):
        with pytest.raises(Mistake, match=why):
            pair.do("load", Snapshot(tensors, state.facts, {}), model="f", optimizer=True)
        assert same(pair.capture("f"), state)
    with pytest.raises(Mistake, match="not given"):
        pair.do("open_sampler", Snapshot(short, {"a": 1}, {}), key="bad", base="tiny")
    assert not pair.machine.has_sampler("bad")


@pytest.mark.parametrize(("base", "where"), [("mine", 1), ("theirs", 0)])
def test_a_mistake_on_one_rank_is_one_on_all(pair: Led, base: str, where: int) -> None:
    """A model directory that one of them does not have: all go on to the next order."""
    with pytest.raises(Mistake, match=rf"no model directory .* \(on rank {where}\)"):
        pair.do("create", model="half", base=base)
    with pytest.raises(Mistake, match="no base model"):
        pair.do("create", model="half", base="unheard of")
    pair.do("create", model="half", base="tiny")
    assert "half" in pair.other()["models"]


def test_what_cannot_be_sampled_leaves_all_in_step(pair: Led) -> None:
    """Mistakes before the first pass, and in the middle."""
    pair.begin("n")
    weights = pair.do("export", model="n")
    assert isinstance(weights, Snapshot)
    pair.do("open_sampler", spoil(weights, "lm_head.weight", 0), key="nan", base="tiny")
    pair.do("open_sampler", weights, key="ok", base="tiny")
    prompt = np.array([1, 10], "<i4").tobytes()
    for key, op, why in (
        ("nan", ops.Sample(prompt=prompt, max_tokens=3), "not finite"),
        ("ok", ops.Sample(prompt=np.zeros(600, "<i4").tobytes()), "no room"),
        ("ok", ops.Sample(prompt=prompt, temperature=-1.0), "temperature"),
    ):
        with pytest.raises(Mistake, match=why):
            pair.do("sample", key=key, line="l", number=1, op=ops.encode(op))
    pair.do("sample", key="ok", line="l", number=1, op=ops.encode(ops.Sample(prompt=prompt)))
    pair.apply("n", batch(0))


def test_adapters_and_single_ranks_are_refused(pair: Led, tmp_path: Path) -> None:
    """With a word about what to do instead."""
    with pytest.raises(Mistake, match="without --fsdp"):
        pair.do("create", model="l", base="tiny", lora=ops.Lora(rank=4))
    with pytest.raises(Mistake, match="--ranks 2"):
        ShardedMachine({}, "run", Ranks())
    serve = ["serve", "--trainer", "holdfast", "--folder", str(tmp_path), "--fsdp"]
    with pytest.raises(Mistake, match="--ranks 2 or more"):
        CliRunner().invoke(cli, serve, catch_exceptions=False)


async def test_after_an_error_nobody_is_told_to_end(folders: dict[str, Path]) -> None:
    """The others may be in the middle of something: they notice that this process has ended."""

    class Two(Ranks):
        size = 2
        told = 0

        def share(self, data: bytes | None) -> bytes:
            self.told += 1
            return super().share(data)

    class Broken(Machine):
        def drop(self, model: str) -> None:
            raise MemoryError if model == "large" else Mistake("no")

    for model, expected in (("large", 1), ("small", 2)):
        ranks = Two()
        made = (Broken(folders, "run"), ranks)
        compute = TorchCompute(folders, lambda made=made: made)  # type: ignore[misc]
        with pytest.raises((MemoryError, Mistake)):
            await compute.drop(model)
        await compute.close()
        assert ranks.told == expected
