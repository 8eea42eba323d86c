"""Everything in bfloat16: what is converted, how updates are rounded, and what stays as it was."""

import dataclasses
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.builders import near_peak, squared_error
from tests.strategies.optimizer_jobs import Foreign, hooked_before
from tests.zoo.small_jobs import regression_job, session_of
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.devices.catalogue import load_device
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.strategies import pure_bf16
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Strategy
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.pure_bf16 import PureBf16
from memfit.strategies.pure_bf16.rounding import RoundedStep, StochasticRounding
from memfit.trace.events import Category

BF16 = torch.bfloat16


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def layers(width: int = 8) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def job_of(model=layers, loss=squared_error, optimizer=adamw, width: int = 8) -> Job:
    return regression_job(model, (width,), loss=loss, optimizer=optimizer)


def started(job: Job, *strategies: Strategy) -> memfit.Run:
    torch.manual_seed(0)
    return memfit.start(job, Plan(strategies=strategies), device="cpu")


def trained(job: Job, *strategies: Strategy, num_steps: int) -> memfit.Run:
    run = started(job, *strategies)
    for seed in range(num_steps):
        torch.manual_seed(seed)
        run.step(job.batch(job.batch_size))
    return run


# --- Rounding ---


def rounded(value: float, count: int) -> torch.Tensor:
    values = torch.full((count,), value)
    target = torch.empty(count, dtype=BF16)
    StochasticRounding("cpu").store([(values, target)])
    return target.float()


@pytest.mark.parametrize("value", [1.001, -1.001, 0.3, -7.0e-5, 3.0e38, 1e-40, 1.0 + 2.0**-16])
def test_rounding_goes_to_a_neighbour_and_is_right_on_average(value):
    count = 100_000
    found = rounded(value, count)
    exact = float(torch.tensor(value))
    below, above = float(found.min()), float(found.max())
    assert below <= exact <= above
    assert set(found.tolist()) <= {below, above}
    nearest = float(torch.tensor(exact).bfloat16())
    assert nearest in {below, above}
    # Five standard deviations of the mean of `count` draws of one of two values.
    chance = (exact - below) / (above - below)
    deviation = (above - below) * (chance * (1 - chance) / count) ** 0.5
    assert float(found.double().mean()) == pytest.approx(exact, abs=5 * deviation)


def test_rounding_follows_the_seed_of_training():
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(rounded(0.3, 1000))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_rounding_leaves_what_bfloat16_can_hold():
    values = torch.cat((torch.randn(1000), torch.tensor([0.0, torch.inf, -torch.inf, 1e-39])))
    values = values.bfloat16()
    target = torch.empty_like(values)
    StochasticRounding("cpu").store([(values.float(), target)])
    assert torch.equal(target, values)


def test_rounding_keeps_nan_whatever_its_bits():
    # CUDA writes NaN with all bits set, where one more carries over into the sign.
    values = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    target = torch.empty(4, dtype=BF16)
    StochasticRounding("cpu").store([(values.view(torch.float32), target)])
    assert bool(target.isnan().all())


# --- What stochastic rounding is for ---


def tiny_updates(optimizer) -> Job:
    """Return 2048 weights of 1, each with a gradient of 1."""

    def model():
        layer = nn.Linear(2048, 1, bias=False)
        nn.init.ones_(layer.weight)
        return layer

    return Job(
        model=model,
        batch=lambda size: torch.ones(size, 2048),
        loss=lambda model, batch: model(batch).mean(),
        optimizer=optimizer,
        batch_size=4,
    )


@pytest.mark.slow
def test_many_tiny_updates_move_weights_as_in_fp32_while_plain_bf16_stands_still():
    num_steps, rate = 200, 1e-4
    job = tiny_updates(lambda parameters: torch.optim.SGD(parameters, lr=rate))
    in_fp32 = trained(job, num_steps=num_steps).model.weight.detach()
    assert float(in_fp32.mean()) == pytest.approx(1 - num_steps * rate, rel=1e-5)

    in_pure_bf16 = trained(job, PureBf16(), num_steps=num_steps).model.weight.detach()
    assert in_pure_bf16.dtype is BF16
    assert float(in_pure_bf16.float().mean()) == pytest.approx(1 - num_steps * rate, abs=0.0012)

    plain = dataclasses.replace(
        job, model=lambda: job.model().to(BF16), batch=lambda size: job.batch(size).to(BF16)
    )
    stuck = trained(plain, num_steps=num_steps).model.weight
    assert torch.equal(stuck, torch.ones_like(stuck))


def test_optimizer_states_decay_as_in_fp32():
    """A factor of 0.999 is nearer to 1 than bfloat16 can tell, so plain bf16 would never decay."""
    parameter = nn.Parameter(torch.zeros(4096, dtype=BF16))
    optimizer = torch.optim.Adam([parameter], betas=(0.9, 0.999))
    step = RoundedStep(StochasticRounding("cpu"), 4096)
    parameter.grad = torch.ones_like(parameter)
    step.step(optimizer)
    first = float(optimizer.state[parameter]["exp_avg_sq"].float().mean())
    for _ in range(100):
        parameter.grad = torch.zeros_like(parameter)
        step.step(optimizer)
    last = optimizer.state[parameter]["exp_avg_sq"]
    assert last.dtype is BF16
    assert float(last.float().mean()) == pytest.approx(first * 0.999**100, rel=0.005)


# --- Steps ---


class ToNearest(StochasticRounding):
    """Round without chance, so that two ways to step can be compared by their bits."""

    def store(self, pairs):
        for values, target in pairs:
            target.copy_(values)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": adamw,
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_stepped_in_slices_ends_up_as_one_stepped_whole(name):
    outcomes = []
    for most_elements in (1000, 1, 30):
        torch.manual_seed(0)
        matrix, scalar = nn.Parameter(torch.randn(7, 9)), nn.Parameter(torch.tensor(1.0))
        optimizer = OPTIMIZERS[name]([matrix, scalar])
        for parameter in (matrix, scalar):
            parameter.data = parameter.data.to(BF16)
        step = RoundedStep(ToNearest("cpu"), most_elements)
        for _ in range(3):
            for parameter in (matrix, scalar):
                parameter.grad = torch.randn_like(parameter)
            step.step(optimizer)
            assert matrix.grad is None
        states = [value for kept in optimizer.state.values() for value in kept.values()]
        counts = [kept["step"] for kept in optimizer.state.values() if "step" in kept]
        assert all(float(count) == 3 for count in counts)
        outcomes.append([matrix, scalar, *states])
    for other in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@pytest.mark.parametrize("name", [*OPTIMIZERS, "adafactor"])
def test_any_optimizer_trains_about_as_in_fp32(name):
    optimizer = {**OPTIMIZERS, "adafactor": torch.optim.Adafactor}[name]
    job = job_of(lambda: nn.Linear(8, 8), optimizer=optimizer)
    plain, planned = (
        trained(job, *strategies, num_steps=20).model.weight.detach()
        for strategies in ((), (PureBf16(),))
    )
    assert planned.dtype is BF16
    assert float((planned.float() - plain).norm() / plain.norm()) < 0.05


def test_the_optimizers_own_hooks_and_counts_see_one_step():
    run = started(job_of(), PureBf16())
    calls = []
    run.optimizer.register_step_post_hook(lambda *_args: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.5)
    run.step(run._steps.session.job.batch(10))
    scheduler.step()
    assert len(calls) == 1
    assert run.optimizer.param_groups[0]["lr"] == 0.005
    assert len(run.optimizer.param_groups[0]["params"]) == 6


def test_a_step_that_fails_leaves_parameters_and_groups_in_place():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise MemoryError

    weight = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = Failing([weight, nn.Parameter(torch.ones(2))], lr=0.1)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(MemoryError):
        RoundedStep(StochasticRounding("cpu"), 100).step(optimizer)
    assert weight.dtype is BF16
    assert len(optimizer.param_groups[0]["params"]) == 2


# --- What is converted ---


class Mixed(nn.Module):
    """Tied weights, a norm with statistics, a buffer in fp32, an integer buffer and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.register_buffer("positions", torch.randn(9, 8))
        self.register_buffer("count", torch.tensor(3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids):
        hidden = self.embedding(ids) + self.positions
        return self.head(self.norm(hidden.mT).mT) * self.scale


def mixed_job() -> Job:
    return Job(
        model=Mixed,
        batch=lambda size: torch.randint(0, 11, (size, 9)),
        loss=lambda model, ids: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()),
        optimizer=adamw,
        batch_size=4,
    )


def test_parameters_and_their_states_are_bfloat16_and_all_else_is_not():
    run = trained(mixed_job(), PureBf16(), num_steps=3)
    dtypes = {name: value.dtype for name, value in run.model.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype is BF16} == {
        "embedding.weight",
        "head.weight",
        "scale",
    }
    assert dtypes["norm.weight"] is dtypes["norm.running_mean"] is torch.float32
    assert dtypes["positions"] is torch.float32
    assert dtypes["count"] is torch.int64
    assert run.model.head.weight is run.model.embedding.weight
    state = run.optimizer.state[run.model.head.weight]
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is BF16
    for parameter in (run.model.head.weight, run.model.scale, run.model.norm.weight):
        step = run.optimizer.state[parameter]["step"]
        assert step.dtype is torch.float32
        assert float(step) == 3


def test_undoing_gives_the_same_parameters_in_fp32_with_their_states():
    job = mixed_job()
    session = session_of(job)
    parameters = dict(session.model.named_parameters())
    undo = PureBf16().apply(session)
    session.gradient_pass(session, job.batch(4), lambda phase: None)
    session.update(session)
    in_bf16 = parameters["embedding.weight"].detach().clone()
    undo()
    assert all(dict(session.model.named_parameters())[n] is p for n, p in parameters.items())
    assert all(parameter.dtype is torch.float32 for parameter in parameters.values())
    assert torch.equal(parameters["embedding.weight"], in_bf16.float())
    assert session.model.head.weight is session.model.embedding.weight
    states = session.optimizer.state[session.model.head.weight]
    assert states["exp_avg"].dtype is states["exp_avg_sq"].dtype is torch.float32
    session.gradient_pass(session, job.batch(4), lambda phase: None)
    session.update(session)


def test_the_model_gets_bfloat16_and_the_loss_its_targets_as_they_are():
    seen = {}

    def loss(model, batch):
        out = model(batch[0])
        seen.update(out=out.dtype, target=batch[1].dtype, loss=F.mse_loss(out, batch[1]).dtype)
        return squared_error(model, batch)

    model = nn.Linear(8, 8)
    model.register_forward_pre_hook(lambda _m, args: seen.update(given=args[0].dtype))
    started(job_of(lambda: model, loss), PureBf16()).step((torch.randn(10, 8), torch.randn(10, 8)))
    assert seen == {
        "given": BF16,
        "out": BF16,
        "target": torch.float32,
        "loss": torch.float32,
    }


def test_dropout_masks_and_the_random_state_are_those_of_the_plain_run():
    states = []
    for strategies in ((), (PureBf16(),)):
        trained(job_of(), *strategies, num_steps=3)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# --- Memory ---


def wide_job() -> Job:
    return job_of(lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), width=512)


@pytest.mark.slow
@pytest.mark.parametrize("slice_elements", [2**12, 2**17, 2**18])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_the_predicted_peak_is_the_measured_one(monkeypatch, slice_elements, options):
    monkeypatch.setattr(pure_bf16, "_SLICE_ELEMENTS", {"cpu": slice_elements})
    job = dataclasses.replace(
        wide_job(), optimizer=lambda parameters: torch.optim.AdamW(parameters, **options)
    )
    plan = Plan(strategies=(PureBf16(),))
    predicted, measured = memfit.predict(job, plan=plan), memfit.measure(job, plan)
    assert predicted.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("bitsandbytes"), reason="needs the extra eight-bit")
def test_an_eight_bit_optimizer_shrinks_its_states_further():
    plan = Plan(strategies=(PureBf16(), EightBitOptimizer()))
    predicted, measured = memfit.predict(wide_job(), plan=plan), memfit.measure(wide_job(), plan)
    assert predicted.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)
    run = trained(wide_job(), *plan.strategies, num_steps=2)
    weight = run.model[0].weight
    states = run.optimizer.state[weight]
    assert weight.dtype is BF16
    assert states["state1"].dtype is states["state2"].dtype is torch.uint8


@pytest.mark.slow
@pytest.mark.parametrize("device", [None, "a100-40gb"])
def test_a_parameter_rests_in_six_bytes_and_has_a_gradient_of_two(device):
    job, plan = wide_job(), Plan(strategies=(PureBf16(),))
    recording = record(job, plan, device=None if device is None else load_device(device))
    num_parameters = sum(parameter.numel() for parameter in job.model().parameters())
    kept = dict.fromkeys(Category, 0)
    for allocation in recording.steady.allocations:
        kept[allocation.category] += allocation.num_bytes
    assert kept[Category.PARAMETERS] == 2 * num_parameters
    assert kept[Category.GRADIENTS] == 2 * num_parameters
    assert kept[Category.OPTIMIZER_STATE] == pytest.approx(4 * num_parameters, rel=0.001)


def normalised_job() -> Job:
    def model():
        first, last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        return nn.Sequential(first, nn.BatchNorm1d(8), nn.Tanh(), last)

    return job_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "other"),
    [
        (job_of(lambda: layers().eval()), ActivationCheckpointing()),
        (job_of(lambda: layers().eval()), MicroBatching(micro_batch_size=3)),
        (normalised_job(), BatchNormReplay(micro_batch_size=3)),
    ],
    ids=lambda value: value.label() if isinstance(value, Strategy) else "",
)
def test_it_works_with_the_strategies_that_cut_a_step_up(job, other):
    found = memfit.verify(job, Plan(strategies=(PureBf16(), other)), dtype=torch.float32)
    assert found.largest_error < 0.05


# --- What is refused ---


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (partial(Foreign, lr=0.1), "Foreign may need all parameters at once"),
        (torch.optim.LBFGS, "LBFGS may need all parameters at once"),
        (hooked_before, "a hook before its step"),
    ],
)
def test_an_optimizer_that_may_look_at_all_parameters_is_refused(optimizer, reason):
    with pytest.raises(StrategyError, match=reason):
        started(job_of(optimizer=optimizer), PureBf16())
