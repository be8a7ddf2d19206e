"""A script in the shape of PyTorch's DDP tutorials: on gloo, with snapshots, without Holdfast.

Run by `holdfast launch`. Arguments: epochs, the file of snapshots, and what it does in the end
("destroy" the process group, or "forget" it). With a fourth argument rank 1 kills itself in the
middle, once: the file of that name says that it has.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    """Trains one model, from its last snapshot on."""

    def __init__(self, model: torch.nn.Module, data: Any, path: Path) -> None:
        self.rank, self.data, self.path, self.done = dist.get_rank(), data, path, 0
        if path.exists():
            snapshot = torch.load(path)
            model.load_state_dict(snapshot["model"])
            self.done = snapshot["epochs"]
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(self, epochs: int, killed: Path | None) -> None:
        for epoch in range(self.done, epochs):
            self.data.sampler.set_epoch(epoch)
            for x, y in self.data:
                self.optimizer.zero_grad()
                loss: Any = mse_loss(self.model(x), y)
                loss.backward()
                self.optimizer.step()
            if self.rank == 0:
                snapshot = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
                torch.save(snapshot, self.path.with_suffix(".new"))
                self.path.with_suffix(".new").rename(self.path)
            middle = self.rank == 1 and epoch == epochs // 2
            if middle and killed is not None and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    epochs, path, end, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    rows = TensorDataset(torch.rand(128, 20), torch.rand(128, 1))
    data = DataLoader(rows, batch_size=32, sampler=DistributedSampler(rows))
    trainer = Trainer(torch.nn.Linear(20, 1), data, Path(path))
    trainer.train(int(epochs), Path(rest[0]) if rest else None)
    if end == "destroy":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
