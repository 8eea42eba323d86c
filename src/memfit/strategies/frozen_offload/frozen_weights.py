"""Which weights of a model are frozen, and what keeps some of them on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.trace.subclasses import known_parts_of

_PLAIN = (torch.nn.Parameter, FakeTensor)
_HOOK_OF_ACCELERATE = "_hf_hook"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeight:
    """A parameter that no gradient is wanted of: who holds it, and why it could not be moved."""

    name: str
    modules: tuple[str, ...]
    """The names of all modules that hold it."""
    num_bytes: int
    obstacle: str = ""
    """A clause that says why it has to stay; empty where it need not."""

    def lies_inside(self, blocks: Iterable[str]) -> bool:
        """Return whether nothing outside of some blocks holds it."""
        inside = [*blocks]
        return all(any(_is_in(module, block) for block in inside) for module in self.modules)

    def is_used_by(self, block: str) -> bool:
        """Return whether a module of a block holds it."""
        return any(_is_in(module, block) for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFacts:
    """Name a model's frozen weights, and what moves weights already."""

    weights: tuple[FrozenWeight, ...] = ()
    aliases: tuple[tuple[str, ...], ...] = ()
    """The names of modules that have several, the one that others know them by first."""
    hooked: str = ""
    """A module whose weights accelerate's hooks bring in."""

    def movable(self, blocks: Sequence[str], min_tensor_bytes: int) -> tuple[FrozenWeight, ...]:
        """Return the weights that some blocks can do without while they do not compute."""
        return tuple(
            each
            for each in self._inside(blocks)
            if not each.obstacle and each.num_bytes >= min_tensor_bytes
        )

    def obstacle(self, blocks: Sequence[str], min_tensor_bytes: int) -> str | None:
        """Say why nothing in some blocks can be moved; None if something can."""
        if self.hooked:
            return (
                f"hooks of accelerate act on {self.hooked} already, as a device map has them; load "
                "the model without one."
            )
        if not self.weights:
            return (
                "all weights require gradients, and one that is trained cannot wait elsewhere: "
                "gradients would go to copies that are thrown away. Freeze weights with "
                "requires_grad_(False), as PEFT does beside adapters."
            )
        if self.movable(blocks, min_tensor_bytes):
            return None
        inside = self._inside(blocks)
        if not inside:
            return "no frozen weight belongs to the blocks alone; name the blocks that hold some."
        if reasons := [each for each in inside if each.obstacle]:
            return f"{reasons[0].name} cannot be moved: {reasons[0].obstacle}."
        largest = max(each.num_bytes for each in inside)
        return (
            f"the largest frozen weight of the blocks has {largest} bytes, and min_tensor_bytes "
            f"is {min_tensor_bytes}."
        )

    def _inside(self, blocks: Sequence[str]) -> list[FrozenWeight]:
        """Return the weights that nothing outside of some blocks holds."""
        names = [*blocks, *(name for names in self.aliases if names[0] in blocks for name in names)]
        return [each for each in self.weights if each.lies_inside(names)]


def frozen_facts(model: torch.nn.Module) -> FrozenFacts:
    """Look for the frozen weights of a model."""
    parameters: dict[int, tuple[str, torch.Tensor]] = {}
    modules: dict[int, list[str]] = {}
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        for key, parameter in module.named_parameters(recurse=False):
            parameters.setdefault(id(parameter), (f"{name}.{key}".lstrip("."), parameter))
            modules.setdefault(id(parameter), []).append(name)
    users = _users_of_storages([tensor for _, tensor in parameters.values()], model)
    found = [
        FrozenWeight(
            name=name,
            modules=tuple(modules[key]),
            num_bytes=parameter.nbytes,
            obstacle=_obstacle(parameter, users),
        )
        for key, (name, parameter) in parameters.items()
        if not parameter.requires_grad
    ]
    aliases = tuple(tuple(each) for each in names.values() if len(each) > 1)
    return FrozenFacts(weights=tuple(found), aliases=aliases, hooked=_hooked(model))


def holders_of(
    parameter: torch.Tensor, model: torch.nn.Module
) -> list[tuple[torch.nn.Module, str]]:
    """Return the modules that hold a parameter, and under which names."""
    return [
        (module, key)
        for module in model.modules()
        for key, held in module._parameters.items()
        if held is parameter
    ]


def _users_of_storages(parameters: Iterable[torch.Tensor], model: torch.nn.Module) -> Counter[int]:
    """Count the parameters and buffers that lie in each storage."""
    tensors = {id(each): each for each in (*parameters, *model.buffers())}
    return Counter(
        part.untyped_storage()._cdata for each in tensors.values() for part in known_parts_of(each)
    )


def _obstacle(parameter: torch.Tensor, users: Counter[int]) -> str:
    """Say why a parameter has to stay where it is; nothing if it need not."""
    if type(parameter) not in _PLAIN:
        return f"it is a {type(parameter).__name__}, not a plain parameter"
    if parameter.layout is not torch.strided:
        return "it is not strided"
    if parameter.is_meta and not isinstance(parameter, FakeTensor):
        return "it is on the meta device, which holds no values"
    storage = parameter.untyped_storage()
    if users[storage._cdata] > 1 or storage.nbytes() != parameter.nbytes:
        return "it shares its memory with other tensors"
    if parameter.grad is not None:
        return "it has a gradient all the same"
    return ""


def _hooked(model: torch.nn.Module) -> str:
    """Name a module that accelerate has put a hook on; nothing where there is none."""
    for name, module in model.named_modules():
        if hasattr(module, _HOOK_OF_ACCELERATE):
            return name or type(module).__name__
    return ""


def _is_in(module: str, block: str) -> bool:
    return module == block or module.startswith(f"{block}.")
