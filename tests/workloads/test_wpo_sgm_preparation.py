"""What is done to data before WPO-SGM is trained: whitening, noise, and where kernels stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memfit.errors import MemfitWarning
from memfit.losses import Kernels, mixture_score_matching
from memfit_workloads.wpo_sgm.centres import choose_centres
from memfit_workloads.wpo_sgm.checkpoints import load_mixture
from memfit_workloads.wpo_sgm.data import DataSizes, Samples, load_samples
from memfit_workloads.wpo_sgm.evaluation import (
    gaussian_negative_log_likelihood,
    negative_log_likelihood,
)
from memfit_workloads.wpo_sgm.sampling import draw
from memfit_workloads.wpo_sgm.triangles import diagonal_places
from memfit_workloads.wpo_sgm.whitening import Whitening

from .test_wpo_sgm_model import mixture
from .test_wpo_sgm_training import AS_IT_IS, losses, train

SIZES = DataSizes(num_train=400, num_validation=50, num_test=100)


@pytest.fixture
def skewed() -> Samples:
    """Return three coordinates that vary by very different amounts, and together."""
    torch.manual_seed(0)
    mixing = torch.diag(torch.tensor([30.0, 1.0, 0.3])) @ torch.linalg.qr(torch.randn(3, 3)).Q
    parts = [torch.randn(n, 3) @ mixing + 5 for n in (400, 50, 100)]
    return Samples(name="skewed", train=parts[0], validation=parts[1], test=parts[2])


def test_whitened_samples_have_unit_covariance_and_come_back(skewed):
    whitening = Whitening.of(skewed.train)
    whitened = whitening.samples(skewed)
    covariance = torch.cov(whitened.train.double().T)
    assert torch.allclose(covariance, torch.eye(3).double(), atol=1e-2)
    assert float(whitened.train.mean(0).abs().max()) < 1e-3
    assert torch.allclose(whitening.undo(whitened.test), skewed.test, rtol=1e-5, atol=1e-4)


def test_likelihoods_of_whitened_samples_are_those_of_the_data(skewed):
    whitened = Whitening.of(skewed.train).samples(skewed)
    found = gaussian_negative_log_likelihood(whitened.train, whitened.test) - whitened.log_volume
    wanted = gaussian_negative_log_likelihood(skewed.train, skewed.test)
    assert found == pytest.approx(wanted, abs=1e-2)


@pytest.mark.slow
def test_a_run_on_whitened_data_reports_figures_of_the_data(tmp_path):
    words = ("--whiten", "--niters", 30, "--eval_every", 30, *AS_IT_IS)
    result = train("--save", tmp_path, *words)
    folder = Path(result["run_folder"])
    told = DataSizes(num_train=60, num_validation=20, num_test=20)
    data = load_samples("8gaussians", told, seed=42)
    whitening = Whitening(**torch.load(folder / "whitening.pth", weights_only=True))
    points = whitening.apply(data.test)
    by_hand = negative_log_likelihood(load_mixture(folder), points, chunk=3) - whitening.log_volume
    assert result["metrics"]["test_nll"] == pytest.approx(by_hand, rel=1e-5)
    gaussian = gaussian_negative_log_likelihood(data.train, data.test)
    assert result["metrics"]["gaussian_test_nll"] == pytest.approx(gaussian)
    drawn_scale = result["metrics"]["distance_to_train"]
    assert 0.05 < drawn_scale / result["metrics"]["distance_of_test_to_train"] < 20


@pytest.mark.slow
def test_noise_changes_the_samples_of_every_step_and_depends_on_the_seed_alone(tmp_path):
    runs = [("a", 0.5), ("b", 0.5), ("c", 0.0)]
    logs = {}
    for name, noise in runs:
        result = train("--save", tmp_path / name, "--data_noise", noise, *AS_IT_IS)
        logs[name] = losses(Path(result["run_folder"]))
    assert logs["a"] == logs["b"]
    assert logs["a"] != logs["c"]


@pytest.mark.slow
def test_kernels_stand_at_the_first_samples_or_amid_clusters():
    pytest.importorskip("sklearn")
    samples = load_samples("8gaussians", SIZES, seed=0)
    first = choose_centres(samples.train, 8, "first", seed=0)
    assert torch.equal(first, samples.train[:8])
    clusters = choose_centres(samples.train, 8, "kmeans", seed=0)
    assert clusters.shape == (8, 2)
    assert clusters.dtype == torch.float32
    to_clusters, to_first = (
        float(torch.cdist(samples.test, centres).min(1).values.mean())
        for centres in (clusters, first)
    )
    assert to_clusters < 0.8 * to_first
    assert torch.equal(clusters, choose_centres(samples.train, 8, "kmeans", seed=0))


def test_samples_are_drawn_from_kernels_that_are_nearly_flat():
    built = mixture("softplus")
    with torch.no_grad():
        built.network.last.bias[diagonal_places(5)] = -20.0  # leaves the floor, 1e-6
        built.network.last.weight[diagonal_places(5)] = 0.0
    assert draw(built, 50, torch.Generator().manual_seed(0), chunk=3).isfinite().all()


def test_weights_take_the_quadratic_form_of_the_precision_in_any_number_of_dimensions():
    """|P d|^2 in its place, or log-densities clamped at 200, give another objective."""
    torch.manual_seed(0)
    num_kernels, size = 4, 600
    centres = 0.02 * torch.randn(num_kernels, size, dtype=torch.float64)
    factors = 0.8 * torch.eye(size, dtype=torch.float64).expand(num_kernels, -1, -1).clone()
    factors *= torch.linspace(0.99, 1.01, num_kernels, dtype=torch.float64)[:, None, None]
    diagonals = torch.full((num_kernels, size), 0.1, dtype=torch.float64)
    precisions = factors @ factors.transpose(1, 2) + torch.diag_embed(diagonals)
    samples = centres + 1.3 * torch.randn(num_kernels, size, dtype=torch.float64)
    log_determinants = torch.logdet(precisions)

    def kernels(chosen):
        rows = [int((centres == centre).all(1).nonzero()) for centre in chosen]
        return Kernels(chosen, factors[rows], diagonals[rows], log_determinants[rows])

    def objective(weigh):
        delta = samples[:, None] - centres
        u = torch.einsum("kij,bkj->bki", precisions, delta)
        weight = torch.softmax(weigh(delta, u), 1)
        a = u.square().sum(2) - precisions.diagonal(dim1=1, dim2=2).sum(1)
        score = -(weight[..., None] * u).sum(1)
        return float((2 * (weight * a).sum(1) - score.square().sum(1)).mean())

    def exact(delta, u):
        return 0.5 * log_determinants - 0.5 * (delta * u).sum(2)

    with pytest.warns(MemfitWarning, match="could not be followed"):  # kernels looks rows up
        found = float(mixture_score_matching(kernels, centres, samples, chunk=3))
    assert found == pytest.approx(objective(exact), rel=1e-12)
    clamped = objective(lambda d, u: (exact(d, u) - 551).clamp(-200, 200))
    assert abs(clamped / found - 1) > 1e-3
    squared = objective(lambda _, u: 0.5 * log_determinants - 0.5 * u.square().sum(2))
    assert abs(squared / found - 1) > 1e-3
