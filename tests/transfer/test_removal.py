"""`holdfast transfer rm` and `stores`: what goes, what is refused, what is said."""

import asyncio
import os

import pytest
from click.testing import CliRunner

from holdfast import transfer
from holdfast.errors import Conflict, Gone, Mistake, NotFound
from holdfast.transfer import shm
from holdfast.transfer.commands import transfer as command
from holdfast.transfer.queue import Item, open_queue
from holdfast.transfer.queue.overview import names
from holdfast.transfer.removal import remove_store


def say(*args: str) -> str:
    """What the command says; its error is raised."""
    done = CliRunner().invoke(command, args, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_store_in_shared_memory_is_removed_when_nobody_uses_it(shm_url: str) -> None:
    """In use it is refused, with the process that uses it; otherwise its memory is free."""
    with transfer.connect(f"{shm_url}?budget=64M&segment=4M") as store:
        with transfer.connect(shm_url) as other:
            other.put({"a": bytes(5 << 20), "b": b""})
        with pytest.raises(Conflict, match=rf"is in use by process {os.getpid()}\. .*--force"):
            say("rm", shm_url)
        assert store.get(["b"]) == {"b": b""}
        (listed,) = (one for one in shm.stores() if one.name == shm.store_name(shm_url))
        assert (listed.used, listed.pids, listed.budget) == (True, (os.getpid(),), 64 << 20)
        assert store.stat().taken <= listed.taken <= listed.budget
        line = next(line for line in say("stores").splitlines() if shm_url in line)
        assert str(os.getpid()) in line
    assert say("rm", shm_url).startswith(f"removed {shm_url}: 2 values, ")
    assert shm_url not in say("stores")
    with pytest.raises(NotFound):
        say("rm", shm_url)


def test_force_removes_a_store_in_use(shm_url: str) -> None:
    """Its users hear of it on every call, and may close it; a new store of that name is empty."""
    with transfer.connect(shm_url) as store:
        store.put({"a": b"1"})
        assert "removed" in say("rm", shm_url, "--force")
        with pytest.raises(Gone, match="was removed while this process had it open"):
            store.get(["a"])
        with pytest.raises(Gone, match="connect again"):
            store.put({"b": b""})
        with transfer.connect(shm_url) as other:
            assert other.stat().keys == 0


def test_a_queue_is_removed_with_its_records(shm_url: str, sqlite_url: str) -> None:
    """Only that queue: another one in the same store and ledger stays as it is."""
    ledger = sqlite_url
    which = ("rm", shm_url, "--queue", "rollouts", "--ledger", ledger)
    with open_queue(shm_url, ledger, "other", ["train"]) as other:
        other.put([Item("s", {"x": 1})])
        with open_queue(shm_url, ledger, "rollouts", ["train"]) as queue:
            queue.put([Item(f"s{at}", {"x": bytes(100)}) for at in range(200)])
            with pytest.raises(Conflict, match=r"has 1 member: member-\S+ \(process \d+ on"):
                say(*which)
        told = say(*which)
        assert "200 values" in told
        assert asyncio.run(names(ledger, "default")) == ["other"]
        assert say(*which).startswith("removed the queue rollouts of run default: 0 values")
        with open_queue(shm_url, ledger, "rollouts", ["train", "more"]) as again:
            assert all(again.put([Item("s1", {"x": 2})]).values()), "it is a new queue"
        assert other.claim("train", 1).fetch() == [{"x": 1}]


def test_a_server_does_not_know_its_users(redis_url: str) -> None:
    """There --force is always needed, and takes nothing that is not ours."""
    neighbour = redis_url.removesuffix(":") + "x:"
    with transfer.connect(redis_url) as store, transfer.connect(neighbour) as beside:
        store.put({f"k{at}": b"1" for at in range(50)})
        beside.put({"theirs": b"2"})
        with pytest.raises(Conflict, match="does not know which processes use it"):
            say("rm", redis_url)
        assert "50 values" in say("rm", redis_url, "--force")
        assert store.stat().keys == 0
        assert beside.get(["theirs"]) == {"theirs": b"2"}


def test_what_cannot_be_removed() -> None:
    """Memory of one process; half of what a queue needs; a name that is none."""
    with pytest.raises(Mistake, match="in the memory of one process"):
        remove_store("memory:x", force=True)
    with pytest.raises(Mistake, match="is not the name of a store"):
        remove_store("shm://..", force=True)
    alone = CliRunner().invoke(command, ["rm", "shm://x", "--queue", "q"])
    assert (alone.exit_code, "belong together" in alone.output) == (2, True)
