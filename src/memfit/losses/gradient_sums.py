"""Adds up gradients over the chunks of a streamed loss, in one tensor per parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.trace.modes import FunctionMode

_LINEAR = F.linear


class GradientSums:
    """The gradients of some tensors, added up over several backward passes.

    The gradient of a linear layer's weight is added in place: autograd would make one more tensor
    of the weight's size for each chunk.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._sums: dict[int, Tensor] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Have linear layers called in here add to the sums in place when they are gone back to."""
        with _SummingLinears({id(each): each for each in self._tensors}, self):
            yield

    def add_from(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, also: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Go back from outputs, given their gradients, and add what reaches the tensors.

        Returns:
            The gradient of each further tensor in ``also``; None where nothing reaches it.
        """
        pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
        wanted = [each for each in (*self._tensors, *also) if each.requires_grad]
        if not pairs or not wanted:
            return [None] * len(also)
        with without_hooks(self._tensors):
            found = torch.autograd.grad(
                [pair[0] for pair in pairs],
                wanted,
                [pair[1] for pair in pairs],
                allow_unused=True,
            )
        by_id = {id(each): gradient for each, gradient in zip(wanted, found, strict=True)}
        for tensor in self._tensors:
            gradient = by_id.get(id(tensor))
            if gradient is not None:
                self.sum_of(tensor).add_(gradient)
        return [by_id.get(id(each)) for each in also]

    def sum_of(self, tensor: Tensor) -> Tensor:
        """Return the sum for a tensor, to be added to."""
        if id(tensor) not in self._sums:
            self._sums[id(tensor)] = torch.zeros_like(tensor)
        return self._sums[id(tensor)]

    def result(self, tensor: Tensor) -> Tensor | None:
        """Return the sum for a tensor; None where nothing was added."""
        return self._sums.get(id(tensor))


class _SummingLinears(FunctionMode):
    """Replaces linear calls whose weight is one of the tensors that are summed for."""

    def __init__(self, tensors: Mapping[int, Tensor], sums: GradientSums) -> None:
        super().__init__()
        self._tensors, self._sums = tensors, sums

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _LINEAR:
            rows, weight, bias = _arguments(*args, **kwargs)
            if self._takes(rows, weight):
                return _SummingLinear.apply(self._sums, rows, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return func(*args, **kwargs)

    def _takes(self, rows: Tensor, weight: Tensor) -> bool:
        """Return whether a weight is summed for, and its product is what the formula below says."""
        return (
            self._tensors.get(id(weight)) is weight
            and weight.requires_grad
            and type(rows) is type(weight.data)
            and rows.dtype == weight.dtype
            and not torch.is_autocast_enabled(weight.device.type)
        )


def _arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:  # noqa: A002 - torch's own name
    return input, weight, bias


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose weight's gradient goes straight to its sum."""

    @staticmethod
    def forward(
        ctx: Any, sums: GradientSums, rows: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Apply the layer."""
        ctx.sums = sums
        ctx.weight = weight  # by identity, which saved tensors do not keep
        ctx.save_for_backward(rows)
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input and bias, and add the weight's to its sum."""
        (rows,) = ctx.saved_tensors
        of_outputs = gradient.reshape(-1, gradient.shape[-1])
        ctx.sums.sum_of(ctx.weight).addmm_(of_outputs.t(), rows.reshape(-1, rows.shape[-1]))
        of_rows = gradient @ ctx.weight if ctx.needs_input_grad[1] else None
        of_bias = of_outputs.sum(0) if ctx.needs_input_grad[3] else None
        return None, of_rows, None, of_bias


@contextmanager
def without_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Keep the tensors' own hooks for the whole gradient; a part of it is none of their concern."""
    hooks = [each._backward_hooks for each in tensors]
    kept = [dict(each) if each else None for each in hooks]
    for each in hooks:
        if each:
            each.clear()
    try:
        yield
    finally:
        for each, before in zip(hooks, kept, strict=True):
            if each is not None and before:
                each.update(before)


def leaves_behind(outputs: Sequence[Tensor], ends: Sequence[Tensor] = ()) -> list[Tensor]:
    """Find the leaves of the graph that outputs hang on, in an order that does not change.

    What lies behind the tensors in ``ends`` is left out.
    """
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves: list[Tensor] = [each for each in outputs if each.is_leaf and each.requires_grad]
    seen = {*nodes, *(each.grad_fn for each in ends)}
    while nodes:
        node: Any = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return list({id(each): each for each in leaves}.values())
