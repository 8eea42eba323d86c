"""The parameters and buffers of modules that compute on the host: which may move, and the move."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from memfit.session.host_tensors import give_memory
from memfit.session.session import Session
from memfit.strategies.host_modules.crossing import HOST

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A parameter or buffer that may not be moved with every module that holds it."""

    name: str
    modules: tuple[tuple[str, ...], ...]
    """The modules that hold its memory, each by all its names."""
    obstacle: str = ""
    """Why it cannot be moved at all, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What has to be known of a model before some of its modules compute on the host."""

    containers: tuple[str, ...] = ()
    """Modules without a forward, which hold others and are never called."""
    held: tuple[HeldTensor, ...] = ()
    device_options: tuple[str, ...] = ()
    """Settings of the optimizer that are tensors on the device."""

    def obstacle(self, names: Sequence[str]) -> str | None:
        """Say why modules cannot compute on the host with all that they hold; None if they can."""
        if found := [name for name in names if name in self.containers]:
            return (
                f"{found[0]} only holds other modules and is never called. Name what it holds, "
                f"such as {found[0]}.0."
            )
        if self.device_options:
            return (
                f"the optimizer's {self.device_options[0]} is a tensor on the device, and torch "
                "copies it to the host without waiting for the copy. Give a number, or a tensor "
                "of the CPU."
            )
        for each in self.held:
            inside = [any(_is_in(path, names) for path in paths) for paths in each.modules]
            if any(inside) and each.obstacle:
                return f"{each.name} cannot be moved to the host: {each.obstacle}."
            if any(inside) and not all(inside):
                other = each.modules[inside.index(False)][0] or "the model itself"
                return (
                    f"{each.name} belongs to {other} as well, which computes on the device. "
                    "Name both, or neither."
                )
        return None


def host_facts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> HostFacts:
    """Look at a model's modules and at what they hold, and at the optimizer's settings."""
    options = (pair for group in optimizer.param_groups for pair in group.items())
    plain = torch.nn.Module.forward
    return HostFacts(
        containers=tuple(
            name for name, each in model.named_modules() if name and type(each).forward is plain
        ),
        held=tuple(_held_by_several(model)),
        device_options=tuple(
            name
            for name, value in options
            if name != "params"
            and any(
                isinstance(each, torch.Tensor) and not each.is_cpu for each in tree_leaves(value)
            )
        ),
    )


def _held_by_several(model: torch.nn.Module) -> Iterator[HeldTensor]:
    """Yield tensors that several modules hold, and those that cannot be moved."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    first: dict[Any, str] = {}
    modules: dict[Any, dict[int, None]] = {}
    tensors: dict[Any, dict[int, torch.Tensor]] = {}
    for name, module in model.named_modules():
        for key, tensor in _own_tensors(module):
            place = _place_of(tensor)
            first.setdefault(place, f"{name}.{key}".lstrip("."))
            modules.setdefault(place, {})[id(module)] = None
            tensors.setdefault(place, {})[id(tensor)] = tensor
    for place, name in first.items():
        holders = tuple(tuple(names[each]) for each in modules[place])
        obstacle = _obstacle([*tensors[place].values()], len(holders))
        if obstacle or len(holders) > 1:
            yield HeldTensor(name=name, modules=holders, obstacle=obstacle)


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module itself."""
    for held in (module._parameters, module._buffers):
        for key, tensor in held.items():
            if tensor is not None:
                yield key, tensor


def _place_of(tensor: torch.Tensor) -> Any:
    """Name the memory of a tensor; a wrapper's is looked for in the wrapper alone."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        return tensor.untyped_storage()._cdata
    return ("wrapper", id(tensor))


def _obstacle(tensors: Sequence[torch.Tensor], num_modules: int) -> str:
    """Say why what lies in one memory cannot be moved; nothing if it can."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"it is a {type(tensor).__name__}, not a plain tensor"
        if tensor.layout is not torch.strided:
            return "it is not strided"
        if tensor.is_meta and not isinstance(tensor, FakeTensor):
            return "it is on the meta device, which holds no values"
    # Those of one recurrent layer lie in one piece on a GPU, and apart elsewhere.
    if len(tensors) > 1 and num_modules > 1:
        return "it shares its memory with other tensors, which would be parted"
    return ""


def _is_in(path: str, names: Iterable[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def tensors_of(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules and of those inside them, each once."""
    found: dict[int, torch.Tensor] = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            found[id(tensor)] = tensor
    return [*found.values()]


def move_to_host(
    session: Session, tensors: Sequence[torch.Tensor], device: torch.device
) -> Callable[[], None]:
    """Have tensors lie on the host with their gradients and states; return what brings them back.

    The tensors stay the same objects. What they take on the host is counted.

    Args:
        session: whose model holds them.
        tensors: parameters and buffers.
        device: where they come back to.
    """
    with ExitStack() as undos:
        for tensor in tensors:
            undos.callback(_move, session.optimizer, tensor, device)
            _move(session.optimizer, tensor, HOST)
            undos.callback(session.spill.add_host, -tensor.nbytes)
            session.spill.add_host(tensor.nbytes)
            undos.callback(session.spill.mark, tensor, is_elsewhere=False)
            session.spill.mark(tensor, is_elsewhere=True)
            if tensor.requires_grad and tensor.is_leaf:
                count = partial(_count_what_comes_with, session)
                undos.callback(tensor.register_post_accumulate_grad_hook(count).remove)
        return undos.pop_all().close


@torch.no_grad()
def _move(optimizer: torch.optim.Optimizer, tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor, its gradient and what an optimizer keeps for it."""
    gradient, tensor.grad = tensor.grad, None
    if tensor.device.type != device.type:
        give_memory(tensor, tensor.detach().to(device))
    if gradient is not None:
        tensor.grad = gradient.to(device)
    # Step counts lie where their parameter does, not on the host at any rate.
    has_counts_beside = any(
        group.get("fused") or group.get("capturable")
        for group in optimizer.param_groups
        if any(each is tensor for each in group["params"])
    )
    state = optimizer.state.get(tensor, {})
    for name, value in list(state.items()):
        if isinstance(value, torch.Tensor) and (value.dim() or has_counts_beside):
            state[name] = value.to(device)


def _count_what_comes_with(session: Session, parameter: torch.Tensor) -> None:
    """Count a parameter's gradient, and the states that an update has made, while they live."""
    states = session.optimizer.state.get(parameter, {}).values()
    for each in (parameter.grad, *states):
        if isinstance(each, torch.Tensor) and not session.spill.holds(each):
            session.spill.hold(each, each.nbytes, is_on_disk=False)
