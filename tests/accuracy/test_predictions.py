"""Predicted peaks of well-known architectures equal the measured ones within their tolerance.

The benchmark of the same name measures all of them, with every optimizer and strategy; here is the
part that is quick enough for every change.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rules import HAS_KNOWN_CONVOLUTIONS

import memfit
from memfit import Plan
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.bf16 import Bf16

# oneDNN lays convolutions and recurrent layers out for the vector width of the processor.
HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
NEEDS_AVX512 = pytest.mark.skipif(
    not HAS_AVX512, reason="the rules for recurrent layers were read off AVX-512"
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # transformers warns of its own future
    pytest.mark.skipif(
        not HAS_KNOWN_CONVOLUTIONS, reason="the rules for scratch were read off AVX2 and AVX-512"
    ),
]


@pytest.fixture(scope="module")
def jobs():
    """Return a function that builds the job of an architecture."""
    pytest.importorskip("transformers", reason="the architectures come from transformers")
    from architectures import OPTIMIZERS, architectures

    def build(architecture: str, optimizer: str):
        return architectures()[architecture](OPTIMIZERS[optimizer])

    return build


def error_fraction(job, *strategies) -> float:
    measured = memfit.measure(job, Plan(strategies=strategies))
    return measured.predicted_peak_bytes / measured.peak_allocated_bytes - 1


@pytest.mark.parametrize("strategies", [(), (Bf16(),)], ids=["plain", "bf16"])
@pytest.mark.parametrize("architecture", ["GPT-2", "ViT", "ResNet", "ConvNeXt"])
def test_an_architecture_is_predicted_within_a_hundredth(jobs, architecture, strategies):
    assert abs(error_fraction(jobs(architecture, "AdamW"), *strategies)) < 0.01


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("architecture", [pytest.param("LSTM", marks=NEEDS_AVX512), "BERT"])
def test_what_takes_no_unknown_scratch_is_predicted_within_a_thousandth(
    jobs, architecture, optimizer
):
    assert abs(error_fraction(jobs(architecture, optimizer))) < 0.001


def test_a_checkpointed_architecture_is_predicted_within_a_hundredth(jobs):
    job = jobs("BERT", "AdamW")
    assert abs(error_fraction(job, ActivationCheckpointing())) < 0.01
