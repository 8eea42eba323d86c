"""What wrappers are made of is counted, the wrappers are not, and what hides its parts is named."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.conformance.builders import near_peak
from tests.zoo.small_jobs import mean_square_job, sgd
from tests.zoo.wrappers import Sealed, Wrapped, wrapped_job
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import OpaqueTensorError, RecordingError
from memfit.observe.allocator_blocks import living_blocks
from memfit.observe.enforced_budget import EnforcedBudget
from memfit.observe.leaks.sizes import Storages
from memfit.prediction.recording import record
from memfit.trace.events import Category, Phase, trace_of_step
from memfit.trace.recorder import Owned, Recorder
from memfit.trace.subclasses import is_hollow, known_parts_of, parts_of

WIDTH = 512
NUM_VALUES = WIDTH * WIDTH
INNER_BYTES = 2 * NUM_VALUES + 4 * WIDTH
SMALL_BYTES = 4 * (8 * WIDTH + 8)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def test_a_plain_tensor_consists_of_itself():
    for plain in (torch.zeros(3), nn.Parameter(torch.zeros(3)), torch.zeros(4)[1:]):
        (part,) = parts_of(plain)
        assert part is plain


def test_a_wrapper_consists_of_the_tensors_inside_at_any_depth():
    inner = Wrapped.of(torch.zeros(4, 4))
    outer = Wrapped(inner, torch.ones(4, 1))
    assert [id(part) for part in parts_of(outer)] == [
        *(id(part) for part in (inner.coarse, inner.scale)),
        id(outer.scale),
    ]


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize(
    ("layout", "num_bytes"),
    [("coo", 2 * 8 * 2 + 4 * 2), ("csr", 8 * 4 + 8 * 2 + 4 * 2), ("csc", 8 * 4 + 8 * 2 + 4 * 2)],
)
def test_a_sparse_tensor_consists_of_indices_and_values(layout, num_bytes):
    dense = torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    sparse = getattr(dense, "to_sparse" if layout == "coo" else f"to_sparse_{layout}")()
    assert sum(part.nbytes for part in parts_of(sparse)) == num_bytes


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_a_masked_tensor_consists_of_data_and_mask():
    masked = torch.masked.masked_tensor(torch.ones(6), torch.ones(6, dtype=torch.bool))
    assert [part.dtype for part in parts_of(masked)] == [torch.float32, torch.bool]


def test_a_wrapper_that_does_not_say_what_it_is_made_of_is_named():
    sealed = Sealed.of(torch.zeros(4, 4))
    with pytest.raises(OpaqueTensorError, match=r"tests\.zoo\.wrappers\.Sealed") as caught:
        list(parts_of(sealed))
    assert "__tensor_flatten__" in str(caught.value)
    assert known_parts_of(sealed) == ()


def test_a_subclass_with_memory_of_its_own_is_no_wrapper():
    class Logged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    logged = torch.Tensor._make_subclass(Logged, torch.zeros(4))
    (part,) = parts_of(logged)
    assert part is logged
    assert not is_hollow(logged)


# --- Prediction ---


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd, ADAMW], ids=["sgd", "adamw"])
def test_the_predicted_peak_of_wrapped_weights_is_the_measured_one(optimizer):
    job = wrapped_job(Wrapped, WIDTH, optimizer)
    prediction, measurement = memfit.predict(job), memfit.measure(job)
    assert prediction.peak_allocated_bytes == near_peak(measurement.peak_allocated_bytes)
    assert prediction.first_step_peak_bytes == near_peak(measurement.first_step_peak_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_inner_tensors_have_the_category_of_their_wrapper(device):
    trace = record(wrapped_job(Wrapped, WIDTH, ADAMW), device=load_device(device)).steady
    found = {
        category: sum(
            block.num_bytes
            for block in trace.allocations
            if block.category is category and block.phase is Phase.SETUP and block.num_bytes > 4
        )
        for category in (Category.PARAMETERS, Category.OPTIMIZER_STATE)
    }
    held_bytes = INNER_BYTES + SMALL_BYTES
    assert found == {Category.PARAMETERS: held_bytes, Category.OPTIMIZER_STATE: 2 * held_bytes}
    owned = [block for block in trace.allocations if block.category is Category.PARAMETERS]
    assert {block.module for block in owned} == {"0", "2"}


@pytest.mark.slow
def test_no_block_is_as_large_as_the_wrapper_says_to_be():
    prediction = memfit.predict(wrapped_job(Wrapped, WIDTH))
    held_bytes = INNER_BYTES + SMALL_BYTES
    assert prediction.by_category["parameters"] == held_bytes < 4 * NUM_VALUES


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_weights_that_hide_their_parts_are_refused_by_name(device):
    with pytest.raises(RecordingError, match=r"wrappers\.Sealed") as caught:
        memfit.predict(wrapped_job(Sealed, 16), device)
    assert "`memfit measure`" in str(caught.value)


def test_an_activation_that_hides_its_parts_is_refused_by_name():
    def loss(model, batch):
        return (Sealed.of(model(batch)) * 2.0).mean()

    with pytest.raises(RecordingError, match=r"wrappers\.Sealed"):
        memfit.predict(mean_square_job(lambda: nn.Linear(8, 8), 8, loss=loss))


@pytest.mark.slow
def test_weights_that_hide_their_parts_can_be_measured_and_trained():
    hidden, shown = (wrapped_job(kind, 64) for kind in (Sealed, Wrapped))
    expected = memfit.predict(shown).peak_allocated_bytes
    assert memfit.measure(hidden).peak_allocated_bytes == near_peak(expected)
    run = memfit.start(hidden)
    run.step(hidden.batch(4))
    run.close()


# --- The recorder ---


@pytest.fixture
def recorder():
    """Return a recorder that has begun a forward."""
    with Recorder() as made:
        made.begin_step()
        made.enter_phase(Phase.FORWARD)
        yield made


def test_an_operator_on_a_wrapper_shows_as_those_inside(recorder):
    wrapped = Wrapped(torch.zeros(4, 4), torch.ones(4, 1))
    _ = wrapped + 1.0
    trace = trace_of_step(recorder.history, recorder.end_step())
    assert [operation.name for operation in trace.operations] == ["zeros", "ones", "mul", "add"]
    assert [block.num_bytes for block in trace.allocations] == [64, 16, 64, 64]


def test_a_storage_that_is_resized_by_itself_is_freed_and_taken_again(recorder):
    gathered = torch.zeros(8)
    gathered.untyped_storage().resize_(0)
    gathered.untyped_storage().resize_(64)
    trace = trace_of_step(recorder.history, recorder.end_step())
    assert [block.num_bytes for block in trace.allocations] == [32, 0, 64]
    assert trace.events == [0, 1, -1, 2, -2]


def test_storages_are_resized_by_torch_itself_again_afterwards():
    resize = torch.UntypedStorage.resize_
    with Recorder():
        assert torch.UntypedStorage.resize_ is not resize
    assert torch.UntypedStorage.resize_ is resize


def test_what_other_fake_tensors_stand_for_takes_no_memory(recorder):
    with FakeTensorMode():
        torch.zeros(8) + 1.0
    torch.zeros(2)
    assert [
        block.num_bytes
        for block in trace_of_step(recorder.history, recorder.end_step()).allocations
    ] == [8]


def test_a_tensor_of_numbers_takes_memory(recorder):
    numbers = torch.tensor([1.0, 2.0, 3.0])
    (block,) = trace_of_step(recorder.history, recorder.end_step()).allocations
    assert (block.num_bytes, block.operator) == (numbers.nbytes, "tensor")


def test_owned_wrappers_give_their_category_to_what_is_inside():
    weight = Wrapped.of(torch.zeros(4, 4))
    recorder = Recorder(lambda: [Owned(weight, Category.PARAMETERS, "layer")])
    with recorder:
        recorder.begin_step()
        trace = trace_of_step(recorder.history, recorder.end_step())
    assert [(block.num_bytes, block.module) for block in trace.allocations] == [
        (32, "layer"),
        (16, "layer"),
    ]


# --- Where a step is really run ---


def test_a_budget_counts_what_wrappers_are_made_of():
    budget = EnforcedBudget(10**6)
    known = Wrapped.of(torch.zeros(4, 4))
    budget.watch([known])
    assert budget.live_bytes == 32 + 16
    with budget:
        made = known.clone()
    assert budget.live_bytes == 2 * (32 + 16)
    del made
    assert budget.live_bytes == 32 + 16


@pytest.mark.slow
def test_living_blocks_leave_wrappers_out(others_bytes):
    made = [Sealed.of(torch.zeros(256, 256)), Wrapped.of(torch.zeros(256, 256))]
    inner_bytes = 2 * 256 * 256 + 4 * 256
    assert sum(living_blocks().values()) - others_bytes == len(made) * inner_bytes


def test_a_look_for_leaks_gives_wrappers_no_storage():
    wrapped = Wrapped.of(torch.zeros(256, 256))
    assert Storages().of_tensor(wrapped).num_bytes < 2 * 256 * 256
