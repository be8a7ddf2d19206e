"""URLs of stores: what is not one is refused before anything is opened."""

import pytest

from holdfast import transfer
from holdfast.errors import Mistake

SHM_NAMES = ["", ".", "..", ".x", "a/b", "a b", "x" * 65, "%2e%2e", "x/x"]
SHM_OPTIONS = ["colour=red", "budget=x", "budget=0"]
REDIS = [":0x", "/x", "?timeout=x", "?timeout=0", "?timeout=nan", "?verify=get", "?prefix=%00"]
MOONCAKE = ["", "?metadata=", "x?metadata=http://x", "?metadata=http://x&segment=5X"]


@pytest.mark.parametrize(
    "url",
    [
        *(f"shm://{name}" for name in SHM_NAMES),
        *(f"shm://test-mistakes?{option}" for option in SHM_OPTIONS),
        *(f"redis://127.0.0.1{rest}" for rest in (*REDIS, "?a=b")),
        *(f"mooncake://127.0.0.1:1{rest}" for rest in (*MOONCAKE, "?nonsense=1")),
        *("ftp://x", "nothing", "memory:a/b", "memory:a?b=c"),
    ],
)
def test_mistakes_in_urls(url: str) -> None:
    """Names that could leave a folder, numbers that are none, options that nobody knows."""
    with pytest.raises(Mistake):
        transfer.connect(url)
