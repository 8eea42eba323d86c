"""Fused attention: attention is computed without its matrix of scores."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import nn

from memfit.errors import StrategyError
from memfit.session.attention import find_explicit_attention, parts_of
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

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """There is one way."""
        yield cls()

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models without attention that could be fused."""
        if facts.explicit_attention:
            return None
        return (
            "no attention in the model is both explicit and replaceable (nn.MultiheadAttention "
            "outside of torch's own Transformer layers, or a model of transformers that is set to "
            "eager and offers sdpa). Where the model writes attention out itself, call "
            "torch.nn.functional.scaled_dot_product_attention there."
        )

    def numerics_for(self, facts: JobFacts) -> Numerics:
        """Dropout masks over attention weights are drawn elsewhere, and so differ."""
        return Numerics.SAME_IN_LAW if facts.attention_may_drop else Numerics.EXACT

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
    swapped: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for key, value in list(vars(module).items()):
            if id(value) in copies and hasattr(type(value), "_attn_implementation"):
                swapped.append((module, key, value))
                setattr(module, key, copies[id(value)])
    model.set_attn_implementation("sdpa")
    refuse = partial(_refuse_if_asked, name)
    handles = [part.register_forward_pre_hook(refuse, with_kwargs=True) for part in parts_of(model)]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        for module, key, value in swapped:
            setattr(module, key, value)

    return undo


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
