"""Advice comes from computations: replays, other batches, other micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from memfit.allocator.settings import AllocatorSettings
from memfit.devices.catalogue import load_device
from memfit.figures import Advice, Topic
from memfit.job import Job
from memfit.prediction.advice import advise, largest_holders
from memfit.prediction.budget import MemoryBudget
from memfit.prediction.largest_batch import PredictedJob, largest_fitting, largest_micro_batch
from memfit.prediction.predict import evaluate
from memfit.prediction.recording import record
from memfit.session.batches import find_layout
from memfit.strategies.bf16 import Bf16
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan
from memfit.units import KIB, MIB


def make_job(
    build: Callable[[], nn.Module] | None = None,
    *,
    batch_size: int = 16,
    optimizer: type[torch.optim.Optimizer] | None = None,
) -> Job:
    return Job(
        model=build or (lambda: nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 4))),
        batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: (optimizer or torch.optim.SGD)(parameters, lr=1e-3),
        batch_size=batch_size,
    )


def predicted(
    job: Job,
    device: str = "cpu",
    *,
    budget_bytes: int | None = None,
    plan: Plan | None = None,
    settings: AllocatorSettings | None = None,
) -> PredictedJob:
    spec, plan, layout = load_device(device), plan or Plan(), find_layout(job)
    settings = settings or AllocatorSettings()
    recording = record(job, plan, layout, device=spec)
    prediction = evaluate(
        job, recording, spec, plan, budget=MemoryBudget(num_bytes=budget_bytes), settings=settings
    )
    return PredictedJob(
        job=job,
        plan=plan,
        layout=layout,
        device=spec,
        settings=settings,
        recording=recording,
        prediction=prediction,
    )


def advice_for(job: PredictedJob) -> dict[Topic, Advice]:
    found = advise(job.recording, job.prediction, job.device, job.settings, job)
    return {entry.topic: entry for entry in found}


def wide_job(batch_size: int = 256) -> Job:
    """Hold little but activations, all linear in the batch."""

    def build() -> nn.Module:
        return nn.Sequential(
            *(kind() for _ in range(6) for kind in (lambda: nn.Linear(64, 64), nn.Tanh))
        )

    return make_job(build, batch_size=batch_size)


def two_wide_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 64))


# --- The search over micro-batches ---


def counting(bytes_of: Callable[[int], int]) -> tuple[Callable[[int], int], list[int]]:
    tried: list[int] = []

    def count(number: int) -> int:
        tried.append(number)
        return bytes_of(number)

    return count, tried


@pytest.mark.parametrize("budget", [111, 170, 350, 349, 999, 1379])
@pytest.mark.parametrize("too_large", [128, 100, 129])
def test_the_largest_number_within_the_budget_is_found(budget: int, too_large: int) -> None:
    bytes_with, tried = counting(lambda number: 100 + 10 * number)
    expected = min((budget - 100) // 10, too_large - 1)

    assert largest_fitting(too_large, budget, bytes_with) == expected
    assert len(tried) <= 12
    assert len(set(tried)) == len(tried)
    assert max(tried) < too_large


def test_a_curve_that_bends_is_followed_to_its_end() -> None:
    def bytes_with(number: int) -> int:
        return max(1000, number * number)

    assert largest_fitting(512, 50_000, bytes_with) == 223


def test_nothing_is_found_early_where_a_line_says_so() -> None:
    bytes_with, tried = counting(lambda number: 5000 + 10 * number)

    assert largest_fitting(1024, 1000, bytes_with) is None
    assert tried == [512, 256]


def test_a_single_sample_is_the_least() -> None:
    assert largest_fitting(8, 5, lambda number: 5 * number) == 1
    assert largest_fitting(1, 5, lambda number: 5 * number) is None


# --- The largest micro-batch of a job ---


def test_a_batch_that_fits_whole_is_its_own_largest_micro_batch() -> None:
    found = largest_micro_batch(predicted(make_job(), budget_bytes=MIB))

    assert (found.micro_batch_size, found.reason) == (16, "")


@pytest.mark.slow
def test_the_largest_micro_batch_fits_and_one_more_sample_does_not() -> None:
    job = predicted(wide_job())
    budget_bytes = int(0.7 * job.prediction.peak_allocated_bytes)
    job = predicted(wide_job(), budget_bytes=budget_bytes)
    found = largest_micro_batch(job).micro_batch_size

    def fits(number: int) -> bool | None:
        return job.with_plan(Plan(strategies=(MicroBatching(micro_batch_size=number),))).fits

    assert found is not None
    assert (fits(found), fits(found + 1)) == (True, False)


@pytest.mark.slow
def test_the_other_strategies_of_a_plan_stay() -> None:
    plain = predicted(wide_job(1024), budget_bytes=1800 * KIB)
    half = predicted(wide_job(1024), budget_bytes=1800 * KIB, plan=Plan(strategies=(Bf16(),)))
    sizes = [largest_micro_batch(job).micro_batch_size for job in (plain, half)]

    assert None not in sizes
    assert sizes[0] != sizes[1]


def test_batch_normalisation_is_the_reason_for_no_micro_batch() -> None:
    job = make_job(lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)))
    found = largest_micro_batch(predicted(job, budget_bytes=10 * KIB))

    assert found.micro_batch_size is None
    assert "batch normalisation" in found.reason


@pytest.mark.slow
def test_a_model_that_is_too_large_by_itself_says_so() -> None:
    found = largest_micro_batch(predicted(make_job(), budget_bytes=KIB))

    assert found.micro_batch_size is None
    assert "not even one sample" in found.reason


# --- Advice ---


@pytest.mark.slow
def test_bytes_per_sample_are_those_that_another_batch_adds() -> None:
    job = predicted(wide_job(2048))
    found = advice_for(job)[Topic.BYTES_PER_SAMPLE].num_bytes
    # Both are far above the parameters, so the peak lies in the same place.
    more = job.with_batch_size(4096).peak_allocated_bytes - job.prediction.peak_allocated_bytes

    assert found == pytest.approx(more / 2048, rel=0.05)


def test_a_batch_that_adds_next_to_nothing_gets_no_line() -> None:
    job = predicted(make_job(two_wide_layers, batch_size=2))

    assert Topic.BYTES_PER_SAMPLE not in advice_for(job)


def test_a_slow_recording_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memfit.prediction.advice._CHEAP_SECONDS", 0.0)

    assert Topic.BYTES_PER_SAMPLE not in advice_for(predicted(wide_job()))


@pytest.mark.slow
def test_saved_activations_are_named_only_where_they_dominate() -> None:
    many = advice_for(predicted(wide_job(4096)))
    few = advice_for(predicted(make_job(batch_size=2)))

    assert many[Topic.SAVED_ACTIVATIONS].part_fraction > 0.5
    assert Topic.SAVED_ACTIVATIONS not in few


@pytest.mark.slow
def test_optimizer_temporaries_are_named_where_its_step_is_the_peak() -> None:
    job = predicted(make_job(two_wide_layers, batch_size=2, optimizer=torch.optim.AdamW), "t4")
    found = advice_for(job)[Topic.OPTIMIZER_TEMPORARIES]
    elsewhere = predicted(make_job(two_wide_layers, batch_size=2), "t4")

    assert 0 < found.num_bytes <= job.prediction.by_category["temporaries"]
    assert Topic.OPTIMIZER_TEMPORARIES not in advice_for(elsewhere)


@pytest.mark.slow
def test_expandable_segments_are_worth_what_a_replay_with_them_saves() -> None:
    job = wide_job(3000)
    found = advice_for(predicted(job, "t4")).get(Topic.EXPANDABLE_SEGMENTS)
    growing = predicted(job, "t4", settings=AllocatorSettings(expandable_segments=True))
    saved = (
        predicted(job, "t4").prediction.peak_reserved_bytes - growing.prediction.peak_reserved_bytes
    )

    assert found is not None
    assert found.num_bytes == saved
    assert Topic.EXPANDABLE_SEGMENTS not in advice_for(growing)
    assert Topic.EXPANDABLE_SEGMENTS not in advice_for(predicted(job))


@pytest.mark.slow
def test_a_guessed_term_is_named_on_a_gpu_alone() -> None:
    guessed = predicted(make_job(), "v100-32gb")
    (term,) = (term for term in guessed.prediction.terms if term.certainty == "guess")
    found = advice_for(guessed)[Topic.GUESSED_TERM]

    assert (found.subject, found.num_bytes) == (term.name, term.num_bytes)
    assert Topic.GUESSED_TERM not in advice_for(predicted(make_job(), "t4")), "all is read there"
    assert Topic.GUESSED_TERM not in advice_for(predicted(make_job()))


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_told_the_micro_batch_that_does() -> None:
    job = predicted(wide_job(1024), budget_bytes=1800 * KIB)

    assert advice_for(job)[Topic.MICRO_BATCH].subject == str(
        largest_micro_batch(job).micro_batch_size
    )


def test_holders_are_the_largest_first_with_phase_and_line() -> None:
    job = predicted(wide_job(), "t4")
    found = largest_holders(job.recording, job.device, 25)
    sizes = [holder.num_bytes for holder in found]

    assert sizes == sorted(sizes, reverse=True)
    assert sizes[:10] == [holder.num_bytes for holder in job.prediction.largest]
    assert {holder.phase for holder in found} >= {"setup", "backward"}
    assert all("test_advice.py:" in holder.source_line for holder in found)
    assert len(largest_holders(job.recording, job.device, 3)) == 3
