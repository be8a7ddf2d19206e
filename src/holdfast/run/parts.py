"""The processes of a run: which there are, and what each is told."""

import math
import shlex
import shutil
import sys
from pathlib import Path

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
from holdfast.run.folder import Folder, Secrets
from holdfast.run.orchestrator_process import OrchestratorSettings
from holdfast.run.records import Keys

__all__ = ["ACCOUNT", "JOB", "ORCHESTRATOR", "base_directory", "parts_of"]

ACCOUNT, JOB = "local", "trainer"
ORCHESTRATOR = "orchestrator"
_BASE = "policy"
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
    config, path, run, url = folder.config, folder.path, folder.run, folder.ledger
    logs, weights = path / "logs", str(folder.weights(ACCOUNT, JOB))
    gateway = GatewaySettings(
        run=run, ledger=url, name="gateway", folder=str(path), port=port, access_log=False
    )
    host = HostSettings(
        run=run,
        ledger=url,
        name="host",
        folder=str(path),
        trainers={"default": _trainer(folder, base)},
        capacity=1,
        restarts=_RESTARTS,
        grace_s=3.0,
    )
    parts = [
        Part("gateway", "holdfast.gateway.process", gateway, logs / "gateway.log", forks),
        Part("host", "holdfast.jobs.host_process", host, logs / "host.log", forks),
    ]
    vllm = _vllm(folder)
    for number in range(config.rollout.replicas):
        name = f"replica-{number}"
        settings = ReplicaSettings(
            run=run,
            ledger=url,
            name=name,
            folder=str(path),
            store=folder.store,
            model=str(base),
            weights=weights,
            channel_key=Keys(run).model,
            token=known.token,
            environment=config.environment.name,
            options=config.environment.options,
            limit_s=config.environment.limit_s,
            lora_rank=config.model.lora_rank,
            max_tokens=config.rollout.max_tokens,
            vllm=vllm,
        )
        log = logs / f"{name}.log"
        parts.append(Part(name, "holdfast.rollout.process", settings, log, forks))
    orchestrator = OrchestratorSettings(
        run=run,
        ledger=url,
        store=folder.store,
        folder=str(path),
        weights=weights,
        gateway=f"http://127.0.0.1:{line or port}",
        account=ACCOUNT,
        job=JOB,
        key=known.key,
        token=known.token,
        base=_BASE,
        config=config.model_dump(mode="json"),
    )
    log = logs / "orchestrator.log"
    parts.append(
        Part(
            ORCHESTRATOR,
            "holdfast.run.orchestrator_process",
            orchestrator,
            log,
            forks,
            # A step that was done is its progress, however long a life has lasted.
            policy=RestartPolicy(well_s=math.inf),
            progress=lambda: state_of(folder)[0],
        )
    )
    return parts


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
    given = ["--model", f"{_BASE}={base}", "--store", folder.store]
    given += ["--ranks", str(train.ranks), "--spares", str(train.spares)]
    return shlex.join([sys.executable, "-m", "holdfast.trainer", *given])
