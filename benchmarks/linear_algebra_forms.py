"""Losses that factorise and solve, as public code has them: each of a square weight and inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, linalg, nn

from memfit import Job

Form = Callable[[Tensor, Tensor], Tensor]
_NUM_INPUTS = 60


def _shifted(matrix: Tensor, weight: float = 1.0) -> Tensor:
    return matrix + weight * torch.eye(matrix.shape[-1], dtype=matrix.dtype)


def _definite(weight: Tensor) -> Tensor:
    return _shifted(weight @ weight.T, weight.shape[-1])


def gaussian_process(weight: Tensor, inputs: Tensor) -> Tensor:
    """Marginal likelihood by a Cholesky root and a triangular solve."""
    features = inputs @ weight
    kernel = _shifted(torch.exp(-torch.cdist(features, features).square()), 0.1)
    root = linalg.cholesky(kernel)
    solved = linalg.solve_triangular(root, features[:, :1], upper=False)
    return solved.square().sum() + root.diagonal().log().sum()


def gaussian_process_by_cholesky_solve(weight: Tensor, inputs: Tensor) -> Tensor:
    """Quadratic form by `cholesky_solve`."""
    features = inputs @ weight
    kernel = _shifted(torch.exp(-torch.cdist(features, features).square()), 0.1)
    return (features[:, :1] * torch.cholesky_solve(features[:, :1], linalg.cholesky(kernel))).sum()


def whitening_by_eigh(weight: Tensor, inputs: Tensor) -> Tensor:
    """ZCA whitening of features."""
    features = inputs @ weight
    values, vectors = linalg.eigh(_shifted(features.T @ features))
    return (features @ (vectors * values.rsqrt()) @ vectors.T).pow(4).mean()


def whitening_by_cholesky(weight: Tensor, inputs: Tensor) -> Tensor:
    """Whitening of features by a triangular solve."""
    features = inputs @ weight
    root = linalg.cholesky(_shifted(features.T @ features))
    return linalg.solve_triangular(root, features.T, upper=False).pow(4).mean()


def orthogonal_by_qr(weight: Tensor, inputs: Tensor) -> Tensor:
    """Orthogonal weight by QR."""
    basis, upper = linalg.qr(weight)
    return (inputs @ (basis * upper.diagonal().sign())).pow(4).mean()


def orthogonal_by_matrix_exp(weight: Tensor, inputs: Tensor) -> Tensor:
    """Orthogonal weight by the exponential of a skew-symmetric matrix."""
    return (inputs @ linalg.matrix_exp(20.0 * (weight - weight.T))).pow(4).mean()


def orthogonal_by_cayley(weight: Tensor, inputs: Tensor) -> Tensor:
    """Orthogonal weight by the Cayley map."""
    skew = weight - weight.T
    return (inputs @ linalg.solve(_shifted(skew), _shifted(-skew))).pow(4).mean()


def powersgd(weight: Tensor, inputs: Tensor) -> Tensor:
    """Low-rank factors of one power iteration."""
    features = inputs @ weight
    basis = linalg.qr(weight.detach()[:, :4])[0]
    return (linalg.qr(features @ weight.T @ basis)[0] * features[:, :4]).sum()


def spectral_norm(weight: Tensor, inputs: Tensor) -> Tensor:
    """Weight over its largest singular value."""
    return (inputs @ (weight / linalg.matrix_norm(weight, 2))).square().mean()


def nuclear_norm(weight: Tensor, inputs: Tensor) -> Tensor:
    """Nuclear norm as a penalty."""
    return (inputs @ weight).square().mean() + linalg.matrix_norm(weight, "nuc")


def ridge_by_solve(weight: Tensor, inputs: Tensor) -> Tensor:
    """Ridge regression in closed form."""
    features = inputs @ weight
    return linalg.solve(_shifted(features.T @ features), features.T @ inputs[:, :3]).square().sum()


def least_squares(weight: Tensor, inputs: Tensor) -> Tensor:
    """Least squares on features."""
    return linalg.lstsq(inputs @ weight, inputs[:, :3]).solution.square().sum()


def log_determinant(weight: Tensor, inputs: Tensor) -> Tensor:
    """Log-determinant of a covariance."""
    return (inputs @ weight).square().mean() - torch.logdet(_definite(weight))


def flow_by_slogdet(weight: Tensor, inputs: Tensor) -> Tensor:
    """Invertible linear layer of a normalising flow."""
    return (inputs @ weight).square().mean() - linalg.slogdet(weight)[1]


def inverse(weight: Tensor, inputs: Tensor) -> Tensor:
    """Mahalanobis distance by an inverse."""
    return (inputs @ linalg.inv(_definite(weight))).square().mean()


def pseudo_inverse(weight: Tensor, inputs: Tensor) -> Tensor:
    """Decoder tied to its encoder by a pseudo-inverse."""
    return (inputs @ linalg.pinv(weight).T).square().mean()


def low_rank_by_svd(weight: Tensor, inputs: Tensor) -> Tensor:
    """Factors of a weight by SVD."""
    left, values, _ = linalg.svd(weight, full_matrices=False)
    return (inputs @ left * values).square().mean()


def spectrum_by_eigvalsh(weight: Tensor, inputs: Tensor) -> Tensor:
    """Penalty on the eigenvalues of a covariance."""
    return linalg.eigvalsh(_definite(weight)).log().sum() + (inputs @ weight).square().mean()


def normal_log_density(weight: Tensor, inputs: Tensor) -> Tensor:
    """Log-density of a multivariate normal distribution."""
    mean = torch.zeros(weight.shape[-1], dtype=weight.dtype)
    return -torch.distributions.MultivariateNormal(mean, _definite(weight)).log_prob(inputs).mean()


def factors_by_lu(weight: Tensor, inputs: Tensor) -> Tensor:
    """Factors of a covariance by LU."""
    _, lower, upper = linalg.lu(_definite(weight))
    return (inputs @ lower).square().mean() + upper.square().mean()


FORMS: tuple[Form, ...] = (
    *(gaussian_process, gaussian_process_by_cholesky_solve, whitening_by_eigh),
    *(whitening_by_cholesky, orthogonal_by_qr, orthogonal_by_matrix_exp, orthogonal_by_cayley),
    *(powersgd, spectral_norm, nuclear_norm, ridge_by_solve, least_squares, log_determinant),
    *(flow_by_slogdet, inverse, pseudo_inverse, low_rank_by_svd, spectrum_by_eigvalsh),
    *(normal_log_density, factors_by_lu),
)


class _Weight(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(size, size, dtype=dtype))


def job_of(form: Form, size: int, dtype: torch.dtype) -> Job:
    """Make the job of one form, at one size."""
    return Job(
        model=lambda: _Weight(size, dtype),
        batch=lambda num_samples: torch.randn(num_samples, size, dtype=dtype),
        loss=lambda model, inputs: form(model.weight, inputs),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
        batch_size=max(_NUM_INPUTS, size + 20),
    )
