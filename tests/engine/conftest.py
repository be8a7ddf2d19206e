"""One small model for all tests of the engine, and reproducible torch while they run."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from holdfast.engine.base import Base, Tenant, load_base
from holdfast.engine.determinism import settle
from holdfast.engine.tiny import make_tiny


@pytest.fixture(autouse=True, scope="package")
def _settled() -> Iterator[None]:
    threads = torch.get_num_threads()
    settle()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package")
def base(tiny: Path) -> Base:
    return load_base("tiny", tiny)


@pytest.fixture(scope="package")
def lively(base: Base) -> Tenant:
    """All the weights, much larger: a model with opinions, so that likely tokens are likely."""
    tenant = base.full("lively")
    with torch.no_grad():
        for parameter in tenant.parameters().values():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
    return tenant
