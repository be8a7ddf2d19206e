"""Manifests: canonical, checked, and never a way out of their folder."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import Corrupt, Mistake, TooLarge, TooNew
from holdfast.tensors import Source, sources
from holdfast.weights import manifest as module
from holdfast.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    TensorEntry,
    carried,
    check_file,
    content_hash,
    decode,
    digest,
    encode,
    is_plain,
    same_shard,
)
from holdfast.weights.shards import index, plan
from holdfast.weights.stfile import chunks

ARRAYS = {
    f"layers.{layer}.{kind}": np.full(8, layer, np.float32)
    for layer in range(4)
    for kind in ("q", "k")
}
CONFIG = b'{"hidden_size": 8}'


def _version(
    arrays: dict[str, np.ndarray[Any, Any]] = ARRAYS,
    *,
    small_bytes: int = 100,
    step: int = 5,
    parent: int | None = 4,
    epoch: int = 7,
    config: bytes = CONFIG,
) -> tuple[Manifest, dict[str, bytes]]:
    """A whole version in memory: the manifest and the bytes of every file."""
    found = {one.name: one for one in sources(arrays)}
    shards = plan(list(found.values()), small_bytes=small_bytes)
    where = {name: one.file for one in shards for name in one.names}
    raw = {one.file: b"".join(chunks([found[name] for name in one.names])) for one in shards}
    if len(shards) > 1:
        raw["model.safetensors.index.json"] = index(
            where.items(), sum(one.bytes for one in shards)
        )
    raw["config.json"] = config
    files = tuple(FileEntry(name, len(one), digest(one)) for name, one in sorted(raw.items()))
    tensors = tuple(_entry(one, where[name]) for name, one in sorted(found.items()))
    return _manifest(files, tensors, step, parent, epoch), raw


def _manifest(
    files: tuple[FileEntry, ...],
    tensors: tuple[TensorEntry, ...],
    step: int = 1,
    parent: int | None = None,
    epoch: int = 0,
) -> Manifest:
    return Manifest(
        step=step,
        parent=parent,
        epoch=epoch,
        kind="model",
        files=files,
        tensors=tensors,
        content=content_hash(tensors, carried(files, tensors)),
    )


def _entry(source: Source, file: str) -> TensorEntry:
    return TensorEntry(source.name, source.dtype, source.shape, file, digest(source.data))


def _file_of(manifest: Manifest, name: str) -> FileEntry:
    return next(one for one in manifest.files if one.name == name)


def _shard_of(manifest: Manifest, tensor: str) -> FileEntry:
    return _file_of(manifest, next(o.file for o in manifest.tensors if o.name == tensor))


# ---- encode and decode -------------------------------------------------------


def test_the_encoding_is_canonical_and_readable() -> None:
    """The order of entries does not matter; each has a line of its own."""
    manifest, _ = _version()
    turned = msgspec.structs.replace(
        manifest, files=manifest.files[::-1], tensors=manifest.tensors[::-1]
    )
    raw = encode(manifest)
    assert encode(turned) == raw
    assert decode(raw, "m") == manifest
    lines = raw.decode().splitlines()
    assert sum(line.startswith('{"name":"layers.') for line in lines) == len(manifest.tensors)
    assert '"step": 5,' in lines


def test_content_depends_on_the_weights_only() -> None:
    """Not on sharding, epoch, step, parent; but on every byte, name, shape and carried file."""
    base = _version()[0].content
    assert _version(small_bytes=1 << 20, step=9, parent=None, epoch=8)[0].content == base
    turned = dict(reversed(ARRAYS.items()))
    assert _version(turned)[0].content == base
    for name in ARRAYS:
        changed = {**ARRAYS, name: ARRAYS[name] + 1}
        assert _version(changed)[0].content != base
        reshaped = {**ARRAYS, name: ARRAYS[name].reshape(2, 4)}
        assert _version(reshaped)[0].content != base
        retyped = {**ARRAYS, name: ARRAYS[name].view(np.int32)}
        assert _version(retyped)[0].content != base
    assert _version(config=b"{}")[0].content != base
    renamed = {name.replace("q", "r"): array for name, array in ARRAYS.items()}
    assert _version(renamed)[0].content != base


def test_a_newer_manifest_is_refused_as_such() -> None:
    """Even if its fields look quite different; fields that only were added are ignored."""
    with pytest.raises(TooNew, match="schema 2"):
        decode(b'{"schema": 2, "files": "elsewhere"}', "step_5/holdfast.json")
    raw = encode(_version()[0])
    assert decode(raw.replace(b"{", b'{"colour": {"a": 1},', 1), "m") == _version()[0]


EVIL = [
    "../x", "a/b", "/etc/passwd", "..", ".", "", ".hidden", "STABLE", "holdfast.json", "a\\b",
    "a\x00b", "a\nb", "x" * 256, "é" * 128, "\u202ea",
]  # fmt: skip


@pytest.mark.parametrize("name", EVIL)
def test_a_name_from_outside_never_becomes_a_path(name: str) -> None:
    """Neither a manifest that was read nor one that is to be written may hold such a file."""
    assert not is_plain(name)
    manifest, _ = _version()
    files = (*manifest.files, FileEntry(name, 0, "0" * 32))
    bad = msgspec.structs.replace(
        manifest,
        files=files,
        content=content_hash(manifest.tensors, carried(files, manifest.tensors)),
    )
    with pytest.raises(Corrupt, match="not a plain file name"):
        decode(msgspec.json.encode(bad), "m")
    with pytest.raises(Mistake, match="not a plain file name"):
        encode(bad)


def _files(manifest: Manifest, **changes: Any) -> Manifest:
    first = msgspec.structs.replace(manifest.files[0], **changes)
    return msgspec.structs.replace(manifest, files=(first, *manifest.files[1:]))


def _tensors(manifest: Manifest, **changes: Any) -> Manifest:
    first = msgspec.structs.replace(manifest.tensors[0], **changes)
    return msgspec.structs.replace(manifest, tensors=(first, *manifest.tensors[1:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: _files(m, bytes=-1), "-1|>= 0"),
        (lambda m: _files(m, bytes=2**63), "files"),
        (lambda m: _files(m, hash="0" * 31), "no valid hash"),
        (lambda m: _files(m, hash="0" * 32 + "\n"), "no valid hash"),
        (lambda m: _files(m, hash="A" * 32), "no valid hash"),
        (lambda m: _files(m, hash="0" * 32), "content hash"),
        (lambda m: _tensors(m, hash="0" * 32), "content hash"),
        (lambda m: _tensors(m, hash="é" * 32), "no valid hash"),
        (lambda m: _tensors(m, name=""), "is empty"),
        (lambda m: _tensors(m, name="__metadata__"), "reserved"),
        (lambda m: _tensors(m, name=m.tensors[1].name), "listed twice"),
        (lambda m: _tensors(m, file="other.safetensors"), "not listed"),
        (lambda m: _tensors(m, dtype="F31"), "unknown dtype"),
        (lambda m: _tensors(m, shape=(1,) * 65), "too many dimensions"),
        (lambda m: _tensors(m, shape=(-1,)), "shape"),
        (lambda m: msgspec.structs.replace(m, files=(*m.files, m.files[0])), "listed twice"),
        (lambda m: msgspec.structs.replace(m, step=-1), "step"),
        (lambda m: msgspec.structs.replace(m, kind="other"), "kind"),
        (lambda m: msgspec.structs.replace(m, schema=0), "schema"),
        (lambda m: msgspec.structs.replace(m, content=""), "content hash"),
    ],
)
def test_what_cannot_be_true_is_refused(
    change: Callable[[Manifest], Manifest], words: str
) -> None:
    manifest, _ = _version()
    with pytest.raises(Corrupt, match=words) as caught:
        decode(msgspec.json.encode(change(manifest)), "step_5/holdfast.json")
    assert str(caught.value).startswith("step_5/holdfast.json ")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff", b"{}", b'{"schema": "1"}', DEEP, b'{"x": ' + DEEP]
)
def test_what_is_no_manifest_is_refused(raw: bytes) -> None:
    with pytest.raises(Corrupt, match="m is not a manifest"):
        decode(raw, "m")


def test_a_manifest_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Corrupt, match="not a manifest"):
        decode(bytes(MAX_MANIFEST_BYTES + 1), "m")
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(TooLarge, match="limit is 100"):
        encode(_version()[0])


@given(
    changes=st.lists(
        st.tuples(st.integers(0), st.binary(max_size=3), st.integers(0, 3)), min_size=1
    )
)
@settings(deadline=None)
def test_a_damaged_manifest_means_the_same_or_is_refused(
    changes: list[tuple[int, bytes, int]],
) -> None:
    """Whatever bytes change, the tensors and the carried files are never other ones."""
    manifest, _ = _version()
    raw = encode(manifest)
    for place, what, over in changes:
        at = place % (len(raw) + 1)
        raw = raw[:at] + what + raw[at + over :]
    try:
        found = decode(raw, "m")
    except (Corrupt, TooNew):
        return
    assert found.content == content_hash(found.tensors, carried(found.files, found.tensors))
    assert all(is_plain(one.name) for one in found.files)


# ---- files against the manifest ----------------------------------------------


def test_every_flipped_byte_is_found_and_its_tensor_named() -> None:
    """In the data the tensor is named; in the header, that it is the header."""
    manifest, raw = _version()
    entry = _shard_of(manifest, "layers.2.q")
    names = {one.name for one in manifest.tensors if one.file == entry.name}
    assert len(names) > 1
    data = len(raw[entry.name]) - 32 * len(names)
    for at in range(entry.bytes):
        damaged = bytearray(raw[entry.name])
        damaged[at] ^= 16
        with pytest.raises(Corrupt) as caught:
            check_file(manifest, entry, memoryview(damaged))
        message = str(caught.value)
        assert message.startswith(f"step_5/{entry.name} is not what was published: ")
        assert (caught.value.key, caught.value.version) == (entry.name, 5)
        named = [name for name in names if f"tensor {name} differs" in message]
        assert len(named) == (at >= data), (at, message)


def test_a_damaged_carried_file_is_found() -> None:
    manifest, raw = _version()
    entry = _file_of(manifest, "config.json")
    damaged = raw["config.json"].replace(b"8", b"9")
    with pytest.raises(Corrupt, match=r"step_5/config.json is not what was published: its hash"):
        check_file(manifest, entry, memoryview(damaged))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"a": np.ones(2, "f4")}, "tensor b is missing"),
        (
            {"a": np.ones(2, "f4"), "b": np.ones(1, "f4"), "c": np.ones(1, "f4")},
            "tensor c is extra",
        ),
        ({"a": np.ones(2, "f4"), "c": np.ones(1, "f4")}, "b is missing, tensor c is extra"),
        ({"a": np.ones(2, "f4"), "b": np.ones(1, "i4")}, "tensor b is I32 of shape"),
        ({"a": np.ones((2, 1), "f4"), "b": np.ones(1, "f4")}, "tensor a is F32 of shape"),
    ],
)
def test_a_shard_holds_exactly_the_tensors_of_its_manifest(
    parts: dict[str, Any], words: str
) -> None:
    """Also if its hash is right: the manifest must not promise other tensors than there are."""
    listed = sources({"a": np.ones(2, "f4"), "b": np.ones(1, "f4")})
    raw = b"".join(chunks(sources(parts)))
    entry = FileEntry("model.safetensors", len(raw), digest(raw))
    tensors = tuple(_entry(one, entry.name) for one in listed)
    manifest = _manifest((entry,), tensors)
    with pytest.raises(Corrupt, match=words):
        check_file(manifest, entry, memoryview(raw))


def test_a_tensor_that_changed_between_hashing_and_writing_is_found() -> None:
    """The file is what was written, but not what was hashed: `each_tensor` sees it."""
    array = np.zeros(4, np.float32)
    (source,) = sources({"w": array})
    tensor = _entry(source, "model.safetensors")
    array[2] = 1
    raw = b"".join(chunks([source]))
    entry = FileEntry("model.safetensors", len(raw), digest(raw))
    manifest = _manifest((entry,), (tensor,))
    check_file(manifest, entry, memoryview(raw))
    with pytest.raises(Corrupt, match="tensor w differs"):
        check_file(manifest, entry, memoryview(raw), each_tensor=True)


# ---- linking instead of writing ----------------------------------------------


def test_only_a_shard_with_the_very_same_tensors_is_linked() -> None:
    """Of two versions that differ in one tensor, all files but that tensor's are the same."""
    parent, _ = _version()
    child, _ = _version({**ARRAYS, "layers.2.q": ARRAYS["layers.2.q"] + 1}, step=6, parent=5)
    changed = _shard_of(child, "layers.2.q").name
    for entry in child.files:
        tensors = [one for one in child.tensors if one.file == entry.name]
        found = same_shard(parent, entry.name, tensors)
        if entry.name == changed or not tensors:
            assert found is None
        else:
            assert found == entry
    (one, *rest) = [o for o in parent.tensors if o.file == changed]
    assert same_shard(parent, changed, [one, *rest]) == _file_of(parent, changed)
    assert same_shard(parent, changed, [*rest, one]) == _file_of(parent, changed)
    assert same_shard(parent, changed, rest) is None
    assert same_shard(parent, changed, []) is None
    assert same_shard(parent, "other.safetensors", [one, *rest]) is None
    for change in ({"dtype": "I32"}, {"shape": (2, 4)}, {"hash": "0" * 32}, {"name": "x"}):
        other = msgspec.structs.replace(one, **change)
        assert same_shard(parent, changed, [other, *rest]) is None
