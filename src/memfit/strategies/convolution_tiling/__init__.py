"""Convolution-tiling: networks of convolutions computed in rows, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from memfit.errors import StrategyError
from memfit.session.forwards import replace_forward
from memfit.session.members import members_replaced
from memfit.session.session import Session
from memfit.strategies.base import Numerics, Seam, Strategy, Undo
from memfit.strategies.convolution_tiling.capture import NotCapturedError, capture
from memfit.strategies.convolution_tiling.execution import TiledForwards
from memfit.strategies.convolution_tiling.rules import Rules, rules_of
from memfit.strategies.convolution_tiling.schedule import schedule
from memfit.strategies.facts import BatchNorm, JobFacts
from memfit.units import MIB

_LEAST_TILE_BYTES = MIB // 4
_OPTIONS = ((8, 0.1), (24, 0.25), (64, 0.5))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)
_AGAIN = "both compute parts of the model again in backward"


@dataclass(frozen=True, slots=True)
class ConvolutionNetworks:
    """Modules of the model that may be such networks, by their classes."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TiledNetworks:
    """The calls of a step that can be computed in rows."""

    largest_bytes: int | None = None
    """Of one result of a convolution in them; None where no step was seen."""
    reasons: tuple[str, ...] = ()
    """Why others cannot, each with the class."""


@dataclass
class _Watch:
    largest_bytes: int = 0
    reasons: list[str] = field(default_factory=list)

    def facts(self) -> TiledNetworks:
        return TiledNetworks(self.largest_bytes, tuple(dict.fromkeys(self.reasons)))


@dataclass(frozen=True, kw_only=True)
class ConvolutionTiling(Strategy):
    """Compute networks of convolutions in rows of their longest side, forward and backward.

    Whole tensors are held only where a convolution gives them, and of those the ones left out that
    are cheap to compute again: what lies between (norms, activations, resizing, joins) is computed
    for the rows that are wanted. Group and instance norms get the statistics of the whole, which
    are gathered first; in backward two numbers for each group make up for them. The outermost
    modules that can be followed are taken, call by call; the rest runs as it is.

    Limits: no dropout, no batch norm in training, no hooks inside, no module that writes into
    tensors, changes attributes, switches autocast or gradients, or branches on values; those run
    as they are. Gradients cannot be differentiated again. Overlaps of rows are computed twice.
    Source: Alwani et al. 2016, "Fused-layer CNN accelerators", MICRO, on rows of fused layers; the
    backward of a norm by its statistics: Ioffe and Szegedy 2015, arXiv 1502.03167, section 3.
    """

    num_tiles: int
    recompute: float = 0.1
    """Convolutions computed again, as a part of the step's multiplications."""

    name: ClassVar[str] = "convolution-tiling"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    seams: ClassVar[frozenset[Seam]] = frozenset({Seam.MODEL})
    never_faster: ClassVar[bool] = True
    not_with_shards: ClassVar[str] = (
        "it reads weights again in backward, when they are shards again"
    )
    excludes: ClassVar[dict[str, str]] = {
        "activation-checkpointing": _AGAIN,
        "batchnorm-replay": "both run parts of the model in pieces",
        "four-bit-base": "weights are read piece by piece",
        "frozen-offload": "weights are read again in backward, after they have left the device",
        "tiling": "both cut the same convolutions",
    }

    def __post_init__(self) -> None:
        self.check_at_least(2, "num_tiles")
        if self.recompute < 0:
            msg = f"recompute must be at least 0, not {self.recompute}"
            raise ValueError(msg)

    @classmethod
    def own_facts(cls, session: Session) -> ConvolutionNetworks:
        """Look for modules with several convolutions."""
        found = [type(each).__name__ for each in session.model.modules() if _may_be_tiled(each)]
        return ConvolutionNetworks(tuple(dict.fromkeys(found)))

    @classmethod
    @contextmanager
    def probe(cls) -> Iterator[Callable[[], TiledNetworks]]:
        """Follow the calls of modules with convolutions."""
        watch = _Watch()

        def look(module: nn.Module, args: Any) -> None:
            if _INSIDE.get() or not _may_be_tiled(module):
                return
            try:
                rules = _rules_of_call(module, module.forward, args, {})
            except NotCapturedError as error:
                watch.reasons.append(f"{type(module).__name__}: {error}")
                return
            sizes = [rules.graph.values[index].num_bytes for index in rules.convolutions]
            watch.largest_bytes = max(watch.largest_bytes, 0, *sizes)

        hook = nn.modules.module.register_module_forward_pre_hook(look)
        try:
            yield watch.facts
        finally:
            hook.remove()

    @classmethod
    def options(cls, facts: JobFacts) -> Iterator[Self]:
        """Offer ever more tiles, where they stay large enough to be worth their calls."""
        for num_tiles, recompute in _OPTIONS:
            if (facts.of(TiledNetworks).largest_bytes or 0) // num_tiles >= _LEAST_TILE_BYTES:
                yield cls(num_tiles=num_tiles, recompute=recompute)

    def obstacle(self, facts: JobFacts) -> str | None:
        """Refuse models without such a network."""
        found = facts.of(TiledNetworks)
        is_unseen = found.largest_bytes is None
        if found.largest_bytes or (is_unseen and facts.of(ConvolutionNetworks).names):
            return None
        why = f" ({'; '.join(found.reasons[:3])})" if found.reasons else ""
        return f"no part of the model is a network of convolutions that can be followed{why}."

    def apply(self, session: Session) -> Undo:
        """Have networks of convolutions computed in rows."""
        with ExitStack() as undos:
            for module in session.model.modules():
                if _may_be_tiled(module):
                    tiled = _TiledForward(module, self.num_tiles, self.recompute)
                    undos.callback(replace_forward(module, tiled))
            return undos.pop_all().close


def _may_be_tiled(module: nn.Module) -> bool:
    """Leave out modules with fewer than two convolutions, or with hooks inside."""
    inner = [each for each in module.modules() if each is not module]
    convolutions = [each for each in inner if isinstance(each, nn.modules.conv._ConvNd)]
    return len(convolutions) > 1 and not any(
        getattr(each, hooks, None) for each in inner for hooks in _HOOKS
    )


def _rules_of_call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Rules:
    """Follow one call.

    Raises:
        NotCapturedError: if it cannot be computed in rows.
    """
    leaves, spec = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(type(each) is nn.Parameter or not each.numel() for each in tensors):
        raise NotCapturedError("it gets no tensors")
    if any(isinstance(each, BatchNorm) and each.training for each in module.modules()):
        # Said before it is followed: another strategy may stand in for the layer, and count calls.
        raise NotCapturedError("it normalises over the batch")
    metas = {id(each): _meta(each) for each in tensors}
    stand_ins: dict[int, Tensor] = {}
    for member in (*module.parameters(), *module.buffers()):
        stand_ins.setdefault(id(member), _meta(member))
    replaced = [metas[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    token = _INSIDE.set(True)
    try:
        with members_replaced(module, lambda tensor: stand_ins.get(id(tensor), tensor)):
            graph = capture(forward, replaced, spec, stand_ins, module)
    finally:
        _INSIDE.reset(token)
    return rules_of(graph)


def _meta(tensor: Tensor) -> Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad)


class _TiledForward:
    """Stand in for the forward of a module."""

    def __init__(self, module: nn.Module, num_tiles: int, recompute: float) -> None:
        self._module, self._forward = module, module.forward
        self._num_tiles, self._recompute = num_tiles, recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the call in rows, or as it is where it cannot be followed."""
        if _INSIDE.get() or not torch.is_grad_enabled() or not _may_be_tiled(self._module):
            return self._forward(*args, **kwargs)
        try:
            rules = _rules_of_call(self._module, self._forward, args, kwargs)
        except NotCapturedError:
            return self._forward(*args, **kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        members = (*self._module.parameters(), *self._module.buffers())
        distinct = list({id(member): member for member in members}.values())
        call = TiledForwards(schedule(rules, self._num_tiles, self._recompute), inputs[0])
        outs = _Tiled.apply(call, *inputs, *distinct)  # type: ignore[no-untyped-call]
        return tree_unflatten(list(outs), rules.graph.out_spec)


class _Tiled(torch.autograd.Function):
    """Keep what the schedule holds, and compute everything else again in backward."""

    @staticmethod
    def forward(ctx: Any, call: TiledForwards, *given: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs without a graph."""
        ctx.set_materialize_grads(False)
        outs = call.forward(given)
        graph = call.rules.graph
        for index in (*range(len(given)), *graph.outputs):
            call.held.pop(index, None)
        followed = call.needing([each.requires_grad for each in given])
        pairs = list(zip(graph.outputs, outs, strict=True))
        ctx.mark_non_differentiable(*(out for index, out in pairs if index not in followed))
        ctx.call = call
        ctx.read_again = [index for index, _ in pairs if index in call.read_later]
        ctx.save_for_backward(*given, *(out for index, out in pairs if index in call.read_later))
        return outs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs, parameters and buffers.

        Raises:
            StrategyError: if the gradients are to be differentiated again, or once more.
        """
        if torch.is_grad_enabled() or ctx.call is None:
            reason = (
                "gradients of a tiled network are wanted twice, by create_graph=True or "
                "retain_graph=True, and what they need is given up as they are made. Do without."
            )
            raise StrategyError(ConvolutionTiling.name, reason)
        call, ctx.call = ctx.call, None
        graph, saved = call.rules.graph, ctx.saved_tensors
        given, outs = saved[: graph.num_given], saved[graph.num_given :]
        call.held.update(enumerate(given))
        call.held.update(zip(ctx.read_again, (each.detach() for each in outs), strict=True))
        grads = call.backward(given, ctx.needs_input_grad[1:], grad_outputs)
        return None, *grads
