"""What is looked at while a run is simulated: every record, as it is written.

`Reference` says what would be there without faults.
"""

from collections.abc import Callable

import msgspec

from holdfast.ledger import Batch, Entry, Event
from holdfast.ledger.records import decode
from holdfast.rollout.asks import QUEUE
from holdfast.run.records import EvalDone, Keys, RunDone, StepDone, StepRecord
from holdfast.sim.protocol import Violation
from holdfast.sim.protocols.run.reference import Reference
from holdfast.sim.protocols.run.toy import FINE, read_content
from holdfast.trainer import records as trained
from holdfast.transfer.queue import records as queued
from holdfast.transfer.queue.records import bits, mask

__all__ = ["RUN", "TRAINED", "Witness"]

RUN = "sim"
KEYS = Keys(RUN)
TRAINED = trained.Keys(RUN, "x", "j")
QUEUED = queued.Keys(RUN, QUEUE)


class Witness:
    """Sees what is recorded, and raises `Violation`."""

    def __init__(
        self, reference: Reference, on_commit: Callable[[StepRecord], None] = lambda _: None
    ) -> None:
        self._reference = reference
        self.on_commit = on_commit
        self.records: dict[str, bytes] = {}
        """Of the run's steps."""
        self.step_of: dict[str, int] = {}
        """By sample."""
        self.acked: set[str] = set()
        self.refs: dict[str, list[str]] = {}
        """The values of each sample that was put."""
        self.members: set[str] = set()
        """Of the queue."""
        self._committed: set[int] = set()
        self._done: set[int] = set()
        self._versions: set[int] = set()
        self._ops: dict[tuple[str, int], str] = {}
        self._samples: dict[int, tuple[str, ...]] = {}

    def observe(self, batch: Batch) -> None:
        """Look at every record of the run, of the queue, of the trainer."""
        for event in sorted(batch.events, key=lambda one: one.key):
            key = event.key
            if key.startswith(KEYS.root):
                self._see_record(key.removeprefix(KEYS.root), event)
            elif key.startswith(QUEUED.prefix):
                self._see_queue(key.removeprefix(QUEUED.prefix), event.entry)
            elif key.startswith(TRAINED.ops) and event.entry is not None:
                self._see_op(*trained.number_of(key), decode(trained.Entry, event.entry))
            elif key.startswith("/vault/") and ".policy/" in key:
                self._see_version(int(key.rpartition("/")[2]), event.entry)

    def _see_record(self, name: str, event: Event) -> None:
        if event.entry is None or name in self.records:
            raise Violation(f"{name} was written before, and is replaced or deleted")
        self.records[name] = event.entry.value
        kind, _, rest = name.partition("/")
        if kind == "commit":
            self._see_commit(int(rest), decode(StepRecord, event.entry))
        elif kind == "done":
            self._see_done(int(rest), decode(StepDone, event.entry))
        elif kind == "eval":
            step, tried = int(rest), decode(EvalDone, event.entry)
            if step not in self._done or tried != self._reference.tried(step):
                raise Violation(f"version {step} earned {tried}: without faults it would not")
        elif kind == "drop":
            step, group = map(int, rest.split("/"))
            if self._reference.luck(step, group) == FINE:
                raise Violation(f"step {step} goes without group {group}: for nothing")
        elif kind == "end":
            self._see_end(decode(RunDone, event.entry))

    def _see_commit(self, step: int, record: StepRecord) -> None:
        if step > 1 and step - 1 not in self._done:
            raise Violation(f"step {step} was committed before step {step - 1} was done")
        self._committed.add(step)
        for key in record.keys:
            if self.step_of.setdefault(key, step) != step:
                raise Violation(f"{key} is in step {self.step_of[key]} and in step {step}")
            if key not in self.refs:
                raise Violation(f"{key} is in step {step}, and not in the queue")
        true = self._reference.step(step, record.dropped)
        if record != true:
            raise Violation(f"step {step} was committed as {record}; without faults: {true}")
        self.on_commit(record)

    def _see_done(self, step: int, done: StepDone) -> None:
        self._done.add(step)
        if step not in self._committed or step not in self._versions:
            raise Violation(f"step {step} is done before it was committed and published")
        if done != self._reference.done[step]:
            true = self._reference.done[step]
            raise Violation(f"step {step} came out as {done}; without faults: {true}")

    def _see_end(self, end: RunDone) -> None:
        if self._done != set(range(1, self._reference.steps + 1)):
            raise Violation(f"the run has ended with the steps {sorted(self._done)}")
        if end.content != self._reference.contents[-1]:
            raise Violation(f"the run has ended with {end.content}")

    def _see_version(self, version: int, entry: Entry | None) -> None:
        if entry is None or version in self._versions:
            raise Violation(f"version {version} was published, and is replaced or deleted")
        self._versions.add(version)
        true = self._reference.contents
        if version >= len(true) or read_content(entry.value) != true[version]:
            raise Violation(f"version {version} has not had exactly the operations before it")

    def _see_op(self, line: str, number: int, entry: trained.Entry) -> None:
        if self._ops.setdefault((line, number), entry.identity) != entry.identity:
            raise Violation(f"operation {number} of {line} was replaced by another one")

    def _see_queue(self, name: str, entry: Entry | None) -> None:
        kind, _, rest = name.partition("/")
        number = rest.partition("/")[0]
        if kind == "member":
            (self.members.discard if entry is None else self.members.add)(rest)
        elif entry is None:
            return
        elif kind == "block":
            block = msgspec.json.decode(entry.value, type=queued.Block)
            keys = tuple(one.key for one in block.samples)
            known = self._samples.get(int(number), ())
            if twice := set(keys[len(known) :]) & self.refs.keys():
                raise Violation(f"{sorted(twice)} were put twice")
            for one in block.samples:
                self.refs[one.key] = [ref.key for ref in one.fields.values()]
            self._samples[int(number)] = keys
        elif kind == "state":
            state = msgspec.json.decode(entry.value, type=queued.State)
            for place in bits(mask(state.acked)):
                self._see_ack(self._samples[int(number)][place])

    def _see_ack(self, key: str) -> None:
        step = self.step_of.get(key)
        if step is None or step not in self._done:
            raise Violation(f"{key} was acknowledged, and its step is not done")
        self.acked.add(key)
