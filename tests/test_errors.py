"""The error tree."""

import pickle

import pytest

from holdfast import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.BatchFailed("two failed", failures={"a": errors.NotFound("no a", key="a")}),
        errors.Compacted("history is gone", revision=7),
        errors.Unavailable("not now", key="k", attempt=3),
    ],
)
def test_errors_cross_processes_whole(error: errors.HoldfastError) -> None:
    """Whoever carries them with pickle (Ray, multiprocessing) gets class, message and details."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), str(error))
    assert {name: repr(value) for name, value in vars(copy).items()} == {
        name: repr(value) for name, value in vars(error).items()
    }
