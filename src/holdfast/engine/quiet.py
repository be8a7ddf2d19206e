"""transformers and peft, imported late, kept from writing to the terminal and from the network.

Importing them takes seconds, so it happens where the first model is loaded. Both talk: progress
bars, warnings, advice. Inside `quiet` they do not; what would matter of it is checked by the
caller and raised as an error. Nor do they ask a hub for anything. Their settings are those of
the whole process: they are put back afterwards, and one thread at a time is inside.
"""

import contextlib
import importlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from holdfast.errors import MissingPackage

__all__ = ["peft", "quiet", "transformers"]

_lock = threading.RLock()


def transformers() -> Any:
    """The package transformers."""
    return _package("transformers")


def peft() -> Any:
    """The package peft."""
    return _package("peft")


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackage(
            f"models need the package {name}: pip install 'holdfast-rl[train]'"
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, no log lines below an error, no warnings and no network, of either."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging = importlib.import_module("transformers.utils.logging")
        hub: Any = importlib.import_module("huggingface_hub.constants")
        level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        offline, hub.HF_HUB_OFFLINE = hub.HF_HUB_OFFLINE, True
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            hub.HF_HUB_OFFLINE = offline
            logging.set_verbosity(level)
            if bars:
                logging.enable_progress_bar()
