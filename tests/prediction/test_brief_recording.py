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
    Bf16,
    MicroBatching,
    OptimizerOffload,
)

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
