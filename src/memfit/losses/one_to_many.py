"""Score each query against every candidate: binary cross-entropy, whole or streamed.

Binary cross-entropy is a sum over candidates, so it can be streamed exactly: scores are made for
one chunk of candidates at a time, in the forward pass and again in the backward pass, and nothing
of size rows x candidates ever lives. Shape suffixes: B rows, N candidates, C candidates in a
chunk, D features, T positives per row, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.errors import JobError
from memfit.losses.chunking import StreamableLoss, checked_chunk_size, chunk_size, note_loss
from memfit.losses.positives import Listed, PositivePairs, listed

LOW_PRECISION = (torch.bfloat16, torch.float16)


def one_to_many_bce(
    query: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    positives: Tensor | PositivePairs,
    *,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Average the binary cross-entropy of ``query @ candidates.T + bias`` over rows x candidates.

    The target of a pair is 1 where the candidate is listed for the row, else 0, smoothed to
    ``y' = (1 - e) y + e / N``. The ConvE reference code writes ``+ 1 / N``, a slip its author has
    acknowledged, which adds mass that does not shrink with ``e``.

    The result does not depend on the chunk size, up to rounding. Scores are computed in float32
    at least, also under autocast: a cross-entropy of 16-bit scores loses the small gradients.

    Args:
        query: (B, D).
        candidates: (N, D).
        bias: (N,), or None.
        positives: (B, T) int64, the candidates whose target is 1, rows padded with -1; or
            `PositivePairs`, which take no room for padding where few rows have very many. A
            candidate listed twice for a row counts once. An index of N or more is an error.
        label_smoothing: ``e``, from 0 to below 1.
        chunk: Candidates per chunk. None takes what `memfit.losses.chunked` has set; without
            either, scores and labels are materialised. Streamed, memory beyond inputs and
            gradients is two B x C buffers, and gradients cannot be differentiated again.

    Returns:
        A scalar.

    Raises:
        JobError: if a shape, dtype, smoothing or chunk size is unusable.

    Source: loss and labels, Dettmers et al. 2018 (arXiv 1707.01476), section 4; label smoothing,
    Szegedy et al. 2016 (arXiv 1512.00567), section 7.
    """
    positive = listed(positives)
    _check_inputs(query, candidates, bias, positive)
    if not 0.0 <= label_smoothing < 1.0:
        msg = f"label_smoothing is {label_smoothing}; needed is a number from 0 to below 1."
        raise JobError(msg)
    num_rows, num_candidates = query.shape[0], candidates.shape[0]
    note_loss(
        StreamableLoss(name="one_to_many_bce", num_rows=num_rows, num_candidates=num_candidates)
    )
    chunk = chunk_size() if chunk is None else checked_chunk_size(chunk)
    if chunk is None:
        return _whole(query, candidates, bias, positive, label_smoothing)
    streamed = _StreamedOneToMany.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        query, candidates, bias, label_smoothing, min(chunk, num_candidates), *positive
    )
    return cast(Tensor, streamed)


def _check_inputs(query: Tensor, candidates: Tensor, bias: Tensor | None, positive: Listed) -> None:
    """Refuse shapes that do not belong together.

    Raises:
        JobError: if a shape or dtype is unusable.
    """
    shapes = (
        f"query {tuple(query.shape)}, candidates {tuple(candidates.shape)}, "
        f"bias {None if bias is None else tuple(bias.shape)}, positives {positive}"
    )
    fits = (
        query.dim() == 2
        and candidates.dim() == 2
        and query.shape[1] == candidates.shape[1]
        and positive.fits(len(query))
        and (bias is None or bias.shape == (candidates.shape[0],))
        and min(*query.shape, *candidates.shape) > 0
    )
    if not fits:
        msg = (
            f"one_to_many_bce got {shapes}; needed are query (B, D), candidates (N, D), "
            "bias (N,) or None, and positives (B, T) torch.int64 padded with -1, or PositivePairs "
            "of two (P,) torch.int64, B and N above 0."
        )
        raise JobError(msg)


def _score_dtype(query: Tensor, candidates: Tensor) -> torch.dtype:
    """Return the dtype in which scores are computed: float32, or more if the inputs have more."""
    dtype = torch.promote_types(query.dtype, candidates.dtype)
    return torch.float32 if dtype in LOW_PRECISION else dtype


def _whole(
    query: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    positive: Listed,
    label_smoothing: float,
) -> Tensor:
    """Compute the loss from all scores and labels at once."""
    dtype = _score_dtype(query, candidates)
    num_rows, num_candidates = query.shape[0], candidates.shape[0]
    with torch.autocast(query.device.type, enabled=False):
        score_BN = F.linear(
            query.to(dtype), candidates.to(dtype), None if bias is None else bias.to(dtype)
        )
        # Column 0 takes the padding, so that no entry needs a mask.
        label_BN = score_BN.new_zeros((num_rows, num_candidates + 1))
        positive.write(label_BN, positive.columns(0, num_candidates, is_last=True), 1.0)
        label_BN = label_BN[:, 1:]
        if label_smoothing:
            label_BN.mul_(1.0 - label_smoothing).add_(label_smoothing / num_candidates)
        return F.binary_cross_entropy_with_logits(score_BN, label_BN)


class _StreamedOneToMany(torch.autograd.Function):
    """Stream chunks of candidates forward, and recompute each chunk's scores backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd.Function passes its arguments by position
        ctx: Any,
        query: Tensor,
        candidates: Tensor,
        bias: Tensor | None,
        label_smoothing: float,
        chunk: int,
        positive_rows: Tensor | None,
        positives: Tensor,
    ) -> Tensor:
        """Add up the loss over chunks.

        With softplus(s) - y' s per pair and y' smoothed, each pair gives softplus(s) - e/N s, and
        a positive pair (1 - e) s less.
        """
        ctx.save_for_backward(query, candidates, bias, positive_rows, positives)
        ctx.label_smoothing, ctx.chunk = label_smoothing, chunk
        background = label_smoothing / candidates.shape[0]
        with torch.autocast(query.device.type, enabled=False):
            loss_B = query.new_zeros(query.shape[0], dtype=_score_dtype(query, candidates))
            pair_buffer = loss_B.new_empty((query.shape[0], chunk + 1))
            positive = Listed(positive_rows, positives)
            for _, score_BC, columns in _score_chunks(query, candidates, bias, positive, chunk):
                pair_BC = pair_buffer[:, : score_BC.shape[1]]
                torch.logaddexp(score_BC, score_BC.new_zeros(()), out=pair_BC)
                pair_BC.sub_(score_BC, alpha=background)
                taken = positive.read(pair_BC, columns)
                taken.sub_(positive.read(score_BC, columns), alpha=1.0 - label_smoothing)
                # A candidate listed twice writes the same value twice, so it counts once.
                positive.write(pair_BC, columns, taken)
                loss_B += pair_BC[:, 1:].sum(dim=1)
            return loss_B.sum() / (query.shape[0] * candidates.shape[0])

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return d = (sigmoid(s) - y') / (B N) to query, candidates and bias, chunk by chunk.

        Raises:
            JobError: if the gradients are to be differentiated again (``create_graph=True``).
        """
        # torch's once_differentiable looks at grad_loss alone, so a second derivative with respect
        # to the inputs would come out as zero without a word.
        if torch.is_grad_enabled():
            msg = (
                "one_to_many_bce was streamed, and its gradients are to be differentiated again; "
                "only the first derivative can be streamed. Leave the chunk size out, or do "
                "without create_graph=True."
            )
            raise JobError(msg)
        query, candidates, bias, *given = ctx.saved_tensors
        positive = Listed(*given)
        needs_query, needs_candidates, needs_bias = ctx.needs_input_grad[:3]
        dtype = _score_dtype(query, candidates)
        num_candidates = candidates.shape[0]
        scale = grad_loss.to(dtype) / (query.shape[0] * num_candidates)
        with torch.autocast(query.device.type, enabled=False):
            grad_query = query.new_zeros(query.shape, dtype=dtype) if needs_query else None
            grad_candidates = candidates.new_empty(candidates.shape) if needs_candidates else None
            grad_bias = bias.new_empty(bias.shape) if needs_bias else None
            query = query.to(dtype)
            for rows, score_BC, columns in _score_chunks(
                query, candidates, bias, positive, ctx.chunk
            ):
                score_BC.sigmoid_().sub_(ctx.label_smoothing / num_candidates)
                taken = positive.read(score_BC, columns).sub_(1.0 - ctx.label_smoothing)
                positive.write(score_BC, columns, taken)
                grad_BC = score_BC[:, 1:].mul_(scale)
                if grad_query is not None:
                    grad_query.addmm_(grad_BC, candidates[rows].to(dtype))
                if grad_candidates is not None:
                    _matmul_into(grad_candidates[rows], grad_BC.t(), query)
                if grad_bias is not None:
                    grad_bias[rows].copy_(grad_BC.sum(dim=0))
        if grad_query is not None:
            grad_query = grad_query.to(ctx.saved_tensors[0].dtype)
        return grad_query, grad_candidates, grad_bias, None, None, None, None


def _score_chunks(
    query: Tensor, candidates: Tensor, bias: Tensor | None, positive: Listed, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Score one chunk of candidates after the other, all in one buffer.

    Yields:
        The chunk's rows of candidates; scores (B, 1 + C), whose column 0 is a place for padding
        and never read; and the positives as columns of these scores, where padding and the
        positives of other chunks are column 0.
    """
    dtype = _score_dtype(query, candidates)
    query = query.to(dtype)
    num_candidates = candidates.shape[0]
    buffer = query.new_zeros((query.shape[0], chunk + 1))
    for start in range(0, num_candidates, chunk):
        rows = slice(start, min(start + chunk, num_candidates))
        size = rows.stop - start
        score_BC = buffer[:, : size + 1]
        weights = candidates[rows].to(dtype).t()
        if bias is None:
            torch.mm(query, weights, out=score_BC[:, 1:])
        else:
            torch.addmm(bias[rows].to(dtype), query, weights, out=score_BC[:, 1:])
        columns = positive.columns(start, size, is_last=rows.stop == num_candidates)
        yield rows, score_BC, columns


def _matmul_into(target: Tensor, left: Tensor, right: Tensor) -> None:
    """Write a matrix product into a slice of a gradient, without a copy where dtypes agree."""
    if target.dtype == right.dtype:
        torch.mm(left, right, out=target)
    else:
        target.copy_(left @ right)
