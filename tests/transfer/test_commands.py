"""`holdfast transfer` and `holdfast queue`, as a shell calls them."""

import json
import subprocess
import sys

import pytest
import torch

from holdfast import transfer
from holdfast.transfer.queue import Item, open_queue


def run(*args: str, code: int = 0) -> str:
    """What the command says."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_a_store_is_shown(shm_url: str) -> None:
    """Counts, keys, values of every kind; and what is not there, or damaged, by its exit code."""
    url = f"{shm_url}?budget=64M&segment=4M"
    with transfer.connect(url) as store:
        store.put({"a/1": torch.arange(3), "a/2": b"raw", "b": None, "c": {"reward": 1.5}})
    assert run("transfer", "stat", url).startswith("4 values, ")
    assert json.loads(run("transfer", "stat", url, "--json"))["keys"] == 4
    listed = run("transfer", "ls", url, "a/")
    assert [line.split()[-1] for line in listed.splitlines()] == ["a/1", "a/2"]
    assert "more than 1" in run("transfer", "ls", url, "--limit", "1")
    assert "tensor([0, 1, 2])" in run("transfer", "get", url, "a/1")
    assert run("transfer", "get", url, "a/2", "--raw") == "raw"
    assert run("transfer", "get", url, "b") == "None\n"
    assert "'reward': 1.5" in run("transfer", "get", url, "c")
    assert "nothing is stored under x" in run("transfer", "get", url, "x", code=4)
    assert "not bytes" in run("transfer", "get", url, "c", "--raw", code=2)
    assert "no store is called 'ftp'" in run("transfer", "stat", "ftp://x", code=2)


def test_a_queue_is_shown(shm_url: str, sqlite_url: str) -> None:
    """Its tasks, what waits, what is claimed by whom; what is not there, by its exit code."""
    ledger, tasks = sqlite_url, {"train": ["x", "r"], "log": []}
    with open_queue(shm_url, ledger, "rollouts", tasks, member="me") as queue:
        queue.put([Item(f"s{at}", {"x": at}, version=at) for at in range(5)])
        queue.put_fields({"s1": {"r": 1.0}})
        queue.claim("log", 2).acknowledge()
        held = queue.claim("log", 1)
        assert run("queue", "show", ledger) == "rollouts\n"
        told = run("queue", "show", ledger, "rollouts")
        lines = {line.split()[0]: line.split() for line in told.splitlines() if line}
        assert lines["train"][-4:] == ["4", "1", "0", "0"]
        assert lines["log"][-4:] == ["0", "2", "1", "2"]
        assert held.batch.owner in told
        found = json.loads(run("queue", "show", ledger, "rollouts", "--json"))
        assert (found["samples"], found["newest"]) == (5, 4)
    assert "no queue 'other'" in run("queue", "show", ledger, "other", code=4)
