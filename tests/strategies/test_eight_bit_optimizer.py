"""The 8-bit optimizer does what torch's does, up to rounding, with its settings and checkpoints."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.conformance.builders import near_peak, squared_error
from tests.zoo.small_jobs import facts_of, session_of
from torch import nn
from torch.optim.lr_scheduler import StepLR

import memfit
from memfit import Job, Plan
from memfit.errors import MissingExtraError
from memfit.kernels.cpu_onednn_3_12 import CPU_OPERATORS
from memfit.observe.allocator_events import AllocatorWatch
from memfit.strategies import eight_bit_optimizer
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
from memfit.strategies.optimizer_in_backward import OptimizerInBackward

WIDTH, HIDDEN = 64, 128
NUM_SMALL = HIDDEN + WIDTH
NUM_LARGE = 2 * WIDTH * HIDDEN
EIGHT_BIT = Plan(strategies=(EightBitOptimizer(),))
IN_BACKWARD = Plan(strategies=(EightBitOptimizer(), OptimizerInBackward()))
ADAM = partial(torch.optim.Adam, lr=0.01)
ADAMW = partial(torch.optim.AdamW, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.03)


def job_with(optimizer, dtype=torch.float32) -> Job:
    """Return a regression with two weights of 8192 values and two small biases."""

    return Job(
        model=lambda: nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)
        ).to(dtype),
        batch=lambda size: (torch.randn(size, WIDTH).to(dtype), torch.randn(size, WIDTH).to(dtype)),
        loss=squared_error,
        optimizer=optimizer,
        batch_size=32,
    )


def trained(job: Job, plan: Plan, num_steps: int) -> memfit.Run:
    """Run a few steps from the same start, on the same batches."""
    torch.manual_seed(0)
    run = memfit.start(job, plan)
    for _ in range(num_steps):
        run.step(job.batch(job.batch_size))
    return run


def weights_of(run: memfit.Run) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def difference(job: Job, other: Job, plan: Plan, num_steps: int) -> float:
    """Return how far training goes another way than the plain one, relative to how far it goes."""
    start = weights_of(trained(job, Plan(), 0))
    plain = weights_of(trained(job, Plan(), num_steps))
    planned = weights_of(trained(other, plan, num_steps))
    return float((planned - plain).norm() / (plain - start).norm())


@pytest.mark.parametrize("optimizer", [ADAM, ADAMW, SGD], ids=["adam", "adamw", "sgd"])
@pytest.mark.parametrize("plan", [EIGHT_BIT, IN_BACKWARD], ids=["after", "in-backward"])
def test_twenty_steps_go_where_torch_goes_up_to_the_rounding_of_states(optimizer, plan):
    job = job_with(optimizer)
    assert 1e-4 < difference(job, job, plan, 20) < 0.05


@pytest.mark.slow
def test_the_first_step_knows_no_rounding_yet():
    for optimizer in (ADAM, ADAMW, SGD):
        job = job_with(optimizer)
        assert difference(job, job, EIGHT_BIT, 1) < 1e-4


def test_in_backward_the_same_updates_are_made():
    after, inside = (
        trained(job_with(ADAMW), plan, 5).state_dict() for plan in (EIGHT_BIT, IN_BACKWARD)
    )
    assert all(torch.equal(after["model"][name], inside["model"][name]) for name in after["model"])


@pytest.mark.slow
def test_large_states_take_two_bytes_and_a_little_per_value():
    run = trained(job_with(ADAMW), EIGHT_BIT, 1)
    dtypes = [run.optimizer.state[weight]["state1"].dtype for weight in run.model.parameters()]
    assert dtypes == [torch.uint8, torch.float32, torch.uint8, torch.float32]
    prediction = memfit.predict(job_with(ADAMW), plan=EIGHT_BIT)
    scale_bytes, table_bytes = 2 * 4 * NUM_LARGE // 256, 2 * 256 * 4
    expected = 2 * NUM_LARGE + scale_bytes + table_bytes + 2 * 4 * NUM_SMALL
    assert prediction.by_category["optimizer state"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("plan", [EIGHT_BIT, IN_BACKWARD], ids=["after", "in-backward"])
def test_a_virtual_gpu_keeps_the_states_in_8_bits(plan):
    plain = memfit.predict(job_with(ADAMW), "a100-40gb")
    planned = memfit.predict(job_with(ADAMW), "a100-40gb", plan)
    assert planned.by_category["optimizer state"] < 0.4 * plain.by_category["optimizer state"]
    assert planned.peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [ADAM, SGD], ids=["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", [EIGHT_BIT, IN_BACKWARD], ids=["after", "in-backward"])
def test_the_predicted_peak_is_the_measured_one(optimizer, dtype, plan):
    job = job_with(optimizer, dtype)
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    assert predicted == near_peak(memfit.measure(job, plan).peak_allocated_bytes)


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
@pytest.mark.parametrize("num_values", [4095, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_what_an_update_takes_inside_is_known_but_for_single_numbers(
    kind, num_values, dtype, weight_decay
):
    from bitsandbytes import optim

    parameter = nn.Parameter(torch.randn(num_values).to(dtype))
    parameter.grad = torch.randn(num_values).to(dtype)
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(optim, f"{kind}8bit")(
        [parameter], 0.1, weight_decay=weight_decay, **settings
    )
    optimizer.step()
    state = optimizer.state[parameter]
    is_small = num_values < 4096
    bits = "32bit" if is_small else "8bit_blockwise"
    decay = {"weight_decay": weight_decay} if is_small else {}
    name = f"bitsandbytes.optimizer_update_{bits}"
    with AllocatorWatch() as watch:
        optimizer.step()
    rule = CPU_OPERATORS.table[name].scratch
    predicted = rule(g=parameter.grad, state2=state.get("state2"), **decay)
    num_bytes_of_numbers = watch.highest_growth_bytes() - predicted
    assert 0 <= num_bytes_of_numbers <= 16


def test_groups_keep_what_the_job_put_into_them():
    def groups(parameters):
        first, *others = parameters
        named = {"params": [first], "lr": 0.5, "name": "first", "momentum": 0.7}
        return SGD([named, {"params": others}])

    run = memfit.start(job_with(groups), EIGHT_BIT)
    first, others = run.optimizer.param_groups
    assert (first["lr"], first["name"], first["betas"]) == (0.5, "first", (0.7, 0.0))
    assert (others["lr"], others["weight_decay"], others["betas"]) == (0.1, 0.03, (0.9, 0.0))
    assert [len(group["params"]) for group in (first, others)] == [1, 3]


def test_a_scheduler_of_the_run_changes_the_rate():
    run = memfit.start(job_with(ADAM), EIGHT_BIT)
    scheduler = StepLR(run.optimizer, step_size=1, gamma=0.0)
    batch = job_with(ADAM).batch(8)
    run.step(batch)
    scheduler.step()
    before = weights_of(run)
    run.step(batch)
    assert torch.equal(before, weights_of(run))


@pytest.fixture
def own_overrides():
    """Forget afterwards what bitsandbytes was told of single weights: it goes by their places."""
    import bitsandbytes

    yield
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()


@pytest.mark.usefixtures("own_overrides")
@pytest.mark.parametrize("plan", [EIGHT_BIT, IN_BACKWARD], ids=["after", "in-backward"])
def test_a_stable_embedding_alone_keeps_fp32_states(plan):
    import bitsandbytes

    def model():
        embedding = bitsandbytes.nn.StableEmbedding(512, 16)
        return nn.Sequential(embedding, nn.Linear(16, 512), nn.Linear(512, 16))

    job = Job(
        model=model,
        batch=lambda size: torch.arange(size) % 512,
        loss=lambda model, ids: model(ids).square().mean(),
        optimizer=ADAM,
        batch_size=16,
    )
    run = trained(job, plan, 1)
    embedding, up, down = run.model
    dtypes = [run.optimizer.state[layer.weight]["state1"].dtype for layer in (embedding, up, down)]
    assert dtypes == [torch.float32, torch.uint8, torch.uint8]


def test_in_backward_a_weight_that_is_still_read_is_not_changed_silently():
    """The kernels of bitsandbytes do not tell autograd of what they change."""

    def loss(model, batch):
        first, _, second = model
        hidden = first(batch[0]) @ second.weight.t().detach()
        return (hidden + second(torch.ones(1, HIDDEN))).square().mean()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        trained(replace(job_with(ADAM), loss=loss), IN_BACKWARD, 1)


def obstacle(optimizer, dtype=torch.float32) -> str | None:
    return EightBitOptimizer().obstacle(facts_of(job_with(optimizer, dtype)))


def scheduled(parameters):
    optimizer = ADAM(parameters)
    StepLR(optimizer, 1)
    return optimizer


class Adam(torch.optim.SGD):
    """An optimizer from elsewhere with a known name."""


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (partial(ADAM, amsgrad=True), "the 8-bit Adam of bitsandbytes has no amsgrad."),
        (partial(ADAMW, maximize=True), "has no maximize."),
        (partial(ADAM, capturable=True), "has no capturable."),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), "has no lr as a tensor."),
        (partial(SGD, nesterov=True), "has no nesterov."),
        (partial(SGD, dampening=0.1), "has no dampening."),
        (partial(SGD, momentum=0.0), "SGD without momentum keeps no states"),
        (partial(ADAM, weight_decay=0.1), "take torch.optim.AdamW"),
        (partial(torch.optim.RMSprop), "no 8-bit version of RMSprop"),
        (partial(Adam, lr=0.1), "no 8-bit version of Adam that does the same"),
        (scheduled, "has a scheduler"),
    ],
)
def test_what_bitsandbytes_does_otherwise_is_refused(optimizer, reason):
    sentence = obstacle(optimizer)
    assert reason in sentence
    assert sentence.endswith(".")


def test_double_precision_is_refused():
    assert "not float64" in obstacle(ADAM, torch.float64)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(ADAM, weight_decay=0.1, decoupled_weight_decay=True),
        partial(ADAM, fused=True),
        partial(ADAM, foreach=True),
    ],
)
def test_settings_that_change_nothing_are_not_refused(optimizer):
    assert obstacle(optimizer) is None


def test_without_the_library_the_way_to_it_is_named(monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(eight_bit_optimizer, "find_spec", lambda name: None)
    monkeypatch.setattr(eight_bit_optimizer, "import_module", refuse)
    assert "pip install 'memfit[eight-bit]'" in obstacle(ADAM)
    with pytest.raises(MissingExtraError, match="bitsandbytes"):
        EightBitOptimizer().apply(session_of(job_with(ADAM)))


@pytest.mark.slow
def test_the_library_is_first_imported_outside_recordings_and_quietly():
    """Imported under a virtual GPU, it would look for CUDA's kernels and lose those of the CPU."""
    code = """
import sys, torch, memfit
from memfit import Plan
from memfit.strategies.eight_bit_optimizer import EightBitOptimizer
job = memfit.Job(
    model=lambda: torch.nn.Linear(64, 64),
    batch=lambda size: torch.randn(size, 64),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.Adam(parameters),
    batch_size=2,
)
assert "bitsandbytes" not in sys.modules
plan = Plan(strategies=(EightBitOptimizer(),))
memfit.predict(job, "a100-40gb", plan)
memfit.start(job, plan).step(torch.randn(2, 64))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stderr == ""
    assert done.returncode == 0
