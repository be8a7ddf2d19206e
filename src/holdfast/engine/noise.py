"""Random numbers that are a function of words: the same on every machine and in every version.

Seeds come from a hash of the words, and numbers from the raw stream of PCG64, which numpy
keeps as it is; no distribution of a library is used, because those may change. So initial
weights depend on nothing but their seed and their name: not on the state of a global
generator, and not on what else was made before.
"""

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["seed_of", "uniform"]


def seed_of(*words: str | int) -> int:
    """A number of 63 bits that depends on the words, on their order and on where they end."""
    digest = hashlib.blake2b(digest_size=8)
    for word in words:
        data = str(word).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little") >> 1


def uniform(shape: tuple[int, ...], bound: float, *words: str | int) -> npt.NDArray[np.float32]:
    """An array of numbers that are uniform in [-bound, bound), from the words' seed."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.PCG64(seed_of(*words)).random_raw(count)
    # 24 bits are exact in float32, and so is what is done to them, up to the last product.
    unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)
    values: npt.NDArray[np.float32] = (unit * np.float32(bound)).reshape(shape)
    return values
