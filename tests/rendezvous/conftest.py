"""Where the nodes of these tests meet, unless a test says otherwise."""

from pathlib import Path

import pytest


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A ledger without any run."""
    return f"sqlite:///{tmp_path}/ledger.db"
