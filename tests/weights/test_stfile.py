"""The file format: the real library reads what we write, and we read what it writes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt, Mistake, TooLarge
from holdfast.tensors import DTYPES, Source, size, sources
from holdfast.weights.stfile import Span, chunks, header, parse

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
DESCRIPTIONS = st.tuples(
    st.sampled_from(sorted(DTYPES.keys() - {"C128"})),  # the library does not have that one
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
MODELS = st.dictionaries(NAMES, DESCRIPTIONS, max_size=6)


def _sources(model: dict[str, tuple[str, tuple[int, ...]]]) -> list[Source]:
    """Zeros and ones only, because those are valid as truth values too."""
    return [
        Source(
            name, code, shape, memoryview(bytes((at + n) % 2 for n in range(size(code, shape))))
        )
        for at, (name, (code, shape)) in enumerate(model.items())
    ]


def _file(found: list[Source]) -> bytes:
    return b"".join(chunks(found))


def _described(found: list[Source]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {one.name: (one.dtype, one.shape, bytes(one.data)) for one in found}


def _library(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (item["dtype"], tuple(item["shape"]), bytes(item["data"]))
        for name, item in safetensors.deserialize(raw)  # type: ignore[no-untyped-call]
    }


def _ours(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (span.dtype, span.shape, raw[span.begin : span.end])
        for name, span in parse(memoryview(raw), "f").items()
    }


@given(model=MODELS)
def test_the_library_reads_what_we_write(model: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Names, dtypes, shapes and bytes agree; every tensor is aligned to its item size."""
    found = _sources(model)
    raw = _file(found)
    assert _library(raw) == _described(found)
    assert _ours(raw) == _described(found)
    for span in parse(memoryview(raw), "f").values():
        assert span.begin % DTYPES[span.dtype] == 0


def test_files_go_to_torch_and_numpy_and_come_from_there(tmp_path: Path) -> None:
    """Through the functions that transformers and vLLM call, on real files; and the library's own
    files, which have another order of tensors and need no metadata."""
    tensors: dict[str, Any] = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
        "half": torch.randn(5, 7).to(torch.bfloat16),
        "eight": torch.randn(3, 3).to(torch.float8_e4m3fn),
        "odd": torch.arange(3, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "double": torch.randn(2, 3, 4, dtype=torch.float64).permute(2, 0, 1),
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    expected = _described(sources(tensors))
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file(sources(tensors)))
    assert _described(sources(safetensors.torch.load_file(path))) == expected
    with safetensors.safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_slice("half")[1:3], tensors["half"][1:3])
    tensors["double"] = tensors["double"].contiguous()
    for metadata in (None, {"format": "pt", "ü": "\n"}):
        assert _ours(safetensors.torch.save(tensors, metadata)) == expected
    arrays = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array(7, np.int8)}
    path.write_bytes(_file(sources(arrays)))
    assert _described(sources(safetensors.numpy.load_file(path))) == _described(sources(arrays))


# ---- damaged files -----------------------------------------------------------

GOOD = _file(
    sources(
        {
            "layer.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
            "layer.1.weight": np.arange(3, dtype=np.int16),
            "b": np.zeros((0, 2), np.float64),
            "c": np.array(True),
        }
    )
)
PIECES = [
    b"0", b"1", b"-", b"-0", b"1.0", b"1e0", b"null", b"true", b"NaN", b"[]", b"{}", b"[", b"]",
    b"{", b"}", b",", b":", b'"', b"\\", b"\\ud800", b"\\u0000", b"\xff", b"\xc3\xa9", b"\x00",
    b" ", b"\n", b"99999999999999999999999", b"18446744073709551615", b"9223372036854775808",
    b"4294967296", b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b'"F64"', b'"F4"',
    b'"__metadata__"', b'"c"', b'"b"', b'"":', b'"x":1,', b'"dtype":"F32",', b'"b":{},',
]  # fmt: skip
MUTATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0), st.integers(1, 255)),
        st.tuples(st.just("cut"), st.integers(0), st.integers(1, 12)),
        st.tuples(st.just("put"), st.integers(0), st.sampled_from(PIECES)),
        st.tuples(st.just("over"), st.integers(0), st.sampled_from(PIECES)),
        st.tuples(st.just("swap"), st.integers(0), st.integers(0)),
        st.tuples(st.just("end"), st.integers(0), st.integers(0, 40)),
    ),
    min_size=1,
    max_size=4,
)


def _mutate(text: bytes, mutations: list[tuple[str, int, Any]]) -> bytes:
    for kind, place, what in mutations:
        at = place % (len(text) + 1)
        match kind:
            case "flip" if at < len(text):
                text = text[:at] + bytes([text[at] ^ what]) + text[at + 1 :]
            case "cut":
                text = text[:at] + text[at + what :]
            case "put":
                text = text[:at] + what + text[at:]
            case "over":
                text = text[:at] + what + text[at + len(what) :]
            case "swap":  # one token in the place of another
                tokens = json.dumps(text.decode("latin-1")).encode()[1:-1].split(b",")
                one, two = place % len(tokens), what % len(tokens)
                tokens[one] = tokens[two]
                joined = b'"' + b",".join(tokens) + b'"'
                text = str(json.loads(joined)).encode("latin-1")
            case "end":
                text = text[: len(text) - what] if place % 2 else text + bytes(what)
    return text


def _agrees(raw: bytes) -> bool:
    """Whether we read the file; if so, the library must read the same."""
    try:
        ours = _ours(raw)
    except Corrupt:
        return False
    assert ours == _library(raw)
    return True


@given(mutations=MUTATIONS, what=st.sampled_from(["file", "header", "header", "padded header"]))
@settings(max_examples=1900, deadline=None)
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(
    mutations: list[tuple[str, int, Any]], what: str
) -> None:
    """Any bytes at all may have changed, the length of the header too; or only the JSON has, and
    its length is right, so that all of it is looked at."""
    if what == "file":
        raw = _mutate(GOOD, mutations)
    else:
        length = int.from_bytes(GOOD[:8], "little")
        text = _mutate(GOOD[8 : 8 + length].rstrip(), mutations)
        text = text.ljust(length) if what == "padded header" else text
        raw = len(text).to_bytes(8, "little") + text + GOOD[8 + length :]
    event(str(_agrees(raw)))


@st.composite
def _nearly_right(draw: st.DrawFn) -> bytes:
    """A file with a header that is valid JSON and mostly true."""
    described: dict[str, Any] = {}
    position = 0
    for name in draw(st.permutations(["a", "b", "c"]))[: draw(st.integers(0, 3))]:
        code = draw(st.sampled_from(["F32", "U8", "BOOL", "C64"]))
        shape: list[Any] = draw(st.lists(st.integers(0, 3), max_size=3))
        begin, end = position, position + size(code, shape)
        position = end
        described[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    rest = position
    if draw(st.booleans()) and described:
        item: dict[str, Any] = described[draw(st.sampled_from(sorted(described)))]
        match draw(st.integers(0, 3)):
            case 0:
                at = draw(st.integers(0, len(item["shape"])))
                item["shape"].insert(at, draw(st.sampled_from(NUMBERS)))
            case 1:
                item["data_offsets"][draw(st.integers(0, 1))] += draw(st.integers(-4, 4))
            case 2:
                item["dtype"] = draw(st.sampled_from(["F4", "F8_E4M3", "I8", "Q", "", 1, None]))
            case _:
                rest += draw(st.integers(-4, 4))
    text = json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + bytes(max(rest, 0))


NUMBERS = [0, 1, 2, 2**32, 2**58, 2**59, 2**62, 2**63, 2**64, 10**30, -1, True, 1.0, None, "1"]


@given(raw=_nearly_right())
@settings(max_examples=1000, deadline=None)
def test_any_description_is_refused_or_read_as_the_library_reads_it(raw: bytes) -> None:
    """Holes, overlaps, huge and negative numbers, in headers that are valid JSON."""
    event(str(_agrees(raw)))


def _with(text: str, data: bytes = b"") -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw + data


def _item(dtype: str = "U8", shape: str = "[4]", offsets: str = "[0,4]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "only 0 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "limit is 100000000"),
        ((3).to_bytes(8, "little") + b"{}", "whole file has 10"),
        (_with("{"), "not JSON"),
        (_with('{"a":' + DEEP), "not JSON"),
        (_with("[]"), "not a JSON object"),
        (_with(" {}"), "not a JSON object"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "not JSON"),
        (_with(f'{{"w":{_item()},"w":{_item()}}}', b"1234"), "'w' stands there twice"),
        (_with('{"w":{"dtype":"U8","dtype":"U8"}}'), "'dtype' stands there twice"),
        (_with(f'{{"w":{_item("Q8")}}}', b"1234"), "tensor w has the unknown dtype 'Q8'"),
        (_with(f'{{"w":{_item(offsets="[4,8]")}}}', b"12345678"), "tensor w .* hole"),
        (_with(f'{{"w":{_item(offsets="[0,8]")}}}', b"12345678"), "tensor w has 8 bytes"),
        (_with(f'{{"w":{_item(offsets="[4,0]")}}}', b"1234"), "tensor w has -4 bytes"),
        (_with(f'{{"v":{_item()},"w":{_item()}}}', b"1234"), "tensor w .* overlaps"),
        (_with(f'{{"w":{_item()}}}', b"123"), "tensor w ends at byte"),
        (_with(f'{{"w":{_item()}}}', b"12345"), "1 bytes behind the last tensor"),
        (_with(f'{{"w":{_item(shape="[-4]")}}}', b"1234"), "-4 is not a length"),
        (_with(f'{{"w":{_item(shape="[4.0]")}}}', b"1234"), "4.0 is not a whole number"),
        (_with(f'{{"w":{_item(shape="[true]")}}}', b"1234"), "tensor w .* got `bool`"),
        (_with(f'{{"w":{_item(shape="4")}}}', b"1234"), "tensor w .* got `int`"),
        (
            _with(f'{{"w":{_item(shape="[9223372036854775807,9223372036854775807,0]")}}}'),
            "tensor w has an impossible shape",
        ),
        (_with(f'{{"w":{_item(shape="[" + "1," * 64 + "1]")}}}'), "tensor w has an impossible"),
        (_with('{"w":{"dtype":"U8","shape":[]}}'), "tensor w is not described"),
        (_with('{"__metadata__":{"a":1}}'), "metadata"),
        (_with(r'{"__metadata__":{"a":"\ud800"}}'), "metadata"),
        (_with(r'{"__metadata__":{"\ud800":"a"}}'), "metadata"),
        (_with(rf'{{"\ud800":{_item()}}}', b"1234"), "not valid Unicode"),
        (_with(f'{{"":{_item()}}}', b"1234"), "is empty"),
    ],
)
def test_every_kind_of_damage_is_named(raw: bytes, words: str) -> None:
    """The error names the file, the tensor and what is wrong with it."""
    with pytest.raises(Corrupt, match=rf"^step_1/x is damaged: .*{words}"):
        parse(memoryview(raw), "step_1/x")


def test_what_cannot_be_written_is_refused() -> None:
    one = Source("a", "U8", (1,), memoryview(b"1"))
    with pytest.raises(Mistake, match="two tensors a"):
        header([one, one])
    with pytest.raises(Mistake, match="tensor a has 1 bytes"):
        header([Source("a", "U8", (2,), memoryview(b"1"))])
    many = [Source(f"{n:01000}", "U8", (0,), memoryview(b"")) for n in range(96_000)]
    with pytest.raises(TooLarge, match="limit is 100000000"):
        header(many)


def test_tensors_are_written_without_a_copy() -> None:
    array = np.arange(4, dtype=np.int64)
    pieces = list(chunks(sources({"a": array})))
    assert isinstance(pieces[1], memoryview)
    array[0] = 9
    assert pieces[1][0] == 9
    assert len(pieces[0]) % 8 == 0
    assert parse(memoryview(b"".join(pieces)), "f") == {
        "a": Span("I64", (4,), len(pieces[0]), len(pieces[0]) + 32)
    }
