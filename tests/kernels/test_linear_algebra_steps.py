"""Steps that factorise and solve are predicted to the byte, or to a few numbers of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memfit

pytestmark = pytest.mark.slow

MOST_BYTES_OFF = 16  # numbers that torch makes tensors of


def with_identity(matrix: Tensor, weight: float = 1.0) -> Tensor:
    return matrix + weight * torch.eye(matrix.shape[-1])


def marginal_likelihood(weight: Tensor, inputs: Tensor) -> Tensor:
    features = inputs @ weight
    kernel = with_identity(torch.exp(-torch.cdist(features, features).square()))
    root = torch.linalg.cholesky(kernel)
    solved = torch.linalg.solve_triangular(root, features[:, :1], upper=False)
    return solved.square().sum() + root.diagonal().log().sum()


def whitening(weight: Tensor, inputs: Tensor) -> Tensor:
    features = inputs @ weight
    values, vectors = torch.linalg.eigh(with_identity(features.T @ features))
    return (features @ (vectors * values.rsqrt()) @ vectors.T).pow(4).mean()


def orthogonal(weight: Tensor, inputs: Tensor) -> Tensor:
    basis, upper = torch.linalg.qr(weight)
    return (inputs @ (basis * upper.diagonal().sign())).pow(4).mean()


def rotation(weight: Tensor, inputs: Tensor) -> Tensor:
    return (inputs @ torch.linalg.matrix_exp(20.0 * (weight - weight.T))).pow(4).mean()


def least_squares(weight: Tensor, inputs: Tensor) -> Tensor:
    return torch.linalg.lstsq(inputs @ weight, inputs[:, :3]).solution.square().sum()


def log_determinant(weight: Tensor, inputs: Tensor) -> Tensor:
    return (inputs @ weight).square().mean() - torch.linalg.slogdet(weight)[1]


def factors(weight: Tensor, inputs: Tensor) -> Tensor:
    left, values, _ = torch.linalg.svd(weight, full_matrices=False)
    return (inputs @ left * values).square().mean()


def pseudo_inverse(weight: Tensor, inputs: Tensor) -> Tensor:
    """The formula of the gradient adds to what it has made itself, in new memory."""
    return (inputs @ torch.linalg.pinv(weight).T).square().mean()


def twice_the_same(weight: Tensor, inputs: Tensor) -> Tensor:
    """Autograd adds up two gradients that one operator has made, in place."""
    features = inputs @ weight
    return (features * features).sum()


def product_with_itself(weight: Tensor, inputs: Tensor) -> Tensor:
    """The gradient of a sum has no memory of its own; each product copies it."""
    features = weight.sin()
    return (features @ features).sum() + 0.0 * inputs.sum()


FORMS = (marginal_likelihood, whitening, orthogonal, rotation, least_squares, log_determinant)
FORMS = (*FORMS, factors, pseudo_inverse, twice_the_same, product_with_itself)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_step_is_predicted_to_the_byte(form):
    torch.manual_seed(0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(40, 40))

    job = memfit.Job(
        model=Layer,
        batch=lambda num_samples: torch.randn(num_samples, 40),
        loss=lambda model, inputs: form(model.weight, inputs),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        batch_size=60,
    )
    measured = memfit.measure(job)
    assert measured.predicted_peak_bytes is not None
    assert abs(measured.predicted_peak_bytes - measured.peak_allocated_bytes) <= MOST_BYTES_OFF
