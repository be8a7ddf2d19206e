"""The two sides, for all tests here."""

from pathlib import Path

import pytest

from compat.sides import Side, unpack


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The old package, unpacked once."""
    return unpack("package", tmp_path_factory.mktemp("old"))


@pytest.fixture
def old(tmp_path: Path, package: Path) -> Side:
    """Holdfast as it was."""
    return Side("old", tmp_path, package)


@pytest.fixture
def new(tmp_path: Path) -> Side:
    """Holdfast as it is."""
    return Side("new", tmp_path)


@pytest.fixture(params=["old first", "new first"])
def sides(request: pytest.FixtureRequest, old: Side, new: Side) -> tuple[Side, Side]:
    """Both, in either order."""
    return (old, new) if request.param == "old first" else (new, old)
