"""What else may go wrong around a guarded step: full disks, odd buffers, states, and loaders."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.guard_faults import update_cut
from torch import nn
from torch.utils.data import DataLoader, Dataset

import memfit
from memfit import GuardSettings, Plan
from memfit.errors import MemfitWarning
from memfit.runtime.largest_batch import largest_batch
from memfit.strategies import pure_bf16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.pure_bf16 import PureBf16

pytestmark = pytest.mark.usefixtures("small_heap", "unhurried_log")


class WithSparseBuffer(nn.Module):
    """A layer beside an adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.adjacency @ self.layer(x).T).T


def job_of(model: Any = lambda: nn.Linear(4, 4), optimizer: Any = torch.optim.AdamW) -> memfit.Job:
    return memfit.Job(
        model=model,
        batch=lambda size: torch.ones(size, 4),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=optimizer,
        batch_size=4,
    )


def test_a_model_may_have_a_sparse_buffer() -> None:
    job = job_of(WithSparseBuffer)
    with memfit.start(job) as run:
        for _ in range(3):
            run.step(job.batch(4))
        assert run._guard is not None
        assert run._guard._log.obstacle is None


class Unwritable:
    """A state that torch cannot write."""

    def __reduce__(self) -> str:
        raise TypeError("no way to write this")


class StrangeAdamW(torch.optim.AdamW):
    """An optimizer with such states."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["strange"] = Unwritable()
        return result


def test_states_that_cannot_be_written_end_no_training_and_a_cut_update_is_said() -> None:
    torch.manual_seed(0)
    job = job_of(optimizer=StrangeAdamW)
    with memfit.start(job, guard=GuardSettings(overhead_fraction=1e9)) as run:
        for _ in range(3):
            run.step(job.batch(4))
        with update_cut("no way to write this"):
            run.step(job.batch(4))


def test_a_full_disk_ends_the_keeping_of_plan_and_timeline_and_not_the_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Plan, "save", fail)
    job = job_of()
    with memfit.start(job, folder=tmp_path) as run:
        with pytest.warns(MemfitWarning, match="kept no more .no room.; training goes on"):
            run.step(job.batch(4))
        run.step(job.batch(4))
    assert run.num_steps == 2


@pytest.mark.slow
def test_a_strategy_that_runs_out_of_memory_as_it_is_applied_leaves_the_plan_before(
    monkeypatch: Any,
) -> None:
    job = job_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    plan = Plan(strategies=(MicroBatching(micro_batch_size=2),))
    with memfit.start(job, plan) as run:
        run.step(job.batch(4))
        convert, calls = pure_bf16._convert, []

        def half_done(optimizer: Any, dtypes: Any) -> None:
            calls.append(1)
            if len(calls) == 1:
                convert(optimizer, dict([*dtypes.items()][:1]))
                raise torch.OutOfMemoryError("allocation failed")
            convert(optimizer, dtypes)

        monkeypatch.setattr(pure_bf16, "_convert", half_done)
        with pytest.raises(torch.OutOfMemoryError):
            run._steps.change_plan(Plan(strategies=(PureBf16(),)))
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
        assert run.plan == plan
        assert run._steps.session.micro_batch_size == 2, "it is in force again"
        run.step(job.batch(4))


class Whole(Dataset[torch.Tensor]):
    """A dataset whose items are batches, drawn with all generators."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(4 + index, 2) + random.random() + np.random.rand()


class Chain:
    """Something that cannot be read by index."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Any:
        return iter(self.loader)


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_loader_without_batches_of_its_own_hands_on_what_the_dataset_gives(
    is_chain: bool,
) -> None:
    def draws() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    before = draws()
    loader = DataLoader(Whole(), batch_size=None)
    found = largest_batch(Chain(loader) if is_chain else loader)
    assert found.batch.shape == (6, 2)
    assert draws() == before
