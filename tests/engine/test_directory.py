"""Model directories from strangers: one clear error each, nothing read outside or fetched."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from holdfast.cli import cli
from holdfast.engine.base import load_base
from holdfast.engine.directory import read_config
from holdfast.engine.loading import load_tokenizer
from holdfast.engine.lora import Lora
from holdfast.errors import Corrupt, HoldfastError, Mistake, NotFound
from holdfast.run.config import Config
from holdfast.run.folder import Folder
from holdfast.run.parts import base_directory
from holdfast.trainer.bases import read_facts
from holdfast.trainer.sharding import skeleton

Change = Callable[[Path], object]

_heard: list[str] = []
_listening = False


def _hear(event: str, _: object) -> None:
    if _listening and event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        _heard.append(event)


sys.addaudithook(_hear)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test here may reach for the network, although nobody has told the hub to stay away."""
    global _listening
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _heard.clear()
    _listening = True
    yield
    _listening = False
    assert _heard == []


def edit(name: str = "config.json", /, **changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **changes}))

    return change


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"more": found}
    return found


def index(shard: object) -> Change:
    """Weights by an index only, which names this file."""

    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        shutil.copy(folder / "model-1.safetensors", folder.parent / "secret.safetensors")
        (folder / "evil.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        content = {"metadata": {}, "weight_map": {"model.norm.weight": shard}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return change


def link(name: str, target: str) -> Change:
    """A link in place of a file, which lies at the target."""

    def change(folder: Path) -> None:
        there = folder / target
        there.parent.mkdir(parents=True, exist_ok=True)
        (folder / name).rename(there)
        (folder / name).symlink_to(target)

    return change


def without(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return change


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def lacks_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pipe(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    os.mkfifo(folder / "generation_config.json")


def templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "x.jinja").symlink_to("/etc/hostname")


def no_metadata(folder: Path) -> None:
    index("model-1.safetensors")(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def deep(depth: int) -> str:
    return '{"x":' * depth + "1" + "}" * depth


LEFT = "transformers cannot load|are not those of its config.json"
BAD: list[tuple[Change, type[HoldfastError], str]] = [
    # what is not a whole model
    (shutil.rmtree, NotFound, "there is no model directory"),
    (without("config.json"), Mistake, "has no config.json"),
    (without("model.safetensors"), Mistake, "has no weights"),
    (pickle_only, Mistake, "pytorch_model.bin, a pickle, which is never loaded"),
    (
        without("tokenizer.json", "tokenizer_config.json"),
        Mistake,
        "has no tokenizer: copy tokenizer.json",
    ),
    (edit(architectures=["BertForMaskedLM"]), Mistake, "not a causal language model"),
    (edit(architectures=None), Mistake, "not a causal language model"),
    (lacks_a_tensor, Mistake, r"1 tensors are not there .*layers\.1\.mlp\.up_proj"),
    (truncated, Corrupt, "cannot be read"),
    (text("config.json", '{"model_type": '), Corrupt, "config.json cannot be read"),
    # what would be read elsewhere
    (index("../secret.safetensors"), Mistake, r"names '\.\./secret\.safetensors', which is not"),
    (index("/etc/passwd"), Mistake, "names '/etc/passwd', which is not a"),
    (index("evil.bin"), Mistake, "names 'evil.bin', a pickle, which is never loaded"),
    (index("model-2.safetensors"), Mistake, "names 'model-2.safetensors', which is not there"),
    (index(["model-1.safetensors"]), Mistake, r"names \['model-1.safetensors'\], which is not"),
    (no_metadata, Mistake, "its weight_map must map tensors to files"),
    (edit(transformers_weights="../x.safetensors"), Mistake, r"names '\.\./x\.safetensors'"),
    (edit(configuration_files=["config.5.0.0.json"]), Mistake, "names other files to read"),
    (edit("tokenizer_config.json", vocab_file="/etc/passwd"), Mistake, "vocab_file='/etc/passwd'"),
    (
        edit("tokenizer_config.json", fast_tokenizer_files=["tokenizer.5.0.json"]),
        Mistake,
        "fast_tokenizer_files=.* names other files",
    ),
    (edit("adapter_config.json", base_model_name_or_path="a/b"), Mistake, "has an adapter_config"),
    (link("tokenizer.json", "../elsewhere.json"), Mistake, "which is outside the model directory"),
    (link("model.safetensors", "../blobs/f00"), Mistake, "which is outside the model directory"),
    (templates, Mistake, "x.jinja is a link to /etc/hostname, which is outside"),
    (lambda folder: (folder / "x").symlink_to("x"), Mistake, "a link that leads nowhere"),
    (pipe, Mistake, "generation_config.json is not a regular file"),
    # what would be fetched, or run
    (edit(attn_implementation="org/kernel"), Mistake, "attn_implementation='org/kernel' is not"),
    (edit(_attn_implementation={"": "a/b"}), Mistake, "fetched from a hub, which is never done"),
    (edit(more={"attn_implementation": "kernels-community/x@v1:y"}), Mistake, "from a hub"),
    (edit(attn_implementation="flash_attention_2"), Mistake, "is not one of eager, sdpa"),
    (edit(attn_implementation=["org/kernel"]), Mistake, "is not one of eager, sdpa"),
    (edit(experts_implementation="deepgemm"), Mistake, "is not one of eager, batched_mm"),
    (edit(more={"auto_map": {"AutoConfig": "evil.Config"}}), Mistake, "which is never run"),
    (
        edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}),
        Mistake,
        "tokenizer_config.json: auto_map=.* which is never run",
    ),
    (edit(text_config={"quantization_config": {"a": 1}}), Mistake, "is quantized"),
    # what is nested or mistyped
    (edit(more=nested(40)), Corrupt, "config.json is nested more than 32 deep"),
    (text("config.json", deep(100_000)), Corrupt, "config.json is nested more than 32 deep"),
    (text("generation_config.json", deep(100_000)), Corrupt, "generation_config.json is nested"),
    (text("config.json", "[1]"), Corrupt, "is not a JSON object"),
    (text("tokenizer_config.json", "[1]"), Corrupt, "is not a JSON object"),
    (text("tokenizer.json", "7"), Corrupt, "is not a JSON object"),
    (edit(architectures=[7]), Mistake, r"architectures=\[7\] is no list of names"),
    (edit(architectures=7), Mistake, "architectures=7 is no list of names"),
    (edit(architectures={"a": 1}), Mistake, "is no list of names"),
    (edit(text_config=[1]), Mistake, r"text_config=\[1\] is not an object"),
    (edit(vocab_size="many"), Mistake, "vocab_size='many' is not a whole number"),
    (edit(num_hidden_layers=10**9), Mistake, "num_hidden_layers=1000000000 is not a whole"),
    (edit(num_hidden_layers=True), Mistake, "num_hidden_layers=True is not a whole number"),
    (edit(max_position_embeddings=-1), Mistake, "max_position_embeddings=-1 is not a whole"),
    (edit("generation_config.json", eos_token_id=[{}]), Mistake, r"eos_token_id=\[{}\] is not"),
    (edit("tokenizer.json", added_tokens=[7]), Mistake, "added_tokens is not a list of objects"),
    # what is left to transformers
    (edit(model_type=7), Mistake, LEFT),
    (edit(model_type="no_such_type"), Mistake, "no_such_type"),
    (edit(model_type=["llama"]), Mistake, LEFT),
    (edit(hidden_size=3), Mistake, LEFT),
    (edit(hidden_size=64), Mistake, LEFT),
    (edit(hidden_act=[1]), Mistake, LEFT),
    (edit(hidden_act="no_such"), Mistake, LEFT),
    (edit(rope_scaling=7), Mistake, LEFT),
    (edit(rope_parameters=[{}]), Mistake, LEFT),
    (edit(rms_norm_eps="x"), Mistake, LEFT),
]


def planted(tiny: Path, tmp_path: Path, change: Change) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    change(folder)
    return folder


@pytest.mark.parametrize(("change", "kind", "words"), BAD)
def test_bad_directories(
    tiny: Path, tmp_path: Path, change: Change, kind: type[HoldfastError], words: str
) -> None:
    """A directory that is not a whole model, that would reach out of itself, or is not what it
    says, is one clear line."""
    folder = planted(tiny, tmp_path, change)
    with pytest.raises(kind, match=words) as caught:
        load_base("bad", folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def by_run(folder: Path, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"directory": str(folder)}})
    base_directory(Folder(tmp_path / "run", "r", config))


@pytest.mark.parametrize(
    "opened",
    [
        lambda folder, _: load_tokenizer(folder),
        lambda folder, _: read_facts("bad", folder),
        lambda folder, _: skeleton("bad", folder, device="cpu"),
        by_run,
    ],
    ids=["tokenizer", "trainer", "fsdp", "run"],
)
@pytest.mark.parametrize("change", [index("../secret.safetensors"), edit(auto_map={"a": "b"})])
def test_every_door_is_the_same(
    tiny: Path, tmp_path: Path, opened: Callable[[Path, Path], object], change: Change
) -> None:
    """Whatever opens a model directory refuses what the engine refuses."""
    folder = planted(tiny, tmp_path, change)
    with pytest.raises(Mistake, match=r"which is n(ot a|ever run)"):
        opened(folder, tmp_path)


def test_serve_looks_before_it_starts(tiny: Path, tmp_path: Path) -> None:
    """`holdfast serve` refuses a model that its trainers would refuse, and starts nothing."""
    folder = planted(tiny, tmp_path, edit(attn_implementation="org/kernel"))
    given = ["serve", "--port", "0", "--folder", str(tmp_path / "f"), "--model", f"m={folder}"]
    with pytest.raises(Mistake, match="attn_implementation='org/kernel' is not one of"):
        CliRunner().invoke(cli, given, catch_exceptions=False)
    assert not (tmp_path / "f").exists()


def test_the_cache_of_hugging_face(tiny: Path, tmp_path: Path) -> None:
    """A snapshot in Hugging Face's cache, all of links to blobs, is a model directory."""
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny.iterdir())):
        shutil.copy(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    latest = tmp_path / "latest"
    latest.symlink_to(snapshot)
    base = load_base("cached", latest)
    assert base.tokenizer.encode("a")
    (blobs / "out").symlink_to("/etc/hostname")
    (snapshot / "more.json").symlink_to("../../blobs/out")
    with pytest.raises(Mistake, match="is a link to /etc/hostname, which is outside"):
        read_config(snapshot)


def test_links_inside(tiny: Path, tmp_path: Path) -> None:
    """A link from one file of the directory to another is read."""
    folder = planted(tiny, tmp_path, link("model.safetensors", "weights-1.safetensors"))
    assert load_base("linked", folder).vocabulary_size == 101


def test_nothing_is_fetched(tiny: Path, tmp_path: Path) -> None:
    """Loading a model, its tokenizer and an adapter opens no connection, nor does a name of
    another model in its config.
    """
    change = edit(_name_or_path="org/other", base_model_name_or_path="org/other")
    base = load_base("tiny", planted(tiny, tmp_path, change))
    base.lora(Lora(rank=2), "a")
    assert base.tokenizer.encode("a")
