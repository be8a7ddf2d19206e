"""A real Slurm with two nodes on this host: its daemons, its commands, and their end.

Own munge key, socket, state and ports; loopback only; nothing of an installed configuration is
read. Where we may (as root), each slurmd and each srun gets a pid namespace of its own: the
daemon's end is then the end of the whole node, of steps that it has let go of too.
"""

import contextlib
import getpass
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from holdfast import proc
from holdfast.errors import MissingPackage
from holdfast.proc import HeldPort
from holdfast.servers import HOST, find_program
from patience import until

PACKAGES = "slurmctld slurmd slurm-client munge"
NODES = ("n1", "n2")
_READY_S = 60.0


def require() -> None:
    """Skip the test that calls this, or fail it in CI, unless Slurm is installed."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + "/usr/sbin"  # where Debian puts the daemons
    try:
        for program in ("slurmctld", "slurmd", "srun", "munged"):
            find_program(program, f"Debian's packages {PACKAGES}")
    except MissingPackage as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))


class Slurm:
    """Two nodes, n1 and n2, below two switches, of two processors each. Use `with`."""

    def __init__(self, folder: Path, *, proctrack: str = "linuxproc") -> None:
        require()
        self.folder = folder
        self._proctrack = proctrack
        self._user = getpass.getuser()
        self._socket = folder / "munge.sock"
        self._children = contextlib.ExitStack()
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes: dict[str, proc.Child] = {}

    def __enter__(self) -> Self:
        self._configure()
        with self._children:
            self._start("munged", *self._munged()).wait_until(self._socket.exists, _READY_S)
            controller = self._start("slurmctld", "slurmctld", "-D", "-c")
            for name in NODES:
                self.nodes[name] = self._start(name, *self._alone(), "slurmd", "-D", "-N", name)
            controller.wait_until(self._idle, _READY_S)
            self._children = self._children.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._children:
            self.run("scancel", "--state=RUNNING", "--signal=KILL", "-u", self._user, check=False)
            self.run("scancel", "-u", self._user, check=False)
            with contextlib.suppress(AssertionError):  # its nodes are killed anyway
                self.until("an empty queue", lambda: not self.run("squeue", "-h"), 20)

    # ---- what tests do ---------------------------------------------------------------

    def run(self, *argv: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run one of Slurm's commands to its end; returns what it says."""
        done = subprocess.run(
            argv,
            env={**_outside(), **self.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{argv} → {done.returncode}\n{done.stdout}"
        return done.stdout

    def start(self, *argv: str, log: Path, env: Mapping[str, str] | None = None) -> proc.Child:
        """Start a command, such as srun, that goes on for a while."""
        return self._children.enter_context(
            # srun has a helper that would look for a dead controller for a minute.
            proc.spawn([*self._alone(), *argv], log=log, env={**self.env, **(env or {})})
        )

    def job(self, name: str) -> str:
        """The number of the running job of this name."""
        found: str = self.until(
            f"job {name}",
            lambda: self.run("squeue", "-h", "-t", "RUNNING", "-n", name, "-o", "%i").strip(),
        )
        return found

    def pid(self, node: str, inner: int) -> int:
        """The pid, as we see it, of what a process on a node calls its pid."""
        space = _space(self.nodes[node].pid, "pid_for_children")
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                pid = int(status.parent.name)
                if _space(pid, "pid") == space and _innermost(status) == inner:
                    return pid
        raise ProcessLookupError(f"{node} has no process {inner}")

    def until(self, what: str, test: Callable[[], Any], timeout_s: float = 90.0) -> Any:
        """Wait for something; tells what the queue looks like when it does not come."""

        def story() -> str:
            jobs, nodes = (
                self.run(*words, check=False) for words in (["squeue", "-l"], ["sinfo"])
            )
            return f"{what}\n{jobs}{nodes}"

        return until(test, story, timeout_s)

    # ---- daemons ---------------------------------------------------------------------

    def _start(self, name: str, *argv: str) -> proc.Child:
        log = self.folder / f"{name}.log"
        return self._children.enter_context(
            proc.spawn(argv, name=name, log=log, env=self.env, package=PACKAGES)
        )

    def _munged(self) -> list[str]:
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"key-file": key.name, "log-file": "munge.log", "pid-file": "munge.pid"}
        files |= {"seed-file": "munge.seed", "socket": self._socket.name}
        argv = ["munged", "--foreground", "--force"]
        return argv + [f"--{option}={self.folder / name}" for option, name in files.items()]

    def _alone(self) -> Sequence[str]:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            return ()
        return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

    def _idle(self) -> bool:
        found = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return found == ["idle"] * len(NODES)

    def _configure(self) -> None:
        self._held = [HeldPort() for _ in range(1 + len(NODES))]
        controller, *ports = (held.port for held in self._held)
        (self.folder / "topology.conf").write_text(
            "SwitchName=leaf1 Nodes=n1\nSwitchName=leaf2 Nodes=n2\n"
            "SwitchName=top Switches=leaf[1-2]\n"
        )
        settings = {
            "ClusterName": "holdfast",
            "SlurmctldHost": f"localhost({HOST})",
            "SlurmctldPort": controller,
            "SlurmUser": self._user,
            "SlurmdUser": self._user,
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={self._socket}",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool.%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd.%n.pid",
            "ProctrackType": f"proctrack/{self._proctrack}",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "TopologyPlugin": "topology/tree",
            "MpiDefault": "none",
            "PlugStackConfig": self.folder / "plugstack.conf",
            "ReturnToService": 2,
            "SlurmdTimeout": 15,
            "KillWait": 20,
            "SlurmctldDebug": "info",
        }
        (self.folder / "plugstack.conf").touch()
        lines = [f"{name}={value}" for name, value in settings.items()]
        for name, port in zip(NODES, ports, strict=True):
            lines.append(
                f"NodeName={name} NodeHostname=localhost NodeAddr={HOST} Port={port} "
                "CPUs=2 RealMemory=1000 State=UNKNOWN"
            )
        lines.append("PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:4")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")


def _space(pid: int, kind: str) -> str:
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def _innermost(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def _outside() -> dict[str, str]:
    """Our environment without what an outer Slurm job may have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
