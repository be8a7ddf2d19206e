"""The same calls through TransferQueue's own storage and through ours: the same answers."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.contrib.transferqueue import versions
from holdfast.errors import Mistake
from peers.transferqueue import system
from peers.transferqueue.answers import Recorder
from peers.transferqueue.calls import SCRIPTS
from peers.transferqueue.system import PROTOTYPE, tq

pytestmark = [
    pytest.mark.filterwarnings(PROTOTYPE),
    # SimpleStorage's own, before 0.1.10
    pytest.mark.filterwarnings(r"ignore:placement_group\w* parameter is deprecated"),
    pytest.mark.timeout(600),
]
NAMES = [script.__name__ for script in SCRIPTS]
DIFFERS = " differs: "


LEAVE = {"tasks", "asynchronous", "checkpoints"}
"""Scripts that clear by metadata of some fields only, or load what they had changed since."""


def _answers(folder: Path, place: system.Place | None = None) -> dict[str, dict[str, Any]]:
    """The answers to all scripts, of the TransferQueue that runs."""
    found, before = {}, 0
    for script in SCRIPTS:
        recorder = Recorder()
        (folder / script.__name__).mkdir()
        script(recorder, folder / script.__name__)
        found[script.__name__] = recorder.answers
        left = len(place.names()) if place is not None else 0
        assert left == before or script.__name__ in LEAVE, "clearing has left values in the store"
        before = left
    return found


@pytest.fixture(scope="module")
def expected(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SimpleStorage answers."""
    with system.simple():
        return _answers(tmp_path_factory.mktemp("simple"))


@pytest.fixture(scope="module", params=["shm", "redis"])
def found(
    request: pytest.FixtureRequest,
    expected: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """What our back end answers; it leaves nothing behind."""
    folder = tmp_path_factory.mktemp(request.param)
    with system.place(request.param, folder) as place:
        with system.running(place.url):
            answers = _answers(folder, place)
        assert place.names() == [], "closing has left values in the store"
        yield answers


@pytest.mark.parametrize("script", NAMES)
def test_the_same_answers(script: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Types, dtypes, shapes, bits, order and metadata; errors where there are errors."""
    theirs, ours = expected[script], found[script]
    labels = [label for label in theirs if not label.endswith(" ")]
    assert labels == [label for label in ours if not label.endswith(" ")]
    wrong = [
        f"{label}\n  SimpleStorage: {theirs[label]} {theirs.get(label + ' ', '')}"
        f"\n  Holdfast:      {ours[label]} {ours.get(label + ' ', '')}"
        for label in labels
        if (theirs[label] == ours[label]) == (DIFFERS in label)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_differs_is_an_error_or_told(found: dict[str, Any]) -> None:
    """What does not travel is refused with what to use instead; nothing is published."""
    kinds = found["kinds"]
    refused = {
        label.partition(":")[0]: kinds[f"{label} "]
        for label in kinds
        if ("SimpleStorage pickles it" in label or label.startswith("td: put"))
        and not label.endswith(" ")
    }
    assert len(refused) == 5
    assert "the field v has 2 items for 3 rows" in kinds["two items for three: put "]
    for name, text in refused.items():
        assert text.startswith("Mistake: "), name
        assert "@v " in text, name
        assert ": use " in text or "convert it" in text, text


def test_every_public_call_is_made() -> None:
    """What TransferQueue offers is in a script, or is no call of its data plane."""
    text = (Path(__file__).parent / "calls.py").read_text()
    elsewhere = {"init", "close", "get_client", "get_metrics_endpoint", "StreamingDataLoader"}
    kinds = {name for name in tq.__all__ if name[0].isupper()}
    missing = [name for name in set(tq.__all__) - elsewhere - kinds if f"tq.{name}" not in text]
    client = [
        name
        for name in dir(tq.TransferQueueClient)
        if not name.startswith("_") and "checkpoint" not in name
    ]
    inside = {"close", "initialize_storage_manager", "kv_list", "async_kv_list"}
    inside |= {"async_kv_retrieve_keys", "async_kv_retrieve_meta", "async_set_custom_meta"}
    missing += [name for name in set(client) - inside if f"client.{name}" not in text]
    assert not [name for name in missing if f"get_client().{name}" not in text]


def test_the_version_is_the_one_that_was_asked_for() -> None:
    """`make test-peers` runs these tests once for each; it names it in TQ_VERSION."""
    assert tq.__version__ == os.environ.get("TQ_VERSION", tq.__version__)
    assert tq.__version__ in versions.SUPPORTED


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`register` says which version is there and which it knows."""
    bootstrap = importlib.import_module("holdfast.contrib.transferqueue.bootstrap")
    for version in ("0.1.7", "0.1.12", "0.2.0", "0.1.11.dev1"):
        monkeypatch.setattr(tq, "__version__", version)
        with pytest.raises(Mistake, match=rf"TransferQueue {version} is installed.*0\.1\.8 to"):
            bootstrap.register()
