"""Contrastive losses over many keys, and embeddings whose encoder keeps nothing for backward.

Shape suffixes: B queries, K keys, C keys in a chunk, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memfit.errors import JobError
from memfit.losses.chunking import checked_chunk_size
from memfit.losses.set_members import CutCall
from memfit.losses.softmax_mean import softmax_mean

if TYPE_CHECKING:
    from memfit.losses.ranks import Group


def contrastive_loss(
    queries: Tensor,
    keys: Tensor,
    positives: Tensor | None = None,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Average the negative log-probability that a softmax over all keys gives each positive key.

    ``mean_b(log sum_k exp(q_b . k_k / t) - q_b . p_b / t)``. Streamed, no B x K matrix is stored.
    Scores are computed in float32 at least, also under autocast.

    Args:
        queries: (B, D).
        keys: (K, D), all that a query is compared with, the positive ones included.
        positives: (B, D), each query's own key; None takes the first B keys.
        temperature: ``t``, above 0.
        chunk: Keys per chunk; see `softmax_mean`.
        group: The ranks that the keys are split over; ``positives`` has to be given then.

    Returns:
        A scalar.

    Raises:
        JobError: if a shape, the temperature or the chunk size is unusable.

    Source: van den Oord et al. 2018 (arXiv 1807.03748), section 2.3.
    """
    if positives is None and group is None:
        positives = keys[: len(queries)]
    _check(queries, keys, positives, temperature)
    assert positives is not None, "checked above"
    with torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        scaled_BD = queries.to(dtype) / temperature
        over_keys = softmax_mean(
            _scores, (keys,), (scaled_BD,), chunk=chunk, group=group, name="contrastive"
        )
        own_B = (scaled_BD * positives.to(dtype)).sum(1)
        return (over_keys.log_sum_exp - own_B).mean()


def one_to_many_cross_entropy(
    query: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    target: Tensor,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Average the cross-entropy of ``query @ candidates.T + bias`` over rows.

    Args:
        query: (B, D).
        candidates: (K, D).
        bias: (K,), or None.
        target: (B,) int64, the candidate that is true for each row.
        chunk: Candidates per chunk; see `softmax_mean`.

    Returns:
        A scalar.

    Raises:
        JobError: if a shape or the chunk size is unusable.
    """
    if bias is None:
        bias = candidates.new_zeros(len(candidates))
    true_BD, dtype = candidates[target], torch.promote_types(query.dtype, torch.float32)
    _check(query, candidates, true_BD, 1.0)
    with torch.autocast(query.device.type, enabled=False):
        query = query.to(dtype)
        over_candidates = softmax_mean(
            _biased_scores, (candidates, bias), (query,), chunk=chunk, name="one_to_many"
        )
        true_B = (query * true_BD.to(dtype)).sum(1) + bias[target].to(dtype)
        return (over_candidates.log_sum_exp - true_B).mean()


def cached_embeddings(encode: Callable[..., Tensor], *inputs: Tensor, chunk: int) -> Tensor:
    """Encode a batch a chunk at a time, keeping embeddings alone; backward encodes again.

    With a loss over all embeddings, memory is that of one chunk, however large the batch. Random
    draws are the same both times.

    Args:
        encode: (chunk of each input) to embeddings (chunk, D); it has to treat samples apart, so
            batch normalisation in training mode is none of its parts. That is proved on a
            recording first.
        inputs: tensors with the samples in dimension 0.
        chunk: Samples per chunk.

    Returns:
        Embeddings, (samples, D).

    Raises:
        JobError: if the chunk size is no whole number of at least 1, or samples meet in ``encode``.

    Source: Gao et al. 2021 (arXiv 2101.06983), section 3.
    """
    if checked_chunk_size(chunk) < len(inputs[0]):
        CutCall(call=lambda some, _: encode(*some), cut=inputs, functions=(encode,)).check(chunk)
    parts = [
        checkpoint(encode, *(each[start : start + chunk] for each in inputs), use_reentrant=False)
        for start in range(0, len(inputs[0]), chunk)
    ]
    return torch.cat(parts)


def _scores(keys_CD: Tensor, queries_BD: Tensor) -> tuple[Tensor]:
    return (queries_BD @ keys_CD.to(queries_BD.dtype).T,)


def _biased_scores(candidates_CD: Tensor, bias_C: Tensor, query_BD: Tensor) -> tuple[Tensor]:
    dtype = query_BD.dtype
    return (torch.addmm(bias_C.to(dtype), query_BD, candidates_CD.to(dtype).T),)


def _check(queries: Tensor, keys: Tensor, positives: Tensor | None, temperature: float) -> None:
    """Refuse what does not belong together.

    Raises:
        JobError: if a shape or the temperature is unusable.
    """
    if not temperature > 0:
        msg = f"The temperature is {temperature}; needed is a number above 0."
        raise JobError(msg)
    shapes = [None if t is None else tuple(t.shape) for t in (queries, keys, positives)]
    if (
        positives is None
        or queries.dim() != 2
        or keys.dim() != 2
        or queries.shape[1] != keys.shape[1]
        or positives.shape != queries.shape
    ):
        msg = (
            f"Queries, keys and positives are {', '.join(map(str, shapes))}; needed are (B, D), "
            "(K, D) and (B, D), with at least as many keys as queries where the first keys are "
            "the positives; positives have to be given where keys are split over ranks."
        )
        raise JobError(msg)
