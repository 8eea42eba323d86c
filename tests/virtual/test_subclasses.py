"""Wrappers are made of fake tensors as they were of real ones, on the CPU and on a virtual GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.conformance.builders import near_peak
from tests.zoo.ragged import (
    WIDTH,
    lengths_of,
    masked,
    masked_job,
    ragged_job,
    rows_from_offsets,
    rows_of,
)
from tests.zoo.small_jobs import mean_square_job
from tests.zoo.wrappers import Sealed, Wrapped
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit.devices.catalogue import load_device
from memfit.errors import OpaqueTensorError, RecordingError
from memfit.prediction.placed_recorder import card_of
from memfit.trace.subclasses import parts_of
from memfit.virtual.tensors import as_virtual, virtual_tensors

CARD = torch.device("cuda", 0)
MASKS = pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")


# --- Batches ---


@MASKS
@pytest.mark.parametrize("make", [rows_of, rows_from_offsets, masked, Wrapped.of])
def test_a_wrapper_of_real_tensors_becomes_one_of_virtual_tensors(make):
    real = make(torch.zeros(4, 4) if make == Wrapped.of else 3)
    with virtual_tensors() as mode:
        virtual = as_virtual(mode, real)
        parts = [*parts_of(virtual)]
    assert type(virtual) is type(real)
    assert all(isinstance(part, FakeTensor) and part.fake_mode is mode for part in parts)
    assert [(part.shape, part.dtype) for part in parts] == [
        (part.shape, part.dtype) for part in parts_of(real)
    ]


def test_a_wrapper_that_hides_its_parts_is_refused_in_a_batch():
    sealed = Sealed.of(torch.zeros(4, 4))
    with pytest.raises(OpaqueTensorError, match=r"wrappers\.Sealed"), virtual_tensors() as mode:
        as_virtual(mode, [sealed])


def test_nested_tensors_that_share_their_lengths_go_on_doing_so():
    real = rows_of(3)
    with virtual_tensors() as mode:
        first, second = as_virtual(mode, (real, real * 2.0))
        assert (first + second).shape[0] == 3
        other = as_virtual(mode, rows_of(3))
        with pytest.raises(RuntimeError):
            first + other


@pytest.mark.slow
@pytest.mark.parametrize("batch", [rows_of, rows_from_offsets])
def test_the_peak_on_rows_of_many_lengths_is_the_measured_one(batch):
    job = ragged_job(batch)
    prediction = memfit.predict(job)
    assert prediction.peak_allocated_bytes == near_peak(memfit.measure(job).peak_allocated_bytes)
    inner_bytes = 4 * sum(lengths_of(64)) * WIDTH + 8 * 65
    assert prediction.by_category["batch"] == inner_bytes


@pytest.mark.slow
def test_code_may_take_rows_one_by_one():
    def loss(model, rows):
        return sum(model(row).square().mean() for row in rows.unbind())

    job = ragged_job(rows_from_offsets, batch_size=8, loss=loss)
    predicted = memfit.predict(job).peak_allocated_bytes
    assert predicted == near_peak(memfit.measure(job).peak_allocated_bytes)


@pytest.mark.slow
def test_rows_of_many_lengths_take_on_a_gpu_what_their_values_take():
    on_cpu, on_card = (memfit.predict(ragged_job(), device) for device in ("cpu", "t4"))
    saved = on_cpu.by_category["saved activations"]
    assert on_card.by_category["saved activations"] == pytest.approx(saved, abs=1024)


@pytest.mark.slow
@MASKS
def test_the_peak_on_a_masked_batch_is_the_measured_one():
    job = masked_job()
    prediction = memfit.predict(job)
    assert prediction.peak_allocated_bytes == near_peak(memfit.measure(job).peak_allocated_bytes)
    assert prediction.by_category["batch"] == 64 * WIDTH * (4 + 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_the_older_layout_are_refused_with_what_to_do():
    def batch(size):
        return torch.nested.nested_tensor([torch.randn(n, WIDTH) for n in lengths_of(size)])

    job = ragged_job(batch, loss=lambda model, rows: model(rows).to_padded_tensor(0.0).mean())
    with pytest.raises(RecordingError, match=r"layout=torch\.jagged"):
        memfit.predict(job)


# --- The virtual GPU ---


@pytest.fixture
def on_card():
    """Put a virtual GPU into the machine."""
    with virtual_tensors(card_of(load_device("t4"))) as mode:
        yield mode


@pytest.mark.usefixtures("on_card")
def test_a_wrapper_lies_where_its_parts_lie():
    made = Wrapped.of(torch.zeros(4, 4, device="cuda"))
    moved = Wrapped.of(torch.zeros(4, 4)).cuda()
    for wrapped in (made, moved, nn.Parameter(made)):
        assert wrapped.device == CARD
        assert (wrapped.is_cuda, wrapped.is_cpu, wrapped.is_meta) == (True, False, False)
        assert all(part.device == CARD for part in parts_of(wrapped))
    assert Wrapped.of(torch.zeros(4, 4)).device.type == "cpu"


@pytest.mark.usefixtures("on_card")
def test_autograd_goes_through_a_wrapper_on_the_card():
    weight = nn.Parameter(Wrapped.of(torch.zeros(4, 4, device="cuda")))
    (weight * 2.0).sum().backward()
    assert weight.grad.device == CARD


@pytest.mark.usefixtures("on_card")
def test_autocast_takes_hold_of_a_wrapper_on_the_card():
    weight = Wrapped.of(torch.zeros(4, 4, device="cuda"))
    with torch.autocast("cuda", torch.float16):
        assert (weight @ weight).dtype is torch.float16


def test_wrappers_are_torchs_own_again_afterwards():
    before = {name: getattr(torch.Tensor, name) for name in ("device", "is_cuda", "is_meta")}
    with virtual_tensors(card_of(load_device("t4"))):
        assert torch.Tensor.device is not before["device"]
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert "_make_wrapper_subclass" not in vars(torch.Tensor)


# --- Compiled code ---


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, fullgraph=True)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `torch.compile", "ignore:`torch.jit.script_method`")
@pytest.mark.parametrize("compile_it", [compiled, compiled_in_place])
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_compiled_code_is_recorded_as_it_was_written_which_is_said(compile_it, device):
    plain = mean_square_job(lambda: nn.Linear(8, 8), 8)
    job = mean_square_job(lambda: compile_it(nn.Linear(8, 8)), 8)
    expected, prediction = memfit.predict(plain, device), memfit.predict(job, device)
    assert prediction.peak_allocated_bytes == expected.peak_allocated_bytes
    assert expected.notes == []
    (note,) = prediction.notes
    assert "torch.compile" in note


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`")
def test_a_step_that_compiles_a_function_is_noted_and_the_compiler_left_as_it_was():
    def setup():
        square = torch.compile(torch.square, fullgraph=True)
        return lambda: square(torch.zeros(4)).sum()

    compile_it = torch.compile
    assert "torch.compile" in memfit.predict_step(setup).notes[0]
    assert torch.compile is compile_it
    assert sys.modules["torch._dynamo.eval_frame"]._stance.stance == "default"
