"""What `import holdfast.transfer` and `import holdfast.ledger` must not load."""

import subprocess
import sys

import pytest

LOOK = """
import importlib, sys
importlib.import_module(sys.argv[1])
heavy = {"aiohttp", "httpx", "torch", "mooncake", "transfer_queue"}
loaded = [n for n in sys.modules if n.split(".")[0] in heavy or n.startswith("holdfast.contrib")]
sys.exit(", ".join(loaded) or 0)
"""


@pytest.mark.parametrize(
    "package", ["holdfast.transfer", "holdfast.transfer.queue", "holdfast.ledger"]
)
def test_optional_parts_are_imported_only_when_asked_for(package: str) -> None:
    """Neither contrib nor what single back ends need: a URL or a user asks for those."""
    done = subprocess.run([sys.executable, "-c", LOOK, package], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
