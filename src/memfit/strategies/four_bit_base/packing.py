"""Packs linear layers into 4 bits with bitsandbytes, and adds adapters with PEFT."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

_ADAPTER = "default"
_ADAPTER_PARTS = ("lora_A", "lora_B")
_LISTS = ("params", "param_names")
"""What a parameter group may have of each of its parameters."""
_IS_PACKED = "is_loaded_in_4bit"
_LEFT_BY_PEFT = ("peft_config", _IS_PACKED)


def libraries() -> tuple[Any, Any]:
    """Import bitsandbytes and PEFT; the first warns of kernels that only inference would want."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("bitsandbytes"), import_module("peft")
    finally:
        log.setLevel(level)


class PackedBase:
    """A model whose linear layers are packed and adapted for a while.

    The plain layers are kept, without their memory, so that all who hold their parameters find
    them again.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, freezes_rest: bool = True
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._freezes_rest = freezes_rest
        self._plain: dict[str, nn.Linear] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._groups = [
            {key: list(group[key]) for key in _LISTS if key in group}
            for group in optimizer.param_groups
        ]

    def pack(self, names: Iterable[str], settings: Mapping[str, Any]) -> None:
        """Put packed layers in the places of plain ones, one after the other."""
        for name in names:
            plain: Any = self._model.get_submodule(name)
            self._model.set_submodule(name, _packed(plain, settings))
            self._plain[name], self._dtypes[name] = plain, plain.weight.dtype
            plain.weight.data = plain.weight.data.new_empty(0)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
            parameter.grad = None

    def adapt(self, names: Sequence[str], *, rank: int, alpha: int) -> None:
        """Add adapters in fp32 to some packed layers; the run's random numbers stay where they are.

        Left alone, PEFT gives them the compute type, in which small updates are lost.
        """
        _, peft = libraries()
        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(names))
        setattr(self._model, _IS_PACKED, True)
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, self._model, _ADAPTER)
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        for parameter in self._unfrozen():
            parameter.requires_grad_(True)

    def _unfrozen(self) -> list[nn.Parameter]:
        """Return what was trained, is still part of the model, and is not to be frozen."""
        if self._freezes_rest:
            return []
        present = {id(each) for each in self._model.parameters()}
        return [each for each in self._trained if id(each) in present]

    def train_adapters(self) -> None:
        """Have the optimizer train adapters, in the groups of the weights beside which they lie."""
        unfrozen = {id(each) for each in self._unfrozen()}
        names = {id(each): name for name, each in self._model.named_parameters()}
        for group in self._optimizer.param_groups:
            places = {id(each) for each in group["params"]}
            kept = [each for each in group["params"] if id(each) in unfrozen]
            for each in group["params"]:
                if id(each) not in unfrozen:
                    self._optimizer.state.pop(each, None)
            adapters = {names[id(each)]: each for each in kept} | {
                f"{name}.{part}.{_ADAPTER}.weight": getattr(layer, part)[_ADAPTER].weight
                for name, plain in self._plain.items()
                if id(plain.weight) in places
                and hasattr(layer := self._model.get_submodule(name), _ADAPTER_PARTS[0])
                for part in _ADAPTER_PARTS
            }
            found = dict(zip(_LISTS, (adapters.values(), adapters), strict=True))
            group.update((key, list(found[key])) for key in _LISTS if key in group)

    def undo(self) -> None:
        """Put plain layers back, with unpacked weights into which the adapters are merged."""
        for name, plain in self._plain.items():
            layer = self._model.get_submodule(name)
            with torch.no_grad():
                plain.weight.data = _merged(layer).to(self._dtypes[name])
            self._model.set_submodule(name, plain)
        for name in _LEFT_BY_PEFT:
            vars(self._model).pop(name, None)
        unfrozen = {id(each) for each in self._unfrozen()}
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            for each in group["params"]:
                if id(each) not in unfrozen:
                    self._optimizer.state.pop(each, None)
            group.update(before)
        for parameter in self._model.parameters():
            parameter.grad = None
        for parameter in self._trained:
            parameter.requires_grad_(True)


def _packed(plain: nn.Linear, settings: Mapping[str, Any]) -> nn.Module:
    """Make a packed layer of a plain one, on its device; bias and training mode come along."""
    library, _ = libraries()
    sizes, device = (plain.in_features, plain.out_features), plain.weight.device
    packed: nn.Module = library.nn.Linear4bit(*sizes, bias=False, device="meta", **settings)
    storage = {name: settings[name] for name in ("quant_type", "compress_statistics")}
    weight: Any = library.nn.Params4bit(
        plain.weight.data, requires_grad=False, module=packed, **storage
    )
    packed.weight = weight.to(device)
    if plain.bias is not None:
        packed.bias = nn.Parameter(plain.bias.detach().clone(), requires_grad=False)
    packed.train(plain.training)
    # Else evaluation on the CPU would repack the weight for good, and no gradient go through it.
    packed.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # no module
    return packed


def merged_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model with packed layers as that of the plain model.

    Weights are unpacked and adapters merged into them, as closing the run does; the model stays as
    it is.
    """
    packed: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # an adapter comes before the layer inside it
        if _is_packed(module) and not any(name.startswith(f"{outer}.") for outer in packed):
            packed[name] = module
    state = {
        name: value
        for name, value in model.state_dict().items()
        if not any(name.startswith(f"{prefix}.") for prefix in packed)
    }
    for name, layer in packed.items():
        plain: Any = getattr(layer, "base_layer", layer)
        with torch.no_grad():
            state[f"{name}.weight"] = _merged(layer)
        if plain.bias is not None:
            state[f"{name}.bias"] = plain.bias.detach().float()
    return state


def _is_packed(module: nn.Module) -> bool:
    """Return whether a module is a packed layer, or its adapter around it."""
    library, _ = libraries()
    return isinstance(getattr(module, "base_layer", module), library.nn.Linear4bit)


def _merged(layer: Any) -> torch.Tensor:
    """Unpack a layer's weight, and add what its adapter does."""
    library, _ = libraries()
    weight = getattr(layer, "base_layer", layer).weight
    unpacked: torch.Tensor = library.functional.dequantize_4bit(weight.data, weight.quant_state)
    return unpacked + layer.get_delta_weight(_ADAPTER) if hasattr(layer, "lora_A") else unpacked
