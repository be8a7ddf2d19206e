"""What is installed is what is pinned: every package, by its version and by hashes."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = {"constraints.txt": ".venv", "constraints-sdks.txt": ".venv-sdks"}
TORCH = "constraints-torch.txt"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(*files: str) -> dict[str, Version]:
    """What the files pin. A line that pins nothing, or has no hash, is an error."""
    found = {}
    for file in files:
        text = (ROOT / file).read_text().replace("\\\n", " ")
        for line in (line for line in text.splitlines() if not line.startswith("#")):
            name, equals, rest = line.partition("==")
            version, *hashes = rest.split()
            assert equals, line
            assert file == TORCH or hashes, f"{file}: {name} has no hash: run scripts/lock"
            assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), line
            found[normal(name)] = Version(version)
    return found


@pytest.mark.parametrize("file", LOCKS)
def test_every_package_is_pinned(file: str) -> None:
    """No package is installed that the lock does not list, nor in another version."""
    python = ROOT / LOCKS[file] / "bin/python"
    assert python.exists(), f"{LOCKS[file]} is not set up: run make setup setup-sdks"
    said = subprocess.check_output([python, "-m", "pip", "list", "--format", "json"], text=True)
    installed = {normal(one["name"]): one["version"] for one in json.loads(said)}
    pins = pinned(file, TORCH)
    strange = {
        name: version
        for name, version in installed.items()
        # NVIDIA's libraries come with torch's build for CUDA, which pins them.
        if name != "holdfast-rl" and not name.startswith(("nvidia-", "cuda-", "triton"))
        if name not in pins or Version(version).public != pins[name].public
    }
    assert strange == {}, f"not in {file}: remove them, or run scripts/lock"
    absent = pins.keys() - installed.keys() - {"torch"}
    assert absent == set(), "pinned, and not installed: run make setup"


def test_nothing_is_missing() -> None:
    """Packages are installed without what they ask for: the lock has all of it."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_pins_are_what_the_project_asks_for() -> None:
    """Every requirement of pyproject.toml, of users' and of developers', has its pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    asked += project["dependency-groups"]["dev"]
    pins = pinned("constraints.txt", TORCH)
    for text in asked:
        one = Requirement(text)
        if one.name != "holdfast-rl":
            assert one.specifier.contains(pins[normal(one.name)]), text
            assert importlib.metadata.version(one.name)


OTHERS = sorted([*ROOT.glob("constraints-peers*.txt"), *ROOT.glob("constraints-docs*.txt")])


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.name)
def test_other_environments_are_pinned(path: Path) -> None:
    """Every line names one version, pip's own too."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.\[\]-]+==[\w.!+]+", line)] == []
    assert any(line.startswith("pip==") for line in lines)
