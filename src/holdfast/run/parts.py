"""The processes of a run: which there are, and what each is told."""

import math
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from holdfast.engine.directory import read_config
from holdfast.engine.tiny import make_tiny
from holdfast.errors import Mistake
from holdfast.gateway.process import GatewaySettings
from holdfast.gateway.serve import Part
from holdfast.jobs.host_process import HostSettings
from holdfast.proc.forkserver import ForkServer
from holdfast.proc.restarts import RestartPolicy
from holdfast.rollout.process import ReplicaSettings
from holdfast.run.ending import state_of
from holdfast.run.folder import BASE, Folder, Secrets
from holdfast.run.orchestrator_process import OrchestratorSettings
from holdfast.run.records import Keys

__all__ = ["ORCHESTRATOR", "base_directory", "parts_of"]

ORCHESTRATOR = "orchestrator"
_RESTARTS = 1000
"""How often a trainer may die early: here, somebody kills it on purpose."""


def base_directory(folder: Folder) -> Path:
    """The model that is trained: the one that was given, or a small one."""
    given = folder.config.model.directory
    if not given:
        return make_tiny(folder.path / "base", positions="learned", context=64)
    path = Path(given).absolute()
    read_config(path)
    return path


def parts_of(
    folder: Folder, base: Path, known: Secrets, port: int, forks: ForkServer, *, line: int = 0
) -> list[Part]:
    """All of them; the orchestrator comes last. It reaches the gateway on `line`, if given."""
    path, logs = str(folder.path), folder.path / "logs"
    shared: Any = {"run": folder.run, "ledger": folder.ledger, "folder": path}
    gateway = GatewaySettings(name="gateway", port=port, access_log=False, **shared)
    trainers = {"default": _trainer(folder, base)}
    host = HostSettings(
        name="host", trainers=trainers, capacity=1, restarts=_RESTARTS, grace_s=3.0, **shared
    )
    parts = [
        Part("gateway", "holdfast.gateway.process", gateway, logs / "gateway.log", forks),
        Part("host", "holdfast.jobs.host_process", host, logs / "host.log", forks),
    ]
    for number in range(folder.config.rollout.replicas):
        name = f"replica-{number}"
        settings = ReplicaSettings(name=name, **shared, **_replica(folder, base, known.token))
        log = logs / f"{name}.log"
        parts.append(Part(name, "holdfast.rollout.process", settings, log, forks))
    orchestrator = Part(
        ORCHESTRATOR,
        "holdfast.run.orchestrator_process",
        OrchestratorSettings(folder=path, gateway=f"http://127.0.0.1:{line or port}"),
        logs / "orchestrator.log",
        forks,
        # A step that was done is its progress, however long a life has lasted.
        policy=RestartPolicy(well_s=math.inf),
        progress=lambda: state_of(folder)[0],
    )
    return [*parts, orchestrator]


def _replica(folder: Folder, base: Path, token: str) -> Any:
    """What all replicas are told."""
    config = folder.config
    return {
        "store": folder.store,
        "model": str(base),
        "weights": str(folder.weights),
        "channel_key": Keys(folder.run).model,
        "token": token,
        "environment": config.environment.name,
        "options": config.environment.options,
        "limit_s": config.environment.limit_s,
        "lora_rank": config.model.lora_rank,
        "max_tokens": config.rollout.max_tokens,
        "vllm": _vllm(folder),
    }


def _vllm(folder: Folder) -> dict[str, object] | None:
    """How replicas start their servers; None if they have none."""
    rollout = folder.config.rollout
    if rollout.kind != "vllm":
        return None
    words = shlex.split(rollout.vllm.command)
    if not words or shutil.which(words[0]) is None:
        raise Mistake(
            f"rollout.vllm.command = {rollout.vllm.command!r}: there is no such program. Give the "
            "path of the vllm of the environment that it is installed in"
        )
    return rollout.vllm.model_dump()


def _trainer(folder: Folder, base: Path) -> str:
    train = folder.config.train
    given = ["--model", f"{BASE}={base}", "--store", folder.store]
    given += ["--ranks", str(train.ranks), "--spares", str(train.spares)]
    return shlex.join([sys.executable, "-m", "holdfast.trainer", *given])
