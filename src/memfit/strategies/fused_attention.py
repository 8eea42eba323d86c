"""Fused attention: attention is computed without its matrix of scores."""

from __future__ import annotations

import copy
import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

from memfit.errors import StrategyError
from memfit.session.forwards import replace_forward
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.facts import JobFacts

_NAME = "fused-attention"
_REMEDY = f"Leave the strategy out with --forbid {_NAME}."
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)
_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rmatmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("and", "or", "xor", "invert", "neg", "pos", "abs"),
    *("lt", "le", "gt", "ge", "eq", "ne"),
    *("getitem", "setitem", "iter", "len", "contains", "bool", "int", "float", "index"),
    *("format", "array", "dlpack"),
)

_EAGER, _FUSED = "eager", "sdpa"
# Torch's own layers never ask their attention for its weights, unless a subclass changes how.
_ASK_FOR_NO_WEIGHTS: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (nn.TransformerEncoderLayer, ("forward", "_sa_block")),
    (nn.TransformerDecoderLayer, ("forward", "_sa_block", "_mha_block")),
)


@dataclass(frozen=True, slots=True)
class AttentionToFuse:
    """Modules that may compute attention scores as whole matrices and could do without."""

    names: tuple[str, ...] = ()
    may_drop: bool = False
    """Whether they may draw random masks over attention weights."""


@dataclass(frozen=True, kw_only=True)
class FusedAttention(Strategy):
    """Compute attention with torch's ``scaled_dot_product_attention``.

    An ``nn.MultiheadAttention`` that is asked for its weights, as it is by default, stores scores
    of batch x heads x queries x keys. It is not asked any more; what it returns in place of the
    weights raises an error as soon as it is used. Models of transformers that compute attention
    eagerly are switched to ``sdpa``; asking them for attention weights raises the same error.

    Limits: attention that a model writes out itself, such as ``softmax(q @ k.T) @ v``, is left
    alone: that it is plain attention, whose scores nobody else uses, does not show from outside.
    So are subclasses of ``nn.MultiheadAttention`` with a forward of their own, and models of
    transformers without ``sdpa``. Torch stores the scores all the same where no fused kernel takes
    the call (with dropout or a learnt mask on the CPU), and a mask for every head where both
    ``attn_mask`` and ``key_padding_mask`` are given. A query whose keys are all masked gives zeros
    in place of NaN. Models that round their softmax to float32 differ in float64 by that rounding.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html on
    ``need_weights``; https://huggingface.co/docs/transformers/attention_interface; Dao et al. 2022,
    https://arxiv.org/abs/2205.14135.
    """

    name: ClassVar[str] = _NAME
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    goes_with_shards: ClassVar[bool] = True

    @classmethod
    def own_facts(cls, session: Session) -> AttentionToFuse:
        """Look for attention that could be fused."""
        found = find_explicit_attention(session.model)
        return AttentionToFuse(found.names, found.may_drop)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models without attention that could be fused."""
        if facts.of(AttentionToFuse).names:
            return None
        return (
            "no attention in the model is both explicit and replaceable (nn.MultiheadAttention "
            "outside of torch's own Transformer layers, or a model of transformers that is set to "
            "eager and offers sdpa). Where the model writes attention out itself, call "
            "torch.nn.functional.scaled_dot_product_attention there."
        )

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Dropout masks over attention weights are drawn elsewhere, and so differ."""
        return Numerics.SAME_IN_LAW if facts.of(AttentionToFuse).may_drop else Numerics.EXACT

    def apply(self, session: Session) -> Undo:
        """Have layers compute no weights, and switch models of transformers."""
        found = find_explicit_attention(session.model)
        with ExitStack() as undos:
            for name, layer in found.layers.items():
                # No weights are computed, whatever the caller asks for.
                forward = partial(_without_weights, layer.forward, name, layer)
                undos.callback(replace_forward(layer, forward))
            for name, model in found.pretrained.items():
                undos.callback(_switch_model(name, model))
            return undos.pop_all().close


def _without_weights(forward: Any, name: str, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a layer's forward without weights, and give something that stands in for them."""
    call = _SIGNATURE.bind(layer, *args, **kwargs)
    call.apply_defaults()
    values = dict(call.arguments)
    del values["self"]
    if not values["need_weights"]:
        return forward(**values)
    # The explicit computation goes by the mask, the fused one by the hint where there is one.
    hint = values["is_causal"] and values["attn_mask"] is None
    output, _ = forward(**{**values, "need_weights": False, "is_causal": hint})
    return output, UncomputedWeights(name)


class UncomputedWeights:
    """Stand in for attention weights that were never computed; raise an error when used."""

    def __init__(self, layer_name: str) -> None:
        self._layer_name = layer_name

    def __repr__(self) -> str:
        return f"<attention weights of {self._layer_name!r}, not computed>"

    @property  # type: ignore[misc]  # code that looks for a tensor must not pass the weights over
    def __class__(self) -> type:
        return torch.Tensor

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # protocols ask whether there is such a thing
        _refuse(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        _refuse(next(leaf for leaf in leaves if type(leaf) is cls))

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return UncomputedWeights, (self._layer_name,)

    __hash__ = object.__hash__


def _refuse(weights: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
    """Say whose weights are missing.

    Raises:
        StrategyError: always.
    """
    reason = (
        f"the step uses the attention weights that {weights._layer_name or 'the model'} returns, "
        f"which fused attention does not compute. {_REMEDY}"
    )
    raise StrategyError(_NAME, reason)


for _operator in _OPERATORS:
    setattr(UncomputedWeights, f"__{_operator}__", _refuse)


def _switch_model(name: str, model: Any) -> Undo:
    """Switch a model of transformers to sdpa, on copies of its configurations.

    A configuration is often shared with models to come, which must not be switched with this one.
    """
    copies: dict[int, Any] = {}
    for part in parts_of(model):
        copy.deepcopy(part.config, copies)
    with ExitStack() as undos:
        for module in model.modules():
            for key, value in list(vars(module).items()):
                if id(value) in copies and hasattr(type(value), "_attn_implementation"):
                    undos.callback(setattr, module, key, value)
                    setattr(module, key, copies[id(value)])
        model.set_attn_implementation("sdpa")
        refuse = partial(_refuse_if_asked, name)
        for part in parts_of(model):
            undos.callback(part.register_forward_pre_hook(refuse, with_kwargs=True).remove)
        return undos.pop_all().close


def _refuse_if_asked(name: str, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a call that asks for attention weights.

    Raises:
        StrategyError: if it does.
    """
    if kwargs.get("output_attentions"):
        reason = (
            f"the step asks {name or 'the model'} for attention weights (output_attentions), which "
            f"fused attention does not compute. {_REMEDY}"
        )
        raise StrategyError(_NAME, reason)


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
        if any(
            isinstance(parent, layer)
            and all(getattr(type(parent), method) is getattr(layer, method) for method in methods)
            for layer, methods in _ASK_FOR_NO_WEIGHTS
        )
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
