"""The examples in deploy/ agree with what the agent reads, takes and returns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from holdfast.launch import commands

DEPLOY = Path(__file__).parents[2] / "deploy"
RUN_FAILED, MISTAKE, NOT_FOUND, AWAY, UNHEALTHY = 1, 2, 4, 3, 10
FIELDS = {
    "metadata.name": "train-3-x7k2p",
    "status.podIP": "127.0.0.1",
    "metadata.labels['batch.kubernetes.io/job-name']": "train",
    "metadata.labels['batch.kubernetes.io/controller-uid']": "0b5c1a6e-7d0f-4f7b-9d53-5f0a7c2d9e1",
}
"""What Kubernetes says of a Job's pod with index 3."""


def documents(name: str) -> list[Any]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def container(workload: Any) -> Any:
    (found,) = workload["spec"]["template"]["spec"]["containers"]
    return found


def environment(node: Any, fields: dict[str, str]) -> dict[str, str]:
    """What a container finds in its environment."""
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1"} | {
        one["name"]: one["value"]
        if "value" in one
        else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in node["env"]
    }


def resolved(node: Any, env: dict[str, str], folder: Path) -> dict[str, Any]:
    """What `holdfast launch` makes of the manifest's command, arguments and environment."""
    args = [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], arg) for arg in node["args"]]
    assert node["command"] == ["holdfast", "launch"]
    argv = [sys.executable, "-m", "holdfast", "launch", "--dry-run", "--log-dir", str(folder)]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        [*argv, *args], env={**ours, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_of_pods(tmp_path: Path) -> None:
    """A pod of the Job gets its name, place and run from Kubernetes, and its ledger by URL."""
    service, job = documents("kubernetes.yaml")
    node = container(job)
    env = {**environment(node, FIELDS), "JOB_COMPLETION_INDEX": "3"}
    found = resolved(node, env, tmp_path)
    assert (found["node"], found["infra_rank"]) == ("train-3", 3)
    assert found["run"] == f"train-{env['JOB_UID']}"
    assert found["address"] == env["POD_IP"]
    assert found["ledger"] == env["HOLDFAST_LEDGER"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == found["rules"]["maximum"]
    assert pod["terminationGracePeriodSeconds"] > found["grace_s"] + 20, "before SIGKILL comes"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_a_job_ends_when_its_run_does() -> None:
    """Codes that another pod would not change end the Job; all others replace the pod."""
    _, job = documents("kubernetes.yaml")
    spec = job["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy demands it"
    evicted, ended = spec["podFailurePolicy"]["rules"]
    assert evicted["action"] == "Ignore"
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget"}]
    assert ended["action"] == "FailJob"
    codes = ended["onExitCodes"]
    assert codes["containerName"] == container(job)["name"]
    assert (codes["operator"], codes["values"]) == ("In", [RUN_FAILED, MISTAKE, NOT_FOUND])
    assert spec["backoffLimit"] >= spec["completions"]


def test_pods_of_a_statefulset(tmp_path: Path) -> None:
    """The place is the number at the end of the pod's name; the run is given."""
    service, stateful = documents("kubernetes-statefulset.yaml")
    node = container(stateful)
    env = environment(node, {**FIELDS, "metadata.name": "nodes-4"})
    found = resolved(node, env, tmp_path)
    assert (found["node"], found["infra_rank"], found["run"]) == ("nodes-4", 4, "train-1")
    spec = stateful["spec"]
    assert spec["replicas"] == found["rules"]["maximum"]
    assert spec["podManagementPolicy"] == "Parallel", "a node waits for the others"
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Always", "a StatefulSet allows nothing else"
    assert pod["terminationGracePeriodSeconds"] > found["grace_s"] + 20
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert spec["serviceName"] == service["metadata"]["name"]


def test_the_flags_of_the_slurm_example_exist() -> None:
    """Every flag behind `holdfast launch` is one of its flags; the script is good bash."""
    script = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    call = re.search(r"holdfast launch (.*?)\"\$@\"", script.read_text(), re.DOTALL)
    assert call
    known = {option for param in commands.launch.params for option in param.opts}
    used = set(re.findall(r"--[a-z-]+", call[1]))
    assert used >= {"--run", "--nnodes", "--grace"}
    assert used <= known
