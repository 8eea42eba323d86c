"""What factorisations and solvers take beside their results is predicted, never low."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from tests.kernels.rules import cpu_scratch_bytes, taken_bytes
from torch import Tensor

ATEN = torch.ops.aten
MOST_ERROR_FRACTION = 0.01
Arguments = Callable[[Tensor, Tensor, Tensor], tuple[object, ...]]
"""Of a positive definite matrix, its lower root and a right side."""
CALLS: Mapping[str, Arguments] = {
    "linalg_cholesky_ex": lambda matrix, root, side: (matrix,),
    "cholesky_solve": lambda matrix, root, side: (side, root),
    "cholesky_inverse": lambda matrix, root, side: (root,),
    "linalg_inv_ex": lambda matrix, root, side: (matrix,),
    "_linalg_solve_ex": lambda matrix, root, side: (matrix, side),
    "linalg_lu_factor_ex": lambda matrix, root, side: (matrix,),
    "_linalg_det": lambda matrix, root, side: (matrix,),
    "_linalg_slogdet": lambda matrix, root, side: (matrix,),
    "linalg_solve_triangular": lambda matrix, root, side: (root, side),
    "triangular_solve": lambda matrix, root, side: (side, root, False),
    "_linalg_eigh": lambda matrix, root, side: (matrix,),
    "_linalg_svd": lambda matrix, root, side: (matrix,),
    "linalg_qr": lambda matrix, root, side: (matrix,),
    "linalg_householder_product": lambda matrix, root, side: (matrix, side[..., 0].contiguous()),
    "geqrf": lambda matrix, root, side: (matrix,),
    "linalg_ldl_factor_ex": lambda matrix, root, side: (matrix,),
    "linalg_lstsq": lambda matrix, root, side: (matrix, side),
}


@pytest.mark.filterwarnings("ignore")  # torch deprecates some of them
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", [(7, 48), (20, 24), (2, 96), (1, 130), (1, 400)], ids=str)
def test_what_an_operator_takes_is_predicted(name, dtype, shape):
    num_matrices, num_rows = shape
    torch.manual_seed(0)
    rows = torch.randn(num_matrices, num_rows, num_rows, dtype=dtype)
    matrix = rows @ rows.mT + num_rows * torch.eye(num_rows, dtype=dtype)
    side = torch.randn(num_matrices, num_rows, 5, dtype=dtype)
    arguments = CALLS[name](matrix, torch.linalg.cholesky(matrix), side)
    named = {"upper": False} if name == "linalg_solve_triangular" else {}

    def call() -> object:
        return getattr(ATEN, name)(*arguments, **named)

    found = call()
    results = found if isinstance(found, tuple) else (found,)
    operands = [each for each in (*arguments, *results) if isinstance(each, Tensor)]
    handled = sum(each.numel() * each.element_size() for each in operands)
    measured = taken_bytes(call)
    error = cpu_scratch_bytes(name, *arguments, out=found, **named) - measured
    assert abs(error) <= MOST_ERROR_FRACTION * (measured + handled) + 64
