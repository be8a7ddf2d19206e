"""Which addresses a process listens on, as the kernel says."""

import ipaddress
import os
from pathlib import Path

_LISTEN = "0A"


def listeners(pid: int | None = None) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a process listens; None: this process."""
    folder = Path(f"/proc/{pid or os.getpid()}")
    held = set()
    for fd in (folder / "fd").iterdir():
        try:
            held.add(str(fd.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (folder / "net" / table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and f"socket:[{words[9]}]" in held:
                address, port = words[1].split(":")
                found.add((_address(address), int(port, 16)))
    return found


def beyond_loopback(pid: int | None = None) -> set[tuple[str, int]]:
    """Those of them that another machine could reach."""
    return {
        (address, port)
        for address, port in listeners(pid)
        if not ipaddress.ip_address(address).is_loopback
    }


def _address(text: str) -> str:
    """Words of 32 bits, each in the order of this machine's bytes."""
    raw = bytes.fromhex(text)
    words = (raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    address = ipaddress.ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)
