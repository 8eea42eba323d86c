"""Whatever a job's code can change is found, told of, and put back to the bit."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.zoo.stateful_modules import SAMPLES, Sample

import memfit
from memfit.session.batches import find_layout
from memfit.session.reachable import live_state_of
from memfit.session.session import Session, open_session

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


def opened(sample: Sample) -> Session:
    torch.manual_seed(0)
    job = sample.build()
    return open_session(job, "cpu", find_layout(job), lambda *_: torch.zeros(()))


def train(session: Session, num_steps: int) -> list[Any]:
    """Do some steps; give everything that they showed, to the bit."""
    shown: list[Any] = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator)
        session.optimizer.zero_grad()
        loss = session.job.loss(session.model, x)
        loss.backward()
        session.optimizer.step()
        shown.append(bits(loss))
    shown += [bits(parameter) for parameter in session.model.parameters()]
    return [*shown, bits(torch.rand(1)), np.random.rand(), random.random()]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@pytest.mark.parametrize("name", SAMPLES)
def test_steps_taken_again_after_a_restore_are_the_same_to_the_bit(name: str) -> None:
    session = opened(SAMPLES[name])
    state = live_state_of(session, copies_parameters=True)
    for _ in range(3):  # fresh, with states made, and steady
        snapshot = state.snapshot()
        first = train(session, 2)
        snapshot.restore()
        assert snapshot.changes() == ()
        assert train(session, 2) == first


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_step_changes_is_named(name: str) -> None:
    session = opened(SAMPLES[name])
    state = live_state_of(session, copies_parameters=True)
    snapshot = state.snapshot()
    train(session, 3)
    told = [change.full_name for change in snapshot.changes()]
    for expected in SAMPLES[name].changes:
        assert any(each == expected or expected in each for each in told), (expected, told)


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_is_said_of_a_job_that_was_only_looked_at(name: str) -> None:
    session = opened(SAMPLES[name])
    state = live_state_of(session)
    snapshot = state.snapshot()
    assert snapshot.changes() == ()
    assert state.obstacles == ()


def test_a_model_function_that_sets_the_default_dtype_leaves_the_asking_process_its_own() -> None:
    def model() -> torch.nn.Module:
        torch.set_default_dtype(torch.float64)
        return torch.nn.Linear(6, 3)

    job = replace(
        SAMPLES["environment"].build(), model=model, batch=lambda size: torch.ones(size, 6)
    )
    memfit.predict(replace(job, loss=lambda model, x: model(x.to(model.weight)).sum()))
    assert torch.get_default_dtype() is torch.float32
