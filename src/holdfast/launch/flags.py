"""From flags and environment to a plan: what `holdfast launch` resolves before it starts."""

import json
import math
import os
import re
import secrets
import socket
from pathlib import Path
from typing import Any

import msgspec

from holdfast import ledger
from holdfast.errors import Mistake
from holdfast.launch import health
from holdfast.launch.crew import Plan
from holdfast.launch.hang import Learnt, Limits
from holdfast.launch.identity import identify
from holdfast.launch.logs import Logs, parse_streams
from holdfast.launch.spec import Kind, Spec
from holdfast.ledger.types import MAX_LEASE_S
from holdfast.machine import state_dir
from holdfast.proc import preload
from holdfast.rendezvous.address import own
from holdfast.rendezvous.records import Rules
from holdfast.timeouts import DEFAULTS

__all__ = ["describe", "resolve"]

_DOMAIN_CHARS = 200
_RANGE = re.compile(r"(\d+)(?::(\d+))?")


def resolve(entry: str, args: tuple[str, ...], given: dict[str, Any]) -> Plan:
    """Everything an agent needs, from the flags and the environment."""
    if given["module"] and given["no_python"]:
        raise Mistake("-m and --no-python exclude each other: a program is not a module")
    kind: Kind = "module" if given["module"] else "program" if given["no_python"] else "script"
    minimum, maximum = _nnodes(given["nnodes"])
    identity = identify(
        os.environ,
        hostname=socket.gethostname(),
        token=secrets.token_hex(3),
        name=given["node_name"],
        infra_rank=given["infra_rank"],
        domain=given["domain"],
        run=given["run_name"],
    )
    run = identity.run
    if not run:
        if maximum > 1:
            raise Mistake(
                "several nodes find each other by the run's name: give every node the same "
                "--run NAME (Slurm and Kubernetes jobs have one by themselves)"
            )
        run = f"run-{secrets.token_hex(4)}"
    url = ledger.lasting(_endpoint(given))
    rules = Rules(
        minimum=minimum,
        maximum=maximum,
        spares=given["spares"],
        segment=given["segment"],
        last_call_s=given["last_call"],
        join_s=given["join_timeout"],
        stop_s=given["grace"] + 20.0,
        max_restarts=given["max_restarts"],
        restart_window_s=given["restart_window"],
    )
    rules.check()
    lease_s = given["lease"]
    least_s = DEFAULTS.etcd_min_lease_s if url.startswith("etcd:") else DEFAULTS.min_node_lease_s
    if not least_s <= lease_s <= MAX_LEASE_S:
        raise Mistake(f"--lease {lease_s:g}: at least {least_s:g} s on this ledger, at most a day")
    grace_s, hang_s = given["grace"], given["hang_after"]
    if grace_s < 0 or (hang_s is not None and not 0 < hang_s < math.inf):
        raise Mistake("--grace is 0 or more, and --hang-after more than 0 seconds")
    if not identity.domain.isprintable() or len(identity.domain) > _DOMAIN_CHARS:
        raise Mistake(f"--domain: at most {_DOMAIN_CHARS} letters that can be printed")
    address = own(given["local_addr"], url)
    folder: Path = given["log_dir"] or state_dir() / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"--log-dir {folder}: {error.strerror}") from None
    return Plan(
        run=run,
        identity=identity,
        address=address,
        ledger_url=url,
        spec=Spec(
            entry=entry,
            kind=kind,
            args=args,
            slots=_slots(given["nproc_per_node"]),
            env=dict(os.environ),
        ),
        rules=rules,
        logs=Logs(
            folder=folder,
            redirects=parse_streams(given["redirects"]),
            tee=parse_streams(given["tee"]),
        ),
        lease_s=lease_s,
        grace_s=grace_s,
        limits=Limits(beat_s=hang_s, learnt=Learnt() if given["learn_limits"] else None),
        checks={**health.built_in(address, folder), **health.load()},
        warm=not given["no_warm"],
        preload=given["preload"] or preload.USER,
    )


def _endpoint(given: dict[str, Any]) -> str | None:
    """Where the ledger is; torchrun's --rdzv-endpoint will do, if it names one."""
    endpoint: str | None = given["rdzv_endpoint"]
    if endpoint is not None and "://" not in endpoint:
        raise Mistake(
            f"--rdzv-endpoint {endpoint}: there is no store host here; name a ledger, as in "
            "--ledger etcd://host:2379"
        )
    return given["url"] or endpoint


def _nnodes(text: str) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise Mistake(f"--nnodes {text!r}: write N or MIN:MAX")
    return int(match[1]), int(match[2] or match[1])


def _slots(text: str) -> int:
    if text.isdecimal():
        return int(text)
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    cpus = len(os.sched_getaffinity(0))
    if text == "gpu" and not gpus:
        raise Mistake("--nproc-per-node gpu: this node has no GPU")
    found = {"gpu": gpus, "cpu": cpus, "auto": gpus or cpus}.get(text)
    if found is None:
        raise Mistake(f"--nproc-per-node {text!r}: write a number, gpu, cpu or auto")
    return found


def describe(plan: Plan) -> str:
    """A plan as JSON, for people."""
    found = {
        "run": plan.run,
        "node": plan.node,
        "infra_rank": plan.identity.infra_rank,
        "domain": plan.identity.domain,
        "address": plan.address,
        "ledger": ledger.without_password(plan.ledger_url),
        "workers": plan.spec.slots,
        "entry": plan.spec.entry,
        "kind": plan.spec.kind,
        "args": list(plan.spec.args),
        "rules": msgspec.structs.asdict(plan.rules),
        "lease_s": plan.lease_s,
        "grace_s": plan.grace_s,
        "logs": str(plan.logs.folder),
        "warm": plan.warm,
    }
    return json.dumps(found, indent=2)
