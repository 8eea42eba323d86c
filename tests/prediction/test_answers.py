"""Jobs that look at values: answers stand in for them, are listed, and prove nothing."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import memfit
from memfit.cli.main import main
from memfit.devices.catalogue import load_device
from memfit.errors import NoPlanFitsError
from memfit.figures import Prediction
from memfit.prediction.recording import record
from memfit.prediction.ways import Way

WIDTH, HIDDEN, ROWS = 16, 64, 64


class Kept(nn.Module):
    """Goes on with the rows that a score keeps, so that the size of what follows is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden[hidden.sum(1) > 0])


def job_of(loss, model=Kept, batch=lambda size: torch.randn(size, WIDTH), rows=ROWS):
    return memfit.Job(
        model=model,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=rows,
    )


def mean_of_kept(model, batch):
    return model(batch).square().mean()


def test_a_number_that_a_loss_asks_for_is_answered_and_listed():
    def loss(model, batch):
        value = model(batch).square().mean()
        return value / max(value.item(), 1e-6)

    found = memfit.predict(job_of(loss, model=lambda: nn.Linear(WIDTH, HIDDEN)))
    line = loss.__code__.co_firstlineno + 2
    (answer,) = found.answers
    assert answer.source_line.endswith(f"test_answers.py:{line}")
    assert (answer.operator, answer.given, answer.decides_sizes) == ("number", "1.0", False)
    assert found.intervals == {}


@pytest.mark.slow
def test_sizes_that_rest_on_an_answer_are_an_interval_around_the_measured_peak():
    job = job_of(mean_of_kept)
    found = memfit.predict(job)
    interval = found.intervals["allocated"]
    assert interval.low_bytes < interval.high_bytes
    measured = memfit.measure(job).peak_allocated_bytes
    assert interval.low_bytes <= measured <= interval.high_bytes
    assert any(answer.decides_sizes for answer in found.answers)


def test_a_path_for_fake_tensors_is_not_taken_where_nothing_has_to_be_made_up():
    library = pytest.importorskip("transformers.utils.import_utils")

    def loss(model, batch):
        if library.is_fake_tensor(batch) or not (batch == batch.abs()).all():
            batch = batch.repeat(2, 1)
        assert len(batch) == ROWS
        return model(batch).mean()

    job = job_of(loss, model=lambda: nn.Linear(WIDTH, 4), batch=lambda n: torch.ones(n, WIDTH))
    found = record(job, device=load_device("h200"))
    assert found.way == Way(is_answered=True)
    assert found.answers == ()


def test_a_step_that_needs_no_answer_is_recorded_without():
    found = record(job_of(lambda model, batch: model(batch).mean(), model=lambda: nn.Linear(16, 4)))
    assert found.way == Way()
    assert found.answers == ()


@pytest.mark.slow
def test_a_mean_over_what_is_kept_is_not_cut_into_pieces():
    """Here every row is kept, so that pieces agree on this batch; on others they would not."""
    job = job_of(mean_of_kept, batch=lambda size: 9 + torch.rand(size, WIDTH))
    with pytest.raises(NoPlanFitsError) as caught:
        memfit.plan(job, budget=1)
    assert "micro-batching: it could not be proved" in str(caught.value)
    assert "micro-batching" not in "".join(caught.value.strategies)


@pytest.mark.slow
def test_a_plan_holds_the_budget_with_either_spread():
    job = job_of(mean_of_kept)
    found = memfit.plan(job, budget="1GiB").prediction
    interval = found.intervals["allocated"]
    assert found.fits
    assert found.peak_allocated_bytes == interval.high_bytes > interval.low_bytes


@pytest.mark.slow
def test_values_of_the_batch_are_known_and_need_no_answer():
    def loss(model, batch):
        x, lengths = batch
        return model(x[: int(lengths.max())]).mean()

    def batch(size):
        return torch.ones(size, WIDTH), torch.full((size,), 3)

    job = job_of(loss, model=lambda: nn.Linear(WIDTH, HIDDEN), batch=batch)
    found = memfit.predict(job)
    assert found.answers == ()
    assert found.peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


def test_recording_changes_nothing_that_the_job_holds():
    seen = torch.zeros(1)
    data = torch.ones(ROWS, WIDTH)

    def loss(model, batch):
        seen.add_(1)
        batch.mul_(2)
        value = model(batch).mean()
        return value * max(1.0, value.item())

    job = job_of(loss, model=lambda: nn.Linear(WIDTH, 4), batch=lambda size: data[:size])
    state = torch.get_rng_state()
    assert memfit.predict(job).answers
    assert seen.item() == 0
    assert torch.equal(data, torch.ones(ROWS, WIDTH))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_size_without_a_bound_is_refused_with_its_line():
    def loss(model, batch):
        return torch.unique(model(batch)).mean()

    job = job_of(loss, model=lambda: nn.Linear(WIDTH, HIDDEN))
    with pytest.raises(memfit.MemfitError, match=r"_unique2.*test_answers.py, line"):
        memfit.predict(job)


@pytest.mark.slow
def test_answers_are_kept_in_files():
    found = memfit.predict(job_of(mean_of_kept))
    again = Prediction.from_json(json.loads(json.dumps(found.to_json())))
    assert again.answers == tuple(found.answers)


JOB_FILE = """
import torch, memfit
from torch import nn

def model():
    print("building")
    return nn.Linear(4, 4)

def loss(model, batch):
    value = model(batch).square().mean()
    return value if value.item() > 0 else 2 * value

job = memfit.Job(model=model, batch=lambda n: torch.randn(n, 4), loss=loss,
                 optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["predict", "plan", "measure", "verify"])
def test_what_a_job_prints_does_not_get_into_the_json(command, tmp_path, capsys, monkeypatch):
    (tmp_path / "job.py").write_text(JOB_FILE)
    monkeypatch.chdir(tmp_path)
    more = ["--budget", "1GiB"] if command == "plan" else []
    assert main([command, "job.py:job", "--json", *more]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "building" in captured.err


@pytest.mark.slow
def test_answers_are_shown_with_their_line(tmp_path, capsys, monkeypatch):
    (tmp_path / "job.py").write_text(JOB_FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "job.py:job"]) == 0
    brief = " ".join(capsys.readouterr().out.split())
    assert "Answered without being known" in brief
    assert main(["predict", "job.py:job", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "Answered without knowing" in out
    assert "job.py:11: answered 1.0" in out


def test_a_fused_sgd_keeps_its_promise():
    """It notes by an attribute of its own that it has looked at its parameters' types."""
    job = job_of(lambda model, batch: model(batch).square().mean(), model=lambda: nn.Linear(16, 4))
    fused = memfit.strategies.OptimizerImplementation(implementation="fused")
    assert memfit.verify(job, memfit.Plan(strategies=(fused,))).keeps_promise
