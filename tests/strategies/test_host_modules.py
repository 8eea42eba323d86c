"""Modules on the host: the same results across real copies, bytes of the device, and refusals.

No GPU is needed. Results are compared on the CPU, where what crosses is cloned as if it had gone to
another device; bytes are those of a step on a virtual GPU, worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.devices.catalogue import load_device
from memfit.prediction.placed_recorder import card_of, recording_on
from memfit.prediction.recording import record
from memfit.strategies import (
    ActivationCheckpointing,
    ActivationOffload,
    Bf16,
    ConvolutionTiling,
    HostModules,
    MicroBatching,
    OptimizerImplementation,
    host_modules,
)
from memfit.units import MIB

from .host_places import CARD, SAMPLES, WIDTH, Around, Cloning, job_of, under


@pytest.fixture
def two_places(monkeypatch):
    """Let the strategy apply on the CPU, with clones for copies to another device."""
    obstacle = HostModules.obstacle
    monkeypatch.setattr(host_modules, "Crossing", Cloning)
    monkeypatch.setattr(
        HostModules,
        "obstacle",
        lambda own, facts: obstacle(own, replace(facts, device_type="cuda")),
    )


# --- Modules that were not made for it.


class GivesTuple(nn.Module):
    """Give a tuple, in which one tensor stands twice and one came in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        own = self.layer(x)
        return own, [own, x], 3, None


class TakesTuple(Around):
    def combined(self, hidden):
        own, (again, same), number, nothing = self.side(hidden)
        assert again is own
        assert same is hidden
        assert nothing is None
        return own * number + again


class TakesDictionary(nn.Module):
    """Take and give dictionaries, and take keywords that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts, *, scale=1.0, name=None, gate=None):
        assert name == "second"
        x = parts["one"] + parts["other"]
        return {"scaled": scale * self.layer(x), "gated": x * gate}


class GivesDictionary(Around):
    def combined(self, hidden):
        parts = {"one": hidden, "other": hidden}
        found = self.side(parts, scale=2.0, name="second", gate=hidden.sigmoid())
        return found["scaled"] + found["gated"]


class CallsTwice(Around):
    def combined(self, hidden):
        return self.side(self.side(hidden).relu())


def normalising() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))


class PartlyFrozen(Around):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.side[0].requires_grad_(False)


class TiedInside(Around):
    """Two layers of the same weight, both on the host."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        self.side[0].weight = self.side[1].weight


class UnderTwoNames(Around):
    """One module under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.same = self.side

    def combined(self, hidden):
        return self.side(hidden) + self.same(hidden)


class Recurrent(Around):
    def __init__(self) -> None:
        super().__init__(lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))

    def combined(self, hidden):
        found, last = self.side(hidden[:, None], None)
        return found[:, 0] + last[0]


MODELS = [
    (Around, ("side",)),
    (lambda: TakesTuple(GivesTuple), ("side",)),
    (lambda: GivesDictionary(TakesDictionary), ("side",)),
    (CallsTwice, ("side",)),
    (lambda: Around(normalising), ("side",)),
    (lambda: Around(normalising), ("side.1",)),
    (lambda: Around(normalising), ("side", "side.0")),
    (PartlyFrozen, ("side",)),
    (TiedInside, ("side",)),
    (UnderTwoNames, ("side",)),
    (Recurrent, ("side",)),
    (Around, ("first", "last")),
]
NAMES = [
    *("a layer", "a tuple", "a dictionary", "called twice", "batch norm", "batch norm alone"),
    *("nested", "frozen", "tied inside", "two names", "recurrent", "the rest"),
]
EACH_MODEL = pytest.mark.parametrize(("model", "names"), MODELS, ids=NAMES)


@EACH_MODEL
@pytest.mark.usefixtures("two_places")
def test_results_are_those_of_the_plain_step(model, names):
    found = memfit.verify(job_of(model), under(*names))
    assert found.largest_error < 1e-10
    assert found.numerics == "exact"


@pytest.mark.slow
@EACH_MODEL
def test_what_the_modules_hold_is_not_on_the_device(model, names):
    job = job_of(model)
    predicted = memfit.predict(job, CARD, under(*names)).by_category
    built = job.model()
    modules = [built.get_submodule(name) for name in names]
    held = {id(each) for module in modules for each in module.parameters()}
    rest = [each for each in built.parameters() if id(each) not in held]
    assert predicted["parameters"] == rounded(rest)
    assert predicted["optimizer state"] == 2 * rounded(rest)
    assert predicted.get("buffers", 0) == rounded(
        buffer
        for name, buffer in built.named_buffers()
        if not any(name.startswith(f"{each}.") for each in names)
    )


def rounded(tensors) -> int:
    """Sum up blocks of the caching allocator, which are multiples of 512 bytes."""
    return sum(-(-each.nbytes // 512) * 512 for each in tensors)


def stack() -> Job:
    return job_of(lambda: nn.Sequential(Around(), Around(), Around()))


def convolutional() -> Job:
    def model():
        blocks = [nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3, padding=1)]
        head = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return nn.Sequential(
            nn.Sequential(*blocks), *pooled, nn.Sequential(head, nn.Linear(WIDTH, WIDTH))
        )

    return replace(
        job_of(model), batch=lambda size: (torch.randn(size, 3, 24, 24), torch.randn(size, WIDTH))
    )


EACH_BESIDE = pytest.mark.parametrize(
    ("job", "names", "beside"),
    [
        (stack, ("0.side", "1.side"), ActivationCheckpointing(blocks=("1",))),
        (stack, ("0.side", "1.side"), ActivationCheckpointing(blocks=("1.side",))),
        (stack, ("0.side", "1.side"), MicroBatching(micro_batch_size=5)),
        (stack, ("1",), OptimizerImplementation(implementation="fused")),
        (stack, ("1",), OptimizerImplementation(implementation="foreach")),
        (convolutional, ("3.0",), ConvolutionTiling(num_tiles=4)),
    ],
    ids=["block", "module itself", "pieces", "fused", "foreach", "tiles"],
)


@pytest.mark.slow
@EACH_BESIDE
@pytest.mark.usefixtures("two_places")
def test_results_are_kept_beside_other_strategies(job, names, beside):
    assert memfit.verify(job(), under(*names, beside=(beside,))).largest_error < 1e-10


@pytest.mark.slow
def test_activations_of_blocks_on_the_card_may_leave_it_as_well():
    plan = under("0.side", "1.side", beside=(ActivationOffload(to="host", min_tensor_bytes=1),))
    assert memfit.predict(stack(), CARD, plan).strategies == plan.labels()


@pytest.mark.slow
@EACH_BESIDE
def test_a_step_beside_other_strategies_is_recorded_on_a_card(job, names, beside):
    plan = under(*names, beside=(beside,))
    assert memfit.predict(job(), CARD, plan).strategies == plan.labels()


@pytest.mark.usefixtures("two_places")
@pytest.mark.parametrize("beside", [Bf16(), Bf16(keep=("side",))], ids=["all", "kept"])
def test_under_autocast_they_compute_in_the_types_of_their_weights(beside):
    class Seen(nn.Linear):
        seen: ClassVar[list[object]] = []

        def forward(self, x):
            self.seen.append((x.dtype, torch.is_autocast_enabled("cpu")))
            return super().forward(x)

    job = job_of(lambda: Around(lambda: Seen(WIDTH, WIDTH)))
    with memfit.start(job, under("side", beside=(beside,))) as run:
        run.step(job.batch(SAMPLES))
    assert Seen.seen[-1] == (torch.float32, False)
    found = memfit.verify(job, under("side", beside=(beside,)))
    assert found.largest_error < 5e-2
    assert found.numerics == "approximate"


@pytest.mark.slow
def test_a_step_under_autocast_is_recorded_on_a_card():
    predicted = memfit.predict(job_of(Around), CARD, under("side", beside=(Bf16(),)))
    assert predicted.numerics == "approximate"


# --- Bytes and seconds.


@pytest.mark.slow
def test_bytes_of_the_device_are_those_worked_out_by_hand():
    """Of a step of AdamW with three layers of 1000 x 1000, one of which is on the host."""
    job = job_of(lambda: Around(width=1000), width=1000, samples=256)
    plain = memfit.predict(job, CARD)
    planned = memfit.predict(job, CARD, under("side"))
    layer = 1000 * 1000 * 4 + 4096  # the bias takes 4000 bytes, eight blocks of 512
    blocks = 3_999_744 + 512  # the weight's 4 000 000 bytes are rounded to blocks of 512 as well
    assert rounded([torch.empty(1000, 1000)]) == blocks
    on_device = planned.by_category
    assert on_device["parameters"] == 2 * (blocks + 4096)
    # What comes later may take a free block as it is, where less than 1 MiB would be left over.
    assert 0 <= on_device["gradients"] - on_device["parameters"] < 2 * MIB
    assert 0 <= on_device["optimizer state"] - 4 * (blocks + 4096) < 4 * MIB
    saved = plain.peak_allocated_bytes - planned.peak_allocated_bytes
    assert saved >= 4 * (layer - 4096)
    # Weight and bias, their gradients, two states of each, and two step counts of 4 bytes.
    assert planned.host_bytes == 4 * (1000 * 1000 + 1000) * 4 + 2 * 4


@pytest.mark.slow
def test_copies_are_counted_both_ways_and_cost_time():
    job = job_of(lambda: Around(width=1000), width=1000, samples=256)
    device = load_device(CARD)
    moved = record(job, under("side"), device=device).spill.link_bytes
    # Input and output of 256 x 1000, each with its gradient.
    assert moved == 4 * 256 * 1000 * 4
    again = under("side", beside=(ActivationCheckpointing(blocks=("side",)),))
    # What is computed again crosses again, without the gradients, which cross once.
    assert record(job, again, device=device).spill.link_bytes == moved + 2 * 256 * 1000 * 4
    plain, planned = memfit.predict(job, CARD), memfit.predict(job, CARD, under("side"))
    link_seconds = moved / device.value("link_bytes_per_second")
    assert planned.step_seconds > plain.step_seconds + link_seconds / 2


@pytest.mark.slow
def test_the_host_computes_at_the_speed_of_the_host():
    job = job_of(lambda: Around(width=1000), width=1000, samples=256)
    planned = memfit.predict(job, CARD, under("side"))
    # Three products of 256 x 1000 x 1000, at the 8e10 operations a second of a small processor.
    assert planned.step_seconds > 3 * 2 * 256 * 1000 * 1000 / 8e10


# --- Undone.


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_what_lives_on_a_card_goes_to_the_host_and_comes_back_with_gradients_and_states(options):
    def devices():
        tensors = [*model[1].parameters(), *model[1].buffers()]
        gradients = [each.grad for each in model[1].parameters()]
        states = [optimizer.state[each] for each in model[1].parameters()]
        moved = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        counts = {state["step"].device.type for state in states}
        return {each.device.type for each in (*tensors, *gradients, *moved)}, counts

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="cuda")).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    with recording_on(card_of(load_device(CARD))):
        side = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model = nn.Sequential(nn.Linear(8, 8), side, nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        step()
        before, parameters = devices(), [*model.parameters()]
        with memfit.attach(model, optimizer, under("1")):
            assert devices() == ({"cpu"}, {"cpu"})
            step()
            assert devices() == ({"cpu"}, {"cpu"})
        assert devices() == before == ({"cuda"}, {"cuda" if "fused" in options else "cpu"})
        step()
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))


@pytest.mark.slow
def test_dropout_on_the_host_draws_other_masks():
    job = job_of(lambda: Around(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))))
    assert memfit.predict(job, CARD, under("side")).numerics == "same-in-law"


@pytest.mark.usefixtures("two_places")
def test_a_run_trains_as_without_it_and_leaves_the_model_as_it_was():
    def trained(plan):
        torch.manual_seed(0)
        job = job_of(lambda: Around(normalising))
        batches = [job.batch(SAMPLES) for _ in range(3)]
        torch.manual_seed(1)
        with memfit.start(job, plan) as run:
            losses = [run.step(batch).loss.item() for batch in batches]
            losses.append(run.evaluate(batches[0]).item())
        assert not any("forward" in vars(each) for each in run.model.modules())
        return losses, run.model.state_dict()

    (losses, values), (plain_losses, plain_values) = trained(under("side")), trained(Plan())
    assert losses == plain_losses
    assert all(torch.equal(values[name], plain_values[name]) for name in plain_values)
