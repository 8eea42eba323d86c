"""The mixture of WPO-SGM: packed factors, three precisions, noise, trainers for existing scripts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from memfit.errors import JobError, MemfitWarning, UsageError
from memfit_workloads import wpo_sgm
from memfit_workloads.wpo_sgm import fitting_chunk
from memfit_workloads.wpo_sgm.model import KernelMixture
from memfit_workloads.wpo_sgm.precisions import log_determinant
from memfit_workloads.wpo_sgm.sampling import draw
from memfit_workloads.wpo_sgm.sizes import PRECISIONS, MixtureSizes
from memfit_workloads.wpo_sgm.triangles import (
    FLOOR,
    diagonal_places,
    fill_triangles,
    triangle_places,
    triangle_size,
)

NUM_DIMENSIONS, NUM_CENTRES = 5, 7


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def mixture(precision: str, noise: float = 0.0, seed: int = 0) -> KernelMixture:
    """Build a small mixture whose kernels differ."""
    torch.manual_seed(seed)
    sizes = MixtureSizes(
        num_dimensions=NUM_DIMENSIONS,
        num_centres=NUM_CENTRES,
        depth=2,
        hidden_units=6,
        precision=precision,
        rank=2,
        stability=0.05,
        noise=noise,
    )
    built = KernelMixture(sizes, torch.randn(NUM_CENTRES, NUM_DIMENSIONS)).double()
    with torch.no_grad():
        built.network.last.weight.normal_(0.0, 0.5)
    return built


def precisions(built: KernelMixture) -> Tensor:
    """Form the precision matrices from the network's outputs, entry by entry."""
    outputs = built.network(built.centres)
    size = built.sizes.num_dimensions
    if built.sizes.precision == "low_rank":
        diagonal = nn.functional.softplus(outputs[:, :size]) + FLOOR
        columns = outputs[:, size:].reshape(-1, size, built.sizes.rank)
        return columns @ columns.transpose(1, 2) + torch.diag_embed(diagonal)
    lower = torch.zeros(NUM_CENTRES, size, size, dtype=torch.float64)
    for row in range(size):
        for column in range(row + 1):
            lower[:, row, column] = outputs[:, row * (row + 1) // 2 + column]
    if built.sizes.precision == "softplus":
        diagonal = nn.functional.softplus(lower.diagonal(dim1=1, dim2=2)) + FLOOR
        lower = lower.tril(-1) + torch.diag_embed(diagonal)
        return lower @ lower.transpose(1, 2)
    return lower @ lower.transpose(1, 2) + built.sizes.stability * eye(size)


def reference_density(built: KernelMixture, samples: Tensor) -> Tensor:
    covariances = torch.linalg.inv(precisions(built))
    covariances = covariances + built.sizes.noise * eye(NUM_DIMENSIONS)
    parts = torch.distributions.MultivariateNormal(built.centres, covariances)
    return torch.logsumexp(parts.log_prob(samples[:, None]), 1) - math.log(NUM_CENTRES)


def samples_of(num: int = 6) -> Tensor:
    return torch.randn(num, NUM_DIMENSIONS, dtype=torch.float64)


def same_gradients(loss: Tensor, expected: Tensor, parameters: list[Tensor], most: float) -> None:
    pairs = zip(
        torch.autograd.grad(loss, parameters),
        torch.autograd.grad(expected, parameters, retain_graph=True),
        strict=True,
    )
    for a, b in pairs:
        assert float((a - b).norm() / b.norm()) <= most


def test_packed_triangles_are_filled_row_by_row_and_gradients_go_back():
    size = 4
    packed = torch.randn(3, triangle_size(size), dtype=torch.float64, requires_grad=True)
    places = triangle_places(size)
    assert diagonal_places(size).tolist() == [0, 2, 5, 9]
    for is_positive in (False, True):
        matrices, diagonals = fill_triangles(packed, places, is_positive=is_positive)
        assert torch.equal(matrices, matrices.tril())
        assert torch.equal(matrices.diagonal(dim1=1, dim2=2), diagonals)
        assert (not is_positive) or (diagonals > 0).all()
        assert torch.autograd.gradcheck(
            lambda p, positive=is_positive: fill_triangles(p, places, is_positive=positive),
            (packed,),
        )


def test_log_determinants_and_their_gradients():
    factors = torch.randn(3, 4, 4, dtype=torch.float64).tril().requires_grad_()
    expected = torch.logdet(factors @ factors.transpose(1, 2) + 0.1 * eye(4))
    assert torch.allclose(log_determinant(factors, 0.1), expected)
    assert torch.autograd.gradcheck(lambda f: log_determinant(f, 0.1), (factors,))


each_precision = pytest.mark.parametrize(
    ("precision", "noise"),
    [*((each, 0.0) for each in PRECISIONS), ("eps", 0.3), ("softplus", 0.3)],
)


@pytest.mark.slow
@each_precision
def test_densities_are_those_of_the_precisions_written_out(precision, noise):
    built, samples = mixture(precision, noise), samples_of()
    expected = reference_density(built, samples)
    for chunk in (None, 1, 3):
        found = built.log_density(samples, chunk=chunk)
        assert torch.allclose(found, expected, rtol=1e-11)
        same_gradients(found.mean(), expected.mean(), list(built.network.parameters()), 1e-9)


@pytest.mark.slow
@each_precision
@pytest.mark.parametrize("chunk", [None, 1, 2, 7])
def test_the_objective_is_that_of_an_autograd_hessian(precision, noise, chunk):
    built, samples = mixture(precision, noise), samples_of(3)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:

        def density(point: Tensor) -> Tensor:
            return reference_density(built, point[None])[0]

        score = torch.autograd.functional.jacobian(density, sample, create_graph=True)
        hessian = torch.autograd.functional.hessian(density, sample, create_graph=True)
        total = total + 2 * hessian.trace() + score.square().sum()
    expected = total / len(samples)
    found = built.score_matching(samples, chunk=chunk)
    assert found.item() == pytest.approx(expected.item(), rel=1e-11)
    same_gradients(found, expected, list(built.network.parameters()), 1e-9)


def test_the_parameters_at_the_documents_scale_are_those_of_its_constant():
    with torch.device("meta"):
        sizes = MixtureSizes(num_dimensions=3072, num_centres=1, precision="softplus")
        built = KernelMixture(sizes, torch.empty(1, 3072))
    assert sum(each.numel() for each in built.parameters()) == 307_021_632


def test_all_kernels_begin_alike():
    sizes = MixtureSizes(num_dimensions=3, num_centres=4, stability=0.5)
    built = KernelMixture(sizes, torch.randn(4, 3))
    kernels = built.kernels(built.centres)
    assert torch.allclose(kernels.factors, 0.1 * eye(3).float().expand(4, 3, 3))
    assert torch.equal(kernels.diagonals, torch.full((4, 3), 0.5))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_drawn_samples_have_the_mixtures_moments(precision):
    built = mixture(precision)
    drawn = draw(built, 40_000, torch.Generator().manual_seed(0), chunk=3)
    covariances = torch.linalg.inv(precisions(built).detach())
    mean = built.centres.mean(0)
    spread = covariances.mean(0) + torch.cov(built.centres.T, correction=0)
    deviations = spread.diagonal().sqrt()
    assert ((drawn.mean(0) - mean).abs() < 0.06 * deviations).all()
    found = torch.cov(drawn.T.double())
    assert ((found - spread).abs() < 0.12 * deviations[:, None] * deviations).all()


def test_sizes_that_make_no_model_are_refused():
    with pytest.raises(UsageError, match="--stability is 0"):
        MixtureSizes(num_dimensions=2, num_centres=1, stability=0)
    with pytest.raises(UsageError, match="no closed form"):
        MixtureSizes(num_dimensions=2, num_centres=1, precision="low_rank", noise=0.1)
    with pytest.raises(TypeError, match="missing"):
        MixtureSizes.from_json({"num_dimensions": 2})


class FactorNet(nn.Module):
    """A script's own factor network."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(NUM_DIMENSIONS, 8), nn.Tanh(), nn.Linear(8, triangle_size(NUM_DIMENSIONS))
        ).double()

    def forward(self, centers: Tensor) -> Tensor:
        return self.layers(centers)


def script_loss(net: nn.Module, centers: Tensor, samples: Tensor, stab: float) -> Tensor:
    """Write down the loss of the whole mixture, with every matrix formed."""
    size = centers.shape[1]
    rows, columns = torch.tril_indices(size, size)
    lower = torch.zeros(len(centers), size, size, dtype=torch.float64)
    lower = lower.index_put(
        (torch.arange(len(centers))[:, None], rows[None], columns[None]), net(centers)
    )
    precision = lower @ lower.transpose(1, 2) + stab * eye(size)
    delta = samples[:, None] - centers
    u = torch.einsum("kij,bkj->bki", precision, delta)
    weight = torch.softmax(0.5 * torch.logdet(precision) - 0.5 * (delta * u).sum(2), 1)
    a = u.square().sum(2) - precision.diagonal(dim1=1, dim2=2).sum(1)
    score = -(weight[..., None] * u).sum(1)
    return (2 * (weight * a).sum(1) - score.square().sum(1)).mean()


@pytest.fixture
def script() -> SimpleNamespace:
    torch.manual_seed(0)
    centers = torch.randn(15, NUM_DIMENSIONS, dtype=torch.float64)
    net, samples = FactorNet(), samples_of()
    return SimpleNamespace(
        net=net, centers=centers, samples=samples, loss=script_loss(net, centers, samples, 1e-2)
    )


@pytest.mark.parametrize("chunk_size", [1, 4, 15, 50])
def test_a_script_that_streams_over_chunks_trains_the_same_objective(script, chunk_size):
    trainer = wpo_sgm.setup_chunked_training(script.net, script.centers, chunk_size)
    found = trainer.compute_loss(script.samples, 1e-2)
    assert found.item() == pytest.approx(script.loss.item(), rel=1e-12)
    same_gradients(found, script.loss, list(trainer.factornet.parameters()), 1e-12)


@pytest.mark.parametrize("steps", [1, 4, 8, 15, 40])
def test_accumulation_over_any_number_of_parts_is_one_step_of_the_whole_mixture(script, steps):
    """Fifteen centres in eight parts, and more parts than centres, are what went wrong before."""
    gradients = torch.autograd.grad(script.loss, list(script.net.parameters()))
    expected = [
        p.detach() - 0.1 * g for p, g in zip(script.net.parameters(), gradients, strict=True)
    ]
    trainer = wpo_sgm.setup_gradient_accumulation_training(script.net, script.centers, steps)
    optimizer = torch.optim.SGD(trainer.factornet.parameters(), lr=0.1)
    loss = trainer.training_step(script.samples, optimizer, stab=1e-2)
    assert loss.item() == pytest.approx(script.loss.item(), rel=1e-12)
    for found, wanted in zip(script.net.parameters(), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_centres_split_over_devices_train_one_network(script, num_devices):
    args = SimpleNamespace(lr=0.1, weight_decay=0.0, chunk_size=2)
    trainer, optimizer = wpo_sgm.setup_model_parallel_training(
        script.net, script.centers, ["cpu"] * num_devices, args
    )
    found = trainer.compute_loss(script.samples, 1e-2)
    assert found.item() == pytest.approx(script.loss.item(), rel=1e-12)
    same_gradients(found, script.loss, list(trainer.factornet.parameters()), 1e-12)
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert owned == {id(p) for p in script.net.parameters()}, "the optimizer holds one network"


@pytest.mark.slow
def test_a_chunk_that_is_not_given_is_the_largest_that_fits_what_is_free(script, monkeypatch):
    centers = torch.randn(200, NUM_DIMENSIONS, dtype=torch.float64)

    def chunk_with(free: int) -> int:
        monkeypatch.setattr(fitting_chunk, "free_memory_bytes", lambda: free)
        trainer = wpo_sgm.setup_chunked_training(FactorNet(), centers)
        found = trainer.compute_loss(script.samples, 1e-2)
        assert found.requires_grad
        return trainer.chunk_size

    assert chunk_with(2**30) == len(centers)
    few, more = chunk_with(100_000), chunk_with(200_000)
    assert 1 <= few < more < len(centers)
    with pytest.raises(JobError, match="one centre at a time"):
        chunk_with(1000)


def test_parts_that_are_trained_one_by_one_are_warned_of(script):
    """The document's loop over devices gives each part a mixture of its own."""
    args = SimpleNamespace(lr=0.1)
    first, second = script.centers.tensor_split(2)
    trainers = [wpo_sgm.setup_chunked_training(script.net, first, 20)]
    with pytest.warns(MemfitWarning, match=r"setup_model_parallel_training.*chunk_size = 20"):
        trainers.append(wpo_sgm.setup_chunked_training(script.net, second, 20))
    exact, _ = wpo_sgm.setup_model_parallel_training(script.net, script.centers, ["cpu"] * 2, args)
    parts = sum(trainer.compute_loss(script.samples, 1e-2).item() for trainer in trainers) / 2
    whole = exact.compute_loss(script.samples, 1e-2).item()
    assert whole == pytest.approx(script.loss.item(), rel=1e-12)
    assert parts != pytest.approx(whole, rel=1e-6)


def test_the_same_centres_may_be_set_up_again(script, recwarn):
    for chunk_size in (2, 4):
        wpo_sgm.setup_chunked_training(script.net, script.centers, chunk_size)
    assert not recwarn.list


def test_what_a_script_gets_wrong_is_said(script):
    trainer = wpo_sgm.setup_chunked_training(script.net, script.centers, 4)
    with pytest.raises(JobError, match="stab is 0"):
        trainer.compute_loss(script.samples, 0.0)
    other = wpo_sgm.setup_chunked_training(nn.Linear(NUM_DIMENSIONS, 3).double(), script.centers, 4)
    with (
        pytest.warns(MemfitWarning, match="cannot be recorded"),
        pytest.raises(JobError, match=r"\(4, 3\) for 4 centres"),
    ):
        other.compute_loss(script.samples)
    with pytest.raises(JobError, match="accumulation_steps is 0"):
        wpo_sgm.setup_gradient_accumulation_training(script.net, script.centers, 0)
    with pytest.raises(JobError, match="chunk_size is 0"):
        wpo_sgm.setup_chunked_training(script.net, script.centers, 0)
    if not torch.cuda.is_available():
        args = SimpleNamespace(lr=0.1)
        with pytest.raises(JobError, match=r"GPU 1, and torch sees 0 here"):
            wpo_sgm.setup_model_parallel_training(script.net, script.centers, [1, 2], args)
    with pytest.raises(AttributeError):
        wpo_sgm.setup_nothing  # noqa: B018 - asked for on purpose
