"""Finds the parts of a model that compute attention scores as whole matrices."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

_EAGER, _FUSED = "eager", "sdpa"
# Torch's own layers never ask their attention for its weights, unless a subclass changes how.
_ASK_FOR_NO_WEIGHTS: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.TransformerEncoderLayer, ("forward", "_sa_block")),
    (nn.TransformerDecoderLayer, ("forward", "_sa_block", "_mha_block")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplicitAttention:
    """Parts of a model whose attention could be fused, by their names."""

    layers: dict[str, nn.MultiheadAttention]
    pretrained: dict[str, Any]
    """Outermost models of transformers that compute attention eagerly and offer sdpa."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name them all; the whole model's name is empty."""
        return (*self.layers, *self.pretrained)

    @property
    def may_drop(self) -> bool:
        """Return whether any of them may draw masks over its attention weights."""
        return any(layer.training and layer.dropout > 0 for layer in self.layers.values()) or any(
            _may_drop(part) for model in self.pretrained.values() for part in parts_of(model)
        )


def find_explicit_attention(model: nn.Module) -> ExplicitAttention:
    """Look for attention that a model computes explicitly and that could be fused."""
    return ExplicitAttention(layers=_layers(model), pretrained=_eager_models(model))


def parts_of(model: nn.Module) -> list[Any]:
    """List the models of transformers inside a model, itself included."""
    kind = _pretrained_class()
    return [part for part in model.modules() if kind is not None and isinstance(part, kind)]


def _layers(model: nn.Module) -> dict[str, nn.MultiheadAttention]:
    """Find torch's attention layers that may be asked for their weights."""
    fused = {
        id(child)
        for parent in model.modules()
        if _asks_for_no_weights(parent)
        for child in parent.children()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        and type(module).forward is nn.MultiheadAttention.forward
        and "forward" not in vars(module)
        and id(module) not in fused
    }


def _asks_for_no_weights(module: nn.Module) -> bool:
    return any(
        isinstance(module, layer)
        and all(getattr(type(module), method) is getattr(layer, method) for method in methods)
        for layer, methods in _ASK_FOR_NO_WEIGHTS
    )


def _pretrained_class() -> Any:
    """Return the base class of transformers' models; None where no such model can be around."""
    library = sys.modules.get("transformers.modeling_utils")
    return getattr(library, "PreTrainedModel", None)


def _eager_models(model: nn.Module) -> dict[str, Any]:
    """Find models of transformers that can be switched, leaving out those inside such a one."""
    found: dict[str, Any] = {}
    kind = _pretrained_class()
    if kind is None:
        return found
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside or not isinstance(module, kind):
            continue
        parts = parts_of(module)
        if not all(_can_be_switched(part) for part in parts):
            continue
        inside.update(id(part) for part in parts)
        if any(part.config._attn_implementation == _EAGER for part in parts):
            found[name] = module
    return found


def _can_be_switched(part: Any) -> bool:
    """Test whether a model of transformers offers sdpa, and is not asked for attention weights."""
    return (
        part.config._attn_implementation in {_EAGER, _FUSED}
        and part._supports_sdpa
        and part._can_set_attn_implementation()
        and not getattr(part.config, "output_attentions", False)
    )


def _may_drop(part: Any) -> bool:
    """Return whether a model of transformers may draw masks over attention weights.

    By the convention of their names: attention layers are called so, and hold their rates.
    """
    layers = [module for module in part.modules() if "Attention" in type(module).__name__]
    rates = [getattr(part.config, "attention_dropout", 0.0)]
    rates += [
        getattr(rate, "p", rate)
        for layer in layers
        for key, rate in (*vars(layer).items(), *layer.named_children())
        if "drop" in key
    ]
    return part.training and any(isinstance(rate, float) and rate > 0 for rate in rates)
