"""What of a model can be packed into 4 bits, and what stands in the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from memfit.session.session import Session
from memfit.session.stand_ins import module_tensors

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACKED = "Params4bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Choose linear layers by name."""

    targets: tuple[str, ...] = ()
    """Those that get an adapter; all packed ones by default."""
    kept: tuple[str, ...] = ()
    """Those that stay plain."""
    only: tuple[str, ...] = ()
    """Modules inside which layers are packed; the whole model by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseFacts:
    """Name a model's linear layers, and what keeps some or all of them from being packed."""

    layers: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    """Layers whose weight another module holds as well."""
    untrained: tuple[str, ...] = ()
    """Layers whose weight the optimizer does not hold."""
    other_dtypes: tuple[str, ...] = ()
    adapted: str = ""
    """A module that is an adapter, or that is packed."""

    def packed(self, choice: LayerChoice) -> tuple[str, ...]:
        """Name the layers that are packed."""
        left = named(self.layers, choice.kept)
        inside = _inside(self.layers, choice.only) if choice.only else self.layers
        return tuple(name for name in inside if name not in left)

    def obstacle(self, choice: LayerChoice) -> str | None:
        """Say what stands in the way of packing."""
        if self.adapted:
            return f"{self.adapted} is an adapter or packed already; add adapters to a plain model."
        return self._unnamed(choice) or self._unpackable(choice.targets, self.packed(choice))

    def _unnamed(self, choice: LayerChoice) -> str | None:
        """Say which words name no layer that they could be for."""
        targets, kept, packed = choice.targets, choice.kept, self.packed(choice)
        for word in choice.only:
            if not _inside(self.layers, (word,)):
                return f"the model has no torch.nn.Linear inside a module called {word}."
        if not packed:
            return "the model has no torch.nn.Linear whose weight could be packed."
        if "" in packed:
            return "the model itself is a torch.nn.Linear that nothing holds; wrap it in a module."
        for word in (*targets, *kept):
            if not named(self.layers, (word,)):
                return f"the model has no torch.nn.Linear called {word}."
        if targets and not named(packed, targets):
            return "all layers that targets names are kept as they are, without adapters."
        return None

    def _unpackable(self, targets: tuple[str, ...], packed: tuple[str, ...]) -> str | None:
        """Say why layers cannot be packed, or need not be."""
        if tied := [name for name in self.tied if name in packed]:
            return (
                f"{tied[0]} shares its weight with another module, which needs it whole; keep the "
                f"layer as it is with kept: [{tied[0].rpartition('.')[2]}]."
            )
        if self.other_dtypes:
            return (
                f"bitsandbytes packs float32, bfloat16 and float16, not {self.other_dtypes[0]}. "
                "To verify a plan, compare in float32: memfit.verify(..., dtype=torch.float32)."
            )
        untrained = set(self.untrained)
        adapted = named(packed, targets) if targets else packed
        if all(name in untrained for name in adapted):
            return "the optimizer trains none of the weights that adapters would lie beside."
        return None


def named(layers: Iterable[str], words: tuple[str, ...]) -> tuple[str, ...]:
    """Choose layers by their names, or the ends of these."""
    return tuple(
        name for name in layers if any(name == word or name.endswith(f".{word}") for word in words)
    )


def _inside(layers: Iterable[str], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Choose layers by the names of modules that hold them, or of themselves."""
    return tuple(
        name
        for name in layers
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    )


def base_facts(session: Session) -> BaseFacts:
    """Look at the linear layers of a session's model."""
    layers = {
        name: module for name, module in session.model.named_modules() if type(module) is nn.Linear
    }
    held = Counter(id(tensor) for _, tensor in module_tensors(session.model))
    groups = session.optimizer.param_groups
    trained = {id(each) for group in groups for each in group["params"]}
    dtypes = {layer.weight.dtype for layer in layers.values()} - set(_DTYPES)
    return BaseFacts(
        layers=tuple(layers),
        tied=tuple(name for name, layer in layers.items() if held[id(layer.weight)] > 1),
        untrained=tuple(name for name, layer in layers.items() if id(layer.weight) not in trained),
        other_dtypes=tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
        adapted=_adapted(session.model),
    )


def _adapted(model: nn.Module) -> str:
    """Name a module that PEFT or bitsandbytes has made; nothing where there is none."""
    for name, module in model.named_modules():
        is_packed = any(type(each).__name__ == _PACKED for each in module._parameters.values())
        if is_packed or hasattr(module, "lora_A") or hasattr(module, "peft_config"):
            return name or type(module).__name__
    return ""
