"""Models are built and run without memory, whatever usual things they do."""

from __future__ import annotations

import copy
import tracemalloc

import pytest
import torch
from tests.zoo.living_jobs import mean_square
from tests.zoo.small_jobs import mean_square_job
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memfit
from memfit import Job
from memfit.errors import RecordingError
from memfit.virtual.tensors import ValuesNeededError, as_virtual, virtual_tensors


def job_of(model, loss=mean_square) -> Job:
    return mean_square_job(model, 8, 6, 6, loss=loss)


def test_tensors_made_inside_have_shapes_and_no_memory():
    tracemalloc.start()
    with virtual_tensors():
        value = torch.randn(10**6, 10**6) @ torch.randn(10**6, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(value, FakeTensor)
    assert (value.shape, value.dtype) == ((10**6, 3), torch.float32)
    assert peak < 10**7


def test_real_tensors_become_virtual_ones_with_their_strides_and_storages_of_their_own():
    real = torch.zeros(4, 6).t()
    with virtual_tensors() as mode:
        virtual = as_virtual(mode, {"x": real, "n": 3, "y": [real]})
    assert virtual["n"] == 3
    assert virtual["x"].stride() == real.stride()
    assert virtual["x"].untyped_storage()._cdata != virtual["y"][0].untyped_storage()._cdata


def test_values_that_depend_on_no_input_are_known():
    with virtual_tensors():
        rates = [rate.item() for rate in torch.linspace(0.0, 0.3, 4)]
        last = int(torch.arange(5)[-1])
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert last == 4


def test_values_of_inputs_are_not_known():
    with pytest.raises(ValuesNeededError, match="depends on the values of tensors"):
        look_at_a_value()


def look_at_a_value() -> float:
    with virtual_tensors():
        return torch.randn(3)[0].item()


def test_an_operator_without_a_virtual_version_is_named_with_what_to_do():
    library = torch.library.Library("memfit_tests", "FRAGMENT")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x.clone(), "CPU")
    with pytest.raises(RecordingError, match="has no fake implementation") as caught:
        memfit.predict(job_of(lambda: nn.Conv2d(8, 8, 3), loss=opaque_loss))
    assert "opaque" in str(caught.value)
    assert "torch.library.register_fake" in str(caught.value)
    assert "`memfit measure`" in str(caught.value)


def opaque_loss(model, batch):
    return model(torch.ops.memfit_tests.opaque(batch)).mean()


def test_truncated_normals_can_be_drawn():
    def model():
        layer = nn.Conv2d(8, 8, 3)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        return layer

    assert memfit.predict(job_of(model)).peak_allocated_bytes > 0


CONVERTED = {
    "moved": lambda: nn.Conv2d(8, 8, 3).to("cpu"),
    "double and back": lambda: nn.Conv2d(8, 8, 3).double().float(),
    "channels last": lambda: nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
    "nested": lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)).to(torch.float32),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_a_model_may_be_moved_and_converted_while_it_is_built(name):
    assert memfit.predict(job_of(CONVERTED[name])).peak_allocated_bytes > 0


@pytest.mark.slow
def test_a_converted_model_takes_the_bytes_of_its_new_type():
    def parameters_of(model) -> int:
        return memfit.predict(job_of(model, loss=loss_in_its_type)).by_category["parameters"]

    plain = parameters_of(lambda: nn.Conv2d(8, 8, 3))
    assert parameters_of(lambda: nn.Conv2d(8, 8, 3).double()) == 2 * plain
    assert parameters_of(lambda: nn.Conv2d(8, 8, 3).bfloat16()) == plain // 2


def loss_in_its_type(model, batch):
    return model(batch.to(model.weight.dtype)).square().mean()


def test_a_tied_weight_stays_tied_when_a_model_is_converted():
    def model():
        pair = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
        pair[1].weight = pair[0].weight
        return pair.double().float()

    assert memfit.predict(job_of(model)).by_category["parameters"] == 6 * 6 * 4


class WithView(nn.Module):
    """Writes to a buffer, reads it through a view, and has ordinary running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 512))
        self.row = self.table[1]
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))

    def forward(self, x):
        self.table.add_(0.1)
        return self.layers(x) * self.row.mean()


@pytest.mark.slow
def test_a_model_with_buffers_may_be_a_copy_of_another():
    template = WithView()
    job = job_of(lambda: copy.deepcopy(template))
    assert memfit.predict(job).peak_allocated_bytes == memfit.measure(job).peak_allocated_bytes


def test_buffers_that_share_memory_share_it_in_a_copy():
    template = WithView()
    template.table.note = ["kept"]
    with virtual_tensors():
        model = copy.deepcopy(template)
        pair = copy.deepcopy([template.table, template.table])
    assert isinstance(model.table, FakeTensor)
    assert model.row.untyped_storage()._cdata == model.table.untyped_storage()._cdata
    assert model.row.storage_offset() == 512
    assert (model.table.shape, model.table.note) == ((2, 512), ["kept"])
    assert pair[0] is pair[1]
    assert pair[0].untyped_storage()._cdata != model.table.untyped_storage()._cdata
    assert type(template.table) is torch.Tensor


@pytest.mark.parametrize(
    "ask", [memfit.predict, pytest.param(memfit.measure, marks=pytest.mark.slow)]
)
def test_asking_leaves_the_random_state_alone(ask):
    before = torch.get_rng_state()
    ask(job_of(lambda: nn.Sequential(nn.Conv2d(8, 8, 3), nn.Dropout(0.5))))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_would_be_compiled_is_left_as_it_is_and_found_where_code_looks_for_it() -> None:
    with virtual_tensors(None) as mode:
        model = torch.nn.Linear(2, 2)
        assert torch.compile(model, mode="max-autotune") is model
        assert model._orig_mod is model
        assert list(model.state_dict()) == ["weight", "bias"]

        @torch.compile(dynamic=False)
        def double(value):
            return 2 * value

        assert double(torch.ones(3)).shape == (3,)
    assert mode.compiled_code.was_asked_for


@pytest.mark.slow
def test_copies_of_a_layer_are_counted_once_as_an_encoder_makes_them():
    def model():
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    job = memfit.Job(
        model=model,
        batch=lambda size: torch.randn(size, 1, 16),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=2,
    )
    predicted = memfit.predict(job)
    own_bytes = sum(each.nbytes for each in model().parameters())
    assert predicted.by_category["parameters"] == own_bytes
    assert predicted.by_category["temporaries"] < own_bytes / 4
