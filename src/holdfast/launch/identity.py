"""Who this node is, from what its scheduler says. Pure.

    what          first that is set
    name          --node-name, SLURMD_NODENAME (with SLURM_LOCALID when a host has several tasks),
                  the pod's name (Kubernetes), else the host's name and a random end
    infra_rank    --infra-rank or --node-rank, SLURM_PROCID, JOB_COMPLETION_INDEX, the number at
                  the end of a pod's name (StatefulSet), GROUP_RANK, else none: order of arrival
    domain        --domain, SLURM_TOPOLOGY_ADDR without its last part (the node itself), else none
    run           --run, `slurm-<job>` (array jobs and requeued jobs have their own), JOB_NAME
                  (Kubernetes), else none

Under Slurm and Kubernetes a node keeps its name when it is started again, and with it its rank.
"""

import re
from collections.abc import Mapping

import msgspec

from holdfast.errors import Mistake

__all__ = ["Identity", "identify"]

_ORDINAL = re.compile(r"-(\d+)$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
    if "SLURMD_NODENAME" in env:
        several = _number(env, "SLURM_NTASKS") != _number(env, "SLURM_JOB_NUM_NODES")
        local = env.get("SLURM_LOCALID", "0")
        return env["SLURMD_NODENAME"] + (f"-{local}" if several else "")
    if _in_kubernetes(env):
        return env.get("POD_NAME", hostname)
    return f"{hostname}-{token}"


def _infra_rank(env: Mapping[str, str], hostname: str) -> int | None:
    for variable in ("SLURM_PROCID", "JOB_COMPLETION_INDEX"):
        if (number := _number(env, variable)) is not None:
            return number
    if _in_kubernetes(env) and (match := _ORDINAL.search(env.get("POD_NAME", hostname))):
        return int(match[1])
    return _number(env, "GROUP_RANK")


def _domain(env: Mapping[str, str]) -> str:
    """Slurm writes the switches from the top down to the node: s0.s4.node17."""
    if env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").startswith("switch"):
        return env.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]
    return ""


def _run(env: Mapping[str, str]) -> str:
    if job := env.get("SLURM_JOB_ID"):
        if array := env.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{env.get('SLURM_ARRAY_TASK_ID', '0')}"
        again = env.get("SLURM_RESTART_COUNT", "0")
        return f"slurm-{job}" + (f"-{again}" if again not in ("", "0") else "")
    return env.get("JOB_NAME", "") if _in_kubernetes(env) else ""


def _number(env: Mapping[str, str], variable: str) -> int | None:
    value = env.get(variable, "")
    return int(value) if value.isdecimal() else None
