"""Rows of a tensor, put and got all at once: frames like any other, proven like any other."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast import transfer
from holdfast.errors import Corrupt, Mistake
from holdfast.transfer import Store
from holdfast.transfer.frame import open_head, prove
from holdfast.transfer.rows import make_rows, open_rows
from transfer.outcomes import fails


@given(
    keys=st.lists(st.text("abcé/0", min_size=1, max_size=60), min_size=1, max_size=8, unique=True),
    size=st.sampled_from([0, 1, 7, 64, 300]),
    data=st.data(),
)
def test_a_row_is_a_frame_like_any_other(keys: list[str], size: int, data: st.DataObject) -> None:
    """Whatever the keys and sizes: each row opens and proves as a frame of its own."""
    payloads = np.frombuffer(
        data.draw(st.binary(min_size=size * len(keys), max_size=size * len(keys))), np.uint8
    ).reshape(len(keys), size)
    frames = make_rows(keys, payloads, 7, "array", "U8", (size,))
    refs = frames.refs()
    for at, key in enumerate(keys):
        frame = frames[key]
        whole = b"".join((frame.head, *frame.parts))
        head = open_head(whole, refs[key])
        prove(head, (whole[head.nbytes :],), refs[key])
        assert frame.ref == refs[key]
        assert (head.kind, head.dtype, head.shape) == ("array", "U8", (size,))
        assert whole[head.nbytes :] == payloads[at].tobytes()
    block = frames.block[:, : frames.size]
    found, right, _ = open_rows(block, keys, list(refs.values()))
    assert right.all()
    assert (found == payloads).all()


def test_every_flipped_bit_of_a_row_is_seen() -> None:
    """In the head, in the key, in the payload; and the other rows are still proven."""
    keys = [f"k{at}" for at in range(5)]
    frames = make_rows(
        keys, np.arange(500, dtype=np.uint8).reshape(5, 100), 7, "array", "U8", (100,)
    )
    refs = list(frames.refs().values())
    block = frames.block[:, : frames.size].copy()
    for at in range(8 * frames.size):
        block[3, at // 8] ^= 1 << at % 8
        _, right, _ = open_rows(block, keys, refs)
        assert right.tolist() == [True, True, True, False, True], f"bit {at}"
        block[3, at // 8] ^= 1 << at % 8
    with pytest.raises(Corrupt):
        open_rows(np.zeros_like(block), keys, refs)


def test_a_row_of_another_generation_or_key_is_not_taken() -> None:
    keys = ["a", "b"]
    old = make_rows(keys, np.zeros((2, 8), np.uint8), 1, "array", "U8", (8,))
    new = make_rows(keys, np.ones((2, 8), np.uint8), 2, "array", "U8", (8,))
    block = np.stack((old.block[0], new.block[1]))[:, : old.size]
    refs = list(old.refs().values())
    assert open_rows(block, keys, refs)[1].tolist() == [True, False]
    assert open_rows(block, ["a", "c"], [refs[0], "c"])[1].tolist() == [True, False]
    with pytest.raises(Corrupt, match="another key"):
        open_rows(block[::-1], keys, [refs[0], "b"])


def test_rows_come_back_in_the_order_asked_for(store: Store) -> None:
    keys = [f"row/{at}" for at in range(300)]
    rows = torch.arange(900, dtype=torch.bfloat16).reshape(300, 3)
    refs = store.put_rows(keys, rows)
    order = list(reversed(keys))
    assert torch.equal(store.get_rows([refs[key] for key in order]), rows.flip(0))
    assert torch.equal(store.get([refs["row/7"]])["row/7"], rows[7])
    array = np.arange(6).reshape(3, 2)
    store.put_rows(["x", "y", "z"], array)
    assert (store.get_rows(["z", "x"]) == array[[2, 0]]).all()
    store.put({"one": torch.ones(2), "two": torch.zeros(2)})
    assert store.get_rows(["two", "one"]).tolist() == [[0, 0], [1, 1]]


def test_what_is_missing_or_stale_among_rows_is_named(store: Store) -> None:
    refs = store.put_rows([f"r{at}" for at in range(50)], torch.zeros(50, 4))
    store.delete(["r3"])
    store.put({"r4": torch.ones(4)})
    with fails({"r3": "stale", "r4": "stale"}):
        store.get_rows(list(refs.values()))
    assert store.get_rows(["r4", "r5"]).tolist() == [[1] * 4, [0] * 4]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda store: store.put_rows(["a"], torch.zeros(2, 2)), "2 rows cannot be put"),
        (lambda store: store.put_rows([], torch.zeros(0, 2)), "cannot be put"),
        (lambda store: store.put_rows(["a", "a"], torch.zeros(2, 2)), "twice"),
        (lambda store: store.put_rows(["a", "b"], b"xy"), "rows are those of a tensor"),
        (lambda store: store.get_rows([]), "no rows"),
        (lambda store: store.get_rows(["t", "u", "t"]), "twice"),
        (lambda store: store.get_rows(["t", "u"]), "not rows of one tensor"),
        (lambda store: store.get_rows(["text"]), "rows are those of"),
    ],
)
def test_mistakes_are_told(call: Callable[[Store], object], match: str) -> None:
    store = transfer.connect("memory:")
    store.put({"t": torch.zeros(2), "u": torch.zeros(3), "text": "x"})
    with pytest.raises(Mistake, match=match):
        call(store)
