"""The commands `holdfast chaos proxy`, `kill` and `during`.

Thin: options in, `proxy` and `processes` do the work, lines out. Both commands end in
good order on Ctrl-C, SIGTERM and SIGHUP, so that connections are closed, statistics are
printed and nobody is left stopped.
"""

import asyncio
import contextlib
import dataclasses
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, get_args

import click

from holdfast import proc
from holdfast.chaos import processes
from holdfast.chaos.below import one_below
from holdfast.chaos.proxy import CutMode, Proxy
from holdfast.chaos.stream import Directions
from holdfast.errors import Gone, Mistake
from holdfast.jobs.note import read_note
from holdfast.machine import state_dir

__all__ = ["chaos"]

F = TypeVar("F", bound=Callable[..., Any])

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_LONGEST_S = 86_400.0
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _duration(text: str | float) -> float:
    """Seconds from a time such as 500ms, 10s, 2m; a bare number is seconds."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s|m|h|)", str(text).strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time such as 500ms, 10s or 2m")
    return float(match[1]) * _UNITS_S[match[2]]


def _address(text: str | tuple[str, int]) -> tuple[str, int]:
    """HOST:PORT, with [brackets] around an IPv6 address."""
    if isinstance(text, tuple):
        return text
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def _time(flag: str, about: str, *names: str, default: str | None = None) -> Callable[[F], F]:
    """An option that is a time."""
    return click.option(flag, *names, type=_duration, metavar="TIME", default=default, help=about)


def _chance(flag: str, about: str) -> Callable[[F], F]:
    """An option that is a probability."""
    return click.option(flag, type=click.FloatRange(0, 1), default=0.0, metavar="P", help=about)


def _bytes(flag: str, kind: click.ParamType[Any], about: str) -> Callable[[F], F]:
    """An option that is a number of bytes."""
    return click.option(flag, type=kind, metavar="BYTES", help=about)


def _seed(command: F) -> F:
    return click.option("--seed", type=int, default=0, show_default=True)(command)


@click.group()
def chaos() -> None:
    """Break real connections and real processes, by seed."""


@chaos.command()
@click.option(
    "--listen", type=_address, metavar="HOST:PORT", default="127.0.0.1:0", show_default=True
)
@click.option("--to", type=_address, metavar="HOST:PORT", required=True, help="The real server.")
@_time("--delay", "Hold every chunk back.", default="0s")
@_time("--jitter", "Vary the delay by up to this.", default="0s")
@_chance("--drop", "Reset a connection with this probability, at a random byte.")
@_chance("--corrupt", "Flip one bit of a byte with this probability.")
@_bytes("--corrupt-every", click.IntRange(1), "Flip one bit in every so many bytes.")
@_bytes(
    "--throttle",
    click.FloatRange(0, min_open=True),
    "Pass at most so many bytes per second and connection.",
)
@_bytes("--truncate", click.IntRange(0), "End every stream in good order after so many bytes.")
@click.option(
    "--direction",
    type=click.Choice(get_args(Directions)),
    default="both",
    help="Where bytes are delayed, corrupted, throttled, truncated, dropped.",
)
@_time("--cut-every", "Cut the line this often ...")
@_time("--cut-for", "... for this long (2s).", default="2s")
@click.option(
    "--cut-mode",
    type=click.Choice(get_args(CutMode)),
    default="refuse",
    help="Whether new connections are refused or never answered.",
)
@_time("--for", "End after this time.", "for_s")
@_seed
def proxy(
    listen: tuple[str, int],
    to: tuple[str, int],
    cut_every: float | None,
    cut_for: float,
    cut_mode: CutMode,
    for_s: float | None,
    seed: int,
    direction: Directions,
    **faults: Any,
) -> None:
    """Stand between a client and a server, and break the line.

    Prints the address to connect to, and at the end what it has done. Ctrl-C ends it.

    \b
    Examples:
      holdfast chaos proxy --to 127.0.0.1:2379 --delay 100ms --jitter 50ms
      holdfast chaos proxy --to 127.0.0.1:6379 --corrupt 0.001 --direction to_client
      holdfast chaos proxy --to 127.0.0.1:2379 --cut-every 10s --cut-for 2s --for 1m
    """
    line = Proxy(*to, listen_host=listen[0], listen_port=listen[1], seed=seed)
    if faults["corrupt"] and faults["corrupt_every"]:
        raise click.UsageError("give --corrupt or --corrupt-every, not both")

    async def run() -> None:
        async with line:
            host, port = line.address
            click.echo(f"listening on {host}:{port}, forwarding to {to[0]}:{to[1]}, seed {seed}")
            _break(line, direction, faults)
            while cut_every is not None:
                await asyncio.sleep(cut_every)
                line.cut(cut_mode)
                await asyncio.sleep(cut_for)
                line.heal()
                _break(line, direction, faults)
            await asyncio.Event().wait()

    _run_until_told(run(), for_s)
    for name, count in dataclasses.asdict(line.stats).items():
        click.echo(f"{name:<18} {count}")


def _break(line: Proxy, direction: Directions, faults: Mapping[str, Any]) -> None:
    """Switch on what was asked for, by the names of the options."""
    line.delay(faults["delay"], faults["jitter"], direction=direction)
    every_bytes = faults["corrupt_every"] or 0
    line.corrupt(faults["corrupt"], every_bytes=every_bytes, direction=direction)
    if faults["drop"]:
        line.drop(faults["drop"], direction=direction)
    if faults["throttle"] is not None:
        line.throttle(faults["throttle"], direction=direction)
    if faults["truncate"] is not None:
        line.truncate(faults["truncate"], direction=direction)


@chaos.command()
@click.argument("pids", nargs=-1, required=True, type=click.IntRange(2), metavar="PID...")
@click.option("--kinds", default="kill,pause", show_default=True, help="What may be done.")
@_time("--every", "About this often (5s).", default="5s")
@_time("--for", "For this long (60s).", "for_s", default="60s")
@_time("--pause", "The longest pause (3s).", default="3s")
@_seed
@click.option("--dry-run", is_flag=True, help="Print the plan, and do nothing.")
def kill(
    pids: tuple[int, ...],
    kinds: str,
    every: float,
    for_s: float,
    pause: float,
    seed: int,
    dry_run: bool,
) -> None:
    """Kill and pause processes at moments chosen by seed.

    Only the processes named, and only while they are the same processes. A paused one is
    always continued, also on Ctrl-C. The first process, this one and its ancestors are
    refused.

    \b
    Examples:
      holdfast chaos kill 4242 4243 --seed 7
      holdfast chaos kill 4242 --kinds pause --every 2s --for 30s
      holdfast chaos kill 4242 4243 --seed 7 --dry-run
    """
    actions = processes.plan(seed, [str(pid) for pid in pids], for_s, **_how(kinds, every, pause))
    if dry_run:
        for action in actions:
            click.echo(str(processes.Outcome(action, "done", None, action.at_s)))
        return
    targets = {str(pid): _identify(pid) for pid in pids}
    _run_until_told(
        processes.carry_out(actions, targets, lambda outcome: click.echo(str(outcome))), None
    )


@chaos.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--below", "pid", type=click.IntRange(2), help="Whose children [default: your `serve`'s]."
)
@click.option(
    "--match",
    "words",
    multiple=True,
    default=("holdfast.trainer",),
    show_default=True,
    help="What the command of a process to be hurt says; may be given again.",
)
@click.option("--kinds", default="kill", show_default=True, help="kill, pause.")
@_time("--every", "About this often (5s).", default="5s")
@_time("--pause", "The longest pause (3s).", default="3s")
@_seed
def during(
    command: tuple[str, ...],
    pid: int | None,
    words: tuple[str, ...],
    kinds: str,
    every: float,
    pause: float,
    seed: int,
) -> None:
    """Run COMMAND, and meanwhile kill what works for it, again and again.

    Ends when COMMAND ends, with its exit code.

    \b
    Examples:
      holdfast chaos during -- python train.py
      holdfast chaos during --match holdfast.trainer --match holdfast.gateway --every 3s \\
          -- python train.py
    """
    if pid is None:
        note = read_note(state_dir())
        if note is None or not note.pid:
            raise Mistake("whose children? Start `holdfast serve` here, or give --below PID")
        pid = note.pid
    _identify(pid)
    how = _how(kinds, every, pause)
    actions = processes.plan(seed, list(words), _LONGEST_S, respawn=True, **how)
    done: list[processes.Outcome] = []

    def tell(outcome: processes.Outcome) -> None:
        if outcome.result == "done":
            done.append(outcome)
        click.echo(f"chaos: {outcome} (pid {outcome.pid})", err=True)

    with proc.spawn(list(command), name=command[0]) as child:

        async def hurt() -> None:
            chaos = asyncio.ensure_future(processes.carry_out(actions, one_below(pid, seed), tell))
            while child.alive():  # noqa: ASYNC110 -- another process's end
                await asyncio.sleep(0.05)
            chaos.cancel()

        _run_until_told(hurt(), None)
        code = child.wait(5.0) if not child.alive() else 130
    click.echo(f"chaos: {len(done)} faults, seed {seed}; {command[0]} ended with {code}", err=True)
    sys.exit(code if code >= 0 else 128 - code)


def _how(kinds: str, every_s: float, pause_s: float) -> dict[str, Any]:
    """What is done, how often and for how long, as `processes.plan` takes it."""
    wanted = [one.strip() for one in kinds.split(",") if one.strip()]
    return {"kinds": wanted, "every_s": every_s, "pause_s": (min(0.5, pause_s), pause_s)}


def _identify(pid: int) -> processes.Identity:
    try:
        return processes.identify(pid)
    except Gone as error:
        raise Mistake(f"{error}: name running processes") from None


def _run_until_told(work: Coroutine[Any, Any, object], limit_s: float | None) -> None:
    """Run until the work is done, the time is up, or a signal asks for the end."""

    async def main() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in _END_SIGNALS:
            loop.add_signal_handler(number, task.cancel)
        try:
            with contextlib.suppress(TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(limit_s):
                    await task
        finally:
            for number in _END_SIGNALS:
                loop.remove_signal_handler(number)

    asyncio.run(main())
