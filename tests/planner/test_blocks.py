"""What is estimated of recomputing blocks holds when it is recorded, on jobs of many kinds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from tests.zoo import planned_jobs as planner_jobs
from tests.zoo.small_jobs import mean_square_job
from torch import nn

from memfit import Job
from memfit.devices.catalogue import load_device
from memfit.figures import Prediction
from memfit.planner.recompute.blocks import chain_of
from memfit.planner.search.candidates import Candidate
from memfit.prediction.process_memory import rules_of
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.linear_cross_entropy import LinearCrossEntropy
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan
from memfit.trace.events import Phase
from memfit.verification.verify import Verifier

LARGEST_ERROR = {"cpu": 0.04, "a100-40gb": 0.05}
"""Shares of the recorded peak. On the GPU the fullest moment may move to scratch of a kernel."""
SMALL = {
    "transformer": {"width": 16, "num_blocks": 3, "tokens": 9, "batch_size": 4},
    "experts": {"width": 16, "num_blocks": 2, "tokens": 8, "batch_size": 4},
    "tied": {"width": 16, "num_blocks": 3, "tokens": 9, "batch_size": 4},
    "resnet": {"channels": 4, "num_blocks": 3, "pixels": 8, "batch_size": 4},
    "unet": {"channels": 4, "pixels": 8, "batch_size": 4},
    "recurrent": {"width": 8, "tokens": 20, "batch_size": 32},
    "post_norm": {"width": 16, "num_blocks": 2, "tokens": 9, "batch_size": 4},
    "gpt2": {"width": 16, "num_blocks": 2, "tokens": 9, "batch_size": 4},
    "bert": {"width": 16, "num_blocks": 2, "tokens": 9, "batch_size": 4},
    "llama": {"width": 16, "num_blocks": 2, "tokens": 9, "batch_size": 4},
}
HUGGING_FACE = ("gpt2", "bert", "llama")
EACH_JOB = pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name in HUGGING_FACE and find_spec("transformers") is None,
                reason="needs transformers",
            ),
        )
        for name in SMALL
    ],
)


class Wasteful(nn.Module):
    """A block whose forward takes much for a moment, and whose input nothing else keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        with torch.no_grad():
            scale = x.unsqueeze(-1).expand(*x.shape, 16).softmax(-1).mean(-1)
        return x + self.down(torch.tanh(self.up(x * 0.5))) * scale


class Tried:
    """A job on a device: its evaluator, and what its refinements are."""

    def __init__(self, job: Job, device: str = "cpu", pieces: int | None = None) -> None:
        self.job = job
        split = pieces is not None and pieces < job.batch_size
        plan = Plan(strategies=(MicroBatching(micro_batch_size=pieces),) if split else ())
        self.evaluator = planner_jobs.evaluator_of(job, device, plan)
        self.plain = self.evaluator.plain
        self.evaluated: Candidate = self.evaluator.in_full(())

    def recorded(self, strategies) -> Prediction:
        return self.evaluator.in_full(strategies).prediction

    def chain(self):
        spec = self.evaluator.device
        return chain_of(self.plain.steady, rules_of(spec), self.evaluator.times.seconds)


@cache
def tried(name: str, device: str = "cpu") -> Tried:
    return Tried(planner_jobs.JOBS[name](), device)


def sample(refinements, num: int):
    """Take some of them, with both ends."""
    last = len(refinements) - 1
    return [refinements[index] for index in sorted({last * n // (num - 1) for n in range(num)})]


def errors_of(found: Tried, refinements) -> list[tuple[float, float]]:
    """Return the errors of bytes and seconds, as shares of what was recorded."""
    errors = []
    for refinement in refinements:
        recorded = found.recorded(refinement.strategies)
        peak_bytes = recorded.peak_allocated_bytes
        errors.append(
            (
                refinement.peak_bytes / peak_bytes - 1,
                refinement.seconds / recorded.step_seconds - 1,
            )
        )
    return errors


@pytest.mark.slow
@EACH_JOB
def test_what_recomputing_takes_is_estimated_to_a_few_hundredths(name):
    found = tried(name)
    refinements = found.evaluated.refinements
    assert refinements
    for bytes_error, seconds_error in errors_of(found, sample(refinements, 3)[1:]):
        assert abs(bytes_error) <= LARGEST_ERROR["cpu"]
        assert abs(seconds_error) <= 0.07


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", "unet", "post_norm"])
def test_on_a_gpu_it_is_estimated_to_a_few_hundredths_as_well(name):
    found = tried(name, "a100-40gb")
    for bytes_error, _ in errors_of(found, sample(found.evaluated.refinements, 3)):
        assert abs(bytes_error) <= LARGEST_ERROR["a100-40gb"]


@pytest.mark.slow
def test_of_plain_blocks_every_estimate_holds_to_two_thousandths():
    found = tried("transformer")
    refinements = found.evaluated.refinements
    assert len(refinements) >= 10
    for bytes_error, seconds_error in errors_of(found, refinements):
        assert abs(bytes_error) <= 1e-3
        assert abs(seconds_error) <= 2e-3


@pytest.mark.slow
def test_what_a_forward_takes_for_a_moment_it_takes_again_when_recomputed():
    job = mean_square_job(
        lambda: nn.Sequential(*(Wasteful(256) for _ in range(4))),
        256,
        batch_size=512,
        optimizer=planner_jobs.sgd,
    )
    found = Tried(job)
    chain = found.chain()
    for place in (1, -1):
        options = [block.options[place] for block in chain.blocks]
        strategies = tuple(
            ActivationCheckpointing(blocks=(block.name,), keep=option.keep)
            for block, option in zip(chain.blocks, options, strict=True)
        )
        recorded = found.recorded(strategies)
        assert chain.peak_bytes(options) == pytest.approx(recorded.peak_allocated_bytes, rel=0.002)


@pytest.mark.slow
@EACH_JOB
def test_refinements_go_from_the_fastest_to_the_smallest(name):
    refinements = tried(name).evaluated.refinements
    prediction = tried(name).evaluated.prediction
    peaks = [prediction.peak_allocated_bytes, *(r.peak_bytes for r in refinements)]
    seconds = [prediction.step_seconds, *(r.seconds for r in refinements)]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)


@pytest.mark.slow
@EACH_JOB
def test_what_is_kept_is_not_computed_again(name):
    """With every matrix product of a block kept, the step has the arithmetic of the plain one."""
    found = tried(name)
    steady = found.plain.steady
    strategies = []
    for block in found.chain().blocks:
        call = next(c for c in steady.calls if c.module == block.name and c.phase is Phase.FORWARD)
        counts: Counter[str] = Counter()
        products = []
        for operation in steady.operations[call.first_operation : call.last_operation]:
            if operation.num_flops:
                products.append(f"{operation.name}.{counts[operation.name]}")
            counts[operation.name] += 1
        strategies.append(ActivationCheckpointing(blocks=(block.name,), keep=tuple(products)))
    kept = found.recorded(tuple(strategies))
    assert kept.num_flops == steady.flops()


@pytest.mark.slow
@EACH_JOB
def test_what_is_kept_and_recomputed_leaves_the_results_as_they_are(name):
    found = Tried(planner_jobs.JOBS[name](**SMALL[name]))
    refinements = found.evaluated.refinements
    assert refinements
    if name != "transformer":
        refinements = sample(refinements, 3)
    trial = Verifier(found.job)
    for refinement in refinements:
        verified = trial.verify(Plan(strategies=refinement.strategies))
        assert verified.dtype == "float64"
        assert verified.largest_error <= 1e-10


@pytest.mark.slow
def test_a_few_micro_batches_say_what_all_of_them_take():
    """Of many, the first and last are recorded; the figures are those of the whole batch."""
    found = Tried(planner_jobs.transformer(width=128, num_blocks=2, tokens=128, batch_size=33))
    pieces = (MicroBatching(micro_batch_size=8),)
    short = found.evaluator.in_short(pieces)
    full = found.evaluator.in_full(pieces)
    assert full.is_exact
    assert short.prediction.batch_size == 33
    for estimated, recorded in (
        (short.prediction, full.prediction),
        (short.refinements[-1], found.recorded(short.refinements[-1].strategies)),
    ):
        seconds = getattr(estimated, "step_seconds", None) or estimated.seconds
        peak_bytes = getattr(estimated, "peak_allocated_bytes", None) or estimated.peak_bytes
        assert peak_bytes == pytest.approx(recorded.peak_allocated_bytes, rel=0.025)
        assert seconds == pytest.approx(recorded.step_seconds, rel=0.03)


@pytest.mark.slow
def test_recomputing_costs_its_time_in_every_micro_batch():
    sizes = {"width": 64, "num_blocks": 2, "tokens": 64}
    one, four = (
        Tried(planner_jobs.transformer(**sizes, batch_size=batch_size), pieces=8)
        for batch_size in (8, 32)
    )
    for once, repeated in zip(one.chain().blocks, four.chain().blocks, strict=True):
        assert repeated.options[-1].saved_bytes == once.options[-1].saved_bytes
        assert repeated.options[-1].seconds == pytest.approx(4 * once.options[-1].seconds)


@pytest.mark.slow
def test_blocks_do_not_lie_inside_each_other_and_come_in_the_order_of_forward():
    for name in SMALL:
        blocks = [block.name for block in tried(name).chain().blocks]
        assert len(blocks) == len(set(blocks))
        assert not [b for b in blocks for other in blocks if b.startswith(f"{other}.")]
        calls = [c.module for c in tried(name).plain.steady.calls]
        assert blocks == sorted(blocks, key=calls.index)


@pytest.mark.slow
def test_a_module_that_is_called_twice_is_no_block():
    found = Tried(planner_jobs.called_twice(width=16, num_blocks=2, tokens=8, batch_size=2))
    assert not [b for b in found.chain().blocks if b.name.startswith("blocks.")]


@pytest.mark.slow
def test_a_chain_that_stores_everything_takes_what_was_recorded():
    for name in SMALL:
        found = tried(name)
        chain = found.chain()
        stored = chain.peak_bytes([block.options[0] for block in chain.blocks])
        recorded_bytes = found.evaluated.prediction.peak_allocated_bytes
        assert stored == pytest.approx(recorded_bytes, rel=1e-3), name


@pytest.mark.slow
def test_a_step_without_gradients_has_no_chain():
    steady = tried("transformer").plain.steady
    without = type(steady)(allocations=steady.allocations, events=steady.events)
    chain = chain_of(without, rules_of(load_device("cpu")), lambda _: 1.0)
    assert chain.blocks == ()


@pytest.mark.slow
def test_recomputing_every_block_lowers_the_peak_of_every_micro_batch():
    """The first micro-batch, whose gradients are new, must not stand in the way of the estimate."""
    sizes = {"width": 64, "num_blocks": 4, "tokens": 64, "batch_size": 16}
    found = Tried(planner_jobs.transformer(**sizes), pieces=2)
    smallest = found.evaluated.refinements[-1]
    recorded = found.recorded((*smallest.strategies, MicroBatching(micro_batch_size=2)))
    assert smallest.peak_bytes < 0.8 * found.evaluated.prediction.peak_allocated_bytes
    assert smallest.peak_bytes == pytest.approx(recorded.peak_allocated_bytes, rel=0.03)


class Wrapped(nn.Module):
    """A head inside another module, as in BERT, which is called before the loss."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh())
        self.decoder = nn.Linear(4 * width, num_classes)

    def forward(self, x):
        return self.decoder(self.transform(x))


@pytest.mark.slow
def test_a_head_whose_logits_are_put_off_is_no_block_and_what_is_beside_it_may_be():
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))

    job = Job(
        model=lambda: nn.Sequential(Wasteful(16), Wasteful(16), Wrapped(16, 2048)),
        batch=lambda size: torch.randn(size, 16),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=256,
    )
    evaluator = planner_jobs.evaluator_of(job, "cpu", Plan())
    chunked = evaluator.in_full((LinearCrossEntropy(num_rows=128),))
    for refinement in chunked.refinements:
        recorded_bytes = evaluator.in_full(refinement.strategies).prediction.peak_allocated_bytes
        assert refinement.peak_bytes == pytest.approx(recorded_bytes, rel=0.03)
    blocks = {
        name
        for refinement in chunked.refinements
        for strategy in refinement.strategies
        if isinstance(strategy, ActivationCheckpointing)
        for name in strategy.blocks
    }
    assert blocks & {"0", "1", "0-1"}
    assert not blocks & {"2", "2.decoder", "0-2"}


class Adapted(nn.Module):
    """A linear layer with a low-rank one beside it, as LoRA has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(), (MicroBatching(micro_batch_size=4096),)])
def test_a_block_whose_adapters_wait_to_be_added_stays_a_block(pieces):
    def block():
        return nn.Sequential(Adapted(1024), nn.GELU(), Adapted(1024), nn.GELU())

    job = Job(
        model=lambda: nn.Sequential(*(block() for _ in range(4)), nn.Linear(1024, 4352)),
        batch=lambda size: torch.randn(size, 1024),
        loss=lambda model, batch: nn.functional.cross_entropy(
            model(batch), torch.zeros(len(batch), dtype=torch.long)
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=16384,
    )
    evaluator = planner_jobs.evaluator_of(job, "cpu", Plan())
    chunked = evaluator.in_full((LinearCrossEntropy(num_rows=128), *pieces))
    blocks = {
        name
        for strategy in chunked.refinements[-1].strategies
        if isinstance(strategy, ActivationCheckpointing)
        for name in strategy.blocks
    }
    assert blocks
    assert not [name for name in blocks if "." in name], "whole blocks, not what is left of them"


class Residual(nn.Module):
    """Two convolutions; ``relu`` keeps its result for its own backward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


@cache
def residual_chain() -> Tried:
    job = mean_square_job(
        lambda: nn.Sequential(*(Residual(16) for _ in range(8))), 16, 64, 64, batch_size=32
    )
    found = Tried(job, "a100-40gb")
    offered = ((None, ActivationOffload()),)
    found.evaluator.space = replace(found.evaluator.space, options=offered)
    found.evaluated = found.evaluator.in_full(())
    return found


def moved(refinement) -> list[str]:
    found = (s.blocks for s in refinement.strategies if isinstance(s, ActivationOffload))
    return [name for names in found for name in names]


@pytest.mark.slow
def test_inputs_that_stay_are_not_counted_as_moved_away():
    """As those of the last block that moves any, and those that ``relu`` before it keeps."""
    found = residual_chain()
    with_moves = [each for each in found.evaluated.refinements if moved(each)]
    assert with_moves
    for bytes_error, _ in errors_of(found, with_moves):
        assert abs(bytes_error) <= 0.005


def test_inputs_are_moved_only_after_a_block_that_is_computed_again():
    chain = residual_chain().evaluated.chain
    moving = [option for block in chain.blocks for option in block.options if option.moved_bytes]
    assert len(moving) >= 6
    assert all(option.follows_recomputed for option in moving)
    assert not any(option.moved_bytes for option in chain.blocks[0].options), "the batch stays"


class Added(nn.Module):
    """What the block gives is changed by what it is a part of, as in RegNet's layers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        result = self.block(x)
        result += x
        return torch.relu(result)


@pytest.mark.slow
def test_what_is_changed_after_the_block_is_not_kept():
    job = mean_square_job(
        lambda: nn.Sequential(*(Added(8) for _ in range(2))), 8, 64, 64, batch_size=32
    )
    found = Tried(job, "a100-40gb")
    assert any(block.name.endswith(".block") for block in found.chain().blocks)
    assert found.evaluated.refinements
    for refinement in found.evaluated.refinements:
        assert found.recorded(refinement.strategies).peak_allocated_bytes  # none is refused
