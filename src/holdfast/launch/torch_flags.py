"""torchrun's flags, all of them, and what `holdfast launch` makes of each.

Every flag of torch 2.13's own parser is in one of three tables. A test compares them with the
parser of the torch that is installed, so that a new flag is noticed. Each may also be given as a
variable, as with torchrun: `PET_NNODES` for `--nnodes`. What stands on the command line counts
more.
"""

import click

from holdfast.errors import Mistake

__all__ = ["NOT_USED", "REFUSED", "SAME", "check", "hidden_options", "take_variables"]

SAME = frozenset(
    {
        "nnodes",
        "nproc_per_node",
        "rdzv_endpoint",
        "rdzv_id",
        "max_restarts",
        "module",
        "no_python",
        "log_dir",
        "redirects",
        "tee",
        "node_rank",
        "local_addr",
    }
)
"""They mean here what they mean there; `rdzv_endpoint` names a ledger."""

NOT_USED = {
    "standalone": "without --run and with one node a run stands alone",
    "rdzv_backend": "the ledger is the rendezvous",
    "rdzv_conf": "its settings have flags of their own: --last-call, --join-timeout",
    "monitor_interval": "nothing polls: ends are heard of at once",
    "start_method": "workers are programs of their own",
    "role": "there is one role",
    "master_addr": "the node with rank 0 is chosen for every cycle",
    "master_port": "a port is chosen for every cycle",
    "event_log_handler": "events are in <log-dir>/<run>/events/<node>.jsonl",
    "run_path": "a warm interpreter runs a script in this way in any case",
}
"""They are taken, told about and not used, by name: why."""

REFUSED = {
    "shutdown_timeout": "give --grace SECONDS: the time from SIGTERM to SIGKILL",
    "signals_to_handle": "leave it out: SIGTERM and Ctrl-C let the workers end in peace, and "
    "--grace SECONDS says how long they have",
    "virtual_local_rank": "leave it out, and set CUDA_VISIBLE_DEVICES from LOCAL_RANK in the "
    "script, or in a program that starts it: --no-python",
    "numa_binding": "bind workers with a program that starts the script, such as --no-python "
    "numactl --cpunodebind=0 --membind=0 python train.py",
    "local_ranks_filter": "give --tee 0:3,1:3 to see local ranks 0 and 1 on the terminal; the "
    "files in --log-dir have all of them",
    "duplicate_stdout_filters": "search the files in --log-dir: <run>/cycle_<n>/rank_<r>.stdout",
    "duplicate_stderr_filters": "search the files in --log-dir: <run>/cycle_<n>/rank_<r>.stderr",
    "logs_specs": "logs are set by --log-dir, --redirects and --tee",
}
"""They would change what the run does, and are refused, by name: what does it here."""

_SWITCHES = frozenset({"standalone", "run_path", "virtual_local_rank"})


def flag(name: str) -> str:
    """A flag as it is written."""
    return f"--{name.replace('_', '-')}"


def hidden_options(command: click.decorators.FC) -> click.decorators.FC:
    """Add the flags that are not used or refused, so that they can be told about."""
    for name in (*NOT_USED, *REFUSED):
        command = click.option(flag(name), hidden=True, is_flag=name in _SWITCHES)(command)
    return command


def take_variables(command: click.Command) -> None:
    """Let every flag of torchrun's be given as a variable, too."""
    for param in command.params:
        for written in param.opts if isinstance(param, click.Option) else ():
            name = written.removeprefix("--").replace("-", "_")
            if name in SAME or name in NOT_USED or name in REFUSED:
                param.envvar = f"PET_{name.upper()}"


def check(given: dict[str, object]) -> list[str]:
    """Refuse what must not be passed over; returns what there is to say about the rest."""
    for name, instead in REFUSED.items():
        if given[name]:
            raise Mistake(f"{flag(name)} (or PET_{name.upper()}) is not done here: {instead}")
    return [f"{flag(name)} is not used: {why}" for name, why in NOT_USED.items() if given[name]]
