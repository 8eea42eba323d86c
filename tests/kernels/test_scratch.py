"""What kernels take inside one operator is predicted by rules read off the allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.kernels.rules import HAS_KNOWN_CONVOLUTIONS, cpu_scratch_bytes
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules
from memfit.strategies.bf16 import Bf16
from memfit.virtual.tensors import virtual_tensors

# oneDNN lays recurrent layers out for the vector width of the processor; the rules know AVX-512.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
NEEDS_AVX512 = pytest.mark.skipif(not HAS_AVX512, reason="the rules were read off AVX-512")


def job_of(model, *shape: int, batch_size: int) -> Job:
    def loss(model, batch):
        out = model(batch)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    return mean_square_job(model, *shape, batch_size=batch_size, loss=loss)


def error_fraction(job: Job, *strategies) -> float:
    measured = memfit.measure(job, Plan(strategies=strategies))
    return measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1


class Tagger(nn.Module):
    """A recurrent network with an output for every step."""

    def __init__(self, num_inputs: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def lstm_job(num_steps, num_inputs, hidden, num_layers, batch_size) -> Job:
    return job_of(
        lambda: Tagger(num_inputs, hidden, num_layers), num_steps, num_inputs, batch_size=batch_size
    )


@pytest.mark.slow
@NEEDS_AVX512
@pytest.mark.parametrize(
    "sizes",
    [
        (32, 64, 128, 2, 8),
        (7, 64, 64, 2, 5),
        (32, 64, 96, 1, 8),
        (12, 20, 48, 1, 8),
        (30, 33, 17, 1, 3),
        (20, 100, 200, 2, 4),
        (20, 80, 250, 1, 6),
    ],
)
def test_an_lstm_is_predicted_to_the_byte(sizes):
    assert error_fraction(lstm_job(*sizes)) == 0


@pytest.mark.slow
@NEEDS_AVX512
@pytest.mark.skipif(
    is_beyond_rules("bfloat16"), reason="what oneDNN's kernels for AMX take is not known"
)
@pytest.mark.parametrize("sizes", [(32, 64, 128, 2, 8), (20, 100, 200, 2, 4), (20, 80, 250, 1, 6)])
def test_an_lstm_in_bf16_is_predicted_a_little_above(sizes):
    assert -0.001 < error_fraction(lstm_job(*sizes), Bf16()) < 0.02


@pytest.mark.slow
@pytest.mark.skipif(not HAS_KNOWN_CONVOLUTIONS, reason="the rules were read off AVX2 and AVX-512")
@pytest.mark.parametrize(
    ("channels", "out", "kernel", "side"), [(16, 32, 3, 16), (3, 16, 3, 24), (32, 32, 1, 16)]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_are_predicted_within_a_hundredth(channels, out, kernel, side, memory_format):
    def model():
        first = nn.Conv2d(channels, out, kernel, padding=kernel // 2)
        second = nn.Conv2d(out, out, kernel, padding=kernel // 2)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.AdaptiveAvgPool2d(1))

    job = job_of(model, channels, side, side, batch_size=16)
    batch = job.batch
    job = replace(job, batch=lambda size: batch(size).contiguous(memory_format=memory_format))
    assert abs(error_fraction(job)) < 0.01


class Attention(nn.Module):
    """Self-attention with torch's own kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(out.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [24, 200])
def test_attention_is_predicted_within_a_thousandth(num_tokens):
    job = job_of(lambda: Attention(32), num_tokens, 32, batch_size=4)
    assert abs(error_fraction(job)) < 0.001


@pytest.mark.slow
def test_products_in_bf16_are_predicted_within_a_hundredth():
    def model():
        return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64))

    assert abs(error_fraction(job_of(model, 256, batch_size=512), Bf16())) < 0.01


def test_operators_without_a_rule_take_nothing_beside_their_outputs():
    value = torch.zeros(4)
    square = torch.zeros(4, 4)
    assert cpu_scratch_bytes("relu", value, out=value) == 0
    assert cpu_scratch_bytes("addmm", value, square, square, out=square) == 0


def test_the_workspace_of_an_lstm_grows_with_every_size():
    def workspace(num_steps=10, num_rows=4, num_inputs=32, hidden=32) -> int:
        with virtual_tensors():
            layer = nn.LSTM(num_inputs, hidden)
            weights = [torch.zeros_like(each) for each in layer.parameters()]
            data = torch.zeros(num_steps, num_rows, num_inputs)
            state = torch.zeros(1, num_rows, hidden)
            settings = (False, [], 2, hidden, 1, True, False, False, True)
            out = torch.ops.aten.mkldnn_rnn_layer(data, *weights, state, state, *settings)
            return out[3].nbytes

    least = workspace()
    # Gates and outputs of all steps are kept, in whole pages.
    assert least % 4096 == 0
    assert least > 10 * 4 * (4 * 32 + 32) * 4
    larger = {"num_steps": 20, "num_rows": 8, "num_inputs": 64, "hidden": 64}
    assert all(workspace(**{name: extent}) > least for name, extent in larger.items())
