"""The examples in deploy/ agree with what the agent reads, takes and returns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    """The documents of a YAML file that keeps to a small part of YAML; all else is an error."""
    found = []
    for text in (DEPLOY / name).read_text().split("\n---\n"):
        lines = [line.rstrip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.lstrip().startswith("#")]
        value, rest = _block(lines, 0)
        assert not rest, f"{name}: not understood: {rest[0]!r}"
        found.append(value)
    return found


def _block(lines: list[str], indent: int) -> tuple[Any, list[str]]:
    """A mapping or a list that is indented so far, and the lines behind it."""
    mapping: dict[str, Any] = {}
    items: list[Any] = []
    pad = " " * indent
    while lines and lines[0].startswith(pad) and lines[0][indent] != " ":
        line = lines[0][indent:]
        if line.startswith("- "):
            match = re.match(r"- ([A-Za-z]+):( |$)", line)
            if match:
                value, lines = _block([f"{pad}  {line[2:]}", *lines[1:]], indent + 2)
            else:
                value, lines = _scalar(line[2:]), lines[1:]
            items.append(value)
            continue
        match = re.fullmatch(r"([A-Za-z][A-Za-z0-9./-]*):(?: (.+))?", line)
        assert match, f"not understood: {line!r}"
        assert match[1] not in mapping, f"twice: {line!r}"
        if match[2]:
            mapping[match[1]], lines = _scalar(match[2]), lines[1:]
            continue
        deeper = len(lines[1]) - len(lines[1].lstrip())
        assert deeper == indent + 2, f"not indented by two: {lines[1]!r}"
        mapping[match[1]], lines = _block(lines[1:], deeper)
    assert not (mapping and items), "a mapping with list items in it"
    return mapping or items, lines


def _scalar(text: str) -> Any:
    assert not re.search(r": | #|^[{&*!|>%@`\"']", text), f"not understood: {text!r}"
    return json.loads(text) if re.fullmatch(r"\d+|true|false|\[.*\]", text) else text


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


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_lines_stay_readable(path: Path) -> None:
    """No tabs, no trailing blanks, at most 99 characters."""
    for line in path.read_text().splitlines():
        assert line == line.rstrip()
        assert "\t" not in line
        assert len(line) <= 99
