"""The real client libraries, as encoders and decoders."""

import base64
import functools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from holdfast.proc import spawn
from holdfast.trainer.wire.body import decode
from trainer.house import SDKS

FAST = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def packed(dtype: str, *values: float) -> bytes:
    """Numbers as the wire has them."""
    return np.asarray(values, dtype=dtype).tobytes()


floats, longs, ints = (functools.partial(packed, dtype) for dtype in ("<f4", "<i8", "<i4"))


def of(kind: type[Any]) -> Callable[[bytes], Any]:
    """What reads a request that is nothing but this."""
    return functools.partial(decode, kind=kind)


class Codec:
    """`sdk_codec.py` at the other end of a pipe."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin, self._stdout = stdin, stdout

    def do(self, what: str, **how: Any) -> Any:
        """What it says; bytes as base64."""
        self._stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
        self._stdin.flush()
        line = self._stdout.readline()
        assert line, "the library's process has ended"
        said = json.loads(line)
        assert "ok" in said, said
        return said["ok"]

    def encode(self, what: str, **how: Any) -> bytes:
        """The body that a library posts."""
        return base64.b64decode(self.do(what, **how))

    def decode(self, what: str, body: bytes, **how: Any) -> Any:
        """What a library makes of a body."""
        return self.do(what, body=base64.b64encode(body).decode(), **how)


@pytest.fixture(scope="session")
def sdk() -> Iterator[Codec]:
    """The client libraries are part of what is tested: without them there is no green."""
    if not SDKS.exists():
        pytest.fail("the client libraries are not here: run `make setup-sdks`")
    argv = [str(SDKS), "-u", str(Path(__file__).with_name("sdk_codec.py"))]
    env = {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    with spawn(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.process.stdin is not None
        assert child.process.stdout is not None
        yield Codec(child.process.stdin, child.process.stdout)
