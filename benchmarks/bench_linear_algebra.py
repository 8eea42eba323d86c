"""What factorisations and solvers take on the CPU, alone and in steps, beside what is predicted.

Run: python benchmarks/bench_linear_algebra.py        (half a minute on one core)
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from linear_algebra_forms import FORMS, job_of
from results_file import save_result
from torch import Tensor
from torch.utils._pytree import tree_leaves

from memfit import measure
from memfit.kernels.cpu import scratch_bytes
from memfit.observe.allocator_events import AllocatorWatch

_SQUARES = [((), 24), ((6,), 48), ((2, 3), 16), ((), 96), ((), 300)]
_RECTANGLES = [((), 200, 30), ((), 30, 200), ((7,), 48, 20), ((3,), 20, 64), ((), 400, 100)]
_LAYOUTS = ("rows", "columns", "gaps")
_DTYPES = (torch.float32, torch.float64)
Call = tuple[str, tuple[object, ...], dict[str, object]]


def _laid_out(matrix: Tensor, layout: str) -> Tensor:
    if layout == "rows":
        return matrix.contiguous()
    if layout == "columns":
        return matrix.mT.contiguous().mT
    gaps = matrix.new_zeros(*matrix.shape[:-1], 2 * matrix.shape[-1])
    gaps[..., ::2] = matrix
    return gaps[..., ::2]


def _on_squares(rows: Tensor, layout: str) -> Iterator[Call]:
    """Yield calls on a positive definite matrix, its root, its factors and five right sides."""
    definite = rows @ rows.mT + rows.shape[-1] * torch.eye(rows.shape[-1], dtype=rows.dtype)
    matrix = _laid_out(definite, layout)
    root = _laid_out(torch.linalg.cholesky(definite), layout)
    factors, pivots = torch.linalg.lu_factor(definite)
    sides = _laid_out(rows[..., :5].clone(), layout)
    for name in ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_lu_factor_ex", "linalg_lu"):
        yield name, (matrix,), {}
    for name in ("_linalg_det", "_linalg_slogdet", "linalg_ldl_factor_ex", "linalg_matrix_exp"):
        yield name, (matrix,), {}
    for name in ("_linalg_eigh", "linalg_eig", "linalg_eigvals"):
        yield name, (matrix,), {}
    yield "_linalg_eigh", (matrix,), {"compute_v": False}
    yield "cholesky_solve", (sides, root), {}
    yield "cholesky_inverse", (root,), {}
    yield "_linalg_solve_ex", (matrix, sides), {}
    yield "linalg_lu_solve", (_laid_out(factors, layout), pivots, sides), {}
    yield "triangular_solve", (sides, root, False), {}
    yield "linalg_solve_triangular", (root, sides), {"upper": False}
    yield "linalg_solve_triangular", (root, sides.mT), {"upper": False, "left": False}


def _on_rectangles(plain: Tensor, layout: str) -> Iterator[Call]:
    """Yield calls on a matrix that need not be square, its reflections and five right sides."""
    matrix, sides = (_laid_out(each, layout) for each in (plain, plain[..., :5].clone()))
    for arguments in ((matrix,), (matrix, True), (matrix, False, False)):
        yield "_linalg_svd", arguments, {}
    for mode in ("reduced", "complete", "r"):
        yield "linalg_qr", (matrix, mode), {}
    for driver in ("gels", "gelsy", "gelsd", "gelss"):
        yield "linalg_lstsq", (matrix, sides), {"driver": driver}
    yield "linalg_pinv", (matrix,), {}
    yield "geqrf", (matrix,), {}
    yield "_euclidean_dist", (matrix, matrix), {}
    if plain.shape[-2] >= plain.shape[-1]:
        reflections, scales = torch.geqrf(plain)
        yield "linalg_householder_product", (_laid_out(reflections, layout), scales), {}
        yield "ormqr", (_laid_out(reflections, layout), scales, sides), {}


def _calls() -> Iterator[Call]:
    for dtype in _DTYPES:
        for layout in _LAYOUTS:
            for batch, size in _SQUARES:
                yield from _on_squares(torch.randn(*batch, size, size, dtype=dtype), layout)
            for batch, *sizes in _RECTANGLES:
                yield from _on_rectangles(torch.randn(*batch, *sizes, dtype=dtype), layout)


def _alone(name: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[int, int]:
    """Return the predicted and the measured peak of a call, operands and results included."""
    packet = getattr(torch.ops.aten, name)
    overload = torch._C._jit_resolve_packet(f"aten::{name}", *arguments, **named) or "default"
    out = packet(*arguments, **named)
    predicted = scratch_bytes(getattr(packet, overload), arguments, named, out)
    with AllocatorWatch() as watch:
        again = packet(*arguments, **named)
    made = {
        each.data_ptr(): each.nbytes() for each in map(Tensor.untyped_storage, tree_leaves(again))
    }
    given = sum(each.nbytes for each in arguments if isinstance(each, Tensor))
    return given + sum(made.values()) + predicted, given + watch.highest_growth_bytes()


def _operators() -> list[dict[str, Any]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for name, arguments, named in _calls():
        found.setdefault(name, []).append(_alone(name, arguments, named))
    return [
        {
            "operator": name,
            "num_cases": len(peaks),
            "num_exact": sum(predicted == measured for predicted, measured in peaks),
            "worst_error_fraction": max(
                (predicted / measured - 1 for predicted, measured in peaks), key=abs
            ),
        }
        for name, peaks in sorted(found.items())
    ]


def _steps() -> list[dict[str, Any]]:
    rows = []
    for form in FORMS:
        for size, dtype in ((40, torch.float32), (150, torch.float64)):
            measured = measure(job_of(form, size, dtype))
            rows.append(
                {
                    "form": form.__name__,
                    "size": size,
                    "dtype": str(dtype).removeprefix("torch."),
                    "predicted_peak_bytes": measured.predicted_peak_bytes,
                    "measured_peak_bytes": measured.peak_allocated_bytes,
                }
            )
    return rows


def main() -> None:
    """Measure every operator in every layout, then steps that use them."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    save_result("linear_algebra", {"operators": _operators(), "steps": _steps()})


if __name__ == "__main__":
    main()
