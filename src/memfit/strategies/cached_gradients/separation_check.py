"""Checks on a few rows of a call that a module treats its rows separately."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import MemfitError
from memfit.session.deterministic_draws import DeterministicDraws, untouched_randomness
from memfit.strategies.cached_gradients.rows import (
    CannotCutError,
    ResultForm,
    RowDims,
    RowsMixedError,
    find_result_form,
)
from memfit.strategies.cached_gradients.structures import taken_apart

_Call = Callable[[Sequence[Any]], Any]
_FEWEST_TO_HALVE = 4
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_COARSEST_TOLERANCE = 5e-2
"""Of 16-bit results, and of any under autocast."""
_CHANGED_ARGUMENTS = "it changes its arguments in place, so it cannot be run again"
_WITHOUT_ROWS = "one of its results has no rows, so it may come from all of them"


@torch.no_grad()
def checked_form(
    call: _Call,
    leaves: Sequence[Any],
    rows: RowDims,
    rows_per_piece: int,
    *,
    needs_rows_everywhere: bool,
) -> ResultForm:
    """Run a call on one piece's rows at once and in two parts, with deterministic random draws.

    Where the parts give what the whole gives, the form of the results follows. Costs two forward
    passes of a piece, without gradients. Fake tensors have no values: their shapes are compared.

    Args:
        call: the module's forward as a function of the leaves of its arguments.
        leaves: of all rows.
        rows: where their rows are.
        rows_per_piece: rows of a piece, fewer than there are.
        needs_rows_everywhere: whether results without rows are refused, even if they are the same
            for the parts; without values nobody knows that.

    Raises:
        RowsMixedError: if the parts give something else for the same rows.
        CannotCutError: if what they give has no rows.
    """
    if rows_per_piece >= _FEWEST_TO_HALVE:
        num_rows, num_first = rows_per_piece, rows_per_piece // 2
    else:
        num_rows, num_first = min(2 * rows_per_piece, rows.num_rows), rows_per_piece

    def on(start: int, count: int) -> Any:
        # Copies, since a module that changes its arguments must not change them before its call.
        some = [_copy(leaf) for leaf in rows.selected(leaves, start, count)]
        with _failures_explained(count, rows.num_rows):
            result = call(some)
        if any(isinstance(leaf, torch.Tensor) and leaf._version for leaf in some):
            raise CannotCutError(_CHANGED_ARGUMENTS)
        return result

    with untouched_randomness(), DeterministicDraws():
        whole = on(0, num_rows)
    first, second = _in_parts(on, num_first, num_rows)
    form = find_result_form(whole, num_rows, first, num_first)
    difference = _difference(form, whole, form.joined([first, second]))
    if difference is not None and _is_steady(form, whole, on, num_rows):
        raise difference
    if not form.has_rows:
        raise CannotCutError("none of its results has the rows of its arguments")
    if needs_rows_everywhere and form.has_others(whole):
        raise CannotCutError(_WITHOUT_ROWS)
    return form


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _in_parts(on: Callable[[int, int], Any], num_first: int, num_rows: int) -> tuple[Any, Any]:
    with untouched_randomness(), DeterministicDraws():
        return on(0, num_first), on(num_first, num_rows - num_first)


def _is_steady(form: ResultForm, whole: Any, on: Callable[[int, int], Any], num_rows: int) -> bool:
    """Return whether a call gives the same when other numbers are drawn.

    If not, it draws in ways that cannot be made deterministic, and a difference proves nothing.
    """
    with untouched_randomness(), DeterministicDraws():
        on(0, num_rows)
        return _difference(form, whole, on(0, num_rows)) is None


def _difference(form: ResultForm, whole: Any, other: Any) -> CannotCutError | None:
    """Return how results differ by more than rounding; None if they don't."""
    leaves, others = taken_apart(whole)[0], taken_apart(other)[0]
    for leaf, its_other, dim in zip(leaves, others, form.dims, strict=True):
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            continue
        error = _relative_error(leaf, its_other)
        if error <= _tolerance(leaf):
            continue
        shape = tuple(leaf.shape)
        if dim is None:
            return CannotCutError(
                f"a result of shape {shape} has no rows and differs from piece to piece "
                f"(by {error:.1g}, relative), as a mean or a loss over rows does"
            )
        return RowsMixedError(
            f"it mixes rows: fewer rows at a time change a result of shape {shape} by {error:.1g} "
            "(relative)"
        )
    return None


def _relative_error(first: torch.Tensor, second: torch.Tensor) -> float:
    """Compare two results, relative to the largest value; what is not a number must match."""
    if first.shape != second.shape:
        return float("inf")
    if not first.is_floating_point() and not first.is_complex():
        return float((first != second).any())
    first, second = first.detach(), second.detach()
    if not bool(torch.equal(first.isnan(), second.isnan())):
        return float("inf")
    gap = (first - second).abs()
    gap = torch.where(first == second, torch.zeros_like(gap), gap).nan_to_num(0.0)
    scale = first.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(scale.max()) if scale.numel() else 0.0
    return float(gap.max()) / (largest or 1.0) if gap.numel() else 0.0


def _tolerance(tensor: torch.Tensor) -> float:
    if torch.is_autocast_enabled(tensor.device.type):
        return _COARSEST_TOLERANCE
    if tensor.dtype is torch.complex64:
        return _TOLERANCES[torch.float32]
    return _TOLERANCES.get(tensor.dtype, _COARSEST_TOLERANCE)


@contextmanager
def _failures_explained(count: int, num_rows: int) -> Iterator[None]:
    """Turn what a module raises for some of its rows into a reason not to cut it."""
    try:
        yield
    except (MemfitError, MemoryError, torch.OutOfMemoryError, CannotCutError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("torch._subclasses"):
            raise
        message = str(error).partition("\n")[0]
        reason = f"on {count} of its {num_rows} rows it raises {type(error).__name__}: {message}"
        raise CannotCutError(reason) from error
