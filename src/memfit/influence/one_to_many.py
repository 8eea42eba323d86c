"""Score each row against every candidate, with a loss for each row, streamed over candidates.

The gradient of a row's loss by the candidates is an outer product, ``d[b] h[b]^T``, whose left
factor has an entry for each candidate. Neither scores (B, N) nor the left factor ever lives whole:
what is asked for is made again from queries and candidates. Shape suffixes: B rows, N candidates,
C candidates in a chunk, D features, T positives per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.errors import JobError
from memfit.losses.positives import Listed, PositivePairs, listed

from .factors import Factor, Outer
from .layouts import Layout
from .products import block_bounds
from .uses import Use

_QUERY, _CANDIDATES, _BIAS = 0, 1, 2


def one_to_many_losses(
    query: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    positives: Tensor | PositivePairs,
    *,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> Tensor:
    """Return each row's mean binary cross-entropy over all candidates, streamed over them.

    Their mean is `memfit.losses.one_to_many_bce` of the same arguments. The score of a pair is
    ``query @ candidates.T + bias``, its target 1 where the candidate is listed for the row, else 0,
    smoothed to ``y' = (1 - e) y + e / N``.

    Args:
        query: (B, D).
        candidates: (N, D).
        bias: (N,), or None.
        positives: (B, T) int64, padded with -1, or `memfit.losses.PositivePairs`; a candidate
            listed twice for a row counts once.
        label_smoothing: ``e``, from 0 to below 1.
        chunk: candidates scored at a time. Memory beyond inputs and gradients is a few B x chunk
            buffers; in an influence scan as many as its budget for products has room for.

    Returns:
        (B,).

    Raises:
        JobError: if a shape, type or smoothing is unusable.

    Source: loss and labels, Dettmers et al. 2018 (arXiv 1707.01476), section 4.
    """
    positive = listed(positives)
    is_usable = (
        query.dim() == candidates.dim() == 2
        and query.shape[1] == candidates.shape[1]
        and positive.fits(len(query))
        and (bias is None or bias.shape == candidates.shape[:1])
        and 0.0 <= label_smoothing < 1.0
        and chunk >= 1
    )
    if not is_usable:
        msg = (
            f"one_to_many_losses got query {tuple(query.shape)}, candidates "
            f"{tuple(candidates.shape)}, positives {positive}, "
            f"label_smoothing {label_smoothing} and chunk {chunk}; needed are query (B, D), "
            "candidates (N, D), bias (N,) or None, positives (B, T) torch.int64 padded with -1 or "
            "PositivePairs of two (P,) torch.int64, a smoothing from 0 to below 1 and a chunk of "
            "at least 1."
        )
        raise JobError(msg)
    losses = _RowLosses.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        query, candidates, bias, label_smoothing, chunk, *positive
    )
    return cast(Tensor, losses)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreGradients:
    """The gradients of rows' losses by their scores, (B, N), made piece by piece."""

    query: Tensor
    candidates: Tensor
    bias: Tensor | None
    positive: Listed
    label_smoothing: float
    scale: Tensor
    """(B, 1): the gradient of each row's loss, over the number of candidates."""

    @property
    def num_samples(self) -> int:
        """Return B."""
        return len(self.query)

    @property
    def num_rows(self) -> int:
        """Return N, the rows of the table of candidates."""
        return len(self.candidates)

    def block(self, start: int, stop: int) -> Tensor:
        """Make the entries of candidates from start to stop: (B, 1, C)."""
        score_BC = self.scores(start, stop)
        label_BC = self.labels(start, stop, score_BC)
        return score_BC.sigmoid_().sub_(label_BC).mul_(self.scale)[:, None]

    def take(self, rows: Tensor) -> Tensor:
        """Make the entries of single candidates (n,) int64: (B, 1, n)."""
        bias = None if self.bias is None else self.bias[rows]
        score_BN = F.linear(self.query, self.candidates[rows], bias)
        return self._of(score_BN, rows.expand(self.num_samples, -1))[:, None]

    def take_own(self, rows: Tensor) -> Tensor:
        """Make for each row the entries of its own candidates (B, S) int64: (B, 1, S)."""
        score_BS = torch.bmm(self.candidates[rows], self.query[:, :, None])[:, :, 0]
        if self.bias is not None:
            score_BS = score_BS + self.bias[rows]
        return self._of(score_BS, rows)[:, None]

    def _of(self, scores: Tensor, rows: Tensor) -> Tensor:
        is_listed = self.positive.holds(rows, self.num_rows)
        label = self.smoothed(is_listed.to(scores.dtype))
        return scores.sigmoid().sub_(label).mul_(self.scale)

    def scores(self, start: int, stop: int) -> Tensor:
        """Make the scores of candidates from start to stop: (B, C)."""
        bias = None if self.bias is None else self.bias[start:stop]
        return F.linear(self.query, self.candidates[start:stop], bias)

    def labels(self, start: int, stop: int, like: Tensor) -> Tensor:
        """Make the targets of candidates from start to stop: (B, C)."""
        size = stop - start
        columns = self.positive.columns(start, size, is_last=stop == self.num_rows)
        # One more column takes what lies outside, padding included.
        label_BC = like.new_zeros((self.num_samples, size + 1))
        self.positive.write(label_BC, columns, 1.0)
        return self.smoothed(label_BC[:, 1:])

    def smoothed(self, labels: Tensor) -> Tensor:
        """Smooth targets in place."""
        if self.label_smoothing:
            labels.mul_(1.0 - self.label_smoothing).add_(self.label_smoothing / self.num_rows)
        return labels


class _RowLosses(torch.autograd.Function):
    """Streams the losses forward, and their gradients by queries, candidates and bias backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        query, candidates, bias, label_smoothing, chunk, *positive = given
        ctx.save_for_backward(query, candidates, bias, *positive)
        ctx.label_smoothing, ctx.chunk = label_smoothing, chunk
        ctx.wants_query_alone = False
        tensors = (query, candidates, bias, *positive)
        scores = _of(ctx, tensors, query.new_ones(len(query)))
        losses: Tensor = query.new_zeros(len(query))
        for start, stop in block_bounds(len(candidates), chunk):
            score_BC = scores.scores(start, stop)
            label_BC = scores.labels(start, stop, score_BC)
            losses -= (score_BC * label_BC).sum(dim=1)
            losses += F.softplus(score_BC).sum(dim=1)
        losses.div_(len(candidates))
        return losses

    @staticmethod
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            msg = (
                "one_to_many_losses are streamed, and their gradients are to be differentiated "
                "again; only the first derivative can be streamed. Do without create_graph=True."
            )
            raise JobError(msg)
        scores = _of(ctx, ctx.saved_tensors, grad_B)
        needs = [needed and not ctx.wants_query_alone for needed in ctx.needs_input_grad]
        grad_query = torch.zeros_like(scores.query) if ctx.needs_input_grad[_QUERY] else None
        grad_candidates = torch.empty_like(scores.candidates) if needs[_CANDIDATES] else None
        grad_bias = None
        if scores.bias is not None and needs[_BIAS]:
            grad_bias = torch.empty_like(scores.bias)
        for start, stop in block_bounds(scores.num_rows, ctx.chunk):
            made_BC = scores.block(start, stop)[:, 0]
            if grad_query is not None:
                grad_query.addmm_(made_BC, scores.candidates[start:stop])
            if grad_candidates is not None:
                grad_candidates[start:stop].addmm_(made_BC.t(), scores.query, beta=0)
            if grad_bias is not None:
                torch.sum(made_BC, dim=0, out=grad_bias[start:stop])
        return grad_query, grad_candidates, grad_bias, None, None, None, None

    @staticmethod
    def per_sample_factor(node: Any, use: Use) -> Callable[[Tensor, Layout], Factor | None] | None:
        """Read the gradient of candidates or bias from the node, which then need not make it."""
        if use.is_transposed or use.position not in (_CANDIDATES, _BIAS):
            return None
        node.wants_query_alone = True
        tensors = node.saved_tensors
        return partial(_outer, ctx=node, tensors=tensors, is_bias=use.position == _BIAS)


def _of(ctx: Any, tensors: tuple[Any, ...], grad_B: Tensor) -> ScoreGradients:
    query, candidates, bias, *positive = tensors
    return ScoreGradients(
        query=query.detach(),
        candidates=candidates.detach(),
        bias=None if bias is None else bias.detach(),
        positive=Listed(*positive),
        label_smoothing=ctx.label_smoothing,
        scale=(grad_B / len(candidates))[:, None],
    )


def _outer(
    grad: Tensor, layout: Layout, *, ctx: Any, tensors: tuple[Any, ...], is_bias: bool
) -> Factor | None:
    if grad.dim() != 1 or layout.num_samples != len(grad):
        return None
    # Weight and bias share what they are made of, so that it is made for both at once.
    shared: ScoreGradients | None = getattr(ctx, "shared_left", None)
    if shared is None:
        shared = ctx.shared_left = _of(ctx, tensors, grad)
    return Outer(left=shared, right=None if is_bias else shared.query[:, None])
