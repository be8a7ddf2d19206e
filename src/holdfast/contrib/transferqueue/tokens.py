"""Names of values in the store, and the tokens that TransferQueue's controller keeps of them.

    name    RUN/INDEX@FIELD/GENERATION                 tq-1f2e3d4c/17@prompt/18c2a0f3e4b5d400
    token   RUN:GENERATION:CHECKSUM:BYTES, in hex      what is needed to make the reference

TransferQueue calls a value `INDEX@FIELD` and uses an index again when it was cleared. The
generation in the name keeps the values apart: a new one never takes the place of an old one,
whose readers get it until it is deleted, and "gone" afterwards. Pure.
"""

import re

from holdfast.errors import Mistake
from holdfast.transfer.frame import Ref

__all__ = ["RUNS", "from_token", "name", "to_token"]

RUNS = "tq-"
"""What the name of every run begins with."""

_TOKEN = re.compile(rf"({RUNS}[0-9a-f]+):([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)", re.ASCII)


def name(run: str, key: str, generation: int) -> str:
    """What the value of a key is called in the store."""
    return f"{run}/{key}/{generation:x}"


def to_token(ref: Ref) -> str:
    """A reference as text, without the parts that TransferQueue knows."""
    run = ref.key.partition("/")[0]
    return f"{run}:{ref.generation:x}:{ref.checksum:x}:{ref.nbytes:x}"


def from_token(key: str, token: object) -> Ref:
    """The reference that a token of this key stands for. Raises `Mistake`."""
    found = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    if found is None:
        raise Mistake(
            f"{key}: its metadata has {token!r:.80}, which is not a reference of Holdfast's: was "
            "it made with another storage back end?",
            key=key,
        )
    run = found[1]
    generation, checksum, nbytes = (int(part, 16) for part in found.groups()[1:])
    return Ref(name(run, key, generation), generation, checksum, nbytes)
