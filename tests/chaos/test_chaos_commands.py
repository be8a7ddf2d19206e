"""`holdfast chaos`: the commands as real processes, ended by real signals."""

import re
import signal
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from holdfast.chaos.commands import chaos
from holdfast.errors import Mistake
from holdfast.proc import Child, spawn
from kids import state
from patience import auntil

from .wires import LIMIT_S

COMMAND = [sys.executable, "-c", "from holdfast.chaos.commands import chaos; chaos()"]


def start(*arguments: str) -> Child:
    return spawn([*COMMAND, *arguments], stdout=subprocess.PIPE)


def line(child: Child) -> str:
    assert child.process.stdout is not None
    return child.process.stdout.readline().decode()


def rest(child: Child) -> str:
    assert child.process.stdout is not None
    return child.process.stdout.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_proxy_forwards_corrupts_and_tells(number: int) -> None:
    """It prints where it listens, breaks what it was told to, and ends in good order on a
    signal with its counts."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        start("proxy", "--to", f"127.0.0.1:{listener.getsockname()[1]}", "--corrupt", "1.0",
              "--direction", "to_server", "--delay", "1ms") as child,
    ):  # fmt: skip
        found = re.match(r"listening on 127\.0\.0\.1:(\d+), forwarding to", line(child))
        assert found is not None
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=LIMIT_S) as sock:
            peer, _ = listener.accept()
            with peer:
                sock.sendall(b"abc")
                got = peer.recv(3, socket.MSG_WAITALL)
                assert all((a ^ b).bit_count() == 1 for a, b in zip(got, b"abc", strict=True))
                peer.sendall(b"xyz")
                assert sock.recv(3, socket.MSG_WAITALL) == b"xyz"
                child.signal(number)
                assert child.wait(LIMIT_S) == 0
        counts = dict(one.split() for one in rest(child).splitlines())
        assert (counts["connections"], counts["flips_to_server"]) == ("1", "3")
        assert (counts["bytes_to_client"], counts["flips_to_client"]) == ("3", "0")


def test_the_proxy_cuts_and_heals_by_the_clock() -> None:
    """With --cut-every and --for it needs nobody."""
    with start("proxy", "--to", "127.0.0.1:1", "--cut-every", "50ms", "--cut-for", "20ms",
               "--for", "500ms") as child:  # fmt: skip
        assert child.wait(LIMIT_S) == 0
        counts = dict(one.split() for one in rest(child).splitlines()[1:])
        assert int(counts["cuts"]) >= 2
        assert int(counts["heals"]) >= int(counts["cuts"]) - 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_kill_ended_by_a_signal_leaves_nobody_stopped(number: int) -> None:
    """Every paused victim is continued before the command ends."""
    with spawn(["sleep", "600"]) as one, spawn(["sleep", "600"]) as other:
        pids = [one.pid, other.pid]
        with start("kill", *map(str, pids), "--kinds", "pause", "--every", "10ms",
                   "--pause", "10m", "--for", "1h") as child:  # fmt: skip
            await auntil(lambda: all(state(pid) == "T" for pid in pids))
            child.signal(number)
            assert child.wait(LIMIT_S) == 0
            told = rest(child)
        await auntil(lambda: all(state(pid) != "T" for pid in pids))
        for pid in pids:
            assert f"{pid}  pause for" in told
            assert f"{pid}  continue" in told


def test_kill_kills() -> None:
    """The end of the plan is the end of the command."""
    with (
        spawn(["sleep", "600"]) as victim,
        start(
            "kill", str(victim.pid), "--kinds", "kill", "--every", "50ms", "--for", "10s"
        ) as child,
    ):
        assert victim.wait(LIMIT_S) == -signal.SIGKILL
        assert child.wait(LIMIT_S) == 0
        assert f"{victim.pid}  kill\n" in rest(child)


def test_a_dry_run_prints_the_plan_and_does_nothing() -> None:
    """The same plan each time, and the victim lives."""
    with spawn(["sleep", "600"]) as victim:
        arguments = ["kill", str(victim.pid), "--seed", "3", "--every", "1s", "--dry-run"]
        first, second = (CliRunner().invoke(chaos, arguments) for _ in range(2))
        assert first.exit_code == 0
        assert first.output == second.output
        assert str(victim.pid) in first.output
        assert victim.alive()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["proxy"], "--to"),
        (["proxy", "--to", "nowhere"], "not HOST:PORT"),
        (["proxy", "--to", "a:1", "--delay", "soon"], "not a time"),
        (["proxy", "--to", "a:1", "--corrupt", "0.1", "--corrupt-every", "9"], "not both"),
        (["kill"], "PID"),
        (["kill", "1"], "1"),
    ],
)
def test_wrong_usage_is_explained(arguments: list[str], said: str) -> None:
    """Exit code 2 and a sentence."""
    result = CliRunner().invoke(chaos, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_process_that_is_not_there_is_a_mistake() -> None:
    """Found out before anything is done."""
    with spawn(["true"]) as gone:
        assert gone.wait(LIMIT_S) == 0
        result = CliRunner().invoke(chaos, ["kill", str(gone.pid)])
    assert isinstance(result.exception, Mistake)
