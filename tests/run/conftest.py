"""What the tests of real runs share."""

from pathlib import Path

import pytest

from . import runs


@pytest.fixture(scope="package")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("run") / "calm"
    runs.run(folder)
    return folder
