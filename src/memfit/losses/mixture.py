"""Mixtures of Gaussian kernels: likelihood and score matching, streamed over the kernels.

A kernel has a centre mu and a precision P = F F^T + diag(s), which is never formed. With
delta = x - mu and z = F^T delta:

    l = log N(x; mu, P^-1) = 1/2 log det P - 1/2 (|z|^2 + sum s delta^2) - D/2 log 2 pi
    u = P delta = F z + s delta        (- grad log N)
    a = |u|^2 - tr P                   (the Laplacian of N, divided by N)

Shape suffixes: B samples, K kernels, C kernels in a chunk, D dimensions, R columns of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from memfit.losses.ranks import counted_over_ranks
from memfit.losses.softmax_mean import SoftmaxMean, softmax_mean

if TYPE_CHECKING:
    from memfit.losses.ranks import Group


class Kernels(NamedTuple):
    """Gaussian kernels with precision ``F F^T + diag(s)``."""

    centres: Tensor
    """(C, D)."""
    factors: Tensor
    """F, (C, D, R)."""
    diagonals: Tensor
    """s, (C, D)."""
    log_determinants: Tensor
    """Of the precisions, (C,)."""


PrepareKernels = Callable[[Tensor], Kernels]


def mixture_score_matching(
    kernels: PrepareKernels,
    centres: Tensor,
    samples: Tensor,
    *,
    chunk: int | None = None,
    tile: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Average the implicit score matching objective of an equal-weight mixture over samples.

    It is ``mean_b(2 tr Hess log p(x_b) + |grad log p(x_b)|^2)`` in closed form: with the softmax
    weights w of the kernels at a sample, s = - sum w u and A = sum w a, it is ``2 A - |s|^2``. No
    product of two D x D matrices is formed, and no derivative is estimated.

    Args:
        kernels: centres (C, D) to kernels, such as a network; called for a chunk at a time.
        centres: (K, D).
        samples: (B, D).
        chunk: Kernels per chunk; see `softmax_mean`.
        tile: Samples at a time.
        group: The ranks that the centres are split over.

    Returns:
        A scalar.

    Raises:
        JobError: if shapes or sizes are unusable.

    Source: Hyvarinen 2005, "Estimation of non-normalized statistical models by score matching",
    theorem 1, times two.
    """
    mean = mixture_means(kernels, centres, samples, chunk=chunk, tile=tile, group=group)
    return score_matching_of(mean)


def mixture_means(
    kernels: PrepareKernels,
    centres: Tensor,
    samples: Tensor,
    *,
    parameters: Sequence[Tensor] = (),
    chunk: int | None = None,
    tile: int | None = None,
    group: Group | None = None,
    is_part: bool = False,
) -> SoftmaxMean:
    """Return what `score_matching_of` needs: the means of u (B, D) and a (B,) over the kernels.

    The means of parts of a mixture, wherever they were computed, are put together by
    `softmax_mean_of_parts`. Arguments and errors are those of `softmax_mean`.
    """
    return _over_kernels(
        _score_terms,
        kernels,
        centres,
        samples,
        parameters=parameters,
        chunk=chunk,
        tile=tile,
        group=group,
        is_part=is_part,
    )


def score_matching_of(mean: SoftmaxMean) -> Tensor:
    """Return the implicit score matching objective from the means of u and a, a scalar."""
    gradient_BD, laplacian_B = mean.means
    return (2.0 * laplacian_B - gradient_BD.square().sum(1)).mean()


def mixture_log_density(
    kernels: PrepareKernels,
    centres: Tensor,
    samples: Tensor,
    *,
    chunk: int | None = None,
    tile: int | None = None,
    group: Group | None = None,
) -> Tensor:
    """Return the log-density of an equal-weight mixture at each sample, (B,), in nats.

    Its negative mean is the likelihood's loss. Arguments and errors are those of
    `mixture_score_matching`.
    """
    mean = _over_kernels(
        _density_terms, kernels, centres, samples, chunk=chunk, tile=tile, group=group
    )
    num_kernels = len(centres)
    if group is not None:
        num_kernels = counted_over_ranks(num_kernels, group, centres.device)
    return mean.log_sum_exp - math.log(num_kernels)


def mixture_score(
    kernels: PrepareKernels, centres: Tensor, samples: Tensor, *, chunk: int | None = None
) -> Tensor:
    """Return the score of an equal-weight mixture, grad log p at each sample, (B, D)."""
    return -mixture_means(kernels, centres, samples, chunk=chunk).means[0]


def _over_kernels(
    terms: Callable[..., tuple[Tensor, ...]],
    kernels: PrepareKernels,
    centres: Tensor,
    samples: Tensor,
    **how: Any,
) -> SoftmaxMean:
    return softmax_mean(terms, (centres,), (samples,), prepare=kernels, name="mixture", **how)


def _score_terms(
    centres: Tensor, factors: Tensor, diagonals: Tensor, log_determinants: Tensor, samples: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return l (B, C), u (B, C, D) and a (B, C)."""
    terms: tuple[Tensor, Tensor, Tensor] = _ScoreTerms.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        centres, factors, diagonals, samples
    )
    quadratic_CB, gradient_CBD, laplacian_CB = terms
    log_density_BC = _log_density(quadratic_CB, log_determinants, samples.shape[1])
    return log_density_BC, gradient_CBD.transpose(0, 1), laplacian_CB.t()


def _density_terms(
    centres: Tensor, factors: Tensor, diagonals: Tensor, log_determinants: Tensor, samples: Tensor
) -> tuple[Tensor]:
    """Return l (B, C)."""
    delta_CBD = samples[None] - centres[:, None]
    quadratic_CB = torch.bmm(delta_CBD, factors).square().sum(2)
    quadratic_CB = quadratic_CB + (diagonals[:, None] * delta_CBD.square()).sum(2)
    return (_log_density(quadratic_CB, log_determinants, samples.shape[1]),)


def _log_density(quadratic_CB: Tensor, log_determinants: Tensor, num_dimensions: int) -> Tensor:
    log_density_CB = 0.5 * (log_determinants[:, None] - quadratic_CB)
    return log_density_CB.t() - 0.5 * num_dimensions * math.log(2.0 * math.pi)


class _ScoreTerms(torch.autograd.Function):
    """The quadratic form, u and a, with a backward that needs one matrix as large as the factors.

    Autograd would keep and add up one such matrix for each use of the factors. With the incoming
    gradients q, g and c, G = g + 2 c u and H = F^T G + 2 q z:

        dF = sum_b (G z^T + delta H^T) - 2 (sum_b c) F
        ds = sum_b (G delta + q delta^2) - sum_b c
        ddelta = F H + s (G + 2 q delta)
    """

    @staticmethod
    def forward(
        ctx: Any, centres: Tensor, factors: Tensor, diagonals: Tensor, samples: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return quadratic form (C, B), u (C, B, D) and a (C, B)."""
        delta_CBD = samples[None] - centres[:, None]
        z_CBR = torch.bmm(delta_CBD, factors)
        u_CBD = torch.bmm(z_CBR, factors.transpose(1, 2)).addcmul_(diagonals[:, None], delta_CBD)
        quadratic_CB = z_CBR.square().sum(2) + (diagonals[:, None] * delta_CBD.square()).sum(2)
        trace_C = torch.linalg.vector_norm(factors, dim=(1, 2)).square() + diagonals.sum(1)
        ctx.save_for_backward(centres, factors, diagonals, samples, z_CBR, u_CBD)
        return quadratic_CB, u_CBD, u_CBD.square().sum(2) - trace_C[:, None]

    @staticmethod
    def backward(
        ctx: Any, of_quadratic_CB: Tensor, of_u_CBD: Tensor, of_a_CB: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of centres, factors, diagonals and samples."""
        centres, factors, diagonals, samples, z_CBR, u_CBD = ctx.saved_tensors
        needs = dict(
            zip(("centres", "factors", "diagonals", "samples"), ctx.needs_input_grad, strict=True)
        )
        delta_CBD = samples[None] - centres[:, None]
        twice_CB1 = 2.0 * of_quadratic_CB[..., None]
        G_CBD = of_u_CBD + 2.0 * of_a_CB[..., None] * u_CBD
        H_CBR = torch.bmm(G_CBD, factors).addcmul_(twice_CB1, z_CBR)
        of_factors = of_diagonals = of_delta_CBD = None
        if needs["factors"]:
            of_factors = factors * (-2.0 * of_a_CB.sum(1))[:, None, None]
            left_CBD, right_CBR = torch.cat((G_CBD, delta_CBD), 1), torch.cat((z_CBR, H_CBR), 1)
            of_factors.baddbmm_(left_CBD.transpose(1, 2), right_CBR)
        if needs["diagonals"]:
            inner_CBD = G_CBD + 0.5 * twice_CB1 * delta_CBD
            of_diagonals = (inner_CBD * delta_CBD).sum(1) - of_a_CB.sum(1)[:, None]
        if needs["centres"] or needs["samples"]:
            of_delta_CBD = torch.bmm(H_CBR, factors.transpose(1, 2))
            of_delta_CBD.addcmul_(diagonals[:, None], G_CBD + twice_CB1 * delta_CBD)
        return (
            -of_delta_CBD.sum(1) if needs["centres"] and of_delta_CBD is not None else None,
            of_factors,
            of_diagonals,
            of_delta_CBD.sum(0) if needs["samples"] and of_delta_CBD is not None else None,
        )
