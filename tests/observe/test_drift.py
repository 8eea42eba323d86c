"""A measured peak that is not the predicted one is told once, with the category that explains it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.zoo.predictions import make_prediction
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.figures import Interval, Prediction
from memfit.observe import drift as drift_module
from memfit.observe.drift import PASSING, PASSING_WITHOUT_GRADIENTS, DriftWatch
from memfit.session.storages import owned_bytes
from memfit.strategies.micro_batching import MicroBatching
from memfit.trace.events import Category
from memfit.trace.recorder import Owned
from memfit.units import MIB

WIDTH, BATCH_SIZE = 512, 512


def make_job(**changes) -> Job:
    """Make a job of about 30 MiB: two square layers, Adam, and inputs as wide as the layers."""
    parts = {
        "model": lambda: nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
        ),
        "batch": lambda size: torch.randn(size, WIDTH),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, foreach=False),
        "batch_size": BATCH_SIZE,
    }
    return Job(**{**parts, **changes})


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return memfit.predict(make_job())


def drifts_of(job: Job, prediction: Prediction, batches, *, watch=None, plan=None):
    """Run steps; return what the watch says after each of them."""
    watch = watch or DriftWatch()
    run = memfit.start(job, plan, device="cpu")
    session = run._steps.session
    found = []
    for step, batch in enumerate(batches, start=1):
        peak_bytes = run.step(batch).measured_peak_bytes
        found.append(watch.check(step, prediction, peak_bytes, session.owned_tensors(batch)))
    return found


def batches_of(*sizes):
    return [torch.randn(size, WIDTH) for size in sizes]


def whole(times=3):
    return batches_of(*[BATCH_SIZE] * times)


# --- Real jobs ---


def test_steps_as_predicted_are_silent_the_first_one_included(prediction):
    assert drifts_of(make_job(), prediction, whole()) == [None] * 3


def test_smaller_batches_are_silent(prediction):
    assert drifts_of(make_job(), prediction, batches_of(512, 512, 100)) == [None] * 3


@pytest.mark.slow
def test_a_plan_is_measured_against_its_own_prediction():
    plan = Plan(strategies=(MicroBatching(micro_batch_size=64),))
    job = make_job()
    predicted = memfit.predict(job, plan=plan)
    assert drifts_of(job, predicted, whole(), plan=plan) == [None] * 3


@pytest.mark.slow
def test_a_batch_twice_as_large_is_named(prediction):
    (*_, drift) = drifts_of(make_job(), prediction, batches_of(512, 512, 1024))
    assert drift.category == "batch"
    assert drift.step == 3
    assert drift.measured_bytes > drift.predicted_bytes == prediction.peak_allocated_bytes
    assert drift.measured_category_bytes == 2 * drift.predicted_category_bytes == 2 * MIB


@pytest.mark.slow
def test_a_larger_model_is_named_by_its_parameters_or_states(prediction):
    wider = make_job(
        model=lambda: nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH), *_idle_layers()
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=False),
    )
    predicted = memfit.predict(make_job(optimizer=wider.optimizer))
    drift = next(filter(None, drifts_of(wider, predicted, whole())))
    assert drift.category == "parameters"
    assert drift.measured_category_bytes > drift.predicted_category_bytes


def _idle_layers():
    """Return layers that hold parameters and are not trained."""
    table = nn.Linear(1024, 4096)
    table.requires_grad_(False)
    table.forward = lambda inputs: inputs
    return [table]


def test_an_extra_buffer_is_named(prediction):
    def model():
        built = make_job().model()
        built.register_buffer("table", torch.zeros(2048, 2048))
        return built

    drift = next(filter(None, drifts_of(make_job(model=model), prediction, whole())))
    assert drift.category == "buffers"
    assert drift.measured_category_bytes - drift.predicted_category_bytes == 16 * MIB


@pytest.mark.slow
def test_something_kept_outside_of_the_job_counts_as_what_passes_in_a_step(prediction):
    kept = []

    def loss(model, batch):
        kept.append(torch.zeros(2048, 2048))
        return model(batch).square().mean()

    found = drifts_of(make_job(loss=loss), prediction, whole())
    assert found[0].category == PASSING
    assert found[0].measured_category_bytes > found[0].predicted_category_bytes + 8 * MIB


def test_optimizer_states_of_another_type_are_named(prediction):
    job = make_job()
    run = memfit.start(job, device="cpu")
    session = run._steps.session
    (batch,) = whole(1)
    run.step(batch)
    for state in run.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].double()
    for parameter in run.model.parameters():
        parameter.grad = None
    watch = DriftWatch()
    owned = [*session.owned_tensors(batch)]
    states_bytes = prediction.by_category["optimizer state"]
    measured = prediction.peak_allocated_bytes + states_bytes
    drift = watch.check(2, prediction, measured, owned)
    assert drift.category == "optimizer state"
    assert drift.measured_category_bytes == pytest.approx(2 * states_bytes, rel=1e-4)


def test_an_optimizer_with_fewer_states_is_named_though_less_is_taken(prediction):
    job = make_job(
        optimizer=lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=False)
    )
    drift = next(filter(None, drifts_of(job, prediction, whole())))
    assert drift.category == "optimizer state"
    assert drift.measured_bytes < drift.predicted_bytes


@pytest.mark.slow
def test_activations_that_are_larger_than_planned_are_what_passes_in_a_step(prediction):
    def loss(model, batch):
        return model(batch).exp().exp().exp().exp().exp().square().mean()

    drift = next(filter(None, drifts_of(make_job(loss=loss), prediction, whole())))
    assert drift.category == PASSING
    assert drift.measured_category_bytes > drift.predicted_category_bytes + 2 * MIB


# --- Made-up figures ---

PREDICTED = make_prediction(
    100 * MIB,
    first_step_peak_bytes=80 * MIB,
    by_category={"parameters": 20 * MIB, "batch": 4 * MIB, "saved activations": 76 * MIB},
)


def owned(*, parameters=20, batch=4, gradients=0, states=0) -> list[Owned]:
    """Return tensors of so many MiB."""
    sizes = {
        Category.PARAMETERS: parameters,
        Category.BATCH: batch,
        Category.GRADIENTS: gradients,
        Category.OPTIMIZER_STATE: states,
    }
    return [
        Owned(torch.empty(mib * MIB, dtype=torch.uint8), category, "")
        for category, mib in sizes.items()
        if mib
    ]


def drift_at(peak_mib: float, prediction=PREDICTED, *, step=2, **sizes):
    """Return what a new watch says of a peak."""
    return DriftWatch().check(step, prediction, int(peak_mib * MIB), owned(**sizes))


TINY = replace(
    PREDICTED, peak_allocated_bytes=2 * MIB, by_category={"parameters": MIB, "batch": MIB}
)
WIDE = replace(
    PREDICTED, intervals={"allocated": Interval(low_bytes=90 * MIB, high_bytes=115 * MIB)}
)


@pytest.mark.parametrize(
    ("peak_mib", "prediction", "step", "is_told"),
    [
        *((peak_mib, PREDICTED, 2, is_told)
          for peak_mib, is_told in ((94, True), (96, False), (104, False), (106, True))),
        # The tolerance is at least a mebibyte.
        (3, TINY, 2, False), (3.01, TINY, 2, True),
        # The prediction's own interval is no drift, and in a first step its distance from the peak.
        (110, WIDE, 2, False), (117, WIDE, 2, True), (90, WIDE, 1, False), (97, WIDE, 1, True),
        # The first step has a peak of its own.
        (80, PREDICTED, 1, False), (80, PREDICTED, 2, True),
        (5, None, 2, False),
        # Less is not told where the size of a batch was not predicted.
        (50, replace(PREDICTED, by_category={"parameters": 20 * MIB}), 2, False),
    ],
)  # fmt: skip
def test_what_is_outside_the_tolerance_and_the_interval_is_told(
    peak_mib, prediction, step, is_told
):
    sizes = {"parameters": 1, "batch": 1} if prediction is TINY else {}
    assert (drift_at(peak_mib, prediction, step=step, **sizes) is not None) == is_told


def test_a_drift_is_told_once_and_again_when_it_has_grown():
    watch = DriftWatch()
    peaks = [110, 110, 114, 116, 116, 122]
    told = [watch.check(n, PREDICTED, mib * MIB, owned()) for n, mib in enumerate(peaks, start=2)]
    assert [found is not None for found in told] == [True, False, False, True, False, True]


def test_another_category_or_direction_is_another_drift():
    watch = DriftWatch()
    kinds = [
        watch.check(2, PREDICTED, 110 * MIB, owned()),
        watch.check(3, PREDICTED, 110 * MIB, owned(parameters=35)),
        watch.check(4, PREDICTED, 90 * MIB, owned()),
        watch.check(5, PREDICTED, 110 * MIB, owned()),
    ]
    assert [kind.category for kind in kinds[:3]] == [PASSING, "parameters", PASSING]
    assert kinds[3] is None


def test_after_another_plan_a_drift_is_news_again():
    watch = DriftWatch()
    other = replace(PREDICTED, strategies=("micro-batching(2)",))
    assert watch.check(2, PREDICTED, 110 * MIB, owned()) is not None
    assert watch.check(3, other, 110 * MIB, owned()) is not None


def test_gradients_that_are_still_there_are_told_apart():
    known = replace(
        PREDICTED,
        by_category={**PREDICTED.by_category, "gradients": 20 * MIB, "saved activations": 56 * MIB},
    )
    larger = drift_at(120, known, gradients=40)
    assert (larger.category, larger.measured_category_bytes) == ("gradients", 40 * MIB)
    assert drift_at(120, known, gradients=20).category == PASSING_WITHOUT_GRADIENTS


def test_a_larger_batch_does_not_explain_activations_out_of_proportion():
    assert drift_at(20 + 8 + 150, batch=8).category == "batch"
    assert drift_at(20 + 8 + 300, batch=8).category == PASSING


def test_without_a_measurement_there_is_nothing_to_tell():
    assert DriftWatch().check(2, PREDICTED, None, owned()) is None


def test_looking_at_the_job_takes_no_more_than_its_share_of_the_time(monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(drift_module, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    looks, watch = [], DriftWatch()

    def costly():
        looks.append(clock.seconds)
        clock.seconds += 0.05
        return owned()

    class Costly:
        def __iter__(self):
            return iter(costly())

    for step in range(2, 2002):
        watch.check(step, PREDICTED, 110 * MIB, Costly())
        clock.seconds += 0.1
    assert sum(0.05 for _ in looks) <= 0.002 * clock.seconds + 10 * 0.05
    assert len(looks) >= 10
    before = len(looks)
    assert watch.check(2003, PREDICTED, 120 * MIB, Costly()) is not None
    assert len(looks) == before + 1, "what is further off is always looked at"


def test_tied_tensors_count_once():
    tensor = torch.zeros(10)
    shared = [Owned(tensor, Category.PARAMETERS, "a"), Owned(tensor[:5], Category.BUFFERS, "b")]
    assert owned_bytes(shared) == {Category.PARAMETERS: 40}
