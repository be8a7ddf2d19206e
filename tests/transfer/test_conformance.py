"""What every store promises, on every back end: what is put is got, or an error says why."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.errors import BatchFailed, Mistake, NotFound
from holdfast.transfer import Ref, Store, connect, status
from transfer.conftest import Opener
from transfer.outcomes import fails, never_mixed, together
from transfer.samples import SAMPLES, same


def failures(store: Store, *wanted: str | Ref) -> dict[str, str]:
    """What went wrong, in one word per key."""
    found = store.get(wanted, partial=True)
    return {key: status(error) for key, error in found.failures.items()}


# Values


def test_every_kind_of_value_comes_back_as_it_was(store: Store) -> None:
    """Type, dtype, shape and bits; by reference and by key, and to another client."""
    refs = store.put(SAMPLES)
    assert list(refs) == list(SAMPLES)
    for wanted in (refs.values(), list(SAMPLES)):
        found = store.get(wanted)
        assert list(found) == list(SAMPLES)
        wrong = [name for name in SAMPLES if not same(SAMPLES[name], found[name])]
        assert not wrong


def test_nothing_empty_and_failed_are_three_things(store: Store) -> None:
    """None and b"" are values; what is not there is an error."""
    refs = store.put({"none": None, "empty": b""})
    assert store.get(refs.values()) == {"none": None, "empty": b""}
    assert failures(store, "absent") == {"absent": "missing"}
    with pytest.raises(BatchFailed) as caught:
        store.get(["none", "absent", "empty"])
    assert list(caught.value.failures) == ["absent"]
    assert isinstance(caught.value.failures["absent"], NotFound)
    assert caught.value.values == {"none": None, "empty": b""}
    assert "absent" in str(caught.value)


def test_a_value_is_the_caller_s_own(store: Store) -> None:
    """Writing to what was put, or got, changes neither the store nor what others get."""
    values: dict[str, Any] = {"t": torch.zeros(1000), "a": np.zeros(1000)}
    store.put(values)
    for mine in (values, store.get(values)):
        mine["t"].fill_(1)
        mine["a"][:] = 1
        found = store.get(values)
        assert not found["t"].any()
        assert not found["a"].any()


ODD_KEYS = ["a b", "ü/ö", "*?[a-z]", "\\", "..", "/", "a:{b}", "k" * 512, "%2F", "'\"", "日本"]


def test_keys_may_look_odd(store: Store) -> None:
    """They name what was put under them and nothing else, and are listed as they are."""
    values = {key: index for index, key in enumerate(ODD_KEYS)}
    refs = store.put(values)
    assert store.get(refs.values()) == values
    assert {found.key for found in store.scan()} == set(ODD_KEYS)
    assert [found.key for found in store.scan("*?")] == ["*?[a-z]"]
    assert store.delete(ODD_KEYS) == dict.fromkeys(ODD_KEYS, True)


# References


def test_a_replaced_value_makes_its_references_stale(store: Store) -> None:
    """The key means the new value, the old reference never does; of any size."""
    for old, new in ((b"old", b"new"), (b"x" * 5000, b"y"), (b"", b"z" * 100_000)):
        before = store.put({"k": old})["k"]
        after = store.put({"k": new})["k"]
        assert store.get(["k"]) == store.get([after]) == {"k": new}
        assert failures(store, before) == {"k": "stale"}
        assert after.generation > before.generation


def test_a_delete_by_reference_takes_that_value_and_no_other(store: Store) -> None:
    """What is deleted is missing by key and gone by reference."""
    old = store.put({"k": 1, "other": 2})
    new = store.put({"k": 3})
    assert store.delete(old.values()) == {"k": False, "other": True}
    assert store.get(new.values()) == {"k": 3}
    assert store.delete([*new.values(), "never"]) == {"k": True, "never": False}
    assert store.delete(new.values()) == {"k": False}
    assert store.exists(["k", "other"]) == {"k": False, "other": False}
    assert failures(store, "k") == {"k": "missing"}
    assert failures(store, *new.values()) == {"k": "stale"}


def test_the_same_put_twice_is_one_put(store: Store) -> None:
    """With a generation of one's own a put can be repeated: the references stay good."""
    values = {"a": torch.arange(9), "b": b""}
    first = store.put(values, generation=41)
    second = store.put(values, generation=41)
    assert first == second
    assert same(store.get(first.values()), values)
    assert {found.generation for found in store.scan()} == {41}


def test_references_travel(open_store: Opener) -> None:
    """As soon as a put has returned, whoever gets its reference, by whatever way, can use it.

    Also when the writer has left (leaving twice does no harm).
    """
    writer, reader = open_store(), open_store()
    for index in range(20):
        refs = writer.put({"a": index, "b": torch.full((100,), index)})
        copy = Ref("b", refs["b"].generation, refs["b"].checksum, refs["b"].nbytes)
        assert same(reader.get(["a", copy]), {"a": index, "b": torch.full((100,), index)})
    writer.close()
    writer.close()
    other = Ref("b", copy.generation, copy.checksum ^ 1, copy.nbytes)
    assert failures(reader, other) == {"b": "stale"}
    larger = Ref("b", copy.generation + 1, copy.checksum, copy.nbytes + 64)
    assert failures(reader, larger) == {"b": "stale"}


def test_every_error_names_its_key_and_no_other(store: Store) -> None:
    """What is missing, replaced or deleted: got, read into buffers, viewed."""
    keys = ["user/key-1", "user/key-2"]
    missing, stale = dict.fromkeys(keys, "missing"), dict.fromkeys(keys, "stale")
    with fails(missing):
        store.get(keys)
    with fails(missing):
        store.get_into({key: bytearray(1) for key in keys})
    with fails(missing), store.view(keys):
        pass
    old = store.put(dict.fromkeys(keys, b"1"))
    store.put(dict.fromkeys(keys, b"22"))
    with fails(stale):
        store.get(old.values())
    with fails(stale), store.view(old.values()):
        pass
    store.delete(keys)
    with fails(stale):
        store.get(old.values())


def test_two_values_of_one_key_cannot_be_asked_for_at_once(store: Store) -> None:
    old, new = store.put({"k": 1})["k"], store.put({"k": 2})["k"]
    with pytest.raises(Mistake, match="twice"):
        store.get([old, new])


# Buffers of the caller


def test_get_into_fills_the_caller_s_buffers(store: Store) -> None:
    """All that are there, when others are missing, too."""
    values = {
        "t": torch.arange(100, dtype=torch.bfloat16).reshape(4, 25),
        "a": np.arange(50, dtype=np.int16),
        "b": b"some bytes",
    }
    refs = store.put(values)
    places: dict[str | Ref, Any] = {
        refs["t"]: torch.empty(4, 25, dtype=torch.bfloat16),
        "a": np.empty(50, np.int16),
        "b": bytearray(10),
    }
    with fails({"absent": "missing"}):
        store.get_into({**places, "absent": bytearray(1)})
    assert same(places[refs["t"]], values["t"])
    assert same(places["a"], values["a"])
    assert places["b"] == values["b"]


FROZEN = np.empty((4, 5))
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    "place",
    [
        torch.empty(4, 5),
        torch.empty(20, dtype=torch.float64),
        torch.empty(5, 4, dtype=torch.float64),
        torch.empty(4, 10, dtype=torch.float64)[:, ::2],
        np.empty((4, 5), np.float64)[:3],
        bytearray(159),
        FROZEN,
        memoryview(bytes(160)),
        bytes(160),
        [1],
    ],
)
def test_get_into_refuses_what_does_not_fit(place: Any) -> None:
    """Another dtype or shape, memory with gaps, or what cannot be written to."""
    store = connect("memory:")
    store.put({"t": torch.ones(4, 5, dtype=torch.float64)})
    with pytest.raises((Mistake, BatchFailed)) as caught:
        store.get_into({"t": place})
    error = caught.value
    assert isinstance(error.failures["t"] if isinstance(error, BatchFailed) else error, Mistake)


def test_a_view_shows_the_values(store: Store) -> None:
    refs = store.put({"t": torch.arange(1000), "n": None})
    with store.view(refs.values()) as found:
        assert same(found["t"], torch.arange(1000))
        assert found["n"] is None
    with pytest.raises(BatchFailed, match="absent"), store.view(["t", "absent"]):
        pass


# Many


def test_five_thousand_keys_at_once(store: Store) -> None:
    values = {f"key {index}": index.to_bytes(4, "little") * 50 for index in range(5000)}
    refs = store.put(values)
    assert store.get(refs.values()) == values
    assert store.get(values) == values
    assert store.exists([*values, "absent"]) == {**dict.fromkeys(values, True), "absent": False}
    assert {found.key: found.nbytes for found in store.scan("key ")} == {
        key: ref.nbytes for key, ref in refs.items()
    }
    stat = store.stat()
    assert (stat.keys, stat.nbytes) == (5000, sum(ref.nbytes for ref in refs.values()))
    assert stat.taken >= stat.nbytes
    removed = store.delete([*refs.values(), "absent"])
    assert removed == {**dict.fromkeys(values, True), "absent": False}
    assert not list(store.scan())


def test_a_hundred_megabytes_in_one_value(store: Store) -> None:
    value = torch.from_numpy(np.random.default_rng(3).integers(0, 255, 100_000_000, np.uint8))
    ref = store.put({"large": value, "small": b"s"})["large"]
    found = store.get([ref, "small"])
    assert torch.equal(found["large"], value)
    place = torch.empty_like(value)
    store.get_into({"large": place})
    assert torch.equal(place, value)
    assert [(found.key, found.nbytes) for found in store.scan("large")] == [("large", ref.nbytes)]
    assert store.delete([ref]) == {"large": True}
    assert failures(store, ref) == {"large": "stale"}


def test_nothing_asked_nothing_answered(store: Store) -> None:
    assert store.put({}) == {}
    assert store.get([]) == {}
    assert store.delete([]) == {}
    assert store.exists([]) == {}


@pytest.mark.long
def test_threads_share_a_store(store: Store) -> None:
    """Each gets its own values, whole, while others put, replace and delete theirs."""
    seed = 11

    def work(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for step in range(15):
            values = {
                f"{number}/{index}": bytes([number, step]) * rng.randrange(1, 3000)
                for index in range(20)
            }
            refs = store.put(values)
            wanted = list(refs.values()) if step % 2 else list(values)
            assert store.get(wanted) == values, f"seed {seed}, thread {number}, step {step}"
            with store.view(wanted) as found:
                assert found == values, f"seed {seed}, thread {number}, step {step}"
            store.delete(rng.sample(list(refs.values()), 5))

    together(partial(work, number) for number in range(6))


def test_a_reader_never_gets_a_mix(open_store: Opener) -> None:
    """While a value is replaced over and over, a get is one of them, or an error."""
    writer, reader = open_store(), open_store()
    sizes = [70_000, 70_000, 30, 70_000, 90_000]
    writer.put({"k": torch.zeros(sizes[0], dtype=torch.uint8)})
    good = 0

    def replace(step: int) -> None:
        size = sizes[step % len(sizes)]
        writer.put({"k": torch.full((size,), step % 251, dtype=torch.uint8)})

    def read() -> None:
        nonlocal good
        found = reader.get(["k"], partial=True)
        assert all(status(error) != "missing" for error in found.failures.values())
        for value in found.values.values():
            assert len(value) in sizes
            assert len(value.unique()) == 1
            good += 1

    never_mixed(read, replace, rounds=150, pause_s=0.005)
    assert good > 50


# Asynchronous twins


async def test_the_asynchronous_twins_do_the_same(store: Store) -> None:
    refs = await store.aput(SAMPLES)
    assert same(await store.aget(refs.values()), store.get(SAMPLES))
    partial = await store.aget(["none", "absent"], partial=True)
    assert list(partial.values) == ["none"]
    assert list(partial.failures) == ["absent"]
    assert await store.aexists(["none", "absent"]) == {"none": True, "absent": False}
    assert await store.adelete([refs["none"], "absent"]) == {"none": True, "absent": False}
    with fails({"none": "stale"}):
        await store.aget([refs["none"]])
    many = {f"m{index}": index for index in range(2000)}
    assert await store.aget((await store.aput(many)).values()) == many
