"""Loss scaling under fp16: what is scaled, when it is unscaled, and what skips a step."""

import dataclasses

import pytest
import torch
from tests.zoo.small_jobs import facts_of, regression_job
from torch import nn

import memfit
from memfit import Job, Plan, Total
from memfit.devices.catalogue import load_device
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.fp16 import Fp16
from memfit.strategies.micro_batching import MicroBatching

FIRST_SCALE = 2.0**16
MOST_SKIPPED = 10
CLOSE = 0.02
"""Relative; float16 rounds to 2^-11 per operation."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def squared_error(model, batch):
    return (model(batch[0]) - batch[1]).float().square().mean()


def total_over_true_rows(model, batch):
    """Leave out rows whose target is negative, so that counts are ragged."""
    is_counted = batch[1][:, :1] >= 0
    terms = (model(batch[0]).float() - batch[1]).square() * is_counted
    return Total(terms.sum(), is_counted.sum())


def layers(width: int = 8) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))


def job_of(model=layers, loss=squared_error, clip=None, optimizer=sgd) -> Job:
    return regression_job(model, (8,), loss=loss, optimizer=optimizer, clip=clip)


def started(job: Job, *strategies) -> memfit.Run:
    torch.manual_seed(0)
    return memfit.start(job, Plan(strategies=strategies), device="cpu")


def scaler_of(run) -> torch.amp.GradScaler:
    return run._steps.session.stateful["gradient_scaler"]


def values_of(run) -> torch.Tensor:
    parts = [parameter.detach().flatten() for parameter in run.model.parameters()]
    return torch.cat(parts).clone()


def batch_of(job: Job):
    torch.manual_seed(1)
    return job.batch(job.batch_size)


def change_after_a_step(job: Job, *strategies) -> torch.Tensor:
    """Step until a step is not skipped."""
    run = started(job, *strategies)
    before = values_of(run)
    for _ in range(MOST_SKIPPED):
        run.step(batch_of(job))
        if not torch.equal(values_of(run), before):
            break
    return values_of(run) - before


def normalised_images() -> Job:
    def model():
        convolution = nn.Conv2d(3, 4, 3, bias=False)
        rest = [nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(convolution, *rest)

    return dataclasses.replace(
        job_of(model), batch=lambda size: (torch.randn(size, 3, 6, 6), torch.randn(size, 4))
    )


@pytest.mark.parametrize(
    ("job", "strategies"),
    [
        (job_of(), (Fp16(),)),
        (job_of(clip=1e-3), (Fp16(),)),
        (job_of(), (ActivationCheckpointing(), Fp16())),
        pytest.param(job_of(), (MicroBatching(micro_batch_size=3), Fp16()), marks=pytest.mark.slow),
        pytest.param(
            job_of(clip=1e-3), (MicroBatching(micro_batch_size=3), Fp16()), marks=pytest.mark.slow
        ),
        (job_of(loss=total_over_true_rows), (Fp16(),)),
        pytest.param(
            job_of(loss=total_over_true_rows),
            (MicroBatching(micro_batch_size=3), Fp16()),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            normalised_images(),
            (BatchNormReplay(micro_batch_size=3), Fp16()),
            marks=pytest.mark.slow,
        ),
        # A plan may be written in any order.
        pytest.param(
            normalised_images(),
            (Fp16(), BatchNormReplay(micro_batch_size=3)),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            job_of(clip=1e-3), (Fp16(), MicroBatching(micro_batch_size=3)), marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: "-".join(s.label() for s in value) if isinstance(value, tuple) else "",
)
def test_a_step_changes_the_parameters_as_the_plain_one_does(job, strategies):
    plain, planned = change_after_a_step(job), change_after_a_step(job, *strategies)
    assert float((planned - plain).norm() / plain.norm()) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("bad_row", [0, 4, 9])
def test_an_infinity_in_any_micro_batch_skips_the_whole_step(bad_row):
    job = job_of()
    run = started(job, MicroBatching(micro_batch_size=3), Fp16())
    batch = batch_of(job)
    batch[1][bad_row] = torch.inf
    before = values_of(run)
    run.step(batch)
    assert torch.equal(values_of(run), before)
    assert scaler_of(run).get_scale() == FIRST_SCALE / 2
    run.step(batch_of(job))
    assert run.num_steps == 2
    assert not torch.equal(values_of(run), before)
    assert scaler_of(run).get_scale() == FIRST_SCALE / 2


@pytest.mark.slow
def test_a_total_whose_scaled_sum_overflows_comes_down_to_a_scale_that_fits():
    def loss(model, batch):
        total = total_over_true_rows(model, batch)
        return Total(total.sum * 1e4, total.count * 1e4)

    job = job_of(loss=loss)
    run = started(job, MicroBatching(micro_batch_size=3), Fp16())
    before, batch = values_of(run), batch_of(job)
    num_skipped = 0
    while torch.equal(values_of(run), before):
        run.step(batch)
        num_skipped += 1
    num_skipped -= 1
    assert num_skipped > 0
    assert scaler_of(run).get_scale() == FIRST_SCALE / 2**num_skipped
    planned, plain = values_of(run) - before, change_after_a_step(job)
    assert float((planned - plain).norm() / plain.norm()) < CLOSE


def test_the_scale_doubles_after_enough_good_steps():
    job = job_of()
    run = started(job, Fp16())
    assert scaler_of(run).get_growth_interval() == 2000
    scaler_of(run).set_growth_interval(2)
    scales = []
    for _ in range(3):
        run.step(batch_of(job))
        scales.append(scaler_of(run).get_scale() / FIRST_SCALE)
    assert scales == [1, 2, 2]


def test_a_checkpoint_keeps_the_scale():
    job = job_of()
    run = started(job, Fp16())
    batch = batch_of(job)
    batch[0][0] = torch.inf
    run.step(batch)
    resumed = started(job, Fp16())
    resumed.load_state_dict(run.state_dict())
    assert scaler_of(resumed).get_scale() == FIRST_SCALE / 2
    run.step(batch_of(job))
    resumed.step(batch_of(job))
    assert torch.equal(values_of(run), values_of(resumed))


def test_a_step_that_failed_does_not_block_the_next_one():
    job = job_of()
    torch.manual_seed(0)
    run = memfit.start(job, Plan(strategies=(Fp16(),)), device="cpu", guard=False)

    def fail(*_args):
        raise MemoryError

    handle = run.optimizer.register_step_pre_hook(fail)
    before = values_of(run)
    with pytest.raises(MemoryError):
        run.step(batch_of(job))
    handle.remove()
    run.step(batch_of(job))
    assert torch.equal(values_of(run) - before, change_after_a_step(job, Fp16()))


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_a_step_is_recorded_as_one_that_is_taken(device):
    job = job_of(optimizer=lambda parameters: torch.optim.Adam(parameters))
    recording = record(
        job, Plan(strategies=(Fp16(),)), device=None if device is None else load_device(device)
    )
    names = {operation.name for operation in recording.steady.operations}
    assert {"_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"} <= names
    assert names & {"sqrt", "_foreach_sqrt"}, "the optimizer's step is missing"


@pytest.mark.slow
def test_an_lstm_is_refused_on_the_cpu_alone():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = nn.LSTM(8, 8)

        def forward(self, x):
            return self.memory(x)[0]

    job = job_of(Recurrent)
    with pytest.raises(StrategyError, match=r"an LSTM \(memory\) in float16 on the CPU"):
        started(job, Fp16())
    assert Fp16().obstacle(dataclasses.replace(facts_of(job), device_type="cuda")) is None
    record(job, Plan(strategies=(Fp16(),)), device=load_device("a100-40gb"))


def test_passes_that_were_tried_leave_no_scale_in_the_gradients_of_the_next_one():
    job = job_of()
    run = started(job, Fp16())
    session, batch = run._steps.session, batch_of(job)
    passes = []
    for _ in range(2):
        session.optimizer.zero_grad()
        session.gradient_pass(session, batch, lambda phase: None)
        passes.append([parameter.grad.clone() for parameter in run.model.parameters()])
    assert all(torch.equal(*both) for both in zip(*passes, strict=True))
    assert scaler_of(run).get_scale() == FIRST_SCALE


def test_a_pass_that_was_tried_and_put_back_before_the_first_step_is_forgotten():
    job = job_of()
    run = started(job, Fp16())
    session, batch, scaler = run._steps.session, batch_of(job), scaler_of(run)
    untouched = dict(vars(scaler))
    session.optimizer.zero_grad()
    session.gradient_pass(session, batch, lambda phase: None)
    vars(scaler).update(untouched)  # as a trial puts back whatever it has reached
    session.optimizer.zero_grad()
    run.step(batch)
    assert scaler.get_scale() == FIRST_SCALE
