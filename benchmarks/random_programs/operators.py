"""Operators that random programs are made of, most of which may or may not mix samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NUM_ROWS, NUM_FEATURES = 4, 3
NUM_CLASSES = 4
_BINS = NUM_CLASSES + 2

Operation = Callable[[Sequence[Tensor], int], Tensor]
"""Computes one more tensor from those there are (the second holds labels) and the batch size."""
Family = Callable[[Random, Sequence[Tensor]], Operation]
"""Draws an operation for the tensors that there are."""

_UNARY: Sequence[Callable[[Tensor], Tensor]] = (
    torch.tanh,
    torch.sigmoid,
    torch.exp,
    torch.relu,
    torch.abs,
    torch.square,
    torch.neg,
    torch.sin,
    F.gelu,
    F.softplus,
    lambda t: t * 1.7,
    lambda t: t + 0.3,
    lambda t: t**3,
    lambda t: t.clamp(-1, 1),
    lambda t: t.clone(),
    lambda t: t.contiguous(),
    lambda t: t.detach(),
    lambda t: torch.sqrt(t.square() + 1),
    lambda t: torch.where(t > 0, t, 0.1 * t),
    lambda t: t / (1 + t.abs()),
    lambda t: torch.zeros_like(t) + t,
)
_BINARY: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    torch.minimum,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.addcmul(a, b, b),
    lambda a, b: a.masked_fill(b > 0, 0.0),
)
_PRODUCTS: Sequence[Callable[[Tensor, Tensor], Tensor]] = (
    torch.matmul,
    torch.cdist,
    torch.outer,
    lambda a, b: a @ b.transpose(-1, -2),
    lambda a, b: torch.einsum("ncd,ncd->nc", a, b),
    lambda a, b: torch.einsum("ncd,nce->de", a, b),
    lambda a, b: torch.einsum("ncd,med->nm", a, b),
    lambda a, b: torch.einsum("ncd,mcd->nmc", a, b).mean(1),
    lambda a, b: torch.einsum("ncd,ned->nce", a, b),
    lambda a, b: F.cosine_similarity(a, b, dim=-1),
    lambda a, b: a[:, None] - b[None],
    lambda a, b: torch.bmm(a, b.transpose(1, 2)),
    lambda a, b: torch.tensordot(a, b, dims=1),
    lambda a, b: a.T @ b,
    lambda a, b: F.scaled_dot_product_attention(a, b, b),
)
_ALONG: Sequence[Callable[[Tensor, int], Tensor]] = (
    lambda t, dim: t.softmax(dim),
    lambda t, dim: t.log_softmax(dim),
    lambda t, dim: t.cumsum(dim),
    lambda t, dim: t.cumprod(dim),
    lambda t, dim: t.cummax(dim).values,
    lambda t, dim: t.flip(dim),
    lambda t, dim: t.roll(1, dim),
    lambda t, _dim: t.roll(1),
    lambda t, dim: t.sort(dim).values,
    lambda t, dim: t.argsort(dim).double(),
    lambda t, dim: t.diff(dim=dim),
    lambda t, dim: t.unfold(dim, 2, 1),
    lambda t, dim: F.normalize(t, dim=dim),
    lambda t, dim: t - t.mean(dim, keepdim=True),
    lambda t, dim: t / (t.abs().sum(dim, keepdim=True) + 1),
    lambda t, dim: torch.fft.rfft(t, dim=dim).abs(),
)
_REDUCTIONS: Sequence[Callable[[Tensor, int, bool], Tensor]] = (
    lambda t, dim, keep: t.sum(dim, keepdim=keep),
    lambda t, dim, keep: t.mean(dim, keepdim=keep),
    lambda t, dim, keep: t.amax(dim, keepdim=keep),
    lambda t, dim, keep: t.logsumexp(dim, keepdim=keep),
    lambda t, dim, keep: t.prod(dim, keepdim=keep),
    lambda t, dim, keep: t.var(dim, keepdim=keep),
    lambda t, dim, keep: t.std(dim, keepdim=keep),
    lambda t, dim, keep: torch.linalg.vector_norm(t, dim=dim, keepdim=keep),
    lambda t, dim, keep: t.max(dim, keepdim=keep).values,
    lambda t, dim, keep: t.median(dim, keepdim=keep).values,
    lambda t, _dim, _keep: t.sum(),
)
_LAYERS: Sequence[Callable[[Tensor], Tensor]] = (
    lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: F.layer_norm(t, t.shape[1:]),
    lambda t: F.layer_norm(t, t.shape),
    lambda t: F.group_norm(t, 2),
    F.instance_norm,
    lambda t: F.batch_norm(t, None, None, training=True),
    lambda t: F.avg_pool1d(t, 2),
    lambda t: F.max_pool1d(t, 2),
    lambda t: F.pad(t, (1, 1)),
    lambda t: F.pad(t, (0, 0, 1, 0)),
    lambda t: F.conv1d(t, torch.ones(2, t.shape[1], 2)),
    lambda t: F.pairwise_distance(t, t.flip(0)),
    lambda t: F.interpolate(t, scale_factor=2.0),
    F.glu,
    lambda t: F.embedding(t.argmax(-1), torch.arange(40.0).view(20, 2)),
    lambda t: F.unfold(t[:, None], 2),
)
_BY_SIZE: Sequence[Callable[[Tensor, int], Tensor]] = (
    lambda t, n: t / n,
    lambda t, n: t * n,
    lambda t, n: t + n,
    lambda t, n: t / n**0.5,
    lambda t, _n: t / t.shape[0],
    lambda t, _n: t / t.numel(),
    lambda t, n: t * torch.arange(n).view(-1, *[1] * (t.dim() - 1)),
    lambda t, _n: t + torch.arange(t.shape[-1]),
    lambda t, _n: t - torch.linspace(0, 1, t.shape[0]).view(-1, *[1] * (t.dim() - 1)),
    lambda t, n: t * torch.ones(n)[0],
    lambda t, n: t * torch.ones(n).sum(),
    lambda t, n: t / torch.full((n,), 1.0).sum(),
    lambda t, n: t * torch.tensor(float(n)),
)
_JOINS: Sequence[Callable[[Tensor, Tensor, int], Tensor]] = (
    lambda a, b, dim: torch.cat([a, b], dim),
    lambda a, b, dim: torch.stack([a, b], dim),
    lambda a, _b, dim: torch.cat([a, a], dim),
    lambda a, b, _dim: torch.stack([a, b], 0).sum(0),
    lambda a, b, _dim: torch.cat([a, b], 0),
    lambda a, b, _dim: torch.cat([a, b], -1),
)
_PICKS: Sequence[Callable[[Tensor, int, int], Tensor]] = (
    lambda t, dim, at: t.select(dim, at),
    lambda t, dim, _at: t.select(dim, -1),
    lambda t, dim, _at: t.narrow(dim, 0, t.shape[dim] - 1),
    lambda t, dim, _at: t.narrow(dim, 0, t.shape[dim] // 2),
    lambda t, dim, _at: t.index_select(dim, torch.arange(0, t.shape[dim], 2)),
    lambda t, dim, _at: t.index_select(dim, torch.arange(t.shape[dim] - 1, -1, -1)),
    lambda t, dim, _at: t.chunk(2, dim)[0] * t.chunk(2, dim)[1],
    lambda t, dim, _at: t.split(2, dim)[0],
    lambda t, _dim, _at: t[torch.arange(t.shape[0])],
    lambda t, _dim, _at: t * torch.eye(t.shape[-2], t.shape[-1]),
    lambda t, _dim, _at: t[:1],
    lambda t, _dim, _at: t.diagonal(dim1=0, dim2=-1),
    lambda t, _dim, _at: t.tril(),
    lambda t, _dim, _at: t[::2] - t[1::2],
)
_SHAPES: Sequence[Callable[[Tensor, int, int, int], Tensor]] = (
    lambda t, a, b, _n: t.transpose(a, b),
    lambda t, a, b, _n: t.flatten(min(a, b), max(a, b)),
    lambda t, _a, _b, _n: t.reshape(-1, 2),
    lambda t, _a, _b, _n: t.reshape(-1, 3),
    lambda t, _a, _b, _n: t.reshape(-1, 4),
    lambda t, _a, _b, n: t.reshape(n, -1),
    lambda t, _a, _b, n: t.reshape(-1, n),
    lambda t, _a, _b, n: t.reshape(n, NUM_ROWS, -1),
    lambda t, a, _b, _n: t.unsqueeze(a),
    lambda t, _a, _b, _n: t.squeeze(),
    lambda t, a, b, _n: t.movedim(a, b),
    lambda t, a, _b, _n: t.unflatten(a, (2, -1)),
    lambda t, a, _b, _n: t.unsqueeze(a).expand(*t.shape[:a], 3, *t.shape[a:]),
)


def _first_row_cleared(t: Tensor, _other: Tensor, _labels: Tensor) -> Tensor:
    t = t.clone()
    t[0] = 0.0
    return t


def _copied_into_zeros(t: Tensor, other: Tensor, _labels: Tensor) -> Tensor:
    return torch.zeros_like(t).copy_(other)


def _multiplied_in_place(t: Tensor, other: Tensor, _labels: Tensor) -> Tensor:
    return t.clone().mul_(other)


def _last_column_replaced(t: Tensor, other: Tensor, _labels: Tensor) -> Tensor:
    t = t.clone()
    t[:, -1] = other[:, 0]
    return t


def _neighbour_added_in_place(t: Tensor, _other: Tensor, _labels: Tensor) -> Tensor:
    result = t.clone()
    result[1:] += t[:-1]
    return result


def _filled_by_columns(t: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    result = torch.empty(len(labels), 2)
    result[:, 0] = t.reshape(len(labels), -1).sum(1)
    result[:, 1] = other.reshape(len(labels), -1)[:, 0]
    return result


def _added_by_label(t: Tensor, _other: Tensor, labels: Tensor) -> Tensor:
    return torch.zeros(_BINS).index_add(0, labels, t.reshape(len(labels), -1).sum(1))


def _scattered_by_label(t: Tensor, _other: Tensor, labels: Tensor) -> Tensor:
    into = labels[:, None].expand(len(labels), 2)
    return torch.zeros(len(labels), _BINS).scatter_add(1, into, t.reshape(len(labels), -1)[:, :2])


_BY_LABEL: Sequence[Callable[[Tensor, Tensor, Tensor], Tensor]] = (
    _first_row_cleared,
    _copied_into_zeros,
    _multiplied_in_place,
    _last_column_replaced,
    _neighbour_added_in_place,
    _filled_by_columns,
    _added_by_label,
    _scattered_by_label,
    lambda t, _other, labels: t[labels % len(labels)],
    lambda t, _other, labels: t.reshape(len(labels), -1).gather(1, labels[:, None] % 2),
    lambda t, _other, labels: F.one_hot(labels, _BINS).double().T @ t.reshape(len(labels), -1),
    lambda _t, _other, labels: F.one_hot(labels, _BINS).double(),
)


def _family(table: Sequence[Callable[..., Tensor]], kind: str) -> Family:
    """Make the family of a table; ``kind`` says what its functions are given."""

    def draw(random: Random, there: Sequence[Tensor]) -> Operation:
        one, other = random.randrange(len(there)), random.randrange(len(there))
        function = random.choice(table)
        num_dims = there[one].dim()
        a, b = (random.randrange(num_dims), random.randrange(num_dims)) if num_dims else (0, 0)
        at = random.randrange(max(there[one].shape[a], 1)) if num_dims else 0
        flag = random.random() < 0.5

        def apply(values: Sequence[Tensor], num_samples: int) -> Tensor:
            given: Mapping[str, Any] = {
                "t": values[one], "o": values[other], "l": values[1], "n": num_samples,
                "a": a, "b": b, "i": at, "k": flag,
            }  # fmt: skip
            return function(*(given[each] for each in kind))

        return apply

    return draw


FAMILIES: Mapping[str, Family] = {
    "unary": _family(_UNARY, "t"),
    "binary": _family(_BINARY, "to"),
    "products": _family(_PRODUCTS, "to"),
    "along": _family(_ALONG, "ta"),
    "reductions": _family(_REDUCTIONS, "tak"),
    "layers": _family(_LAYERS, "t"),
    "by size": _family(_BY_SIZE, "tn"),
    "joins": _family(_JOINS, "toa"),
    "picks": _family(_PICKS, "tai"),
    "shapes": _family(_SHAPES, "tabn"),
    "by label": _family(_BY_LABEL, "tol"),
}
