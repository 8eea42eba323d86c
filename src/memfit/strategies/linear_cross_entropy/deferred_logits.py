"""Replaces a linear layer and the cross-entropy of its outputs, wherever user code has the pair.

Inside `deferred_logits`, a linear call with many outputs gives a tensor without memory, which knows
what it stands for. Views of it stand for the same views. Cross-entropy takes it to
`memfit.losses.linear_cross_entropy`, so that the logits never exist. Any other use makes them, by
the user's own calls, and everything goes on as it would have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from memfit.errors import StrategyError
from memfit.losses.linear_cross_entropy import chunked_cross_entropy
from memfit.losses.row_chunks import Chunking, Targets, at_least_float32
from memfit.session.gathered import KeptGathered
from memfit.strategies.linear_cross_entropy.deferred_calls import STRATEGY, Call, Family, Member
from memfit.strategies.linear_cross_entropy.logit_views import (
    ABOUT_PLACE,
    ABOUT_SHAPE,
    HEAD_CALLS,
    LOSSES,
    VIEWS,
    asks_for_no_values,
    can_be_chunked,
    head_of,
    view_of,
)
from memfit.strategies.linear_cross_entropy.noted_logits import note_head
from memfit.trace.modes import FunctionMode
from memfit.virtual.cuda.placement import device_told_to_cpp


@contextmanager
def deferred_logits(num_rows: int, gathered: KeptGathered | None = None) -> Iterator[None]:
    """Compute the cross-entropy of linear layers inside this block in chunks of so many rows.

    Args:
        num_rows: of a chunk.
        gathered: keeps what ranks gather until it has been read; None where they gather nothing.
    """
    deferral = _Deferral(num_rows, gathered)
    try:
        with deferral:
            yield
    finally:
        deferral.end()


class _Deferral(FunctionMode):
    """Puts off linear calls with many outputs."""

    def __init__(self, num_rows: int, gathered: KeptGathered | None) -> None:
        super().__init__()
        self._num_rows = num_rows
        self._gathered = gathered
        self._of_gathered: list[weakref.ref[Family]] = []

    def end(self) -> None:
        """Let go of what was gathered: who asks for its logits from now on is refused."""
        for reference in self._of_gathered:
            if (family := reference()) is not None:
                family.is_past = True

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        head = head_of(func, args, kwargs) if func in HEAD_CALLS else None
        if head is None:
            return func(*args, **kwargs)
        call = Call.of(func, args, kwargs, head.hidden.device.type)
        first = Member.first(head, call, self._num_rows)
        if self._gathered is not None and self._gathered.keep(head.hidden, head.weight, head.bias):
            self._of_gathered.append(weakref.ref(first.family))
        return _tensor_for(first)


class DeferredLogits(Tensor):
    """Logits that are made when something other than a loss asks for them."""

    _member: Member

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Say that it is made of no tensors: there are none until somebody asks for values."""
        return [], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, shape: Any, stride: Any) -> Tensor:
        """Refuse to be made of tensors; torch asks for both or none."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions, keep views, stream losses, and make the logits for all else."""
        kwargs = kwargs or {}
        if func in ABOUT_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in ABOUT_PLACE:
            return getattr(args[0]._member.rows, ABOUT_PLACE[func])
        if asks_for_no_values(func, args):
            return _noted_hook(args[0], args[1])
        kept = _kept(func, args, kwargs)
        if kept is not None:
            return kept
        args, kwargs = tree_map_only(DeferredLogits, _made_real, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the function
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return values to what goes past Python, such as the user's own autograd functions.

        Raises:
            StrategyError: if it writes into them.
        """
        if func._schema.is_mutable:
            reason = f"{func} writes into the logits from outside Python; --forbid {STRATEGY}."
            raise StrategyError(STRATEGY, reason)
        args, kwargs = tree_map_only(DeferredLogits, _values_of, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class _Linked(torch.autograd.Function):
    """Joins deferred logits to the graph, for what goes past Python."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,  # noqa: ARG004 - for autograd, as the next one
        bias: Tensor | None,  # noqa: ARG004
        member: Member,
    ) -> Tensor:
        """Make a tensor without memory."""
        ctx.member = member
        logits = member.logits
        # The tensors of a virtual GPU lie elsewhere for C++, which compares devices.
        device = device_told_to_cpp(rows) if isinstance(rows, FakeTensor) else rows.device
        tensor: Tensor = Tensor._make_wrapper_subclass(
            DeferredLogits, logits.shape, dtype=logits.dtype, device=device
        )
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Make the logits once more, and go back through them."""
        member, needed = ctx.member, ctx.needs_input_grad[:3]
        wanted = [each for each, is_needed in zip(member.inputs, needed, strict=True) if is_needed]
        is_differentiated_again = torch.is_grad_enabled()
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            found = torch.autograd.grad(
                member.values(), wanted, grad, create_graph=is_differentiated_again
            )
        gradients = iter(found)
        return (*(next(gradients) if is_needed else None for is_needed in needed), None)


def _tensor_for(member: Member) -> Tensor:
    """Return a tensor that stands for logits."""
    tensor: Any = _Linked.apply(*member.inputs, member)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    tensor._member = member
    member.family.members.append(weakref.ref(member))
    return cast(Tensor, tensor)


def _kept(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Do without the logits, where a call can; None where it needs them."""
    is_known = func in VIEWS or func in LOSSES
    if not is_known or not torch.is_grad_enabled() or not _is_first_alone(args, kwargs):
        return None
    member: Member = args[0]._member
    if member.family.is_real:
        return None
    if func in LOSSES:
        is_usual = can_be_chunked(func, member.logits, *args[1:], **kwargs)
        return _loss(member, *args[1:], **kwargs) if is_usual else None
    view = view_of(func, member.logits, args[1:], kwargs)
    if view is None:
        return None
    return _tensor_for(
        member.seen_as(view, Call.of(func, args[1:], kwargs, member.rows.device.type))
    )


def _noted_hook(tensor: DeferredLogits, hook: Any) -> RemovableHandle:
    """Have a hook called when backward begins, by whichever way it goes."""
    tensor._member.hooks.append(hook)
    with torch._C.DisableTorchFunctionSubclass():
        handle: RemovableHandle = Tensor.register_hook(tensor, hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return handle


def _is_first_alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the first argument is deferred, and no other one."""
    others = tree_leaves((args[1:], dict(kwargs)))
    is_first = bool(args) and isinstance(args[0], DeferredLogits)
    return is_first and not any(isinstance(leaf, DeferredLogits) for leaf in others)


def _made_real(tensor: DeferredLogits) -> Tensor:
    """Make the logits, in the graph."""
    tensor._member.check_time()
    tensor._member.family.make_real()
    return tensor._member.make_real()


def _values_of(tensor: DeferredLogits) -> Tensor:
    """Return the logits to what is dispatched, below autograd."""
    member = tensor._member
    member.check_time()
    return member.values() if member.real is None else member.real


def _loss(
    member: Member,
    labels: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **_legacy: Any,
) -> Tensor:
    """Compute a loss in chunks."""
    member.check_time()
    member.check_inputs()
    note_head(member.logits)
    head, rows = member.family.head, member.rows
    loss = chunked_cross_entropy(
        rows.reshape(-1, rows.shape[-1]),
        head.weight,
        head.bias,
        Targets(
            labels=labels.reshape(-1),
            class_weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        ),
        reduction=reduction,
        chunking=Chunking(
            num_rows=member.family.num_rows,
            product_dtype=member.family.product_dtype,
            loss_dtype=at_least_float32(member.dtype),
        ),
    )
    for hook in member.all_hooks():
        loss.register_hook(partial(_at_begin, hook))
    loss = loss.reshape(labels.shape) if reduction == "none" else loss
    # Autocast has losses computed in float32.
    return loss if torch.is_autocast_enabled(rows.device.type) else loss.to(member.dtype)


def _at_begin(hook: Any, grad: Tensor) -> None:
    """Tell a sharded module that backward begins; it returns the gradient as it is."""
    hook(grad)
