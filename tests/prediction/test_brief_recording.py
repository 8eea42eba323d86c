"""What is predicted from a few micro-batches is what is predicted from all of them."""

from __future__ import annotations

import pytest
import torch
from tests.conformance import builders
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.prediction import brief_recording, predict
from memfit.prediction.recording import record
from memfit.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    BatchNormReplay,
    Bf16,
    MicroBatching,
    OptimizerOffload,
)

pytestmark = pytest.mark.slow

BATCH_SIZE = 18


def _model() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 16))


def _job() -> Job:
    return Job(
        model=_model,
        batch=lambda size: torch.randn(size, 16),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=builders.sgd,
        batch_size=BATCH_SIZE,
    )


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "others",
    [(), (ActivationCheckpointing(), Bf16()), ("activation-offload",), ("optimizer-offload",)],
    ids=["alone", "recomputed", "activations", "states"],
)
def test_a_prediction_is_that_of_the_whole_recording(others, size, device, monkeypatch):
    to = "disk" if device == "cpu" else "host"
    moved = {
        "activation-offload": ActivationOffload(to=to, min_tensor_bytes=1),
        "optimizer-offload": OptimizerOffload(to=to),
    }
    strategies = [moved.get(each, each) for each in others]
    plan = Plan(strategies=(*strategies, MicroBatching(micro_batch_size=size)))
    found = []  # in one line of this file, which is told of what lives
    for record_step in (brief_recording.record_briefly, record):
        monkeypatch.setattr(predict, "record_briefly", record_step)
        found.append(memfit.predict(_job(), device=device, plan=plan).to_json())
        assert found[-1].pop("record_seconds") > 0
    assert found[0] == found[1]


def _normalised_job(batch_size: int) -> Job:
    """Make a job whose statistics are replayed, with dropout between them."""
    return Job(
        model=lambda: nn.Sequential(
            *(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Flatten(), nn.Linear(56, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        ),
        batch=lambda size: (torch.randn(size, 1, 16), torch.zeros(size, dtype=torch.int64)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=torch.optim.Adam,
        batch_size=batch_size,
    )


@pytest.mark.parametrize("device", ["cpu", "t4"])
@pytest.mark.parametrize(("batch_size", "size"), [(24, 2), (23, 2), (13, 1)])
def test_replayed_statistics_are_recorded_from_few_pieces(batch_size, size, device, monkeypatch):
    plan = Plan(strategies=(BatchNormReplay(micro_batch_size=size),))
    recorded, found = [], []
    for record_step in (brief_recording.record_briefly, record):
        monkeypatch.setattr(predict, "record_briefly", record_step)
        found.append(
            memfit.predict(_normalised_job(batch_size), device=device, plan=plan).to_json()
        )
        assert found[-1].pop("record_seconds") > 0

    def noted(job, plan=None, **options):
        recorded.append(record(job, plan, **options))
        return recorded[-1]

    monkeypatch.setattr(brief_recording, "record", noted)
    longer = brief_recording.record_briefly(_normalised_job(batch_size), plan)
    assert found[0] == found[1]
    (few,) = recorded
    assert len(few.steady.operations) < len(longer.steady.operations)


def test_few_pieces_are_recorded_where_pieces_are_alike(monkeypatch):
    recorded = []

    def noted(job, plan=None, **options):
        recorded.append(record(job, plan, **options))
        return recorded[-1]

    monkeypatch.setattr(brief_recording, "record", noted)
    plan = Plan(strategies=(MicroBatching(micro_batch_size=1),))
    longer = brief_recording.record_briefly(_job(), plan)
    (few,) = recorded
    assert len(few.steady.operations) < len(longer.steady.operations) / 3
    brief_recording.record_briefly(_job(), Plan())
    assert len(recorded) == 2
