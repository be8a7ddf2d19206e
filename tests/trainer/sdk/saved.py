"""What a trainer has published, as anybody who has its folder finds it."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.house import JOB, House


def folder(there: House, path: str) -> Path:
    """The folder of what was saved as `tinker://MODEL/FOLDER/NAME`."""
    model, kind, name = path.removeprefix("tinker://").split("/")
    letter = "w" if kind == "weights" else "s"
    home = there.folder / "trainers" / "local" / JOB / "weights" / f"{model}.{letter}.{name}"
    (version,) = home.glob("step_*")
    assert (version / "STABLE").exists()
    return version


def tensors(there: House, path: str) -> dict[str, torch.Tensor]:
    """What was saved."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder(there, path).glob("*.safetensors")):
        found |= load_file(file)
    assert found
    return found


def digest(there: House, path: str) -> str:
    """Equal for equal bits under equal names."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors(there, path).items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()
