"""What convolutions take beside their results is predicted, over a sweep of shapes, never low."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tests.kernels.rules import HAS_KNOWN_CONVOLUTIONS, cpu_scratch_bytes, taken_bytes
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit.kernels.cpu_onednn_3_12 import convolutions
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules

pytestmark = pytest.mark.skipif(
    not HAS_KNOWN_CONVOLUTIONS, reason="the rules were read off AVX2 and AVX-512"
)

MOST_LOW_FRACTION = 0.01
ATEN = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One convolution; ``num_dims`` of positions, of equal extents."""

    num_in: int
    num_out: int
    side: int = 16
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    batch: int = 4
    num_dims: int = 2
    is_last: bool = False
    is_transposed: bool = False
    dtype: torch.dtype = torch.float32


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pairs(shape: Shape) -> Iterator[tuple[int, int, int]]:
    """Yield what forward and backward take, predicted and measured, and the bytes they handle."""
    memory_format = torch.channels_last if shape.is_last else torch.contiguous_format
    sides = (shape.side,) * shape.num_dims
    image = torch.randn(shape.batch, shape.num_in, *sides, dtype=shape.dtype)
    first, second = shape.num_out, shape.num_in // shape.groups
    if shape.is_transposed:
        first, second = shape.num_in, shape.num_out // shape.groups
    weight = torch.randn(first, second, *(shape.kernel,) * shape.num_dims, dtype=shape.dtype)
    image, weight = (each.contiguous(memory_format=memory_format) for each in (image, weight))
    bias = torch.randn(shape.num_out, dtype=shape.dtype)
    dims = [[each] * shape.num_dims for each in (shape.stride, shape.padding, shape.dilation)]
    settings = (*dims, shape.is_transposed, [0] * shape.num_dims, shape.groups)

    forward = (image, weight, bias, *settings)
    out = ATEN.convolution(*forward)
    handled = sum(each.numel() * each.element_size() for each in (image, weight, out))
    measured = taken_bytes(lambda: ATEN.convolution(*forward))
    yield cpu_scratch_bytes("convolution", *forward, out=out), measured, handled

    gradient = torch.randn_like(out)
    for wanted in ([True, True, True], [False, True, True], [True, False, False]):
        backward = (gradient, image, weight, [shape.num_out], *settings, wanted)
        measured = taken_bytes(lambda backward=backward: ATEN.convolution_backward(*backward))
        yield cpu_scratch_bytes("convolution_backward", *backward), measured, handled


def assert_close(shape: Shape, most_high_fraction: float) -> None:
    for predicted, measured, handled in pairs(shape):
        error_fraction = (predicted - measured) / (measured + handled)
        assert -MOST_LOW_FRACTION <= error_fraction <= most_high_fraction


DENSE = [
    *(Shape(num_in=each, num_out=other) for each in (1, 3, 5, 12, 16, 20, 64) for other in (2, 48)),
    *(
        Shape(num_in=each, num_out=2, kernel=1, padding=0, side=32)
        for each in (1, 3, 8, 16, 24, 64)
    ),
    *(Shape(num_in=each, num_out=24, stride=2) for each in (1, 3, 8, 32, 48)),
    *(Shape(num_in=each, num_out=32, kernel=7, padding=3, stride=2, side=28) for each in (3, 16)),
    *(Shape(num_in=each, num_out=20, kernel=1, padding=0, stride=2) for each in (3, 16, 40)),
    Shape(num_in=16, num_out=20, kernel=1, padding=0, stride=2, side=15),
    Shape(num_in=24, num_out=32, kernel=5, padding=2),
    Shape(num_in=24, num_out=32, kernel=5, padding=0, batch=1),
    Shape(num_in=20, num_out=32, dilation=2, padding=2),
    Shape(num_in=128, num_out=64, side=4, batch=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", DENSE, ids=str)
def test_what_a_dense_convolution_takes_is_predicted(shape, num_threads):
    assert_close(shape, most_high_fraction=0.02)


LAST = [
    Shape(num_in=3, num_out=16, is_last=True),
    Shape(num_in=16, num_out=2, is_last=True, kernel=1, padding=0, side=32),
    Shape(num_in=48, num_out=20, is_last=True),
    Shape(num_in=32, num_out=32, is_last=True, stride=2),
    Shape(num_in=32, num_out=32, is_last=True, groups=32),
]


@pytest.mark.parametrize("shape", LAST, ids=str)
def test_what_a_convolution_with_channels_last_takes_is_predicted(shape, num_threads):
    assert_close(shape, most_high_fraction=0.05)


OTHERS = [
    Shape(num_in=20, num_out=20, groups=20, batch=8),
    Shape(num_in=32, num_out=32, groups=32, kernel=7, padding=3, batch=8),
    Shape(num_in=32, num_out=32, groups=32, stride=2, batch=8),
    Shape(num_in=32, num_out=64, groups=2),
    Shape(num_in=16, num_out=8, groups=4),
    Shape(num_in=2, num_out=12, num_dims=1, side=200),
    Shape(num_in=16, num_out=32, num_dims=1, side=200, stride=2),
    Shape(num_in=3, num_out=8, num_dims=3, side=8),
    Shape(num_in=16, num_out=16, num_dims=3, side=8),
    Shape(num_in=16, num_out=8, is_transposed=True),
    Shape(num_in=16, num_out=8, is_transposed=True, kernel=2, padding=0, stride=2),
    Shape(num_in=3, num_out=2, dtype=torch.float64),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_other_convolutions_are_predicted_not_far_above(shape, num_threads):
    assert_close(shape, most_high_fraction=0.4)


HALF = [
    *(Shape(num_in=each, num_out=32, dtype=torch.bfloat16, side=32) for each in (3, 8, 16, 40)),
    *(Shape(num_in=each, num_out=2, dtype=torch.bfloat16) for each in (3, 16)),
    Shape(num_in=16, num_out=2, kernel=1, padding=0, dtype=torch.bfloat16, side=32),
    Shape(num_in=64, num_out=32, kernel=1, padding=0, dtype=torch.bfloat16),
    Shape(num_in=32, num_out=32, stride=2, dtype=torch.bfloat16),
    Shape(num_in=32, num_out=32, groups=32, dtype=torch.bfloat16),
]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 on this processor"
)
@pytest.mark.skipif(
    is_beyond_rules("bfloat16"), reason="what oneDNN's kernels for AMX take is not known"
)
@pytest.mark.parametrize("shape", HALF, ids=str)
def test_a_convolution_in_bf16_is_predicted_not_far_above(shape, num_threads):
    assert_close(shape, most_high_fraction=0.6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "side", "stride"),
    [((16, 2, 1), 64, 1), ((3, 2, 1), 64, 1), ((16, 2, 3), 64, 1), ((32, 64, 3), 32, 2)],
)
def test_a_job_with_a_narrow_or_strided_convolution_is_predicted_within_a_thousandth(
    sizes, side, stride, num_threads
):
    def loss(model, batch):
        return model(batch).square().mean()

    def model():
        num_in, num_out, kernel = sizes
        return nn.Conv2d(num_in, num_out, kernel, stride, padding=kernel // 2)

    def wide_model():
        return nn.Sequential(nn.Conv2d(sizes[0], sizes[0], 1), model())

    for make in (model, wide_model):
        job = mean_square_job(make, sizes[0], side, side, batch_size=8, loss=loss)
        measured = memfit.measure(job)
        error_fraction = measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1
        assert abs(error_fraction) < 0.001


def half_job() -> memfit.Job:
    def model():
        return nn.Conv2d(16, 24, 3, padding=1).bfloat16()

    def loss(model, batch):
        return model(batch.bfloat16()).float().square().mean()

    return mean_square_job(model, 16, 16, 16, batch_size=4, loss=loss)


def product_job() -> memfit.Job:
    def loss(model, batch):
        return model(batch.bfloat16()).float().square().mean()

    return mean_square_job(lambda: nn.Linear(16, 24).bfloat16(), 16, batch_size=4, loss=loss)


@pytest.mark.parametrize("half_job", [half_job, product_job])
@pytest.mark.parametrize("is_unknown", [False, True])
def test_a_prediction_says_where_no_rule_describes_a_kernel(monkeypatch, half_job, is_unknown):
    monkeypatch.setattr(convolutions, "has_avx512", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: is_unknown)
    notes = [note for note in memfit.predict(half_job()).notes if "convolutions" in note]
    assert len(notes) == is_unknown
    assert all("in bfloat16 take here is a guess" in note for note in notes)


def test_what_holds_onednn_back_decides_which_rules_there_are(monkeypatch):
    monkeypatch.setattr(convolutions, "has_avx512", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for limit, is_beyond in (
        *(("", True), ("all", True), ("AVX512_CORE_AMX", True)),
        *(("AVX512_CORE_BF16", False), ("AVX10_1_512", False)),
    ):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert is_beyond_rules("bfloat16") is is_beyond
        assert not is_beyond_rules("float32")
