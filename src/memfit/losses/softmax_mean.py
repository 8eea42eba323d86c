"""Log-sum-exp and softmax-weighted means over a set, streamed exactly over chunks of the set.

The softmax couples all members, so chunks cannot be treated one by one: a mean of losses of chunks
is another loss. But what a chunk needs to know of all others is small: log-sum-exp and means. They
are found in a first pass that keeps nothing. In a second pass, in backward, each chunk is computed
again, and its gradients follow from its own terms and these few numbers.

Shape suffixes: B samples, K members of the set, C members in a chunk, M entries of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memfit.errors import JobError
from memfit.losses.chunking import StreamableLoss, checked_chunk_size, chunk_size, note_loss
from memfit.losses.set_members import CutCall
from memfit.losses.set_stream import SetStream
from memfit.losses.softmax_sums import weighted_sum

if TYPE_CHECKING:
    from memfit.losses.ranks import Group

Terms = Callable[..., Sequence[Tensor]]


class SoftmaxMean(NamedTuple):
    """What a softmax over a set gives for each sample."""

    log_sum_exp: Tensor
    """(B,)."""
    means: tuple[Tensor, ...]
    """The mean of each value over the set, (B, M...)."""


def softmax_mean(
    terms: Terms,
    members: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    prepare: Terms | None = None,
    parameters: Sequence[Tensor] = (),
    chunk: int | None = None,
    tile: int | None = None,
    group: Group | None = None,
    is_part: bool = False,
    name: str = "softmax_mean",
) -> SoftmaxMean:
    """Average values over a set, weighted by the softmax of log-weights over the whole set.

    ``log_sum_exp[b] = log sum_k exp l[b, k]`` and ``mean[b] = sum_k softmax_k(l[b, k]) v[b, k]``,
    where ``l, *v = terms(*prepare(*members), *inputs)``. Any function of the two may be the loss.
    The result does not depend on chunk, tile and number of ranks, up to rounding.

    Streamed, memory is what one chunk takes, 2 + M numbers per sample, and one sum of gradients per
    parameter; each chunk is computed twice. Random draws in it are the same both times. Gradients
    reach members, inputs and every parameter that ``prepare`` and ``terms`` use.

    Args:
        terms: (prepared members, inputs) to log-weights (B, C) and any number of values
            (B, C, M...). Each entry may depend on its own sample and member alone, which is
            proved on a recording before anything is cut.
        members: tensors with the K members in dimension 0.
        inputs: tensors with the B samples in dimension 0.
        prepare: what is done once per member, whatever the samples: members (C, ...) to prepared
            members (C, ...), such as a network. None leaves them as they are. It must treat
            members one by one as well: no batch normalisation in training, no mean over them.
        parameters: Tensors that ``prepare`` or ``terms`` use and that other tensors were computed
            into, such as copies of weights on another device. Leaves are found without.
        chunk: Members per chunk. None takes what `memfit.losses.chunked` has set; without either,
            everything is computed at once by autograd.
        tile: Samples at a time within a chunk; None takes all. Only together with chunks.
        group: The ranks that the set is split over, each with members of its own (any number from
            1) and the same inputs. Every rank gets the results and gradients of the whole set: one
            all-gather of B (2 + M) numbers in forward, one all-reduce of each parameter's and
            input's gradient in backward. The loss is then computed on every rank alike.
        is_part: Whether the members are a part of a set whose others are computed elsewhere; see
            `softmax_mean_of_parts`.
        name: What to call this loss where a plan asks for the losses that can be streamed.

    Returns:
        Log-sum-exp and means, in float32 at least.

    Raises:
        JobError: if a shape or size is unusable, if what would lie in different chunks meets in
            ``prepare`` or ``terms``, if these write into a buffer, or, in backward, if gradients
            are to be differentiated again, or a chunk uses a parameter that the first one does not.

    Source: the weights and sums, Milakov and Gimelshein 2018 (arXiv 1805.02867); two passes with
    recomputation as in Gao et al. 2021 (arXiv 2101.06983), section 3, whose cached gradients are
    replaced by the few numbers that determine them.
    """
    members, inputs = tuple(members), tuple(inputs)
    num_members = _common_length(members, "members")
    num_samples = _common_length(inputs, "inputs")
    of_members, of_samples = _cut_calls(terms, prepare, members, inputs)
    note_loss(
        StreamableLoss(
            name=name,
            num_rows=num_samples,
            num_candidates=num_members,
            smallest_chunk=1,
        ),
        lambda: of_members.separability(max(1, num_members // 4)),
    )
    chunk = chunk_size() if chunk is None else checked_chunk_size(chunk)
    if chunk is None and tile is None and group is None and not is_part:
        prepared = members if prepare is None else prepare(*members)
        log_weight_BK, *values = terms(*prepared, *inputs)
        log_weight_BK = log_weight_BK.to(torch.promote_types(log_weight_BK.dtype, torch.float32))
        return _mean_of(log_weight_BK, values)
    stream = SetStream(
        terms=terms,
        prepare=prepare,
        chunk=min(chunk or num_members, num_members),
        tile=num_samples if tile is None else checked_chunk_size(tile),
        group=group,
        num_members=len(members),
        leaves=list(parameters),
    )
    if stream.chunk < num_members or group is not None or is_part:
        of_members.check(min(stream.chunk, max(1, num_members // 2)))
    if stream.tile < num_samples:
        of_samples.check(stream.tile)
    if not torch.is_grad_enabled():
        sums = stream.sums(members, inputs)
        return SoftmaxMean(sums[0], tuple(sums[1:]))
    leaves = stream.begin(members, inputs)
    results = _Streamed.apply(stream, *members, *inputs, *leaves)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return SoftmaxMean(results[0], tuple(results[1:]))


def softmax_mean_of_parts(parts: Sequence[SoftmaxMean]) -> SoftmaxMean:
    """Put the results of parts of a set together, as if they had been one set.

    Parts may have been computed apart, on several devices; they have to be on one device here.
    """
    log_sum_exp_BP = torch.stack([part.log_sum_exp for part in parts], dim=1)
    stacked = [torch.stack(each, dim=1) for each in zip(*(p.means for p in parts), strict=True)]
    return _mean_of(log_sum_exp_BP, stacked)


def _common_length(tensors: Sequence[Tensor], what: str) -> int:
    """Return the extent of dimension 0 that all share.

    Raises:
        JobError: if there is none, or it is 0.
    """
    shapes = [tuple(each.shape) for each in tensors]
    lengths = {shape[0] if shape else 0 for shape in shapes}
    if len(lengths) != 1 or 0 in lengths:
        msg = (
            f"softmax_mean got {what} of shapes {', '.join(map(str, shapes)) or 'none'}; needed is "
            "at least one tensor, all with the same extent, at least 1, in dimension 0."
        )
        raise JobError(msg)
    return lengths.pop()


def _cut_calls(
    terms: Terms, prepare: Terms | None, members: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[CutCall, CutCall]:
    """Say what is computed for some of the members, and for some of the samples, at a time."""

    def of_members(some: Sequence[Tensor], samples: Sequence[Tensor]) -> Sequence[Tensor]:
        return terms(*(some if prepare is None else prepare(*some)), *samples)

    def of_samples(some: Sequence[Tensor], others: Sequence[Tensor]) -> Sequence[Tensor]:
        return of_members(others, some)

    functions = (terms, prepare)
    return (
        CutCall(call=of_members, cut=members, others=inputs, row_dim=1, functions=functions),
        CutCall(call=of_samples, cut=inputs, others=members, functions=functions),
    )


def _mean_of(log_weight_BK: Tensor, values: Sequence[Tensor]) -> SoftmaxMean:
    weight_BK = torch.softmax(log_weight_BK, dim=1)
    means = (
        weighted_sum(weight_BK, value).reshape(len(value), *value.shape[2:]) for value in values
    )
    return SoftmaxMean(torch.logsumexp(log_weight_BK, dim=1), tuple(means))


class _Streamed(torch.autograd.Function):
    """Two passes over a set: sums in forward, gradients in backward."""

    @staticmethod
    def forward(ctx: Any, stream: SetStream, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Find log-sum-exp and means."""
        # Parameters stay with the stream: their sums go by identity, which saving may change.
        own = tensors[: len(tensors) - len(stream.leaves)]
        results = stream.sums(*stream.parted(own))
        ctx.stream, ctx.num_own = stream, len(own)
        ctx.versions = [each._version for each in stream.leaves]
        ctx.save_for_backward(*own, *results)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of members, inputs and parameters.

        Raises:
            JobError: if they are to be differentiated again, or a parameter was changed in between.
        """
        if torch.is_grad_enabled():
            msg = (
                "softmax_mean was streamed, and its gradients are to be differentiated again; "
                "only the first derivative can be streamed. Leave the chunk size out, or do "
                "without create_graph=True."
            )
            raise JobError(msg)
        if ctx.versions != [each._version for each in ctx.stream.leaves]:
            msg = (
                "softmax_mean was streamed, and a parameter has been changed in place since. Go "
                "back before the optimizer's step."
            )
            raise JobError(msg)
        saved = ctx.saved_tensors  # once: checkpointing computes them anew each time
        own, results = saved[: ctx.num_own], saved[ctx.num_own :]
        found = ctx.stream.gradients(own, results, gradients)
        needed = ctx.needs_input_grad[1:]
        return None, *(each if n else None for each, n in zip(found, needed, strict=True))
