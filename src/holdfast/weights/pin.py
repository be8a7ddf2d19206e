"""A pinned version: its files are open, were checked, and are read without a copy.

What was published by Holdfast was compared byte by byte; of what was not (`verified` is
False) only the structure is known to be sound.

The descriptors outlive everything: a consumer that was stopped for longer than its lease
still reads the right bytes from an open pin, even if the version was deleted meanwhile.
What it cannot do any more is begin something new with the pin's *paths* (`stage`), and
`check` says so.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast import faults
from holdfast.errors import LeaseLost, Mistake
from holdfast.tensors import Source, as_numpy, as_torch
from holdfast.text import several
from holdfast.weights import foreign
from holdfast.weights.book import Seat
from holdfast.weights.channel import Channel
from holdfast.weights.disk import OpenFile
from holdfast.weights.layout import version_folder
from holdfast.weights.manifest import Manifest
from holdfast.weights.records import Version
from holdfast.weights.stfile import Span, parse
from holdfast.weights.trouble import translate

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

__all__ = ["Pin"]

STAGED = faults.declare("weights.pin.staged", "linked into the staging folder, not checked")


class Pin:
    """Gives out tensors. They stay valid after the pin was left, as long as they are used."""

    def __init__(
        self,
        channel: Channel,
        seat: Seat,
        version: Version,
        manifest: Manifest,
        files: Mapping[str, OpenFile],
    ) -> None:
        self.version = version
        self.manifest = manifest
        self._channel = channel
        self._seat = seat
        self._files = files
        self._spans: dict[str, tuple[str, Span]] = {}
        for name in sorted({tensor.file for tensor in manifest.tensors}):
            spans = parse(files[name].view(), name)
            self._spans.update({tensor: (name, span) for tensor, span in spans.items()})
        self._staging = ""
        self._left = False

    @property
    def number(self) -> int:
        """The pinned version."""
        return self.version.version

    @property
    def verified(self) -> bool:
        """Whether every byte was compared with what was published.

        Of a version without a manifest (a trainer that is not ours) only the structure was.
        """
        return bool(self.version.manifest)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of this version."""
        return tuple(sorted(self._spans))

    @property
    def lost(self) -> bool:
        """Whether the pin has ended, as far as we can tell by our own clock."""
        return self._seat.lost.is_set() or not self._seat.believes()

    async def check(self) -> None:
        """Ask the book whether the pin still counts; raise `LeaseLost` if not.

        `Conflict`: a foreign trainer has written over the files that we read.
        """
        if self.lost or not await self._seat.holds(self.number):
            raise LeaseLost(
                f"the pin of version {self.number} has ended: tensors that are open stay "
                "right, paths may be gone; pin again",
                version=self.number,
            )
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        """Raise `Conflict` when a foreign trainer has written over files that we read."""
        if not self.verified and not self._left and foreign.changed(self._files):
            raise foreign.rewritten(self.number)

    def raw(self, name: str) -> memoryview:
        """The bytes of one tensor."""
        self._must_be_open()
        file, span = self._find(name)
        return self._files[file].view()[span.begin : span.end]

    def numpy(self, name: str) -> "np.ndarray[Any, Any]":
        """One tensor as a numpy array, without a copy."""
        span = self._find(name)[1]
        return as_numpy(self.raw(name), span.dtype, span.shape)

    def torch(self, name: str) -> "Tensor":
        """One tensor as a torch tensor, without a copy."""
        span = self._find(name)[1]
        return as_torch(self.raw(name), span.dtype, span.shape)

    def sources(self) -> list[Source]:
        """All tensors as they were published, without a copy."""
        tensors = self.manifest.tensors
        return [Source(one.name, one.dtype, one.shape, self.raw(one.name)) for one in tensors]

    def state_dict(self) -> "dict[str, Tensor]":
        """All tensors for torch, without a copy."""
        return {name: self.torch(name) for name in self.names}

    def load_into(self, target: "Mapping[str, Tensor]") -> None:
        """Copy everything into tensors that are already there, such as `model.state_dict()`.

        Names, shapes and kinds are compared first: either all is loaded or nothing. `Conflict`:
        a foreign trainer wrote over the files meanwhile, and what was loaded must not be used.
        """
        found = self.fits(target)
        import torch

        with torch.no_grad():
            for name, tensor in found.items():
                target[name].copy_(tensor)
        self._check_unchanged()

    def fits(self, target: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Our tensors for these places; a `Mistake` names what does not fit."""
        problems = [f"{name} is not in the version" for name in target if name not in self._spans]
        problems += [f"{name} has no place to go" for name in self.names if name not in target]
        found = {name: self.torch(name) for name in self.names if name in target}
        for name, tensor in found.items():
            there = target[name]
            if tensor.shape != there.shape or tensor.dtype != there.dtype:
                problems.append(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, its place is "
                    f"{there.dtype} {tuple(there.shape)}"
                )
        if problems:
            what = several(problems, 5, "; ")
            raise Mistake(f"version {self.number} does not fit: {what}", version=self.number)
        return found

    def carried(self, name: str) -> bytes:
        """A file that was carried along, such as `config.json`."""
        if name not in self._files or name in {tensor.file for tensor in self.manifest.tensors}:
            raise Mistake(f"version {self.number} carries no file {name!r}")
        self._must_be_open()
        return bytes(self._files[name].view())

    async def stage(self) -> str:
        """A folder with this version for a reader that opens paths itself (vLLM).

        It belongs to this consumer: it is there until the pin is left, or its lease ends.
        The files are hard links, copies where links do not work.
        """
        self._must_be_open()
        if not self._staging:  # its own, also beside another pin of the same version
            nonce = f"{self._channel.runtime.random.getrandbits(32):08x}"
            self._staging = f"{self._channel.layout.staging}/{self._seat.id}/{nonce}"
        path = f"{self._staging}/{version_folder(self.number)}"
        problem: OSError | None = None
        try:
            await self._link(path)
        except OSError as error:
            problem = error
        # A sweep may have removed some of it if our lease ended meanwhile.
        await self.check()
        if problem is not None:
            raise translate(problem, f"version {self.number} cannot be staged") from problem
        return path

    async def _link(self, path: str) -> None:
        disk = self._channel.disk
        await disk.make(path)
        async with await disk.folder(path) as folder:
            there = {item.name for item in await folder.items()}
            for name, file in self._files.items():
                if name not in there and not await folder.link(name, file):
                    await folder.write(name, [file.view()])
            faults.point(STAGED)

    async def close(self) -> None:
        """Let go of files and staging folder; the seat's pin is the subscriber's affair."""
        self._left = True
        for file in self._files.values():
            file.close()
        if self._staging:
            await self._channel.disk.remove(self._staging)
            self._staging = ""

    def _must_be_open(self) -> None:
        if self._left:
            raise Mistake(
                f"the pin of version {self.number} was left: read inside its `with` block "
                "(tensors that were taken there stay valid), or pin again",
                version=self.number,
            )

    def _find(self, name: str) -> tuple[str, Span]:
        if name not in self._spans:
            raise Mistake(f"version {self.number} has no tensor {name!r}")
        return self._spans[name]
