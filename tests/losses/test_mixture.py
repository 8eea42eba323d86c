"""Mixture losses against their definitions: densities by torch.distributions, scores by autograd."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from memfit.losses import (
    Kernels,
    mixture_log_density,
    mixture_score,
    mixture_score_matching,
    softmax_mean_of_parts,
)
from memfit.losses.mixture import mixture_means, score_matching_of

NUM_DIMENSIONS, NUM_KERNELS, NUM_SAMPLES = 4, 7, 5
CHUNKS = (None, 1, 2, 3, 7, 50)


class Shapes(nn.Module):
    """A network that gives factors and diagonals of precisions."""

    def __init__(self, num_columns: int = NUM_DIMENSIONS) -> None:
        super().__init__()
        self.num_columns = num_columns
        self.layers = nn.Sequential(
            nn.Linear(NUM_DIMENSIONS, 6),
            nn.Tanh(),
            nn.Linear(6, NUM_DIMENSIONS * (num_columns + 1)),
        ).double()

    def kernels(self, centres: Tensor) -> Kernels:
        raw, factors = self.layers(centres).split(
            (NUM_DIMENSIONS, NUM_DIMENSIONS * self.num_columns), dim=1
        )
        factors = factors.reshape(-1, NUM_DIMENSIONS, self.num_columns)
        diagonals = raw.exp()
        precisions = factors @ factors.transpose(1, 2) + torch.diag_embed(diagonals)
        return Kernels(centres, factors, diagonals, torch.logdet(precisions))

    def density(self, centres: Tensor, samples: Tensor) -> Tensor:
        """Return log p by torch.distributions."""
        _, factors, diagonals, _ = self.kernels(centres)
        precisions = factors @ factors.transpose(1, 2) + torch.diag_embed(diagonals)
        parts = torch.distributions.MultivariateNormal(centres, precision_matrix=precisions)
        each = parts.log_prob(samples[:, None])
        return torch.logsumexp(each, 1) - math.log(len(centres))


def make(num_columns: int = NUM_DIMENSIONS) -> tuple[Shapes, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = Shapes(num_columns)
    centres = torch.randn(NUM_KERNELS, NUM_DIMENSIONS, dtype=torch.float64)
    samples = torch.randn(NUM_SAMPLES, NUM_DIMENSIONS, dtype=torch.float64)
    return shapes, centres, samples


def by_autograd(shapes: Shapes, centres: Tensor, samples: Tensor) -> Tensor:
    """Return mean(2 tr Hess log p + |grad log p|^2) by differentiating twice."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:

        def density(point: Tensor) -> Tensor:
            return shapes.density(centres, point[None])[0]

        score = torch.autograd.functional.jacobian(density, sample, create_graph=True)
        hessian = torch.autograd.functional.hessian(density, sample, create_graph=True)
        total = total + 2 * hessian.trace() + score.square().sum()
    return total / len(samples)


def gradients(loss: Tensor, shapes: Shapes, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*shapes.parameters(), *others]))


def assert_equal(found: list[Tensor], expected: list[Tensor], most: float = 1e-12) -> None:
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).norm() / b.norm()) <= most


@pytest.mark.slow
@pytest.mark.parametrize("num_columns", [1, 3, NUM_DIMENSIONS, 6])
def test_score_matching_is_what_differentiating_the_density_twice_gives(num_columns):
    shapes, centres, samples = make(num_columns)
    expected = by_autograd(shapes, centres, samples)
    of_expected = gradients(expected, shapes)
    for chunk in CHUNKS:
        found = mixture_score_matching(shapes.kernels, centres, samples, chunk=chunk)
        assert found.item() == pytest.approx(expected.item(), rel=1e-12)
        assert_equal(gradients(found, shapes), of_expected)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [1, 2, 5])
def test_samples_may_be_tiled_as_well(tile):
    shapes, centres, samples = make()
    expected = mixture_score_matching(shapes.kernels, centres, samples)
    found = mixture_score_matching(shapes.kernels, centres, samples, chunk=3, tile=tile)
    assert_equal(gradients(found, shapes), gradients(expected, shapes))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_log_density_is_that_of_the_mixture(chunk):
    shapes, centres, samples = make()
    expected = shapes.density(centres, samples)
    found = mixture_log_density(shapes.kernels, centres, samples, chunk=chunk)
    assert torch.allclose(found, expected, rtol=1e-13)
    assert_equal(gradients(found.mean(), shapes), gradients(expected.mean(), shapes))


def test_the_score_is_the_gradient_of_the_log_density():
    shapes, centres, samples = make()
    samples.requires_grad_()
    expected = torch.autograd.grad(shapes.density(centres, samples).sum(), samples)[0]
    found = mixture_score(shapes.kernels, centres, samples, chunk=2)
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("chunk", [None, 2])
def test_gradients_reach_samples_and_centres(chunk):
    shapes, centres, samples = make()
    centres.requires_grad_()
    samples.requires_grad_()
    expected = by_autograd(shapes, centres, samples.detach())
    found = mixture_score_matching(shapes.kernels, centres, samples, chunk=chunk)
    of_centres, of_samples = torch.autograd.grad(found, [centres, samples], retain_graph=True)
    assert_equal([of_centres], [torch.autograd.grad(expected, centres)[0]])
    step = 1e-6 * torch.randn_like(samples)
    with torch.no_grad():
        higher, lower = (
            mixture_score_matching(shapes.kernels, centres, samples + sign * step)
            for sign in (1, -1)
        )
    assert float((of_samples * 2 * step).sum()) == pytest.approx(float(higher - lower), rel=1e-6)


def test_parts_of_a_mixture_on_several_devices_make_the_whole():
    shapes, centres, samples = make()
    parts = [
        mixture_means(shapes.kernels, part, samples, chunk=2) for part in centres.split((1, 4, 2))
    ]
    found = score_matching_of(softmax_mean_of_parts(parts))
    expected = mixture_score_matching(shapes.kernels, centres, samples)
    assert_equal(gradients(found, shapes), gradients(expected, shapes))


def test_far_away_samples_and_narrow_kernels_give_numbers():
    """In many dimensions log-densities are far below what any clamp would leave alone."""
    shapes, centres, samples = make()
    for chunk in (None, 2):
        found = mixture_log_density(shapes.kernels, centres, 1e4 + samples, chunk=chunk)
        assert found.isfinite().all()
        assert (found < -1e6).all()
