"""Cross-entropy of a linear layer's outputs, computed in chunks of rows without storing logits.

The loss is a sum over rows, and a row's gradient is known as soon as its logits are, up to the
factor that comes from above. With m the largest logit of a row, e_c = exp(l_c - m) and Z their sum:

    loss_r      = w_y (log Z - (l_y - m))
    d loss / dl = w_y (e_c / Z - [c = y])

and with label smoothing s the first is taken 1 - s times, and s/V times the same for every class.
So each chunk's logits are made once, turned into their gradient in place, multiplied into the
gradients of hidden and weight, and overwritten by the next chunk: no more matrix products than in
the whole computation, and one buffer of a chunk besides the gradients.

Where the factor from above differs by row (reduction "none"), or has to come before rounding
(float16, under a gradient scaler), the gradients are made in backward, from logits made again.

Torch 2.13 has this too (``F.linear_cross_entropy`` with options), but without label smoothing and
without regard to autocast; and it is one operator, inside which a recorded step sees nothing.

Shape suffixes: N rows, R rows in a chunk, V classes, D features, 1 a dimension of size one.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from memfit.errors import JobError
from memfit.losses.row_chunks import (
    Chunking,
    Gradients,
    Targets,
    at_least_float32,
    product_dtype_of,
    row_chunks,
)

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_rows: int | None = None,
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(hidden_ND, weight_VD, bias), labels_N)`` in chunks.

    The result does not depend on the chunks, up to rounding. Products are computed in the type
    that autocast asks for; the loss, and the sum that is the weight's gradient, in float32 at
    least. Gradients can be taken once, and not differentiated again.

    Args:
        hidden_ND: (N, D).
        weight_VD: (V, D).
        labels_N: (N,) int64.
        bias: (V,), or None.
        class_weight: (V,), or None.
        ignore_index: the label of rows that count for nothing.
        reduction: ``mean``, ``sum`` or ``none``, as in ``F.cross_entropy``.
        label_smoothing: from 0 to 1.
        num_rows: rows per chunk. None takes as many as there are features, so that a chunk of
            logits is as large as the weight.

    Returns:
        A scalar; (N,) for the reduction ``none``.

    Raises:
        JobError: if a shape, dtype or setting is unusable.

    Source: gradients made in the forward pass, Hsu et al. 2024 (arXiv 2410.10989), section 3.2;
    label smoothing, Szegedy et al. 2016 (arXiv 1512.00567), section 7.
    """
    _check_tensors(hidden_ND, weight_VD, labels_N, bias, class_weight)
    num_rows = hidden_ND.shape[1] if num_rows is None else num_rows
    if reduction not in _REDUCTIONS or not 0.0 <= label_smoothing <= 1.0 or num_rows < 1:
        msg = (
            f"linear_cross_entropy got reduction={reduction!r}, label_smoothing={label_smoothing} "
            f"and num_rows={num_rows}; needed are one of {', '.join(_REDUCTIONS)}, a number from 0 "
            "to 1, and at least 1 row."
        )
        raise JobError(msg)
    product_dtype = product_dtype_of(hidden_ND, weight_VD)
    chunking = Chunking(
        num_rows=num_rows,
        product_dtype=product_dtype,
        loss_dtype=at_least_float32(product_dtype),
    )
    targets = Targets(
        labels=labels_N,
        class_weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return chunked_cross_entropy(
        hidden_ND, weight_VD, bias, targets, reduction=reduction, chunking=chunking
    )


def chunked_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias: Tensor | None,
    targets: Targets,
    *,
    reduction: str,
    chunking: Chunking,
) -> Tensor:
    """Compute the loss from arguments that are known to belong together."""
    is_uniform = reduction != "none" and chunking.product_dtype is not torch.float16
    function = _InOnePass if is_uniform else _InTwoPasses
    computed = function.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        hidden_ND, weight_VD, bias, targets, chunking, torch.is_grad_enabled()
    )
    loss = cast(Tensor, computed)
    if reduction == "none":
        return loss
    total = loss if is_uniform else loss.sum()
    return _mean(total, targets, chunking.loss_dtype) if reduction == "mean" else total


def _mean(total: Tensor, targets: Targets, dtype: torch.dtype) -> Tensor:
    """Divide by what all rows count for; a mean of nothing is no number."""
    share = targets.total_share(dtype)
    is_nothing = share == 0
    # The gradient of nothing is zero all the same, as torch has it.
    return torch.where(is_nothing, torch.nan, total / share.masked_fill(is_nothing, 1))


class _InOnePass(torch.autograd.Function):
    """Add up the loss over all rows, and make the gradients on the way."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd.Function passes its arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        chunking: Chunking,
        wants_gradients: bool,
    ) -> Tensor:
        """Return the sum of the losses."""
        wanted = ctx.needs_input_grad[:3] if wants_gradients else (False,) * 3
        loss = hidden.new_zeros((), dtype=chunking.loss_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = Gradients(hidden, weight, bias, chunking.product_dtype, wanted)
            for chunk in row_chunks(hidden, weight, bias, targets, chunking):
                loss += chunk.losses.sum()
                if any(wanted):
                    gradients.add(chunk, chunk.to_gradient())
            # Not among the saved tensors: backward scales them in place and hands them out.
            ctx.gradients = gradients.finish(weight, bias)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients by the factor from above, and hand them out."""
        _refuse_second_derivative()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            msg = (
                "linear_cross_entropy has handed its gradients out already, and they can be taken "
                "once. Where a loss is backpropagated twice, forbid the strategy "
                "linear-cross-entropy, or use the reduction 'none'."
            )
            raise JobError(msg)
        scaled = (None if each is None else each.mul_(grad_loss) for each in gradients)
        return (*scaled, *(None,) * 3)


class _InTwoPasses(torch.autograd.Function):
    """Give the loss of every row, and make the gradients in backward from logits made again."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd.Function passes its arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Targets,
        chunking: Chunking,
        _wants_gradients: bool,
    ) -> Tensor:
        """Return the losses, one a row."""
        ctx.save_for_backward(hidden, weight, bias)
        ctx.targets, ctx.chunking = targets, chunking
        loss_N = hidden.new_empty(hidden.shape[0], dtype=chunking.loss_dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in row_chunks(hidden, weight, bias, targets, chunking):
                loss_N[chunk.rows] = chunk.losses
        return loss_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        """Make the gradients, each row's with its own factor."""
        _refuse_second_derivative()
        hidden, weight, bias = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            wanted, dtype = ctx.needs_input_grad[:3], ctx.chunking.product_dtype
            gradients = Gradients(hidden, weight, bias, dtype, wanted)
            for chunk in row_chunks(hidden, weight, bias, ctx.targets, ctx.chunking):
                factor_R1 = grad_N[chunk.rows].unsqueeze(1)
                gradients.add(chunk, chunk.to_gradient(factor_R1))
            return (*gradients.finish(weight, bias), *(None,) * 3)


def _refuse_second_derivative() -> None:
    """Refuse ``create_graph=True``, which would otherwise give zero without a word.

    Raises:
        JobError: if the gradients are to be differentiated again.
    """
    if torch.is_grad_enabled():
        msg = (
            "The gradients of linear_cross_entropy are to be differentiated again; only the first "
            "derivative can be chunked. Do without create_graph=True, or forbid the strategy "
            "linear-cross-entropy."
        )
        raise JobError(msg)


def _check_tensors(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> None:
    """Refuse shapes and types that do not belong together.

    Raises:
        JobError: if one is unusable.
    """
    num_classes = weight.shape[:1]
    fits = (
        hidden.dim() == weight.dim() == 2
        and hidden.shape[1] == weight.shape[1]
        and labels.shape == hidden.shape[:1]
        and all(each is None or each.shape == num_classes for each in (bias, class_weight))
    )
    if fits and labels.dtype == torch.int64:
        return
    shapes = ", ".join(
        f"{name} {None if each is None else tuple(each.shape)}"
        for name, each in (
            ("hidden", hidden),
            ("weight", weight),
            ("bias", bias),
            ("class_weight", class_weight),
        )
    )
    msg = (
        f"linear_cross_entropy got {shapes} and labels {tuple(labels.shape)} {labels.dtype}; "
        "needed are hidden (N, D), weight (V, D), bias and class_weight (V,) or None, and labels "
        "(N,) torch.int64."
    )
    raise JobError(msg)
