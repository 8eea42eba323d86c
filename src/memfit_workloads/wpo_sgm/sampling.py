"""Draw samples from a kernel mixture, a chunk of kernels at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from memfit.losses import Kernels

from .model import KernelMixture


@torch.no_grad()
def draw(
    mixture: KernelMixture, num_samples: int, generator: torch.Generator, *, chunk: int = 16
) -> Tensor:
    """Draw samples, (samples, D) on the CPU: a kernel for each, and a Gaussian draw from it.

    Args:
        mixture: with all its centres here.
        num_samples: how many.
        generator: on the CPU.
        chunk: kernels at a time.
    """
    chosen = torch.randint(len(mixture.centres), (num_samples,), generator=generator)
    noise = torch.randn(num_samples, mixture.sizes.num_dimensions, generator=generator)
    drawn = torch.empty_like(noise)
    for kernels_of_chunk in chosen.unique().split(chunk):
        kernels = mixture.kernels(mixture.centres[kernels_of_chunk.to(mixture.centres.device)])
        for place, kernel in enumerate(kernels_of_chunk.tolist()):
            rows = (chosen == kernel).nonzero()[:, 0]
            one = Kernels(*(part[place : place + 1] for part in kernels))
            drawn[rows] = _from_kernel(one, noise[rows].to(mixture.centres)).to(drawn)
    return drawn


def _from_kernel(kernel: Kernels, noise: Tensor) -> Tensor:
    """Turn standard normal draws (n, D) into draws from one kernel.

    With P = A^T A and A = Q R, x = mu + R^-1 noise has covariance P^-1. P itself is not formed: it
    would square the factor's condition number.
    """
    factor, diagonal = kernel.factors[0].double(), kernel.diagonals[0].double()
    rows = torch.cat((factor.T, torch.diag(diagonal.sqrt())))
    root = torch.linalg.qr(rows, mode="r").R
    offsets = torch.linalg.solve_triangular(root, noise.double().T, upper=True).T
    return (kernel.centres[0] + offsets).to(noise.dtype)
