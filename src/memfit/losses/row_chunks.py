"""Makes a linear layer's logits in chunks of rows: their losses, and the gradients of its inputs.

Shape suffixes: N rows, R rows in a chunk, V classes, D features, 1 a dimension of size one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_CLASSES_PER_SLICE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Say how many rows go into a chunk, and in which types products and losses are computed."""

    num_rows: int
    product_dtype: torch.dtype
    loss_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Say what the rows are held against, in the words of ``F.cross_entropy``."""

    labels: Tensor
    class_weight: Tensor | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0

    def shares_of(self, labels: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return usable labels, which of them are to be ignored, and what each row counts for."""
        is_ignored = labels == self.ignore_index
        labels = labels.masked_fill(is_ignored, 0)
        if self.class_weight is None:
            shares = torch.ones_like(labels, dtype=dtype)
        else:
            shares = self.class_weight.to(dtype)[labels]
        return labels, is_ignored, shares.masked_fill_(is_ignored, 0.0)

    def total_share(self, dtype: torch.dtype) -> Tensor:
        """Add up what all rows count for, by which a mean is divided."""
        if self.class_weight is None:
            return (self.labels != self.ignore_index).sum()
        return self.shares_of(self.labels, dtype)[2].sum()

    def total_weight(self, num_classes: int) -> Tensor | int:
        """Add up the weights of all classes."""
        return num_classes if self.class_weight is None else self.class_weight.sum()

    def weighted_sum(self, values_RV: Tensor) -> Tensor:
        """Add up each row, with the weights of the classes."""
        if self.class_weight is None:
            return values_RV.sum(dim=1, keepdim=True)
        return values_RV @ self.class_weight.to(values_RV.dtype).unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of rows: its losses, and what the gradient of its logits is made of."""

    rows: slice
    targets: Targets
    hidden: Tensor
    """(R, D), in the type of products, as the next one."""
    weight: Tensor
    """(V, D)."""
    exponentials: Tensor
    """(R, V): of the logits less the largest of the row, in the type of losses."""
    products: Tensor
    """(R, V): room for the gradient; the same memory where products have the type of losses."""
    sums: Tensor
    """(R, 1): of the exponentials."""
    labels: Tensor
    """(R, 1), as the next two."""
    is_ignored: Tensor
    shares: Tensor
    losses: Tensor
    """(R,)."""

    def to_gradient(self, factor_R1: Tensor | float = 1.0) -> Tensor:
        """Turn the exponentials into the gradient of the logits, in place."""
        smoothing, num_classes = self.targets.label_smoothing, self.exponentials.shape[1]
        picked_R1 = self.shares * (1.0 - smoothing) * factor_R1
        if not smoothing:
            self.exponentials.mul_(picked_R1 / self.sums)
        else:
            every_R1 = torch.full_like(picked_R1, smoothing / num_classes) * factor_R1
            every_R1.masked_fill_(self.is_ignored, 0.0)
            total = picked_R1 + every_R1 * self.targets.total_weight(num_classes)
            self.exponentials.mul_(total / self.sums)
            class_weight = self.targets.class_weight
            if class_weight is None:
                self.exponentials.sub_(every_R1)
            else:
                self.exponentials.addcmul_(every_R1, class_weight.to(every_R1.dtype), value=-1.0)
        self.exponentials.scatter_add_(1, self.labels, -picked_R1)
        if self.products.dtype != self.exponentials.dtype:
            self.products.copy_(self.exponentials)
        return self.products


class Gradients:
    """Adds up the gradients of hidden, weight and bias, as far as they are wanted.

    Operators that convert types on the way would make copies that a recorded step does not see.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product_dtype: torch.dtype,
        wanted: Sequence[bool],
    ) -> None:
        # A sum of rounded parts would lose what the one product of the whole computation keeps.
        dtype = at_least_float32(product_dtype)
        self._of_hidden = hidden.new_empty(hidden.shape) if wanted[0] else None
        self._of_weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self._of_bias = None
        if bias is not None and wanted[2]:
            self._of_bias = torch.zeros_like(bias, dtype=dtype)

    def add(self, chunk: Chunk, grad_RV: Tensor) -> None:
        """Multiply the gradient of a chunk's logits into them."""
        if self._of_hidden is not None:
            target = self._of_hidden[chunk.rows]
            if target.dtype == grad_RV.dtype:
                torch.mm(grad_RV, chunk.weight, out=target)
            else:
                target.copy_(grad_RV @ chunk.weight)
        if self._of_weight is not None:
            _add_product(self._of_weight, grad_RV.t(), chunk.hidden)
        if self._of_bias is not None:
            self._of_bias.add_(chunk.exponentials.sum(dim=0, dtype=self._of_bias.dtype))

    def finish(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients, in the types of what they belong to."""
        of_weight, of_bias = self._of_weight, self._of_bias
        return (
            self._of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None or bias is None else of_bias.to(bias.dtype),
        )


def product_dtype_of(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the type in which autocast, or the lack of it, has a linear layer computed."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device_type = hidden.device.type
    if dtype is not torch.float64 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return dtype


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Widen a type of low precision."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def row_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Targets, chunking: Chunking
) -> Iterator[Chunk]:
    """Make the logits and losses of one chunk after the other, all in one buffer."""
    product_dtype, loss_dtype = chunking.product_dtype, chunking.loss_dtype
    num_all = hidden.shape[0]
    weight = weight.to(product_dtype)
    bias = None if bias is None else bias.to(product_dtype)
    shape = (min(chunking.num_rows, num_all), weight.shape[0])
    logits = hidden.new_empty(shape, dtype=loss_dtype)
    products = logits
    if product_dtype != loss_dtype:
        products = hidden.new_empty(shape, dtype=product_dtype)
    for start in range(0, num_all, chunking.num_rows):
        rows = slice(start, min(start + chunking.num_rows, num_all))
        hidden_RD = hidden[rows].to(product_dtype)
        logits_RV, products_RV = logits[: rows.stop - start], products[: rows.stop - start]
        if bias is None:
            torch.mm(hidden_RD, weight.t(), out=products_RV)
        else:
            torch.addmm(bias, hidden_RD, weight.t(), out=products_RV)
        if product_dtype != loss_dtype:
            logits_RV.copy_(products_RV)
        yield Chunk(
            rows=rows,
            targets=targets,
            hidden=hidden_RD,
            weight=weight,
            products=products_RV,
            **_with_losses(logits_RV, targets, rows),
        )


def _with_losses(logits_RV: Tensor, targets: Targets, rows: slice) -> dict[str, Tensor]:
    """Turn logits into exponentials in place, and give the losses and what goes with them."""
    smoothing, num_classes = targets.label_smoothing, logits_RV.shape[1]
    label_R1, is_ignored_R1, share_R1 = targets.shares_of(
        targets.labels[rows].unsqueeze(1), logits_RV.dtype
    )
    logits_RV.sub_(logits_RV.amax(dim=1, keepdim=True))
    picked_R1 = logits_RV.gather(1, label_R1)
    every_R1 = targets.weighted_sum(logits_RV) if smoothing else None
    sum_R1 = logits_RV.exp_().sum(dim=1, keepdim=True)
    log_R1 = sum_R1.log()
    loss_R1 = (log_R1 - picked_R1) * share_R1
    if every_R1 is not None:
        every_R1 = log_R1 * targets.total_weight(num_classes) - every_R1
        loss_R1.mul_(1.0 - smoothing).add_(every_R1, alpha=smoothing / num_classes)
    return {
        "exponentials": logits_RV,
        "sums": sum_R1,
        "labels": label_R1,
        "is_ignored": is_ignored_R1,
        "shares": share_R1,
        # Also where the logits of an ignored row are infinite, and zero times them no number.
        "losses": loss_R1.masked_fill_(is_ignored_R1, 0.0).squeeze(1),
    }


def _add_product(target_VD: Tensor, left_VR: Tensor, right_RD: Tensor) -> None:
    """Add a matrix product to a gradient, slice by slice where types have to be converted."""
    if target_VD.dtype == left_VR.dtype:
        target_VD.addmm_(left_VR, right_RD)
        return
    for start in range(0, target_VD.shape[0], _CLASSES_PER_SLICE):
        classes = slice(start, start + _CLASSES_PER_SLICE)
        target_VD[classes].add_((left_VR[classes] @ right_RD).to(target_VD.dtype))
