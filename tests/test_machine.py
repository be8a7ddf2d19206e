"""What the machine says about itself."""

from pathlib import Path

import pytest

from holdfast.machine import (
    UNKNOWN_FILE_SYSTEM,
    file_system_of,
    is_network_file_system,
    mounts,
)

MOUNTINFO = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
36 27 0:32 / /mnt/with\040blank rw,noatime shared:1 master:2 - nfs4 host:/export rw,vers=4.2
37 27 0:33 / /mnt/dash-here rw - fuse.sshfs user@host:/ - rw
38 27 0:34 /sub /mnt/\134 rw - btrfs /dev/sdb rw
nonsense
39 27 0:35 / /short
"""


def test_mountinfo_is_parsed() -> None:
    """Optional fields, escapes and hyphens do not confuse it; a bad line is left out."""
    assert mounts(MOUNTINFO) == {
        22: ("proc", "/proc"),
        27: ("ext4", "/"),
        36: ("nfs4", "/mnt/with blank"),
        37: ("fuse.sshfs", "/mnt/dash-here"),
        38: ("btrfs", "/mnt/\\"),
    }


def test_the_file_system_of_real_paths() -> None:
    """Known mounts are found, and what is below them, whether it exists or not."""
    assert file_system_of("/proc") == ("proc", "/proc")
    assert file_system_of("/proc/self/stat/not/there") == ("proc", "/proc")
    assert file_system_of("/dev/shm") == ("tmpfs", "/dev/shm")
    assert file_system_of("/dev/shm/not/there/yet.db") == ("tmpfs", "/dev/shm")


def test_a_link_is_followed_to_where_it_leads(tmp_path: Path) -> None:
    """A ledger behind a symbolic link lies where the link leads, not where it is."""
    link = tmp_path / "link"
    link.symlink_to("/dev/shm")
    assert file_system_of(link / "ledger.db") == ("tmpfs", "/dev/shm")


def test_a_relative_path_counts_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sqlite:///ledger.db is such a path."""
    monkeypatch.chdir("/dev/shm")
    assert file_system_of("ledger.db") == ("tmpfs", "/dev/shm")
    monkeypatch.chdir(tmp_path)
    assert file_system_of("x") == file_system_of(tmp_path)
    assert file_system_of("x")[0] != UNKNOWN_FILE_SYSTEM


def test_file_systems_of_the_network_are_known() -> None:
    """Those that hosts share, however they are written; not those that are fine for a ledger."""
    for fstype in ("nfs4", "NFS4", "cifs", "9p", "lustre", "ceph", "fuse.sshfs", "fuse.s3fs"):
        assert is_network_file_system(fstype)
    for fstype in ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "fuse"):
        assert not is_network_file_system(fstype)
