"""The map from tensors to files: stable, bounded, and kind to what does not change."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import Mistake
from holdfast.tensors import Source, sources
from holdfast.weights.shards import Shard, index, index_file, plan
from holdfast.weights.stfile import chunks

MB = 1 << 20


def _source(name: str, shape: tuple[int, ...], dtype: str = "BF16") -> Source:
    """A tensor without its bytes: a plan must not look at them."""
    return Source(name, dtype, shape, memoryview(b""))


def _model(layers: int, hidden: int, rank: int) -> list[Source]:
    """A decoder with grouped-query attention and LoRA matrices on every projection."""
    wide, narrow = 4 * hidden, hidden // 4
    projections = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    found = [
        _source("model.embed_tokens.weight", (32_000, hidden)),
        _source("lm_head.weight", (32_000, hidden)),
        _source("model.norm.weight", (hidden,)),
    ]
    for layer in range(layers):
        base = f"model.layers.{layer}"
        found.append(_source(f"{base}.input_layernorm.weight", (hidden,)))
        found.append(_source(f"{base}.post_attention_layernorm.weight", (hidden,)))
        for name, (rows, columns) in projections.items():
            found.append(_source(f"{base}.{name}.base_layer.weight", (rows, columns)))
            found.append(_source(f"{base}.{name}.lora_A.default.weight", (rank, columns)))
            found.append(_source(f"{base}.{name}.lora_B.default.weight", (rows, rank)))
    return found


def _touched(shards: list[Shard], words: tuple[str, ...]) -> float:
    """The part of all bytes in files that hold a tensor with one of these words in its name."""
    changed = [one for one in shards if any(word in name for name in one.names for word in words)]
    return sum(one.bytes for one in changed) / sum(one.bytes for one in shards)


@pytest.mark.parametrize(("hidden", "rank"), [(512, 4), (1024, 16), (2048, 16), (4096, 64)])
def test_training_adapters_rewrites_at_most_a_twentieth(hidden: int, rank: int) -> None:
    """When all LoRA matrices of 32 layers change, 95% of the bytes stay linked."""
    shards = plan(_model(32, hidden, rank))
    assert _touched(shards, ("lora_A", "lora_B")) <= 0.05


def test_the_files_of_a_model_of_today_are_few() -> None:
    """Hundreds of tensors, tens of files, none above the limit but single large tensors."""
    found = _model(32, 4096, 16)
    shards = plan(found)
    assert len(shards) < 40
    assert all(one.bytes <= 1 << 30 for one in shards)


MODELS = st.dictionaries(
    st.builds(
        "{}.{}.{}".format,
        st.sampled_from(["layers", "blocks"]),
        st.integers(0, 12),
        st.sampled_from(["q", "k", "lora_A", "norm", "x"]),
    ),
    st.integers(0, 200),
    min_size=1,
)


@given(model=MODELS, data=st.data())
def test_a_plan_depends_on_names_dtypes_and_shapes_only(
    model: dict[str, int], data: st.DataObject
) -> None:
    """Neither on the order of the mapping nor on values."""
    found = [_source(name, (length,), "U8") for name, length in model.items()]
    shuffled = data.draw(st.permutations(found))
    valued = [Source(o.name, o.dtype, o.shape, memoryview(b"7" * o.shape[0])) for o in found]
    plans = [plan(one, max_shard_bytes=500, small_bytes=320) for one in (found, shuffled, valued)]
    assert plans[0] == plans[1] == plans[2]


@given(model=MODELS, rank=st.none() | st.integers(0, 99_999))
def test_a_plan_is_complete_and_bounded(model: dict[str, int], rank: int | None) -> None:
    """Every tensor is in one file; files keep the limits; large classes are not mixed."""
    found = [_source(name, (length,), "U8") for name, length in model.items()]
    shards = plan(found, max_shard_bytes=500, small_bytes=320, rank=rank)
    names = [name for one in shards for name in one.names]
    assert sorted(names) == sorted(model)
    assert len({one.file for one in shards}) == len(shards)
    if sum(model.values()) <= 320:
        assert len(shards) == 1
        return
    totals: dict[str, int] = {}
    for name, length in model.items():
        kind = (name.split(".")[0], name.split(".")[2])
        totals[str(kind)] = totals.get(str(kind), 0) + length
    for one in shards:
        assert one.names
        assert one.bytes == sum(model[name] for name in one.names)
        assert one.bytes <= 500 or len(one.names) == 1
        kinds = {str((name.split(".")[0], name.split(".")[2])) for name in one.names}
        if len(kinds) > 1:
            assert one.bytes <= 320
            assert all(totals[kind] < 20 for kind in kinds)


def test_the_rule_in_figures() -> None:
    """Natural order, splitting at the limit, packing of what is small, and the names."""
    found = [_source(f"layers.{n}.q", (40,), "U8") for n in range(12)]
    found += [_source(f"layers.{n}.norm", (1,), "U8") for n in range(12)]
    found += [_source("head", (900,), "U8"), _source("bias", (3,), "U8")]
    shards = plan(found, max_shard_bytes=200, small_bytes=320)
    assert [(one.file, one.names, one.bytes) for one in shards] == [
        ("model-00001-of-00005.safetensors", ("head",), 900),
        ("model-00002-of-00005.safetensors", tuple(f"layers.{n}.q" for n in range(5)), 200),
        ("model-00003-of-00005.safetensors", tuple(f"layers.{n}.q" for n in range(5, 10)), 200),
        ("model-00004-of-00005.safetensors", ("layers.10.q", "layers.11.q"), 80),
        (
            "model-00005-of-00005.safetensors",
            ("bias", *(f"layers.{n}.norm" for n in range(12))),
            15,
        ),
    ]


def test_a_small_model_is_one_file_under_its_plain_name() -> None:
    found = [_source("a", (32 * MB,)), _source("b", (0,))]
    assert [one.file for one in plan(found)] == ["model.safetensors"]
    assert plan(found)[0].bytes == 64 * MB
    assert len(plan([*found, _source("c", (1,))])) == 2
    assert plan(found, rank=3)[0].file == "model-rank00003-00001.safetensors"


def test_an_adapter_is_always_one_file() -> None:
    """PEFT and vLLM look for `adapter_model.safetensors` and for nothing else."""
    found = [_source(f"layers.{n}.lora_A.weight", (32 * MB,)) for n in range(32)]
    (shard,) = plan(found, stem="adapter_model")
    assert shard.file == "adapter_model.safetensors"
    assert len(plan(found)) > 1


def test_each_rank_plans_alone() -> None:
    """Names of different ranks never collide, whatever the others have."""
    files = [
        one.file
        for rank in range(3)
        for one in plan(
            [_source(f"w.{n}", (10,), "U8") for n in range(20 + rank)],
            max_shard_bytes=50,
            small_bytes=40,
            rank=rank,
        )
    ]
    assert len(set(files)) == len(files)
    assert files[0] == "model-rank00000-00001.safetensors"
    with pytest.raises(Mistake):
        plan([], small_bytes=0)


def test_names_with_odd_numbers_are_sorted_all_the_same() -> None:
    """Leading zeros, numbers alone and very long numbers neither fail nor collide."""
    names = ["1", "01", "a1", "a01", "a", "1a", "9" * 1000, "b.2", "b.10", "²"]
    (shard,) = plan([_source(name, (1,)) for name in names])
    assert sorted(shard.names) == sorted(names)
    assert shard.names.index("b.2") < shard.names.index("b.10")


def test_the_index_is_what_transformers_and_vllm_read(tmp_path: Path) -> None:
    """Following `weight_map` from the index finds every tensor, as their loaders do."""
    arrays = {f"layers.{n}.{kind}": np.full((8, n + 1), n) for n in range(4) for kind in "qkv"}
    found = {one.name: one for one in sources(arrays)}
    shards = plan(list(found.values()), max_shard_bytes=600, small_bytes=300)
    for shard in shards:
        parts = [found[name] for name in shard.names]
        (tmp_path / shard.file).write_bytes(b"".join(chunks(parts)))
    total = sum(one.bytes for one in shards)
    places = [(name, one.file) for one in shards for name in one.names]
    (tmp_path / index_file()).write_bytes(index(places, total))
    content = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert content.keys() == {"metadata", "weight_map"}
    assert content["metadata"] == {"total_size": sum(array.nbytes for array in arrays.values())}
    assert content["weight_map"].keys() == arrays.keys()
    loaded = {}
    for file in sorted(set(content["weight_map"].values())):
        part = safetensors.numpy.load_file(tmp_path / file)
        assert part.keys() == {k for k, v in content["weight_map"].items() if v == file}
        loaded.update(part)
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())


def test_a_tensor_in_two_files_is_refused() -> None:
    """Ranks that both publish the same tensor have made a mistake; it names the tensor."""
    with pytest.raises(Mistake, match=r"tensor w is in a\.safetensors and in b\.safetensors"):
        index([("w", "a.safetensors"), ("w", "b.safetensors")], 2)
