"""Optimizers of the user's own, and torch's, on sparse gradients: what they do with rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import JobFunctionError, RecordingError
from memfit.figures import Certainty
from memfit.kernels.cpu_onednn_3_12.sparse import OPERATORS

ROWS = 300
SCALARS_BYTES = 64
"""A number that an operator takes is a tensor of its own meanwhile, which nothing records."""
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
Change = Callable[[torch.Tensor], None]


class Own(torch.optim.Optimizer):
    """Change each table in one way, beside memory of its own, so that the peak is there."""

    def __init__(self, parameters: object, change: Change) -> None:
        super().__init__(parameters, {})
        self.change = change

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Change all tables."""
        _beside = torch.empty(60_000)
        for group in self.param_groups:
            for weight in group["params"]:
                self.change(weight)


def different(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of rows that all differ."""
    return torch.arange(size, dtype=dtype)


def alike(size: int) -> torch.Tensor:
    """Return one number again and again."""
    return torch.full((size,), 3)


def column(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers that lie apart, as those of one column of a table do."""
    return torch.stack([different(size, dtype), different(size, dtype)], 1)


def job_of(
    optimizer: Callable[..., torch.optim.Optimizer],
    batch: Callable[[int], torch.Tensor] = different,
    *,
    width: int = 16,
    size: int = 100,
    **options: object,
) -> memfit.Job:
    """Make a job of one table, that looks up the last column of its batch."""
    return memfit.Job(
        model=lambda: nn.Embedding(ROWS, width, sparse=True, **options),
        batch=batch,
        loss=lambda model, batch: model(batch[..., 1] if batch.dim() > 1 else batch).square().sum(),
        optimizer=optimizer,
        batch_size=size,
    )


def own(change: Change) -> Callable[..., torch.optim.Optimizer]:
    """Make an optimizer of a change."""
    return lambda parameters: Own(parameters, change)


def add_rows(weight):
    rows = weight.grad.coalesce()
    weight.index_add_(0, rows.indices()[0], rows.values(), alpha=-0.1)


def set_rows(weight):
    rows = weight.grad.coalesce()
    weight[rows.indices()[0]] -= 0.1 * rows.values()


def divide(weight):
    weight.grad = weight.grad / 4
    weight.add_(weight.grad, alpha=-0.1)


def divide_in_place(weight):
    weight.grad.div_(4)
    weight.add_(weight.grad, alpha=-0.1)


def multiply_in_place(weight):
    weight.grad.mul_(torch.tensor(0.25))
    weight.add_(weight.grad, alpha=-0.1)


def multiply_what_was_added_up(weight):
    rows = weight.grad.coalesce()
    rows *= 0.25
    weight.add_(rows.coalesce(), alpha=-0.1)


def negate(weight):
    weight.add_(-weight.grad, alpha=0.1)


def shorten(weight):
    norm = weight.grad.norm()
    weight.grad.mul_(1 / (norm + 1))


def norm_of_all_dimensions(weight):
    torch.norm(weight.grad, 2)


def lay_out(weight):
    weight.sub_(weight.grad.to_dense(), alpha=0.1)


def sum_up(weight):
    if weight.grad._nnz() and not weight.grad.is_coalesced():
        torch.sparse.sum(weight.grad)


def empty(weight):
    weight.grad.zero_()
    weight.add_(torch.empty(ROWS, 8).repeat(1, 2))


CHANGES = [
    add_rows,
    divide,
    divide_in_place,
    multiply_in_place,
    multiply_what_was_added_up,
    negate,
    shorten,
    norm_of_all_dimensions,
    lay_out,
    sum_up,
    empty,
]
SGD = partial(torch.optim.SGD, lr=0.1)
SPARSE_ADAM = partial(torch.optim.SparseAdam, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)


def check_equal(job: memfit.Job) -> None:
    """Check that the peak that is predicted is the one that is measured."""
    measured = memfit.measure(job)
    assert measured.predicted_peak_bytes == pytest.approx(
        measured.peak_allocated_bytes, abs=SCALARS_BYTES
    )


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_an_optimizer_of_ones_own_does_takes_what_is_measured(change):
    check_equal(job_of(own(change)))


@pytest.mark.slow
@pytest.mark.parametrize("change", [set_rows, multiply_what_was_added_up])
def test_rows_that_are_alike_leave_the_peak_in_the_interval(change):
    job = job_of(own(change), alike)

    predicted, measured = memfit.predict(job), memfit.measure(job)

    assert predicted.certainty is Certainty.GUESS
    interval = predicted.intervals["allocated"]
    assert interval.low_bytes <= measured.peak_allocated_bytes <= interval.high_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [(SGD, torch.int64), (SPARSE_ADAM, torch.int64), (ADAGRAD, torch.int32)],
    ids=["SGD", "SparseAdam", "Adagrad with short ones"],
)
def test_indices_that_lie_apart_are_copied_with_their_rows(optimizer, dtype):
    check_equal(job_of(optimizer, partial(column, dtype=dtype), width=1))


@pytest.mark.slow
@pytest.mark.parametrize(("width", "size"), [(1, 1), (3, 8), (1, 300), (33, 300)])
def test_rows_of_any_width_and_number_take_what_is_measured(width, size):
    check_equal(job_of(SPARSE_ADAM, width=width, size=size))


@pytest.mark.slow
def test_ascent_takes_rows_of_the_other_sign():
    check_equal(job_of(partial(SPARSE_ADAM, maximize=True)))


def test_a_single_row_is_not_sorted():
    one, two = (
        torch.sparse_coo_tensor(torch.zeros(1, count).long(), torch.ones(count, 4), (9, 4))
        for count in (1, 2)
    )

    sorting = OPERATORS["_coalesce"].scratch

    assert sorting(self=one) == 0
    assert sorting(self=two) == 3 * 2 * 8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda weight: weight.grad.clone(), "is copied"),
        (lambda weight: weight.grad.abs(), "not known what aten.abs"),
        (lambda weight: weight.grad * torch.ones(ROWS, 16), "not known what aten.mul"),
        (lambda weight: weight.grad.norm(dim=0), "not known what aten.norm"),
        (lambda weight: torch._foreach_mul_([weight.grad], 2.0), "not known what aten._foreach_m"),
    ],
    ids=["copy", "absolute", "dense factor", "norm of columns", "foreach"],
)
def test_other_things_are_refused_by_name_with_what_to_do(change, reason):
    with pytest.raises(RecordingError, match=rf"{reason}.*sparse=False.*memfit measure"):
        memfit.predict(job_of(own(change)))


@pytest.mark.parametrize(
    ("job", "function", "reason"),
    [
        (job_of(torch.optim.AdamW), "optimizer", "its step raised RuntimeError: Adam does not sup"),
        (job_of(torch.optim.RMSprop), "optimizer", "RMSprop does not support sparse gradients"),
        (
            job_of(SGD, scale_grad_by_freq=True),
            "loss",
            "its backward pass raised RuntimeError: .*scale_grad_by_freq not supported",
        ),
    ],
    ids=["AdamW", "RMSprop", "frequencies"],
)
def test_a_step_that_torch_refuses_is_named_with_its_sentence(job, function, reason):
    with pytest.raises(
        JobFunctionError, match=rf"The job's {function} failed: .*{reason}"
    ) as found:
        memfit.predict(job)

    assert found.value.function == function
    assert "\n" not in str(found.value)
    assert "Expected" not in str(found.value)
