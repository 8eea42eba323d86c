"""A second step whose forward and backward are copied is the step that would be recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import groupby

import pytest
import torch
from tests.zoo import planned_jobs, stateful_modules
from tests.zoo.modules_with_effects import DRAWING, NEVER_BATCH, ON_BATCH
from torch import nn

from memfit import Job, Plan, Total
from memfit.devices.catalogue import load_device
from memfit.errors import MemfitError
from memfit.prediction import repeated_pass
from memfit.prediction.recording import Recording, record
from memfit.session.spill import Spill
from memfit.strategies import (
    CATALOGUE,
    ActivationCheckpointing,
    ActivationOffload,
    Bf16,
    FourBitBase,
    MicroBatching,
    OptimizerImplementation,
    OptimizerInBackward,
    OptimizerOffload,
    Tiling,
)
from memfit.trace.abridgement import few_pieces
from memfit.trace.events import Trace

WIDTH = 16
TINY = {"width": 32, "num_blocks": 2, "tokens": 16, "batch_size": 8}


@pytest.fixture
def copies(monkeypatch) -> list[object]:
    """Return the passes that were copied, as they come."""
    found: list[object] = []
    repeat = repeated_pass.RepeatedPass._repeat

    def noted(self, copy):
        found.append(copy)
        return repeat(self, copy)

    monkeypatch.setattr(repeated_pass.RepeatedPass, "_repeat", noted)
    return found


def in_any_order(history: Trace) -> list[object]:
    """List events, with those that end memory one after another in no order.

    Autocast lets go of its copies of weights by their addresses.
    """
    runs = groupby(history.events, key=lambda event: event < 0)
    return [each for ends, run in runs for each in (sorted(run) if ends else run)]


def moved_by(spill: Spill) -> dict[str, object]:
    """Return what is counted, but for what has not been collected yet of a run that is over."""
    names = set(Spill.__slots__) - {"_elsewhere", "host_bytes", "disk_bytes"}
    return {name: getattr(spill, name) for name in names}


def assert_same(one: Recording, other: Recording) -> None:
    for name in ("allocations", "operations", "calls", "releases", "extras"):
        assert getattr(one.history, name) == getattr(other.history, name), name
    assert in_any_order(one.history) == in_any_order(other.history)
    assert one.marks == other.marks
    assert list(one.forward_starts) == list(other.forward_starts)
    assert moved_by(one.spill) == moved_by(other.spill)
    assert one.answers == other.answers


def assert_same_under(job: Job, plain: Recording, device: str, *plans: Plan) -> None:
    """Hold a plan's recording with a copied pass beside the one where both steps are recorded."""
    for plan in plans:
        whole, copied = (
            record(
                job,
                plan,
                device=load_device(device),
                way=plain.way,
                facts=plain.facts,
                repeats_pass=repeats,
            )
            for repeats in (False, plain.has_like_passes)
        )
        assert_same(whole, copied)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_plans_that_copy_and_plans_that_do_not(device, copies):
    job = planned_jobs.transformer(**TINY)
    plain = record(job, device=load_device(device))
    to = "disk" if device == "cpu" else "host"
    pieces = MicroBatching(micro_batch_size=2)
    plans = [
        Plan(strategies=(OptimizerImplementation(implementation="fused"),)),
        Plan(strategies=(ActivationCheckpointing(), pieces)),
        Plan(strategies=(OptimizerOffload(to=to), ActivationCheckpointing())),
        Plan(strategies=(Tiling(num_tiles=2), pieces)),
        Plan(strategies=(OptimizerInBackward(),)),
        Plan(strategies=(ActivationOffload(to=to, min_tensor_bytes=1),)),
    ]
    assert plain.has_like_passes
    assert_same_under(job, plain, device, *plans)
    # Updates in backward are none to copy, nor are buffers that only the first step makes.
    assert len(copies) == (5 if device == "cpu" else 4)


@pytest.mark.slow
def test_a_few_pieces_of_many_count_as_often(copies):
    job = planned_jobs.transformer(**TINY)
    plain = record(job)
    plan = Plan(strategies=(MicroBatching(micro_batch_size=1),))
    counts = []
    for repeats in (False, True):
        with few_pieces(4) as few:
            record(job, plan, facts=plain.facts, way=plain.way, repeats_pass=repeats)
        counts.append(few.counts)
    assert counts[0] == counts[1]
    assert len(copies) == 1


def test_a_total_counts_in_each_step(copies):
    def loss(model: nn.Module, x: torch.Tensor) -> Total:
        return Total(model(x).square().sum(), (x[:, 0] > 0).sum())

    job = _job(lambda: nn.Linear(WIDTH, WIDTH), loss=loss)
    plain = record(job)
    assert plain.has_like_passes
    assert_same_under(job, plain, "cpu", Plan(strategies=(MicroBatching(micro_batch_size=2),)))
    assert len(copies) == 1


def _looking(num_times: int) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return a loss that looks at values so often."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        for _ in range(num_times):
            if not (out > 0).any():
                return (out + torch.zeros(2, *out.shape)).square().mean()
        return out.square().mean()

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(("num_times", "num_copies"), [(1, 1), (300, 0)])
def test_what_is_made_up_is_counted_in_each_step(num_times, num_copies, copies):
    """Asked a thousand times in a row, the answer turns, which is in the second step here."""
    job = _job(lambda: nn.Linear(WIDTH, WIDTH), loss=_looking(num_times))
    plain = record(job)
    assert plain.answers
    assert plain.has_like_passes
    assert_same_under(job, plain, "cpu", Plan(strategies=(MicroBatching(micro_batch_size=2),)))
    assert len(copies) == num_copies


class Scratch(nn.Module):
    """Takes memory that hangs on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        scratch = torch.zeros(self.num_calls, WIDTH)
        return self.layer(x) + scratch.sum()


class Keeping(Scratch):
    """Keeps its last output, as a cache does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x).detach()
        return self.layer(x)


class Late(Scratch):
    """Makes a table the first time, and keeps it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.num_calls:
            self.table = torch.zeros(WIDTH)
        self.num_calls += 1
        return self.layer(x) + self.table


@pytest.mark.parametrize("model", [Scratch, Keeping, Late])
def test_steps_that_differ_are_recorded(model, copies):
    job = _job(model)
    plain = record(job)
    assert not plain.has_like_passes
    assert_same_under(job, plain, "cpu", Plan(strategies=(MicroBatching(micro_batch_size=2),)))
    assert not copies


class Shortened(nn.Module):
    """Keeps its weight in another type under autocast, so that only a plan's steps differ."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and self.kept is None:
            self.kept = self.layer.weight.detach().bfloat16()
        return self.layer(x)


def test_what_a_plan_alone_leaves_is_no_pass_to_copy(copies):
    job = _job(Shortened)
    plain = record(job)
    assert plain.has_like_passes
    assert_same_under(job, plain, "cpu", Plan(strategies=(Bf16(),)))
    assert not copies


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*NEVER_BATCH, *ON_BATCH, *DRAWING], ids=lambda k: k.__name__)
def test_modules_with_effects(kind):
    _try_all(_job(lambda: nn.Sequential(kind(WIDTH), kind(WIDTH))), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("sample", stateful_modules.SAMPLES.values(), ids=lambda s: s.name)
def test_modules_with_state(sample):
    _try_all(sample.build(), "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "rtx-3060-12gb"])
@pytest.mark.parametrize("name", planned_jobs.JOBS)
def test_every_strategy(name, device):
    _try_all(planned_jobs.JOBS[name](), device)


def _try_all(job: Job, device: str) -> None:
    """Try the mildest setting of every strategy, alone and on micro-batches."""
    try:
        plain = record(job, device=load_device(device))
    except MemfitError:
        return
    if not plain.has_like_passes:
        return
    pieces = MicroBatching(micro_batch_size=max(1, job.batch_size // 2))
    for kind in CATALOGUE:
        if kind is FourBitBase:  # what it has replaced goes whenever garbage is collected
            continue
        for strategy in [*kind.options(plain.facts)][:1]:
            for others in ((), (pieces,)):
                plan = Plan(strategies=(strategy, *others))
                with suppress(MemfitError):
                    assert_same_under(job, plain, device, plan)


def _job(model: Callable[[], nn.Module], **given: object) -> Job:
    return stateful_modules.job(
        model, **{"batch": lambda size: torch.randn(size, WIDTH), "batch_size": 4, **given}
    )
