"""Optimizer states of 4 and 8 bits are counted as what they take, whoever keeps them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.conformance.builders import near_peak, squared_error
from tests.prediction.test_sharded import measured_peak_bytes
from tests.zoo.sharded import NUM_BLOCKS, WIDTH, ranks, sharded_step
from tests.zoo.small_jobs import regression_job
from torch import nn

import memfit
from memfit.session.storages import owned_bytes, owned_tensors
from memfit.trace.events import Category

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Of torchao and of torch's compiler, while they are imported."""
HIDDEN = 256
NUM_LARGE = 2 * WIDTH * HIDDEN
NUM_SMALL = HIDDEN + WIDTH
TABLE_BYTES = {8: 256 * 4, 4: 16 * 4}
BLOCK_SIZES = {8: 256, 4: 128}
NUM_TENSORS, NUM_STATES = 4, 2


def state_bytes(num_bits: int) -> int:
    """Add up codes, scales and tables of both states of the weights, fp32 biases and step counts.

    Source: torchao/optim/subclass_4bit.py and subclass_8bit.py, torchao 0.18: states of 4096 values
    and more, in blocks with one fp32 scale each, and a table of the values of each code per tensor.
    """
    of_one = NUM_LARGE * num_bits // 8 + 4 * NUM_LARGE // BLOCK_SIZES[num_bits]
    tables_bytes = 2 * TABLE_BYTES[num_bits]
    return NUM_STATES * (of_one + tables_bytes + 4 * NUM_SMALL) + 4 * NUM_TENSORS


def torchaos(num_bits: int):
    """Return what builds torchao's optimizer, which memfit imports in no other test."""
    optim = pytest.importorskip("torchao.optim")
    return partial(getattr(optim, f"AdamW{num_bits}bit"), lr=0.01)


def job_with(optimizer):
    return regression_job(
        lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)),
        (WIDTH,),
        loss=squared_error,
        optimizer=optimizer,
    )


@pytest.fixture
def eagerly():
    """Have torchao's optimizers run as they are written: compiling takes a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("num_bits", [8, 4])
def test_the_peak_with_torchaos_states_is_the_measured_one(num_bits):
    job = job_with(torchaos(num_bits))
    prediction, measurement = memfit.predict(job), memfit.measure(job)
    assert prediction.peak_allocated_bytes == near_peak(measurement.peak_allocated_bytes)
    assert prediction.first_step_peak_bytes == near_peak(measurement.first_step_peak_bytes)
    for figures in (prediction, measurement):
        assert figures.by_category["optimizer state"] == state_bytes(num_bits)


@pytest.mark.slow
@pytest.mark.parametrize("num_bits", [8, 4])
def test_torchaos_states_are_states_on_a_gpu_as_well(num_bits):
    prediction = memfit.predict(job_with(torchaos(num_bits)), "h100-80gb")
    counts_bytes, rounding_bytes = 4 * NUM_TENSORS, 512 * 6 * NUM_STATES * NUM_TENSORS
    found = prediction.by_category["optimizer state"]
    assert 0 <= found - (state_bytes(num_bits) - counts_bytes) < rounding_bytes
    assert any("torch.compile" in note for note in prediction.notes)


@pytest.mark.usefixtures("eagerly")
@pytest.mark.filterwarnings("ignore:torchao.optim.* remembers results")
def test_the_states_of_a_run_are_counted_as_what_they_take():
    job = job_with(torchaos(8))
    run = memfit.start(job)
    batch = job.batch(4)
    run.step(batch)
    found = owned_bytes(owned_tensors(run.model, run.optimizer, batch))
    assert found[Category.OPTIMIZER_STATE] == state_bytes(8)
    run.close()


@pytest.mark.slow
@pytest.mark.usefixtures("eagerly")
@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_peak_with_sharded_low_bit_states_is_the_measured_one(num_bits, num_ranks):
    """They are wrappers twice: a DTensor of torchao's tensors."""
    with ranks(num_ranks):
        setup = sharded_step(torchaos(num_bits))
        prediction = memfit.predict_step(setup)
        assert prediction.peak_allocated_bytes == near_peak(measured_peak_bytes(setup))
    num_values = NUM_BLOCKS * 4 * WIDTH**2 / num_ranks
    assert prediction.by_category["optimizer state"] < NUM_STATES * num_values * num_bits / 8 * 1.4


@pytest.mark.slow
def test_the_peak_with_the_states_of_bitsandbytes_is_the_measured_one():
    from bitsandbytes import optim

    job = job_with(partial(optim.AdamW8bit, lr=0.01))
    prediction, measurement = memfit.predict(job), memfit.measure(job)
    assert prediction.peak_allocated_bytes == near_peak(measurement.peak_allocated_bytes)
    scale_bytes, table_bytes = 4 * NUM_LARGE // 256, 256 * 4
    held_bytes = NUM_STATES * (NUM_LARGE + scale_bytes + table_bytes + 4 * NUM_SMALL)
    assert prediction.by_category["optimizer state"] == held_bytes
