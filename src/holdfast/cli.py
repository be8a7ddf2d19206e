"""The command `holdfast`.

Subcommands live with the parts they belong to and are imported when they are called.
Exit codes: 0 done; 1 what was checked does not hold; 2 the call must be changed; 3 try
again later; 4 gone or not found; 5 fenced;
6 corrupt; 7 the outcome is unknown: look before trying again; 70 a bug in Holdfast;
130 interrupted; 141 the reader of the output has left.
"""

import json
import os
import sys
import traceback
from importlib import import_module

import click

from holdfast import __version__
from holdfast.errors import HoldfastError

__all__ = ["main"]

_LEFT = 141  # what a shell reports for a program that SIGPIPE has ended

# name -> (module, attribute, one line for the overview)
_COMMANDS = {
    "accounts": ("holdfast.gateway.commands", "accounts", "Make and revoke API keys."),
    "chaos": ("holdfast.chaos.commands", "chaos", "Break things on purpose, by seed."),
    "clean": ("holdfast.commands", "clean", "Remove what a killed run left in memory."),
    "check": ("holdfast.check.commands", "check", "Check a run's promises from its event logs."),
    "doctor": ("holdfast.doctor", "doctor", "Check this machine and a configuration."),
    "faults": ("holdfast.cli", "faults", "List the named fault points."),
    "jobs": ("holdfast.jobs.commands", "jobs", "Create trainer jobs, and look after them."),
    "launch": ("holdfast.launch.commands", "launch", "Run a program on several nodes."),
    "ledger": ("holdfast.ledger.commands", "ledger", "Look into a ledger, and look after it."),
    "nodes": ("holdfast.launch.commands", "nodes", "Move nodes of a run out, or back in."),
    "queue": ("holdfast.transfer.commands", "queue", "Look into a queue of samples."),
    "run": ("holdfast.commands", "run", "Run a whole RL job, and keep it running."),
    "serve": ("holdfast.gateway.commands", "serve", "Start control plane, gateway and host."),
    "sim": ("holdfast.sim.commands", "sim", "Simulate the protocols under seeded faults."),
    "status": ("holdfast.launch.commands", "status", "Show the nodes of a run."),
    "transfer": ("holdfast.transfer.commands", "transfer", "Look into a store of values."),
    "why": ("holdfast.commands", "why", "Say what a run is waiting for."),
    "weights": (
        "holdfast.weights.commands",
        "weights",
        "Look into a channel of weights, and look after it.",
    ),
}


class _Commands(click.Group):
    """Imports a subcommand only when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][2]) for name in sorted(_COMMANDS)])


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 99},
    epilog="Exit codes: 0 done, 1 a check failed, 2 bad call, 3 try again later, 4 gone or not "
    "found, 5 fenced, 6 corrupt, 7 outcome unknown (look first), 70 a bug, 130 interrupted. "
    "Every command has a --help of its own.",
)
@click.version_option(__version__, prog_name="holdfast")
@click.option("--debug", is_flag=True, help="Show the whole traceback of an error.")
def cli(debug: bool) -> None:
    """Keep distributed RL post-training running while parts of it die.

    Kill any process at any moment: nothing is lost, nothing is done twice, and the run
    ends with the same weights, bit for bit.

    \b
    Try:
      holdfast doctor                          is this machine fit?
      holdfast sim election --seeds 1000       see a protocol survive 1000 bad days
      holdfast sim election --seed 7           replay one of them
      holdfast ledger watch sqlite:///x.db     follow a ledger live
    """


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def faults(as_json: bool) -> None:
    """List the named fault points: places in the code where a test can kill, stop or delay.

    \b
    Arm them with the environment variable HOLDFAST_FAULTS, for instance
      HOLDFAST_FAULTS="ledger.sqlite.after_commit:kill@3" python my_script.py
    """
    from holdfast.faults import catalogue

    for name, about in catalogue().items():
        click.echo(
            json.dumps({"point": name, "about": about}) if as_json else f"{name:40} {about}"
        )


def main() -> None:
    """Run the command line; errors become one line and an exit code."""
    debug = "--debug" in sys.argv
    try:
        code = _run()
    except click.exceptions.Exit as end:
        code = end.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except HoldfastError as error:
        _complain(str(error), debug=debug)
        code = error.exit_code
    except BrokenPipeError:  # the reader of our output has left, as in `... | head`
        code = _LEFT
    except OSError as error:
        _complain(f"the system refused: {error}", debug=debug)
        code = 3
    except Exception as error:  # noqa: BLE001 -- the outermost boundary
        _complain(
            f"internal error: {type(error).__name__}: {error} "
            "(run again with --debug before the command to see where)",
            debug=debug,
        )
        code = 70
    sys.exit(_flushed(code))


def _run() -> int:
    # Not click's own main(): it turns a reader who has left into exit code 1.
    with cli.make_context("holdfast", sys.argv[1:]) as context:
        if plan := os.environ.get("HOLDFAST_FAULTS"):
            from holdfast import faults as fault_points

            fault_points.check(plan)  # a misspelt point would never fire
        cli.invoke(context)
    return 0


def _flushed(code: int) -> int:
    """Write out what is left; a reader who has left meanwhile must not raise again."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return code or _LEFT
        _complain(f"the output could not be written: {error}", debug=False)
        return code or 3
    return code


def _complain(message: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    click.echo(f"holdfast: {message}", err=True)


if __name__ == "__main__":
    main()
