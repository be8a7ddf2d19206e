"""A model whose weights are spread over the ranks: FSDP2, torch's `fully_shard`.

- A rank holds its part of every parameter: the rows that `torch.chunk` gives to it. While a
  layer computes, every rank has that layer whole, and no other.
- No rank ever holds the whole model: it is built without weights, and each layer is read from
  the files, cut, and let go before the next.
- A pass is one of all ranks, each with tokens of its own. Either all of them know how many there
  are (training), or rank 0 says before each that there is one more (`leading`, `attend`), and
  the others compute next to nothing in it.
- Gradients come out summed over the ranks, each rank its part of them.
- What is read or written whole goes from rank to rank one tensor at a time, as bytes.
"""

import contextlib
import copy
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from holdfast.engine import directory, loading
from holdfast.engine.base import Base, Tenant
from holdfast.engine.quiet import quiet, transformers
from holdfast.errors import Mistake
from holdfast.trainer.ranks import Ranks

__all__ = ["ShardedTenant", "skeleton"]


def skeleton(name: str, folder: Path, *, device: str) -> Base:
    """A base that knows its form, and has no weights."""
    config = directory.read_config(folder)
    hook = register_module_parameter_registration_hook(cast("Any", _without_weights))
    try:
        with loading.one_error(folder, f"transformers cannot make the model of {folder}"), quiet():
            library = transformers()
            form = library.AutoConfig.from_pretrained(
                str(folder.absolute()), local_files_only=True, trust_remote_code=False
            )
            model = library.AutoModelForCausalLM.from_config(form, dtype=torch.float32)
    finally:
        hook.remove()
    model.eval()
    base = Base(name, folder, model, config)
    base.device = torch.device(device)
    return base


def _without_weights(_module: nn.Module, _name: str, given: Any) -> nn.Parameter | None:
    """The form of a parameter in its place. One that has no weights already stays: it is tied."""
    if given is None or given.is_meta:
        return None
    return nn.Parameter(torch.empty_like(given, device="meta"), given.requires_grad)


class ShardedTenant(Tenant):
    """One rank's part of a model that is trained, or sampled from."""

    def __init__(self, base: Base, name: str, mesh: DeviceMesh, ranks: Ranks) -> None:
        self._form = base.full(name)
        self._ranks = ranks
        self._leads = False
        model = copy.deepcopy(self._form.model())
        try:
            _spread(model, base.folder, mesh)
        except BaseException:
            base.drop(self._form)
            raise
        tied = {key for key, _ in model.named_parameters(remove_duplicate=False)}
        super().__init__(
            base,
            name,
            model,
            dict(model.named_parameters()),
            self._form.carried_files(),
            self._form.weights_file,
            {key: one for key, one in model.state_dict().items() if key not in tied},
        )

    # ---- weights ---------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """What this rank holds of each parameter: the memory itself, in the order of names."""
        return {name: _local(one.detach()) for name, one in self.parameters().items()}

    def state(self) -> dict[str, Tensor]:
        """What this rank holds of what is published; `wholes` makes the rest of it."""
        return dict(sorted({**self.parts(), **self._buffers}.items()))

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take rank 0's weights. The others give tensors without content, of the same form.

        So whether the form is right is known to every rank, and nobody waits in vain.
        """
        self._form.load_state(
            {name: torch.empty_like(one, device="meta") for name, one in state.items()}
        )
        for name, mine in self.state().items():
            mine.copy_(self.own({name: state[name]})[name])

    def wholes(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Put together what the ranks hold of weights, moments or gradients: rank 0 gets it."""
        found = {}
        for key, part in held.items():
            like = self._like(key)
            whole = part.detach().clone() if like is None else self._joined(part, like)
            if self._ranks.rank == 0:
                found[key] = whole.cpu()
        return found

    def _joined(self, part: Tensor, like: DTensor) -> Tensor:
        """All ranks' parts of something that has the form of a parameter."""
        spread = DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        return spread.full_tensor().contiguous()

    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of what rank 0 has whole; see `load_state`."""
        found = {}
        for key, given in wholes.items():
            whole, like = self._told(given), self._like(key)
            if like is None:
                found[key] = whole.clone()
                continue
            mine = _local(like.detach())
            pieces = whole.chunk(self._ranks.size)
            if self._ranks.rank < len(pieces):
                found[key] = pieces[self._ranks.rank].to(mine.device, copy=True)
            else:  # fewer rows than ranks
                found[key] = torch.zeros_like(mine, dtype=whole.dtype)
        return found

    def _told(self, given: Tensor) -> Tensor:
        """A tensor of rank 0, on every rank: the bytes, whatever they mean."""
        if given.is_meta:
            given = torch.empty_like(given, device="cpu")
        given = given.cpu().contiguous()
        self._ranks.spread(given.reshape(-1).view(torch.uint8), 0)
        return given

    def _like(self, key: str) -> DTensor | None:
        """The parameter whose form this has, if it is spread like one (`adam.State` has names)."""
        kind, slash, name = key.partition("/")
        if slash and kind not in ("m", "v"):
            return None
        return cast("DTensor | None", self._parameters.get(name if slash else key))

    def take_gradients(self) -> Tensor:
        """This rank's part of what backward passes have summed up, as one vector; it is gone."""
        found = []
        for name, part in self.parts().items():
            one = self._parameters[name]
            gradient, one.grad = one.grad, None
            mine = torch.zeros_like(part) if gradient is None else _local(gradient)
            found.append(mine.reshape(-1).float())
        return torch.cat(found)

    # ---- passes ----------------------------------------------------------------

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0: the others take part in every pass until this ends, also with a `Mistake`.

        Not with another error: then ranks are out of step, and this process must end.
        """
        self._leads = True
        try:
            yield
        except Mistake:
            self._announce(0)
            raise
        finally:
            self._leads = False
        self._announce(0)

    @torch.no_grad()
    def attend(self) -> None:
        """Another rank: take part in rank 0's passes."""
        while self._announce(0):
            self.idle()

    def idle(self) -> Tensor:
        """Take part in a pass without anything to compute; give the logits of one token."""
        tokens = torch.zeros(1, 1, dtype=torch.int64, device=self.base.device)
        logits: Tensor = super()._pass(input_ids=tokens, use_cache=False).logits
        return logits

    def _pass(self, **given: Any) -> Any:
        if self._leads:
            self._announce(1)
        return super()._pass(**given)

    def _announce(self, more: int) -> int:
        """What rank 0 says: whether there is one more pass."""
        return int(self._ranks.spread(torch.tensor([more]), 0))

    def release(self) -> None:
        """See `Tenant.release`."""
        super().release()
        self.base.drop(self._form)
        gc.collect()  # FSDP's objects hold each other


def _local(spread: Tensor) -> Tensor:
    """This rank's part: the memory itself."""
    return cast("DTensor", spread).to_local()


def _spread(model: nn.Module, folder: Path, mesh: DeviceMesh) -> None:
    """Give every rank its part of the weights, layer by layer."""
    names = {one: name for name, one in model.named_parameters()}
    files = _Files(folder)
    for unit in (*_layers(model), model):
        _fill(unit, names, files)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        sharded = cast("FSDPModule", unit)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo can do nothing else
    tied = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    for key, one in model.state_dict().items():
        if key not in tied:
            one.copy_(files.read(key, one))


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered at a time: the members of the lists that are in no other list."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from _layers(child)


def _fill(unit: nn.Module, names: Mapping[nn.Parameter, str], files: "_Files") -> None:
    """Read the weights that it does not have yet. What was tied stays tied."""
    read: dict[nn.Parameter, nn.Parameter] = {}
    for module in unit.modules():
        for key, one in list(module.named_parameters(recurse=False)):
            if not one.is_meta:
                continue
            if one not in read:
                read[one] = nn.Parameter(files.read(names[one], one))
            setattr(module, key, read[one])


class _Files:
    """The safetensors files of a model directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._where = loading.stored(folder)

    def read(self, name: str, like: Tensor) -> Tensor:
        """One tensor."""
        if name not in self._where:
            raise self._others(f"{name} is not there")
        with (
            loading.one_error(self._folder),
            safe_open(self._where[name], "pt") as file,
        ):
            found: Tensor = file.get_tensor(name)
        if found.shape != like.shape:
            raise self._others(f"{name} is {list(found.shape)}, not {list(like.shape)}")
        return found.to(like.dtype)

    def _others(self, what: str) -> Mistake:
        return Mistake(f"the weights in {self._folder} are not those of its config.json: {what}")
