"""From and to tensors: exactly the same bytes, no copy where none is needed, clear refusals."""

import math
import mmap
import sys
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import MissingPackage, Mistake
from holdfast.proc import spawn
from holdfast.tensors import DTYPES, Source, as_numpy, as_torch, size, source, sources

# What the safetensors library takes each code for, and what it does not have.
TORCH: dict[str, Any] = {
    **safetensors.torch._TYPES,
    "C128": torch.complex128,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NUMPY: dict[str, Any] = {**safetensors.numpy._TYPES, "C128": np.complex128}
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def _one(value: object) -> Source:
    found = source("t", value)
    assert found.data.format == "B"
    assert found.data.ndim == 1
    assert found.data.contiguous
    assert found.data.nbytes == size(found.dtype, found.shape)
    return found


def _raw(code: str, shape: tuple[int, ...]) -> bytes:
    """Some bytes; zeros and ones only, because those are valid as truth values too."""
    return bytes(index * 7 % 3 % 2 for index in range(size(code, shape)))


def test_the_table_has_every_dtype_with_the_size_that_torch_gives_it() -> None:
    assert {code: dtype.itemsize for code, dtype in TORCH.items()} == DTYPES


@pytest.mark.parametrize(("convert", "kinds"), [(as_torch, TORCH), (as_numpy, NUMPY)])
@given(data=st.data(), shape=SHAPES)
def test_tensors_come_back_as_they_were(
    convert: Any, kinds: dict[str, Any], data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """Bytes to tensor to bytes is the identity for every dtype and shape, 0-d and empty too."""
    code = data.draw(st.sampled_from(sorted(kinds)))
    raw = _raw(code, shape)
    tensor = convert(memoryview(bytearray(raw)), code, shape)
    assert tensor.dtype == kinds[code]
    assert tuple(tensor.shape) == shape
    one = _one(tensor)
    assert (one.dtype, one.shape, bytes(one.data)) == (code, shape, raw)


@given(shape=SHAPES, data=st.data())
def test_the_order_in_memory_does_not_matter(shape: tuple[int, ...], data: Any) -> None:
    """Transposed, strided, reversed or big-endian: the bytes are those of the values in rows."""
    order = data.draw(st.permutations(range(len(shape))))
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape).transpose(order)
    expected = array.tobytes()
    assert bytes(_one(array).data) == expected
    assert bytes(_one(np.asfortranarray(array)).data) == expected
    assert bytes(_one(array.astype(">f4")).data) == expected
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape).permute(order)
    assert bytes(_one(tensor).data) == expected
    assert _one(tensor).shape == array.shape
    if shape:
        assert bytes(_one(array[::-2]).data) == array[::-2].tobytes()
        assert bytes(_one(tensor[::2]).data) == array[::2].tobytes()


def test_what_is_contiguous_is_not_copied() -> None:
    """A change of the tensor is seen in its source, and back."""
    tensor = torch.zeros(3, 2, dtype=torch.bfloat16)
    array = np.zeros((3, 2), np.int32)
    scalar = torch.zeros(())
    found = {one.name: one.data for one in sources({"t": tensor, "a": array, "s": scalar})}
    tensor[0, 0] = 1
    array[0, 0] = 5
    scalar.fill_(1)
    assert bytes(found["t"][:2]) == b"\x80\x3f"
    assert found["a"][0] == 5
    assert bytes(found["s"]) == b"\x00\x00\x80\x3f"
    with mmap.mmap(-1, 4096) as shared:
        loaded = as_torch(memoryview(shared)[8:16], "F32", (2,))
        viewed = as_numpy(memoryview(shared)[8:16], "F32", (2,))
        loaded[1] = 1.0
        assert shared[8:16] == b"\x00\x00\x00\x00\x00\x00\x80\x3f"
        assert viewed.tolist() == [0.0, 1.0]
        viewed[0] = 2.0
        assert loaded.tolist() == [2.0, 1.0]
        del loaded, viewed


def test_a_buffer_that_torch_cannot_use_in_place_is_copied() -> None:
    """Read-only bytes and odd addresses give right tensors, which can be written."""
    raw = b"\x07" + np.arange(3, dtype=np.float32).tobytes()
    for view in (memoryview(raw)[1:], memoryview(bytearray(raw))[1:]):
        tensor = as_torch(view, "F32", (3,))
        tensor += 1
        assert tensor.tolist() == [1.0, 2.0, 3.0]
        assert tensor.data_ptr() % 4 == 0
        array = as_numpy(view, "F32", (3,))
        assert array.flags.writeable is not view.readonly


def test_parameters_tied_weights_and_lazy_views_work() -> None:
    """Gradients are ignored, tied weights written twice, promised signs carried out."""
    weight = torch.nn.Parameter(torch.arange(4.0))
    found = sources({"lm_head": weight, "embed": weight, "slice": weight[1:3]})
    assert [one.name for one in found] == ["embed", "lm_head", "slice"]
    assert bytes(found[0].data) == bytes(found[1].data) == np.arange(4, dtype="f4").tobytes()
    assert bytes(found[2].data) == np.arange(1, 3, dtype="f4").tobytes()
    lazy = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64).conj()
    assert lazy.is_conj()
    assert bytes(_one(lazy).data) == np.array([1 - 2j, 3 + 4j], "c8").tobytes()
    assert lazy.imag.is_neg()
    assert bytes(_one(lazy.imag).data) == np.array([-2, 4], "f4").tobytes()
    assert bytes(_one(torch.ones(1).expand(3)).data) == np.ones(3, "f4").tobytes()


def test_a_matrix_keeps_its_rows_and_a_read_only_array_is_fine() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    assert bytes(_one(array.view(np.matrix)).data) == array.tobytes()
    array.flags.writeable = False
    assert bytes(_one(array).data) == array.tobytes()


def _nested() -> object:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def _fake() -> object:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def _quantized() -> object:
    return torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.ones(2, 2).to_sparse(), "sparse"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (_quantized, "quantized"),
        (_nested, "nested"),
        (_fake, "FakeTensor"),
        (lambda: torch.nn.UninitializedParameter(), "not initialized"),
        (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
        (lambda: torch.zeros((1,) * 65), "65 dimensions"),
        (lambda: np.array([object()]), "object"),
        (lambda: np.array(["text"]), "dtype str"),
        (lambda: np.zeros(2, "i4,f4"), "void"),
        (lambda: np.zeros(2, np.longdouble), "float128"),
        (lambda: np.ma.masked_array([1.0], [True]), "masked"),
        (lambda: [1.0, 2.0], "is a list"),
        (lambda: None, "NoneType"),
    ],
)
def test_what_cannot_be_published_is_refused_with_the_tensors_name(make: Any, words: str) -> None:
    with pytest.raises(Mistake, match=words) as caught:
        sources({"good": np.ones(1), "the.bad.one": make()})
    assert "the.bad.one" in str(caught.value)
    assert caught.value.key == "the.bad.one"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty"),
        (b"a", "not text but bytes"),
        ("__metadata__", "reserved"),
        ("é" * 513, "1026 bytes"),
        ("a\ud800", "not valid Unicode"),
    ],
)
def test_names_that_no_file_can_hold_are_refused(name: Any, words: str) -> None:
    with pytest.raises(Mistake, match=words):
        sources({"good": np.ones(1), name: np.ones(1)})
    assert sources({"a" * 1024: np.ones(1)})


def test_an_empty_mapping_is_refused() -> None:
    """It would be a version without weights."""
    with pytest.raises(Mistake, match="no tensors"):
        sources({})


@pytest.mark.parametrize("code", ["BF16", "F8_E4M3"])
def test_numpy_says_what_it_does_not_have(code: str) -> None:
    """And how to read it all the same."""
    with pytest.raises(Mistake, match=r"torch, or take the raw view"):
        as_numpy(memoryview(bytearray(DTYPES[code])), code, (1,))


@pytest.mark.parametrize("convert", [as_numpy, as_torch])
def test_a_buffer_of_the_wrong_length_is_refused(convert: Any) -> None:
    with pytest.raises(Mistake, match="7 bytes"):
        convert(memoryview(bytearray(7)), "F32", (2,))
    with pytest.raises(Mistake, match="not a dtype"):
        convert(memoryview(bytearray(8)), "F31", (2,))


def test_without_torch_numpy_works_and_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert _one(np.ones(2)).dtype == "F64"
    with pytest.raises(MissingPackage, match=r"holdfast-rl\[train\]"):
        as_torch(memoryview(bytearray(4)), "F32", (1,))


def test_numpy_users_never_import_torch() -> None:
    code = (
        "import sys, numpy, holdfast.weights.manifest, holdfast.weights.shards\n"
        "from holdfast import tensors\n"
        "tensors.sources({'a': numpy.ones(2)})\n"
        "sys.exit('torch' in sys.modules)"
    )
    with spawn([sys.executable, "-c", code], name="numpy user") as child:
        assert child.wait(60) == 0
