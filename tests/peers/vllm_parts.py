"""What the tests with vLLM share: weights in folders, questions, and the processes of a server."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import load_file, save_file

from kids import alive, stat
from peers.conftest import MODEL

PROMPT = [5, 6, 7, 8]

Weights = dict[str, torch.Tensor]


def weights_of(folder: Path) -> Weights:
    """All tensors of a folder."""
    found: Weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def carried_of(folder: Path) -> dict[str, bytes | str | Path]:
    """What is published beside the tensors of a folder."""
    return {one.name: one for one in folder.iterdir() if "safetensors" not in one.name}


def edit(folder: Path, change: Callable[[Weights], None]) -> None:
    """Change the tensors of a folder, shard by shard; files that are links elsewhere stay."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        file.unlink()
        save_file(tensors, file, {"format": "pt"})


async def generate(url: str, prompt: list[int] = PROMPT, count: int = 16) -> dict[str, Any]:
    """The likeliest continuation, as the server answers."""
    sampling = {"max_tokens": count, "temperature": 0, "ignore_eos": True}
    body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling}
    limit = aiohttp.ClientTimeout(total=90)
    async with (
        aiohttp.ClientSession(timeout=limit) as session,
        session.post(f"{url}/inference/v1/generate", json=body) as answer,
    ):
        answer.raise_for_status()
        choice: dict[str, Any] = (await answer.json())["choices"][0]
        return choice


def group_of(word: str) -> dict[int, str]:
    """The processes, by pid, of the group whose leader has this on its command line."""
    names: dict[int, str] = {}
    groups: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            if alive(pid := int(folder.name)):
                names[pid], groups[pid] = words, int(stat(pid)[2])
    leaders = [pid for pid, words in names.items() if word in words and groups[pid] == pid]
    return {pid: words for pid, words in names.items() if groups[pid] in leaders}


def ended(group: Iterable[int]) -> bool:
    """Whether all of these processes have ended."""
    return not any(map(alive, group))
