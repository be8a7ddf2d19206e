"""Who this node is, from what its scheduler says. Pure.

    what          first that is set
    name          --node-name, SLURMD_NODENAME (and SLURM_LOCALID where a step has several tasks
                  per node), POD_NAME (Kubernetes; without the random end that a Job adds), the
                  pod's host name, else the host's name and a random end
    infra_rank    --infra-rank or --node-rank, SLURM_PROCID, JOB_COMPLETION_INDEX (Kubernetes), the
                  number at the end of a pod's name (StatefulSet), GROUP_RANK, else none: order of
                  arrival
    domain        --domain, SLURM_TOPOLOGY_ADDR without its last part (the node itself), else none
    run           --run, `slurm-<job>.<step>` (array tasks and requeued jobs have their own),
                  `<JOB_NAME>-<JOB_UID>` (Kubernetes; see deploy/kubernetes.yaml), else none

- Under Slurm and Kubernetes a node keeps its name when it is started again, and with it its rank.
- Two nodes of one step or Job never get the same name, nor the same infra_rank: SLURM_PROCID
  counts tasks, SLURM_NODEID would be the same for all tasks of a host.
- A run that ended is over for everybody who comes later. So a name is taken from the scheduler
  only where it cannot be that of an earlier run: a step, not a job, which may have many; never
  a step of one task, whose shell may start many; a Job's uid, not its name alone.
"""

import re
from collections.abc import Mapping

import msgspec

from holdfast.errors import Mistake

__all__ = ["Identity", "identify"]

_ORDINAL = re.compile(r"-(\d+)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LAST_STEP = 0xFFFF_FF00
"""Slurm's numbers above this are not steps of srun: the batch script, a shell of salloc."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This node. `run` is empty when nothing names it."""

    name: str
    infra_rank: int | None = None
    domain: str = ""
    run: str = ""


def identify(
    env: Mapping[str, str],
    *,
    hostname: str,
    token: str,
    name: str | None = None,
    infra_rank: int | None = None,
    domain: str | None = None,
    run: str | None = None,
) -> Identity:
    """Put together what was given and what the environment says."""
    if infra_rank is None:
        infra_rank = _infra_rank(env, hostname)
    elif infra_rank < 0:
        raise Mistake(f"--infra-rank is a number from 0 on, not {infra_rank}")
    identity = Identity(
        name=name or _name(env, hostname, token),
        infra_rank=infra_rank,
        domain=domain if domain is not None else _domain(env),
        run=run or _run(env),
    )
    for what, value in (("--node-name", identity.name), ("--run", identity.run or "x")):
        if not _NAME.fullmatch(value):
            raise Mistake(
                f"{what} {value[:140]!r}: use letters, digits, '.', '_' and '-', at most 128, "
                "beginning with a letter or a digit"
            )
    return identity


def _in_kubernetes(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env


def _name(env: Mapping[str, str], hostname: str, token: str) -> str:
    if host := env.get("SLURMD_NODENAME"):
        tasks, nodes = _number(env, "SLURM_STEP_NUM_TASKS"), _number(env, "SLURM_STEP_NUM_NODES")
        return host if tasks == nodes else f"{host}-{env.get('SLURM_LOCALID', '0')}"
    return _pod(env, hostname) if _in_kubernetes(env) else f"{hostname}-{token}"


def _pod(env: Mapping[str, str], hostname: str) -> str:
    """What all pods of one index are called. A Job names its pods <job>-<index>-<random>."""
    pod = env.get("POD_NAME") or hostname
    index = env.get("JOB_COMPLETION_INDEX", "")
    match = re.fullmatch(rf"(.+-{re.escape(index)})-[a-z0-9]{{5}}", pod) if index else None
    return match[1] if match else pod


def _infra_rank(env: Mapping[str, str], hostname: str) -> int | None:
    if (task := _number(env, "SLURM_PROCID")) is not None:
        return task
    if _in_kubernetes(env):
        if (index := _number(env, "JOB_COMPLETION_INDEX")) is not None:
            return index
        if match := _ORDINAL.search(env.get("POD_NAME") or hostname):
            return int(match[1])
    return _number(env, "GROUP_RANK")


def _domain(env: Mapping[str, str]) -> str:
    """Slurm writes switches or blocks from the top down to the node: s0.s4.node17."""
    levels = env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    if levels[-1] != "node":
        return ""
    above = env.get("SLURM_TOPOLOGY_ADDR", "").split(".", maxsplit=len(levels) - 1)[:-1]
    return ".".join(above)


def _run(env: Mapping[str, str]) -> str:
    if job := env.get("SLURM_JOB_ID"):
        step = _number(env, "SLURM_STEP_ID")
        alone = _number(env, "SLURM_STEP_NUM_TASKS") in (None, 1)
        if step is None or step > _LAST_STEP or alone:
            return ""
        if array := env.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
        again = _number(env, "SLURM_RESTART_COUNT")
        return f"slurm-{job}.{step}" + (f"-{again}" if again else "")
    name, uid = env.get("JOB_NAME"), env.get("JOB_UID")
    return f"{name}-{uid}" if _in_kubernetes(env) and name and uid else ""


def _number(env: Mapping[str, str], variable: str) -> int | None:
    value = env.get(variable, "")
    return int(value) if value.isdecimal() else None
