"""What this machine says about itself: its boot, and the file system under a path.

Linux-shaped: everything but the user's own folder comes from /proc. Nothing is cached, because a
mount can change under a running process.
"""

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import Unavailable
from holdfast.files import private_folder

__all__ = [
    "UNKNOWN_FILE_SYSTEM",
    "begun_at",
    "boot_id",
    "file_system_of",
    "is_alive",
    "is_network_file_system",
    "listeners",
    "listening_users",
    "mounts",
    "place",
    "state_dir",
]

UNKNOWN_FILE_SYSTEM = "unknown"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTINFO = Path("/proc/self/mountinfo")

# File systems on which locks or shared memory maps do not hold between hosts, or do not
# hold at all. A FUSE mount is named after its program.
# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "eos", "fhgfs", "gfs", "gfs2",
    "glusterfs", "gpfs", "kafs", "lustre", "mfs", "mmfs", "ncpfs", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "quobyte", "smb2", "smb3", "smbfs", "wekafs",
    "fuse.alluxio-fuse", "fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph-fuse", "fuse.cephfs",
    "fuse.curlftpfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.geesefs", "fuse.glusterfs",
    "fuse.goofys", "fuse.hdfs", "fuse.juicefs", "fuse.mfs", "fuse.moosefs", "fuse.mount-s3",
    "fuse.mountpoint-s3", "fuse.quobyte", "fuse.rclone", "fuse.s3fs", "fuse.seaweedfs",
    "fuse.smbnetfs", "fuse.sshfs", "fuse.vmhgfs-fuse", "fuse_dfs", "vboxsf", "vmhgfs",
})
# fmt: on


def boot_id() -> str:
    """The identity of this boot of the kernel; the same in every container on it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError as error:
        raise Unavailable(f"{_BOOT_ID} cannot be read ({error}): mount /proc") from error


def place() -> str:
    """This host, this boot, this pid namespace: where a pid means what it says."""
    space = Path("/proc/self/ns/pid").stat().st_ino
    return f"{socket.gethostname()}/{boot_id()[:8]}/{space}"


def file_system_of(path: str | Path) -> tuple[str, str]:
    """The type and the mount point of the file system that holds `path`.

    A path that does not exist yet counts as its nearest ancestor that does. Where the
    system does not tell, the answer is ("unknown", "/").
    """
    try:
        mount_id = _mount_id(Path(path).absolute())
        return mounts(_MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape"))[mount_id]
    except (OSError, KeyError):
        return UNKNOWN_FILE_SYSTEM, "/"


def is_network_file_system(fstype: str) -> bool:
    """Whether a file system of this type is shared between hosts, so that locks may lie."""
    return fstype.lower() in NETWORK_FILE_SYSTEMS


def mounts(mountinfo: str) -> Mapping[int, tuple[str, str]]:
    """Parse /proc/PID/mountinfo into {mount id: (type, mount point)}."""
    found: dict[int, tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        try:
            # A varying number of optional fields ends with a lone hyphen.
            fstype = fields[fields.index("-", 6) + 1]
            found[int(fields[0])] = (fstype, _unescape(fields[4]))
        except (ValueError, IndexError):
            continue  # a line that we cannot read is a mount that we do not know
    return found


def _mount_id(path: Path) -> int:
    """Ask the kernel, not the text of the path: links and stacked mounts mislead."""
    for candidate in (path, *path.parents):
        try:
            descriptor = os.open(candidate, os.O_PATH)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            details = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii")
        finally:
            os.close(descriptor)
        if match := re.search(r"^mnt_id:\s*(\d+)$", details, re.MULTILINE):
            return int(match[1])
    raise KeyError(str(path))


def _unescape(text: str) -> str:
    """Undo the octal escapes that the kernel puts for blanks and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def state_dir() -> Path:
    """The folder for what lasts between runs. For its owner only: programs' output is in it."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return private_folder(Path(home) / "holdfast")


def begun_at(pid: int) -> int:
    """When a process began, in ticks since boot; 0 when it is not there."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, began: int) -> bool:
    """Whether the process that began then is there, and more than a name to be collected."""
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == began and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def listeners(port: int) -> list[int]:
    """The processes that listen at a TCP port, as far as we may know."""
    inodes = {f"socket:[{inode}]" for _, inode in _listening(port)}
    found = []
    for process in Path("/proc").iterdir() if inodes else ():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if any(str(one.readlink()) in inodes for one in (process / "fd").iterdir()):
                    found.append(int(process.name))
    return found


def listening_users(port: int) -> set[int]:
    """The users whose sockets listen at a TCP port: known for every user's, unlike its process."""
    return {user for user, _ in _listening(port)}


def _listening(port: int) -> list[tuple[int, str]]:
    """User and inode of each socket that listens at a TCP port."""
    found = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                    found.append((int(cells[7]), cells[9]))
    return found
