"""Ledgers of before: every record of every kind is read, by programs and for people."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from compat.sides import unpack
from holdfast import ledger
from holdfast.cli import cli
from holdfast.jobs import records as jobs
from holdfast.ledger import Entry, Put
from holdfast.ledger.audit import Override
from holdfast.ledger.election import Leader, Token
from holdfast.ledger.records import Record, decode, encode
from holdfast.rendezvous import records as rendezvous
from holdfast.run import records as run
from holdfast.trainer import records as trainer
from holdfast.transfer.queue import records as queue
from holdfast.transfer.queue import steps
from holdfast.weights import records as weights

LEDGERS = {
    "run": "killed/ledger.db",
    "ended": "ledger.db",
    "house": "ledger.db",
    "records": "ledger.db",
}
KINDS: dict[str, type[Record]] = {
    "/holdfast/audit/[^/]+": Override,
    "/fixture/election/leader": Leader,
    "/fixture/election/token": Token,
    "R/accounts/[^/]+": jobs.Account,
    "R/commands": jobs.Commands,
    "R/jobs/alive/[^/]+/[^/]+": jobs.Alive,
    "R/jobs/checkpoints/[^/]+/[^/]+/.+": jobs.Checkpoint,
    "R/jobs/hosts/[^/]+": jobs.Host,
    "R/jobs/records/[^/]+/[^/]+": jobs.Job,
    "R/queue/[^/]+/barrier": Record,
    "R/queue/[^/]+/block/[0-9]{12}": queue.Block,
    "R/queue/[^/]+/config": queue.Config,
    "R/queue/[^/]+/done/[0-9]{12}": queue.Done,
    "R/queue/[^/]+/fields/[0-9]{12}/[^/]+": queue.Fields,
    "R/queue/[^/]+/finished/train": steps.Finished,
    "R/queue/[^/]+/freed/[0-9]{12}": queue.Freed,
    "R/queue/[^/]+/head": queue.Head,
    "R/queue/[^/]+/member/[^/]+": queue.Member,
    "R/queue/[^/]+/state/[0-9]{12}/[^/]+": queue.State,
    "R/queue/[^/]+/steps/train/[0-9]{12}": steps.StepRecord,
    "R/rdzv/drains/[^/]+": rendezvous.Drain,
    "R/rdzv/ends/[0-9]+/[0-9]+": rendezvous.End,
    "R/rdzv/head/closer": rendezvous.Closer,
    "R/rdzv/head/cycle": rendezvous.Cycle,
    "R/rdzv/nodes/[^/]+": rendezvous.Node,
    "R/steps/commit/[0-9]{8}": run.StepRecord,
    "R/steps/done/[0-9]{8}": run.StepDone,
    "R/steps/drop/[0-9]{8}/[0-9]{5}": run.Drop,
    "R/steps/end": run.RunDone,
    "R/steps/eval/[0-9]{8}": run.EvalDone,
    "R/steps/model(/session)?": run.ModelRecord,
    "R/trainer/[^/]+/[^/]+/models/[^/]+": trainer.Model,
    "R/trainer/[^/]+/[^/]+/now": trainer.Now,
    "R/trainer/[^/]+/[^/]+/ops/[^/]+/[0-9]{10}": trainer.Entry,
    "R/trainer/[^/]+/[^/]+/results/[^/]+/[0-9]{10}": trainer.Result,
    "R/trainer/[^/]+/[^/]+/samplers/[^/]+": trainer.Sampler,
    "R/trainer/[^/]+/[^/]+/saved/[^/]+/[^/]+/[^/]+": trainer.Save,
    "R/trainer/[^/]+/[^/]+/seat": trainer.Seat,
    "R/trainer/[^/]+/[^/]+/sessions/[^/]+": trainer.Session,
    "R/weights/[^/]+/live/consumers/[^/]+/[0-9]+": weights.Consumer,
    "R/weights/[^/]+/live/head": weights.Head,
    "R/weights/[^/]+/live/marks/[0-9]{12}": weights.Mark,
    "R/weights/[^/]+/live/target": weights.Target,
    "R/weights/[^/]+/live/versions/[0-9]{12}": weights.Version,
    "R/weights/[^/]+/live/writer": weights.Writer,
    "R/weights/[^/]+/swept/[0-9]{12}": weights.Swept,
}
"""Which keys have which records (R is /runs/RUN): what the fixtures were written with."""
PATTERNS = {re.compile(text.replace("R/", "/runs/[^/]+/", 1)): text for text in KINDS}
PLAIN = re.compile("/fixture/by-hand|/runs/[^/]+/jobs/epochs/[^/]+/[^/]+|/end of the past")
"""What is no record: a value by hand, a number, and the mark below."""


def everything(path: Path) -> Iterator[Entry]:
    """Whatever was ever written to a ledger, also what has ended with its lease since."""
    with ledger.open_sync(f"sqlite:///{path}") as opened:
        opened.txn([], [Put("/end of the past", b"")])
        watch = opened.watch("/", start=1)
        while True:
            batch = watch.next(60.0)
            assert batch is not None, "the history has no end"
            written = [event.entry for event in batch.events if event.entry is not None]
            yield from written
            if any(entry.key == "/end of the past" for entry in written):
                watch.close()
                return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All fixtures that have a ledger."""
    place = tmp_path_factory.mktemp("ledgers")
    for name in LEDGERS:
        unpack(name, place)
    return place


def test_every_record_is_read(folder: Path) -> None:
    """Every value that was ever written is a record of its kind; it is written again as it was."""
    seen = set()
    for name, path in LEDGERS.items():
        for entry in everything(folder / name / path):
            found = [text for pattern, text in PATTERNS.items() if pattern.fullmatch(entry.key)]
            if not found:
                assert PLAIN.fullmatch(entry.key), f"{entry.key}: what is this?"
                continue
            (kind,) = found
            seen.add(kind)
            before = json.loads(entry.value)
            after = json.loads(encode(decode(KINDS[kind], entry)))
            assert before.items() <= after.items(), f"{entry.key} lost something"
            assert before["schema"] == after["schema"] == KINDS[kind].SCHEMA, entry.key
    assert seen == set(KINDS), "these were not in any fixture"


def told(*words: str) -> str:
    """What `holdfast` with these words prints."""
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


@pytest.mark.parametrize("name", LEDGERS)
def test_a_ledger_is_sound_and_shown(folder: Path, name: str) -> None:
    """`ledger check`, `ls` and `get`."""
    url = f"sqlite:///{folder / name / LEDGERS[name]}"
    told("ledger", "check", url)
    listed = [json.loads(line) for line in told("ledger", "ls", url, "--json").splitlines()]
    assert len(listed) > 20, listed
    assert told("ledger", "get", url, listed[-1]["key"])


def test_overviews_show_them(folder: Path) -> None:
    """Those of queue, rendezvous and weights."""
    url = f"sqlite:///{folder / 'records' / 'ledger.db'}"
    queue = json.loads(told("queue", "show", url, "rollouts", "--run", "r", "--json"))
    assert (queue["ever"], queue["samples"], queue["blocks"]) == (2000, 1000, 1), queue
    assert {one["name"]: one["done"] for one in queue["tasks"]} == {"train": 4, "log": 0}
    status = json.loads(told("status", "launched", "--ledger", url, "--json"))
    assert (status["cycle"]["state"], status["cycle"]["number"]) == ("succeeded", 1), status
    assert [one["state"] for one in status["nodes"]] == ["finished"], status
    where = str(folder / "records" / "policy")
    shown = told("weights", "ls", where, "--ledger", url, "--run", "r", "--json").splitlines()
    versions = {one.get("version"): one.get("state") for one in map(json.loads, shown)}
    assert (versions[2], versions[3]) == ("published", "damaged"), versions
