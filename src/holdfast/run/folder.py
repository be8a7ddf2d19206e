"""A run's folder.

run.json            what was asked for, written once
secrets.json        keys of this run, for its owner's eyes only
ledger.db           the ledger, unless another one was given
base/               the small model, unless another one was given
events/, logs/      one file per process
trainers/           journal, checkpoints and versions
metrics.jsonl       a line per step
final.json          how it ended
report.html         the same, to look at
"""

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from holdfast.errors import Mistake, NotFound
from holdfast.files import append_to, private_folder, write_private
from holdfast.run.config import Config

__all__ = ["ACCOUNT", "BASE", "JOB", "Folder", "Secrets"]

ACCOUNT, JOB = "local", "trainer"
BASE = "policy"
"""The name of the base model at the trainer."""


class Secrets(msgspec.Struct, frozen=True):
    """What the parts of a run show each other."""

    token: str
    key: str = ""


class _Written(msgspec.Struct, frozen=True):
    run: str
    seed: int
    config: dict[str, object]
    began: float
    cwd: str = ""
    """Where it was begun: paths in its configuration are relative to that."""


class Folder:
    """The folder of one run. `open` makes it, or finds it."""

    def __init__(self, path: Path, run: str, config: Config, cwd: str = "") -> None:
        self.path = path
        self.cwd = cwd
        self.run = run
        self.config = config

    @classmethod
    def make(cls, path: Path, config: Config) -> "Folder":
        """A new run. Raises `Mistake` where there is one."""
        path = path.absolute()
        if (path / "run.json").exists():
            raise Mistake(f"{path} has a run already: `holdfast run --resume {path}`, or --out")
        if path.exists() and any(path.iterdir()):
            raise Mistake(f"{path} is not empty: give another --out")
        private_folder(path)
        run = f"run-{secrets.token_hex(4)}"
        cwd = str(Path.cwd())
        written = _Written(run, config.seed, config.model_dump(mode="json"), time.time(), cwd)
        write_private(path / "run.json", msgspec.json.format(msgspec.json.encode(written)))
        return cls(path, run, config, cwd)

    @classmethod
    def find(cls, path: Path) -> "Folder":
        """A run that was begun."""
        path = path.absolute()
        try:
            written = msgspec.json.decode((path / "run.json").read_bytes(), type=_Written)
        except FileNotFoundError:
            raise NotFound(f"there is no run in {path}") from None
        except msgspec.MsgspecError as error:
            raise Mistake(f"{path / 'run.json'} cannot be read: {error}") from None
        return cls(path, written.run, Config.model_validate(written.config), written.cwd)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Be the only supervisor of this run."""
        private_folder(self.path)
        fd = append_to(self.path / "lock")
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Mistake(f"another `holdfast run` is at work in {self.path}") from None
            yield
        finally:
            os.close(fd)

    @property
    def ledger(self) -> str:
        """Where the run's ledger is."""
        return self.config.ledger or f"sqlite:///{self.path / 'ledger.db'}"

    @property
    def store(self) -> str:
        """Where samples are."""
        return self.config.store or f"shm://{self.run}?budget=256M"

    def secrets(self) -> Secrets:
        """The run's secrets, made with the first use."""
        path = self.path / "secrets.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Secrets)
        except FileNotFoundError:
            made = Secrets(token=secrets.token_urlsafe(24))
            self.keep(made)
            return made

    def keep(self, known: Secrets) -> None:
        """Write the secrets down."""
        write_private(self.path / "secrets.json", msgspec.json.encode(known))

    @property
    def weights(self) -> Path:
        """Where the trainer publishes."""
        return self.path / "trainers" / ACCOUNT / JOB / "weights"
