"""What workers are told: torchrun's variables, and the rule for starting early."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import Mistake, TooLarge
from holdfast.launch import spec as specs
from holdfast.launch.spec import Order, Spec, arguments, base, encode, environment
from launch.node import make_seat, script


def test_every_slot_has_its_own_place() -> None:
    """Ranks follow from the node's first rank; the counts are those of node, group and world."""
    seat = make_seat(2, rank=1, nodes=3, first_rank=2, world_size=6)
    env = environment(Spec(entry="t.py", slots=2), seat, 1, error_file="/e", beat="/b")
    assert env == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "ROLE_RANK": "3",
        "ROLE_NAME": "default",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "r1",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": "/e",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "HOLDFAST_RUN": "r1",
        "HOLDFAST_CYCLE": "3",
        "HOLDFAST_CYCLE_REVISION": "17",
        "HOLDFAST_LEDGER": "sqlite:///x",
        "HOLDFAST_NODE": "n0",
        "HOLDFAST_BEAT": "/b",
    }


@pytest.mark.parametrize(
    ("slots", "env", "expected"),
    [
        (1, {}, None),
        (2, {}, "1"),
        (2, {"OMP_NUM_THREADS": "4"}, "4"),
        (1, {"OMP_NUM_THREADS": "4"}, "4"),
    ],
)
def test_omp_threads_as_torchrun(slots: int, env: dict[str, str], expected: str | None) -> None:
    """One thread each if there are several workers and the user did not say otherwise."""
    assert base(Spec(entry="t.py", slots=slots, env=env)).get("OMP_NUM_THREADS") == expected


def test_the_base_holds_nothing_of_a_seat() -> None:
    """A launcher inside a launcher does not leak its own rank into early interpreters."""
    stale = dict.fromkeys(specs.PER_SEAT, "9") | {"HOME": "/h"}
    assert base(Spec(entry="t.py", env=stale)) == {
        "HOME": "/h",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def test_a_seat_adds_only_what_may_differ() -> None:
    """Whatever the seat, an interpreter that was started with the base can serve it."""
    spec = Spec(entry="t.py", slots=2, env={"HOME": "/h", "RANK": "9"})
    env = environment(spec, make_seat(2), 0, error_file="/e", beat="/b")
    assert specs.import_time_differences(base(spec), env) == ()
    assert env.keys() - base(spec).keys() == specs.PER_SEAT


@pytest.mark.parametrize(
    ("started", "ordered", "names"),
    [
        ({"A": "1"}, {"A": "1", "RANK": "3"}, ()),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, ("OMP_NUM_THREADS",)),
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}, ("CUDA_VISIBLE_DEVICES",)),
        ({"PYTHONPATH": "/a", "LD_PRELOAD": "x"}, {}, ("LD_PRELOAD", "PYTHONPATH")),
        ({}, {"HOLDFAST_FAULTS": "a.b:kill"}, ("HOLDFAST_FAULTS",)),
    ],
)
def test_what_may_not_differ(
    started: dict[str, str], ordered: dict[str, str], names: tuple[str, ...]
) -> None:
    """Everything but the variables of a seat."""
    assert specs.import_time_differences(started, ordered) == names


def test_arguments_know_their_slot() -> None:
    """`${local_rank}` is replaced, as torchrun does; nothing else is touched."""
    spec = Spec(entry="t.py", args=("--r=${local_rank}", "$HOME", "$$"), slots=2)
    assert arguments(spec, 1) == ("--r=1", "$HOME", "$$")


def test_bad_values_are_refused() -> None:
    """One clear line each."""
    with pytest.raises(Mistake, match="nothing to run"):
        Spec(entry="")
    with pytest.raises(Mistake, match="1 to 1024 workers"):
        Spec(entry="t.py", slots=0)


def test_an_order_carries_any_bytes() -> None:
    """What is not UTF-8 in the environment arrives as Python keeps it; size is bounded."""
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")
    order = Order(entry="t.py", kind="script", args=(odd,), env={"A": odd}, cwd="/")
    data = encode(order)
    assert int.from_bytes(data[:4], "big") == len(data) - 4
    assert json.loads(data[4:])["env"]["A"] == odd
    with pytest.raises(TooLarge, match="at most"):
        encode(Order(entry="t.py", kind="script", args=("x" * (1 << 23),), env={}, cwd="/"))


@pytest.mark.long
def test_nothing_that_torchrun_sets_is_missing(tmp_path: Path) -> None:
    """Real torchrun against us: every variable that it adds, we add too."""
    path = script(tmp_path, "import json, os; print(json.dumps(dict(os.environ)))")
    clean = {"PATH": "/usr/bin", "HOME": str(tmp_path)}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    told = subprocess.run(
        [*run, "--redirects=3", "--log-dir", str(tmp_path / "l"), str(path)],
        env=clean,
        check=True,
        timeout=100,
        capture_output=True,
    )
    outputs = list((tmp_path / "l").rglob("stdout.log"))
    assert len(outputs) == 2, told.stderr.decode()
    theirs = json.loads(outputs[0].read_text())
    spec = Spec(entry="t.py", slots=2, env=clean)
    ours = environment(spec, make_seat(2), 0, error_file="/e", beat="/b")
    assert theirs.keys() - ours.keys() <= {"LC_CTYPE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
