"""torchrun's flags and variables: each is taken, or refused with what does it here."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from holdfast.errors import Mistake
from holdfast.launch import torch_flags
from holdfast.launch.commands import launch

TORCH = {
    action.dest: action
    for action in get_args_parser()._actions
    if action.option_strings and action.dest != "help"
}
"""The flags of the torch that is installed, as its own parser has them."""


def dry_run(folder: Path, *args: str, said: str = "", **env: str) -> dict[str, object]:
    """What a call would start, and what it says of its flags."""
    ledger = f"sqlite:///{folder}/l.db"
    found = CliRunner().invoke(
        launch,
        ["--dry-run", "--log-dir", str(folder), *args],
        env={"HOLDFAST_LEDGER": ledger, **env},
        catch_exceptions=False,
    )
    assert found.exit_code == 0, found.output
    assert said in found.stderr
    plan: dict[str, object] = json.loads(found.stdout)
    return plan


def test_every_flag_of_torchrun_is_in_one_table() -> None:
    """A flag that a new torch has, or no longer has, fails this test."""
    tables = [torch_flags.SAME, torch_flags.NOT_USED.keys(), torch_flags.REFUSED.keys()]
    assert sorted(name for table in tables for name in table) == sorted(TORCH)


@pytest.mark.parametrize("name", sorted(TORCH))
def test_every_spelling_of_torchruns_is_understood(name: str, tmp_path: Path) -> None:
    """With dashes and with underscores; switches take no value. What is refused says so."""
    action = TORCH[name]
    values = {"nnodes": "1", "nproc_per_node": "2", "max_restarts": "1", "node_rank": "3"}
    values |= {"redirects": "3", "tee": "3", "log_dir": str(tmp_path), "local_addr": "127.0.0.1"}
    value = [] if action.nargs == 0 else [values.get(name, "sqlite:////tmp/x.db")]
    if name == "rdzv_id":
        value = ["r"]
    for written in action.option_strings:
        script = ["--no-python", "true"] if name != "module" else ["true"]
        if name in torch_flags.REFUSED:
            with pytest.raises(Mistake, match=f"--{name.replace('_', '-')} .* not done here: "):
                dry_run(tmp_path, written, *value, *script)
        else:
            assert dry_run(tmp_path, written, *value, *script)["entry"] == "true"


def test_the_flags_of_the_script_are_its_own(tmp_path: Path) -> None:
    """They are handed on as they are; a flag that is not used is told."""
    told = "--master-port is not used: a port is chosen for every cycle"
    flags = ("--nproc_per_node=2", "--rdzv_id", "mine", "--master_port", "29500")
    plan = dry_run(tmp_path, *flags, "train.py", "--own_flag", "-x", said=told)
    assert (plan["run"], plan["workers"]) == ("mine", 2)
    assert plan["args"] == ["--own_flag", "-x"]


def test_the_variables_of_torchrun_count_and_the_command_line_counts_more(tmp_path: Path) -> None:
    """As with torchrun: PET_ and the flag's name."""
    env = {
        "PET_NNODES": "1:4",
        "PET_NPROC_PER_NODE": "3",
        "PET_RDZV_ID": "named",
        "PET_MAX_RESTARTS": "9",
        "PET_NODE_RANK": "7",
        "PET_NO_PYTHON": "1",
        "PET_STANDALONE": "0",
        "PET_RDZV_ENDPOINT": "master:29400",
    }
    plan = dry_run(tmp_path, "--nproc-per-node", "2", "true", **env)
    assert (plan["run"], plan["workers"], plan["infra_rank"]) == ("named", 2, 7)
    assert plan["kind"] == "program"
    rules = plan["rules"]
    assert isinstance(rules, dict)
    assert (rules["minimum"], rules["maximum"], rules["max_restarts"]) == (1, 4, 9)
    with pytest.raises(Mistake, match="give --grace SECONDS"):
        dry_run(tmp_path, "true", **env, PET_SHUTDOWN_TIMEOUT="5")
    with pytest.raises(Mistake, match="there is no store host here"):
        dry_run(tmp_path, "--rdzv-endpoint", "master:29400", "true", **env)


def test_every_flag_of_torchrun_has_its_variable() -> None:
    """torchrun reads one for each; so do we, also where it has none."""
    variables = {
        param.envvar for param in launch.params if isinstance(param, click.Option) and param.envvar
    }
    assert variables >= {f"PET_{name.upper()}" for name in TORCH}
