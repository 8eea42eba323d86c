"""The recorder notes every allocation and free of a step, and what each is for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn
from torch.utils.checkpoint import checkpoint

import memfit
from memfit import Job, Plan
from memfit.figures import Certainty
from memfit.kernels.scratch import Scratch
from memfit.prediction.recording import record
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.trace.accumulation import num_holders_when_exclusive
from memfit.trace.events import Category, Phase, trace_of_step
from memfit.trace.recorder import Owned, Place, Recorder

FLOAT = 4


@pytest.fixture
def recorder():
    """Return a recorder of which nobody owns anything."""
    return Recorder(lambda: ())


def allocations_of(trace, operator: str):
    return [block for block in trace.allocations if block.operator == operator]


def final_bytes(trace) -> int:
    return sum(delta for _, delta in trace.deltas())


def job_of(model, *, width: int = 16, batch_size: int = 6) -> Job:
    return mean_square_job(model, width, batch_size=batch_size)


class ResidualBlock(nn.Module):
    """The input feeds two operators, so autograd adds two gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


def residual_job(num_blocks: int = 5, width: int = 32, batch_size: int = 48) -> Job:
    return job_of(
        lambda: nn.Sequential(*(ResidualBlock(width) for _ in range(num_blocks))),
        width=width,
        batch_size=batch_size,
    )


# --- Events ---


def test_an_allocation_and_its_free_are_events_in_order(recorder):
    with recorder:
        recorder.begin_step()
        recorder.enter_phase(Phase.FORWARD)
        first = torch.empty(10)
        second = torch.empty(20)
        del first
        third = torch.empty(5)
        del second, third
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.num_bytes for block in trace.allocations] == [40, 80, 20]
    assert trace.events == [0, 1, -1, 2, -2, -3]
    assert {block.phase for block in trace.allocations} == {Phase.FORWARD}


def test_a_view_is_no_allocation_and_keeps_its_base_alive(recorder):
    with recorder:
        recorder.begin_step()
        base = torch.zeros(8)
        view = base.view(2, 4)[0]
        del base
        during = list(recorder.history.events)
        del view
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert during == [0]
    assert trace.events == [0, -1]


def test_an_operator_in_place_is_no_allocation(recorder):
    with recorder:
        recorder.begin_step()
        value = torch.zeros(8)
        value.add_(1.0).mul_(2.0)
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.operator for block in trace.allocations] == ["zeros"]
    assert [operation.name for operation in trace.operations] == ["zeros", "add_", "mul_"]


def test_a_resized_storage_is_freed_and_allocated_anew(recorder):
    with recorder:
        recorder.begin_step()
        value = torch.empty(4)
        value.resize_(16)
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.num_bytes for block in trace.allocations] == [16, 64]
    assert trace.events == [0, -1, 1]


def test_what_lives_when_a_step_begins_comes_first_in_phase_setup():
    weight = torch.zeros(3)
    recorder = Recorder(lambda: [Owned(weight, Category.PARAMETERS, "layer")])
    with recorder:
        recorder.begin_step()
        recorder.enter_phase(Phase.FORWARD)
        recorder.begin_step()
        trace = trace_of_step(recorder.history, recorder.end_step())
    (block,) = trace.allocations
    assert (block.num_bytes, block.phase) == (12, Phase.SETUP)
    assert (block.category, block.module) == (Category.PARAMETERS, "layer")
    assert trace.events == [0]


def test_owned_tensors_are_counted_once_in_the_first_step_too():
    weight = torch.zeros(3)
    recorder = Recorder(lambda: [Owned(weight, Category.PARAMETERS, "layer")])
    with recorder:
        recorder.begin_step()
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.num_bytes for block in trace.allocations] == [12]
    assert trace.events == [0]


def test_tensors_that_share_a_storage_are_one_allocation():
    base = torch.zeros(6)
    owned = [Owned(base[:2], Category.PARAMETERS, "a"), Owned(base[2:], Category.PARAMETERS, "b")]
    recorder = Recorder(lambda: owned)
    with recorder:
        recorder.begin_step()
        recorder.begin_step()
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.num_bytes for block in trace.allocations] == [24]


# --- Steps of a job ---


@pytest.mark.slow
def test_a_steady_step_ends_with_what_it_began_with():
    recording = record(residual_job())
    parameters = 5 * (32 * 32 + 32) * FLOAT
    assert final_bytes(recording.steady) == parameters + 48 * 32 * FLOAT
    assert recording.steady.events == record(residual_job()).steady.events


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "batch_size"), [(1, 5), (5, 48), (3, 200)])
def test_a_residual_connection_is_predicted_to_the_byte(num_blocks, batch_size):
    measured = memfit.measure(residual_job(num_blocks, batch_size=batch_size))
    assert measured.predicted_peak_bytes == measured.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("num_blocks", "batch_size"), [(1, 5), (5, 48)])
def test_the_first_step_is_predicted_to_the_byte(num_blocks, batch_size):
    job = residual_job(num_blocks, batch_size=batch_size)
    predicted = memfit.predict(job).first_step_peak_bytes
    assert predicted == memfit.measure(job).first_step_peak_bytes


def test_gradients_of_a_residual_connection_are_added_in_place():
    trace = record(residual_job()).steady
    sums = [block for block in allocations_of(trace, "add") if block.phase is Phase.BACKWARD]
    assert sums == []
    assert "add" in {o.name for o in trace.operations if o.phase is Phase.BACKWARD}


@pytest.mark.slow
def test_an_addition_whose_first_gradient_is_still_needed_makes_a_new_tensor():
    """The gradient of ``first`` is also that of ``second``, so nobody may add to it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x):
            first = self.inner(x)
            second = torch.tanh(first)
            return (first + second) + x * first

    measured = memfit.measure(job_of(lambda: Shared(), width=32, batch_size=40))
    assert measured.predicted_peak_bytes == measured.peak_allocated_bytes


def test_the_holders_of_an_exclusive_gradient_are_known():
    assert min(num_holders_when_exclusive()) > 0


def test_recording_restores_the_hooks_and_modes_around_it():
    before = len(torch.nn.modules.module._global_forward_pre_hooks)
    with Recorder(lambda: ()):
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == before + 1
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == before


def test_predicting_builds_no_real_tensor():
    """Sixteen GiB of weights would not fit; with shapes only they take no time."""
    job = job_of(lambda: nn.Linear(65_536, 65_536), width=65_536, batch_size=1)
    prediction = memfit.predict(job)
    assert prediction.peak_allocated_bytes > 2 * 65_536 * 65_536 * FLOAT


# --- Categories ---


class Classifier(nn.Module):
    """A small model with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))) * self.scale


def adam_job() -> Job:
    optimizer = partial(torch.optim.Adam, lr=0.1)
    return mean_square_job(Classifier, 16, batch_size=32, optimizer=optimizer)


def bytes_by_category(trace, phase: Phase) -> dict[Category, int]:
    found = dict.fromkeys(Category, 0)
    for block in trace.allocations:
        if block.phase is phase:
            found[block.category] += block.num_bytes
    return found


def test_what_lives_between_steps_is_categorised_to_the_byte():
    setup = bytes_by_category(record(adam_job()).steady, Phase.SETUP)
    weights = (16 * 64 + 64 + 64 * 16 + 16) * FLOAT
    assert setup[Category.PARAMETERS] == weights
    # Two moments for each weight, and a step count for each of the four parameters.
    assert setup[Category.OPTIMIZER_STATE] == 2 * weights + 4 * FLOAT
    assert setup[Category.BUFFERS] == 16 * FLOAT
    assert setup[Category.BATCH] == 32 * 16 * FLOAT
    assert setup[Category.GRADIENTS] == setup[Category.TEMPORARIES] == 0


def test_optimizer_states_are_allocated_in_the_first_step():
    recording = record(adam_job())
    first = bytes_by_category(recording.first, Phase.OPTIMIZER)
    steady = bytes_by_category(recording.steady, Phase.OPTIMIZER)
    assert first[Category.OPTIMIZER_STATE] > 0
    assert steady[Category.OPTIMIZER_STATE] == 0


def test_gradients_are_those_of_the_parameters():
    trace = record(adam_job()).steady
    gradients = [block for block in trace.allocations if block.category is Category.GRADIENTS]
    assert sum(block.num_bytes for block in gradients) == (16 * 64 + 64 + 64 * 16 + 16) * FLOAT
    assert {block.phase for block in gradients} == {Phase.BACKWARD}
    assert {block.module for block in gradients} == {"first", "second"}


def test_what_backward_needs_is_saved_and_the_rest_of_forward_is_temporary():
    trace = record(adam_job()).steady
    forward = [block for block in trace.allocations if block.phase is Phase.FORWARD]
    saved = {b.operator for b in forward if b.category is Category.SAVED_ACTIVATIONS}
    passing = {b.operator for b in forward if b.category is Category.TEMPORARIES}
    assert "relu" in saved
    # The output of the first layer is consumed by relu, which saves its own output instead.
    assert "addmm" in passing


# --- Modules ---


class Nested(nn.Module):
    """Two levels of modules, and an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x)).exp()


def test_operators_belong_to_the_module_that_runs_them():
    trace = record(job_of(Nested)).steady
    forward = {(b.operator, b.module) for b in trace.allocations if b.phase is Phase.FORWARD}
    assert {("addmm", "body.0"), ("tanh", "body.1"), ("addmm", "head"), ("exp", "")} <= forward


def test_operators_in_backward_belong_to_the_module_whose_forward_they_undo():
    trace = record(job_of(Nested)).steady
    backward = {(b.operator, b.module) for b in trace.allocations if b.phase is Phase.BACKWARD}
    assert ("tanh_backward", "body.1") in backward
    assert {module for operator, module in backward if operator == "mm"} == {"body.0", "head"}


def test_bytes_by_module_add_up_to_the_peak():
    prediction = memfit.predict(job_of(Nested))
    assert sum(prediction.by_module.values()) == prediction.peak_allocated_bytes
    assert {"body.0", "head"} <= set(prediction.by_module)


# --- Recomputation ---


@pytest.mark.slow
def test_recomputed_activations_are_allocated_in_backward_under_their_module():
    plain = record(residual_job()).steady
    plan = Plan(strategies=(ActivationCheckpointing(),))
    checkpointed = record(residual_job(), plan).steady
    again = [b for b in allocations_of(checkpointed, "tanh") if b.phase is Phase.BACKWARD]
    assert [b for b in allocations_of(plain, "tanh") if b.phase is Phase.BACKWARD] == []
    assert sorted(block.module for block in again) == [str(block) for block in range(5)]
    assert {block.category for block in again} == {Category.SAVED_ACTIVATIONS}
    assert checkpointed.flops() > plain.flops()


def test_recomputation_that_a_model_does_itself_is_seen():
    class Frugal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 64)

        def forward(self, x):
            return checkpoint(lambda y: torch.tanh(self.inner(y)), x, use_reentrant=False)

    backward = [
        operation.name
        for operation in record(job_of(Frugal)).steady.operations
        if operation.phase is Phase.BACKWARD
    ]
    assert "tanh" in backward
    assert "addmm" in backward


def test_matrix_products_are_counted_by_their_shapes():
    trace = record(job_of(lambda: nn.Linear(16, 16, bias=False), batch_size=6)).steady
    # One product forward and one for the gradient of the weight; the input needs none.
    assert trace.flops() == 2 * (2 * 6 * 16 * 16)


def test_questions_about_a_tensor_are_no_operations():
    """Fake tensors are asked for their device all the time; that costs a real step nothing."""
    names = {operation.name for operation in record(residual_job()).steady.operations}
    assert not any(name.startswith(("prim", "profiler")) for name in names)
    assert not any("view" in name or name == "t" for name in names)


@pytest.mark.parametrize(
    "select",
    [
        lambda x: x[:, torch.arange(3)],
        lambda x: x.gather(1, torch.zeros(64, 2, dtype=torch.int64)),
        lambda x: x.max(dim=1).values,
        lambda x: x.index_select(1, torch.arange(3)),
        lambda x: x.topk(2, dim=1).values,
    ],
    ids=["index", "gather", "max", "index_select", "topk"],
)
def test_the_gradient_of_a_selection_is_filled_in_place(select):
    width = 512
    job = mean_square_job(
        lambda: nn.Linear(width, width),
        width,
        batch_size=64,
        loss=lambda model, batch: select(model(batch)).sum(),
    )
    blocks = [
        block
        for block in record(job).steady.allocations
        if block.phase is Phase.BACKWARD and block.num_bytes == 64 * width * 4
    ]
    assert len(blocks) == 1, [block.operator for block in blocks]


def test_scratch_that_is_likely_none_keeps_the_most_it_may_be(recorder):
    maybe = Scratch.between("heuristics", (), high_bytes=512, certainty=Certainty.GUESS)
    recorder._pass_by(maybe, "convolution", Place("", ""))
    recorder._pass_by(Scratch.exact("its source"), "mm", Place("", ""))

    (extra,) = recorder.history.extras
    assert (extra.low_bytes, extra.high_bytes) == (0, 512)
    assert [block.num_bytes for block in recorder.history.allocations] == [0]
    assert recorder.history.events == [0, -1]
