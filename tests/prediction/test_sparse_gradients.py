"""Sparse gradients of embeddings: the peak that is predicted is never below the one measured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import RecordingError
from memfit.figures import Certainty, Prediction
from memfit.strategies import MicroBatching
from memfit.trace.events import Phase
from memfit.trace.operators import describe

ROWS, WIDTH = 300, 16
SCALARS_BYTES = 64
"""A number that an operator takes is a tensor of its own meanwhile, which nothing records."""
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")


class TwoTables(nn.Module):
    """Add the rows of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.second = nn.Embedding(2 * ROWS, WIDTH, sparse=True)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Look up in both."""
        return self.first(numbers) + self.second(numbers)


class Twice(nn.Module):
    """Look up in one table twice, and apply it as weights."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.is_tied = is_tied

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Look up, and multiply."""
        found = self.table(numbers)
        if self.is_tied:
            return nn.functional.linear(found, self.table.weight)
        return found * self.table((numbers + 7) % ROWS)


def different(size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers of rows that all differ, 4 to a sample."""
    return torch.arange(4 * size, dtype=dtype).reshape(size, 4) % ROWS


def alike(size: int) -> torch.Tensor:
    """Return one number again and again."""
    return torch.full((size, 4), 3)


def mixed(size: int) -> torch.Tensor:
    """Return numbers each of which is there twice."""
    return different(size) // 2


def table(kind: type[nn.Module] = nn.Embedding, **options: object) -> nn.Module:
    """Make an embedding with a sparse gradient."""
    return kind(ROWS, WIDTH, sparse=True, **options)


SGD = partial(torch.optim.SGD, lr=0.1)
SPARSE_ADAM = partial(torch.optim.SparseAdam, lr=0.1)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
SUM = partial(table, nn.EmbeddingBag, mode="sum")
MEAN = partial(table, nn.EmbeddingBag, mode="mean")


def job_of(
    model: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    batch: Callable[[int], torch.Tensor] = different,
    **options: object,
) -> memfit.Job:
    """Make a job with few samples."""
    return memfit.Job(
        model=model,
        batch=batch,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=optimizer,
        batch_size=32,
        **options,
    )


IN_PIECES = memfit.Plan(strategies=(MicroBatching(micro_batch_size=8),))
JOBS = {
    "SGD": job_of(table),
    "SparseAdam": job_of(table, SPARSE_ADAM),
    "Adagrad": job_of(table, ADAGRAD),
    "two tables": job_of(TwoTables, SPARSE_ADAM),
    "twice": job_of(Twice),
    "tied": job_of(lambda: Twice(is_tied=True)),
    "sums of bags": job_of(SUM),
    "means of bags": job_of(MEAN, ADAGRAD),
    "narrow rows": job_of(partial(nn.Embedding, ROWS, 1, sparse=True), ADAGRAD),
    "no padding": job_of(partial(nn.Embedding, ROWS, 1, sparse=True, padding_idx=250)),
    "short numbers": job_of(table, batch=partial(different, dtype=torch.int32)),
}


def predicted_around(job: memfit.Job, plan: memfit.Plan | None = None) -> Prediction:
    """Predict a job, check that what is measured lies where it may, and return the prediction."""
    predicted, measured = memfit.predict(job, plan=plan), memfit.measure(job, plan)
    interval = predicted.intervals["allocated"]
    assert interval.low_bytes <= measured.peak_allocated_bytes
    assert measured.peak_allocated_bytes <= predicted.peak_allocated_bytes + SCALARS_BYTES
    assert interval.high_bytes == predicted.peak_allocated_bytes
    return predicted


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_where_all_rows_differ_the_peak_is_the_one_that_is_measured(name):
    measured = memfit.measure(JOBS[name])

    assert measured.predicted_peak_bytes == pytest.approx(
        measured.peak_allocated_bytes, abs=SCALARS_BYTES
    )


@pytest.mark.slow
def test_in_pieces_the_peak_is_the_one_that_is_measured_where_all_rows_differ():
    measured = memfit.measure(job_of(table), IN_PIECES)

    assert measured.predicted_peak_bytes == pytest.approx(
        measured.peak_allocated_bytes, abs=SCALARS_BYTES
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        job_of(table, SPARSE_ADAM, alike),
        job_of(partial(table, padding_idx=3), SPARSE_ADAM, alike),
        job_of(partial(SUM, padding_idx=0), SGD, mixed),
        job_of(Twice, SPARSE_ADAM, mixed),
    ],
    ids=["alike", "all padding", "padding in bags", "twice"],
)
def test_where_rows_are_alike_the_peak_lies_in_the_interval(job):
    predicted = predicted_around(job)

    assert predicted.certainty is Certainty.GUESS
    assert predicted.terms[0].certainty is Certainty.GUESS
    answer = predicted.answers[0]
    assert (answer.source_line, answer.given) == ("sparse gradients", "that all rows differ")
    assert answer.decides_sizes


@pytest.mark.slow
@pytest.mark.parametrize("batch", [different, mixed, alike])
@pytest.mark.parametrize("optimizer", [SGD, SPARSE_ADAM], ids=["SGD", "SparseAdam"])
def test_in_pieces_the_gradient_grows_by_the_rows_of_each(optimizer, batch):
    predicted = predicted_around(job_of(Twice, optimizer, batch), IN_PIECES)

    assert predicted.numerics == "exact"


@pytest.mark.slow
def test_steps_of_any_code_are_a_guess_by_the_most_rows():
    def setup():
        model = table()
        optimizer, numbers = SPARSE_ADAM(model.parameters()), mixed(32)

        def step():
            model(numbers).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    predicted = memfit.predict_step(setup)

    of_job = memfit.predict(job_of(table, SPARSE_ADAM))
    assert predicted.certainty is Certainty.GUESS
    assert predicted.peak_allocated_bytes == pytest.approx(
        of_job.peak_allocated_bytes, abs=SCALARS_BYTES
    )


def test_what_does_not_depend_on_values_is_exact():
    predicted = memfit.predict(job_of(table))

    assert predicted.certainty is Certainty.EXACT
    assert not predicted.answers


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (job_of(table, partial(SGD, momentum=0.9)), "SGD with momentum .* without an end"),
        (job_of(table, partial(SGD, weight_decay=0.1)), "as of weight_decay, in torch either"),
        (job_of(table, clip_grad_norm=1.0), "no aten.linalg_vector_norm.* in torch either"),
    ],
    ids=["momentum", "decay", "clipping"],
)
def test_what_cannot_be_followed_is_refused_with_what_dense_gradients_take(job, reason):
    with pytest.raises(
        RecordingError, match=rf"{reason}.*sparse=False\): this one takes 18\.8 KiB"
    ):
        memfit.predict(job)


def test_only_what_could_be_run_is_to_be_measured():
    with pytest.raises(RecordingError) as of_momentum:
        memfit.predict(job_of(table, partial(SGD, momentum=0.9)))
    with pytest.raises(RecordingError) as of_decay:
        memfit.predict(job_of(table, partial(SGD, weight_decay=0.1)))

    assert "memfit measure" in str(of_momentum.value)
    assert "memfit measure" not in str(of_decay.value)


@pytest.mark.slow
def test_a_plan_is_verified_with_dense_copies_of_the_gradients():
    found = memfit.verify(job_of(table, ADAGRAD), IN_PIECES)

    assert found.earned == "exact"
    assert found.gradient_errors == {"weight": pytest.approx(0.0, abs=1e-12)}


def test_an_update_by_rows_moves_rows_and_not_the_table():
    weight = torch.zeros(1000, 4)
    rows = torch.sparse_coo_tensor(torch.tensor([[3, 5]]), torch.ones(2, 4), (1000, 4))

    operation = describe(torch.ops.aten.add_.Tensor, (weight, rows), {}, weight, Phase.OPTIMIZER)

    bytes_of_rows = 2 * 8 + 2 * 4 * 4
    assert operation.moved_bytes == 3 * bytes_of_rows
