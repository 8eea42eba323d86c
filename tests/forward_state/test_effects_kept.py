"""What a forward changes besides its results happens once per step, however often it is run."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.zoo import modules_with_effects as samples
from tests.zoo.modules_with_effects import DRAWING, NEVER_BATCH, ON_BATCH, REFUSED, Block
from tests.zoo.small_jobs import mean_square_job, session_of
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.analysis.effects import Effect, EffectKind, Effects
from memfit.analysis.judgement import judge_effects
from memfit.analysis.separability import PROVED, Outcome
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.runtime.planned_steps import PlannedSteps
from memfit.runtime.run import open_plain_session
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Numerics
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.micro_batching import MicroBatching

WIDTH, BATCH_SIZE, NUM_STEPS = 6, 8, 6
EXACT = 1e-10
ALL = (*NEVER_BATCH, *ON_BATCH, *DRAWING, samples.BatchNormalised)
KEEPING = ActivationCheckpointing(keep=("addmm.0", "mm.0", "tanh.0", "bernoulli_.0"))


class Listed(nn.Module):
    """Blocks in a ModuleList, the first of which is called twice."""

    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(WIDTH) for _ in range(2))

    def forward(self, x):
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


class Normalised(nn.Module):
    """A block before and one behind a batch normalisation."""

    def __init__(self, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm, self.second = block(WIDTH), nn.BatchNorm1d(WIDTH), block(WIDTH)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def in_a_row(block: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(*(block(WIDTH) for _ in range(2)))


def nested(block: Callable[[int], nn.Module]) -> nn.Module:
    pairs = (nn.Sequential(block(WIDTH), nn.Dropout(0.2), block(WIDTH)) for _ in range(2))
    return nn.Sequential(*pairs)


def job_of(model: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> Job:
    return mean_square_job(lambda: model().to(dtype), WIDTH, dtype=dtype, batch_size=BATCH_SIZE)


def sow() -> None:
    samples.NUM_GLOBAL_CALLS = 0
    samples.TOTALS["calls"] = 0
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


POSITIONS = {
    torch.Generator: torch.Generator.get_state,
    np.random.Generator: lambda source: repr(source.bit_generator.state),
    random.Random: lambda source: repr(source.getstate()),
    torch.Tensor: lambda tensor: tensor.detach().clone(),
    nn.Parameter: lambda tensor: tensor.detach().clone(),
    **dict.fromkeys((int, float, str), lambda value: value),
}


def state_of(value, seen=None):
    """Turn all that a module holds into what can be compared; sources by where they stand."""
    seen = {} if seen is None else seen
    if type(value) in POSITIONS:
        return POSITIONS[type(value)](value)
    if id(value) in seen:
        return None
    seen[id(value)] = value
    if isinstance(value, dict):
        return {str(key): state_of(each, seen) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [state_of(each, seen) for each in value]
    if callable(value) and getattr(value, "__closure__", None):
        return [state_of(cell.cell_contents, seen) for cell in value.__closure__]
    if isinstance(value, (nn.Module, samples.Memory)):
        held = {name: each for name, each in vars(value).items() if name != "forward"}
        return state_of(held, seen)
    return None


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in flat(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in flat(each)]
    if isinstance(value, torch.Tensor):
        return [value.double()]
    return (
        [torch.tensor(float(value if not isinstance(value, str) else hash(value)))] if value else []
    )


def outcome(job: Job, plan: Plan, num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """Run some steps; give losses, gradients, parameters and everything that was changed."""
    sow()
    layout = find_layout(job)
    sow()
    session = open_plain_session(job, "cpu", layout)
    steps = PlannedSteps(session, plan)
    found: list[torch.Tensor] = []

    def note_gradients() -> None:
        parameters = session.model.parameters()
        found.extend(p.grad.clone() for p in parameters if p.grad is not None)

    batches = [job.batch(BATCH_SIZE) for _ in range(num_steps)]
    losses = [steps.attempt(batch, note_gradients).loss for batch in batches]
    steps.close()
    left = state_of(session.model)
    others = [samples.NUM_GLOBAL_CALLS, samples.TOTALS["calls"]]
    return [*losses, *found, *flat(left), *flat(others)]


def draws_left() -> list[object]:
    return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]


def largest_difference(job: Job, *strategies, num_steps: int = NUM_STEPS) -> float:
    plain = outcome(job, Plan(), num_steps)
    planned = outcome(job, Plan(strategies=strategies), num_steps)
    assert [t.shape for t in plain] == [t.shape for t in planned]
    return max(
        float((a - b).abs().max()) for a, b in zip(plain, planned, strict=True) if len(a.view(-1))
    )


@pytest.fixture
def overlooked():
    """Have the proof overlook whatever it finds, so that the check of a running step is left."""
    with patch.object(Separation, "_found", lambda separation, *asked: PROVED):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("block", ALL, ids=lambda block: block.__name__)
@pytest.mark.parametrize("strategy", [ActivationCheckpointing(), KEEPING], ids=["whole", "keep"])
@pytest.mark.parametrize("build", [in_a_row, nested, Listed], ids=lambda build: build.__name__)
def test_recomputed_blocks_change_what_they_change_once(block, strategy, build):
    names = ("0", "1") if build is not Listed else ("blocks.0", "blocks.1")
    strategy = type(strategy)(blocks=names, keep=strategy.keep)
    assert largest_difference(job_of(lambda: build(block)), strategy) <= EXACT


@pytest.mark.parametrize("block", DRAWING, ids=lambda block: block.__name__)
def test_recomputed_blocks_leave_generators_where_they_would_be(block):
    job = job_of(lambda: in_a_row(block))
    left = []
    for strategies in ((), (ActivationCheckpointing(blocks=("0", "1")),)):
        outcome(job, Plan(strategies=strategies))
        left.append(draws_left())
    assert left[0] == left[1]


@pytest.mark.parametrize("block", REFUSED, ids=lambda block: block.__name__)
@pytest.mark.parametrize(
    "strategy",
    [ActivationCheckpointing(blocks=("0", "1")), MicroBatching(micro_batch_size=3)],
    ids=lambda strategy: strategy.name,
)
def test_what_cannot_be_read_again_is_refused_by_name(block, strategy):
    name = {"Iterating": "factors", "Reading": "file"}[block.__name__]
    with pytest.raises(StrategyError, match=rf"0\.{name} is a .*cannot be put back"):
        outcome(job_of(lambda: in_a_row(block)), Plan(strategies=(strategy,)))


@pytest.mark.slow
@pytest.mark.parametrize("block", NEVER_BATCH, ids=lambda block: block.__name__)
@pytest.mark.parametrize(
    "others", [(), (ActivationCheckpointing(blocks=("0", "1")),)], ids=["alone", "recomputed"]
)
def test_pieces_change_once_what_does_not_depend_on_the_batch(block, others):
    job = job_of(lambda: in_a_row(block))
    assert largest_difference(job, MicroBatching(micro_batch_size=3), *others) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("block", NEVER_BATCH, ids=lambda block: block.__name__)
def test_replayed_pieces_change_once_what_does_not_depend_on_the_batch(block):
    job = job_of(lambda: Normalised(block))
    assert largest_difference(job, BatchNormReplay(micro_batch_size=3)) <= EXACT


CHANGED = {
    "Recurrent": "state",
    "RecurrentInPlace": "state",
    "VectorQuantised": "codes|sizes|sums",
    "OwnStatistics": "mean",
    "InstanceNormalised": r"norm\.running_mean",
    "Listing": r"features\[0\]",
    "Remembering": r"means\['hidden'\]",
    "WithMemory": r"memory\.vector",
    "Queueing": "queue",
}


REFUSED_FOR = {
    "Recurrent": r"sets {owner}\.state to another object",
    "RecurrentInPlace": r"writes what depends on the batch .*copy at .*modules_with_effects\.py",
    "VectorQuantised": "couples the samples of a batch: mul at .*modules_with_effects",
    "OwnStatistics": r"sets {owner}\.mean to another object",
    "Listing": r"changes what {owner}\.features holds",
    "Remembering": "couples the samples of a batch: mul at .*modules_with_effects",
    "WithMemory": r"writes what depends on the batch .*lerp at .*modules_with_effects\.py",
    "Queueing": "couples the samples of a batch: mul at .*modules_with_effects",
}
on_pieces = pytest.mark.parametrize(
    ("strategy", "build", "owner"),
    [
        (MicroBatching(micro_batch_size=3), in_a_row, r"model\.0"),
        (BatchNormReplay(micro_batch_size=3), Normalised, r"model\.first"),
    ],
    ids=["micro-batching", "batchnorm-replay"],
)


@pytest.mark.slow
@pytest.mark.parametrize("block", ON_BATCH, ids=lambda block: block.__name__)
@on_pieces
def test_what_depends_on_the_batch_is_refused_before_anything_runs(block, strategy, build, owner):
    job = job_of(lambda: build(block))
    session = session_of(job)
    if block is samples.InstanceNormalised:  # its statistics are those of its own samples
        assert strategy.numerics_for(gather_facts(session)) is Numerics.UNPROVED
        return
    with pytest.raises(StrategyError, match=REFUSED_FOR[block.__name__].format(owner=owner)):
        PlannedSteps(session, Plan(strategies=(strategy,)))


@pytest.mark.parametrize("block", ON_BATCH, ids=lambda block: block.__name__)
@on_pieces
@pytest.mark.usefixtures("overlooked")
def test_what_depends_on_the_batch_is_an_error_before_any_update(block, strategy, build, owner):
    job = job_of(lambda: build(block))
    session = session_of(job)
    steps = PlannedSteps(session, Plan(strategies=(strategy,)))
    before = [parameter.detach().clone() for parameter in session.model.parameters()]
    with pytest.raises(StrategyError, match=rf"leaves {owner}\.({CHANGED[block.__name__]}) in"):
        steps.attempt(job.batch(BATCH_SIZE))
    assert all(map(torch.equal, before, session.model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("block", DRAWING[:-1], ids=lambda block: block.__name__)
def test_passes_that_would_draw_other_numbers_are_an_error(block):
    job = job_of(lambda: Normalised(block))
    with pytest.raises(StrategyError, match="all passes over a piece would have to draw the same"):
        outcome(job, Plan(strategies=(BatchNormReplay(micro_batch_size=3),)))


FOLLOWED = (samples.OwnGenerator, samples.GlobalDropout, Block)
"""What they draw, if anything, torch's operators draw."""


@pytest.mark.slow
@pytest.mark.parametrize("block", [*DRAWING, Block], ids=lambda block: block.__name__)
def test_pieces_that_draw_are_the_same_in_law_alone(block):
    class Plain(Block):
        def forward(self, x):
            return x + self.hidden(x)

    job = job_of(lambda: in_a_row(Plain if block is Block else block))
    facts, strategy = record(job).facts, MicroBatching(micro_batch_size=3)
    expected = Numerics.EXACT if block is Block else Numerics.SAME_IN_LAW
    found = strategy.separability(facts.separation)
    if block in FOLLOWED:
        assert found.is_proved
    else:
        assert strategy.numerics_for(facts) is Numerics.UNPROVED
        assert "; what is drawn outside torch's operators cannot be followed" in found.sentence
        strategy.settle(facts.separation, replace(found, trial="on one batch nothing differs."))
    assert strategy.numerics_for(facts) is expected


class Appending(nn.Module):
    """Blocks that write to a list which they are given."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, cache):
            cache.append(x.detach())
            return x + torch.tanh(self.linear(x)) * len(cache)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        cache: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, cache)
        return x * len(cache)


def test_a_list_that_is_passed_in_is_as_it_was():
    strategy = ActivationCheckpointing(blocks=("blocks.0-2",))
    assert largest_difference(job_of(Appending), strategy) <= EXACT


class Large(Block):
    """Begins to change a table of more than 64 KiB in its third call."""

    def prepare(self, width):
        self.num_calls = 0
        self.register_buffer("table", torch.zeros(2**14, width, dtype=torch.float64))

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls > 2:
            self.table.add_(0.1)
        return x + self.hidden(x + self.table[0])


def test_a_large_tensor_that_changes_late_is_an_error_once_and_right_from_then_on():
    job = job_of(lambda: nn.Sequential(Large(WIDTH)))
    session = session_of(job)
    steps = PlannedSteps(session, Plan(strategies=(ActivationCheckpointing(blocks=("0",)),)))
    batch = job.batch(BATCH_SIZE)
    for _ in range(2):
        steps.attempt(batch)
    with pytest.raises(StrategyError, match=r"0\.table in place for the first time"):
        steps.attempt(batch)
    block = session.model[0]
    table, before = block.table.clone(), block.linear.weight.detach().clone()
    steps.attempt(batch)
    assert torch.equal(block.table, table + 0.1)
    weight, bias = before.clone().requires_grad_(), block.linear.bias
    assert not torch.equal(before, block.linear.weight)
    assert weight.shape == (WIDTH, bias.numel())


def test_a_state_of_more_than_64_mib_is_an_error():
    class Huge(Large):
        def prepare(self, width):
            super().prepare(width)
            self.num_calls = 9
            self.table = torch.zeros(2**21, width, dtype=torch.float64)

    plan = Plan(strategies=(ActivationCheckpointing(blocks=("0",)),))
    with pytest.raises(StrategyError, match=r"0\.table; no more than 64.0 MiB are copied"):
        outcome(job_of(lambda: nn.Sequential(Huge(WIDTH))), plan, 1)


def test_hooks_that_come_later_are_seen():
    job = job_of(lambda: in_a_row(samples.HookCounting))
    found = []
    for strategies in ((), (ActivationCheckpointing(blocks=("0", "1")),)):
        sow()
        session = session_of(job)
        steps = PlannedSteps(session, Plan(strategies=strategies))
        batch = torch.ones(BATCH_SIZE, WIDTH, dtype=torch.float64)
        steps.attempt(batch)
        calls: list[int] = []

        def scaled(module, args, out, calls=calls):
            calls.append(1)
            return out * len(calls)

        session.model[0].linear.register_forward_hook(scaled)
        found.append([float(steps.attempt(batch).loss) for _ in range(3)])
        found.append(len(calls))
    assert found[0] == found[2]
    assert found[1] == found[3] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [samples.SpectralParametrized, samples.Clipping, samples.Following]
)
@pytest.mark.parametrize(
    "strategy",
    [ActivationCheckpointing(blocks=("0", "1")), MicroBatching(micro_batch_size=2)],
    ids=lambda strategy: strategy.name,
)
def test_copies_of_what_changes_are_predicted(block, strategy):
    class Wide(block):
        def __init__(self, width):
            super().__init__(64 * width)

    job = mean_square_job(lambda: nn.Sequential(Wide(1), Wide(1)), 64, batch_size=64)
    plan = Plan(strategies=(strategy,))
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    assert memfit.measure(job, plan).peak_allocated_bytes == predicted


STATE = Effect(owner="model.0", name="state", kind=EffectKind.BINDING, depends_on_batch=True)
JUDGED = {
    "depends": (STATE, Outcome.REFUTED),
    "not known": (replace(STATE, depends_on_batch=None), Outcome.REFUTED),
    "does not depend": (replace(STATE, depends_on_batch=False), Outcome.NOT_KNOWN),
    "seen by operators": (replace(STATE, kind=EffectKind.TENSOR), Outcome.PROVED),
    "draws of torch": (
        Effect(owner="torch", name="global generator", kind=EffectKind.GENERATOR),
        Outcome.PROVED,
    ),
    "other draws": (
        Effect(owner="model.0", name="source", kind=EffectKind.GENERATOR, detail="numpy"),
        Outcome.NOT_KNOWN,
    ),
}


@pytest.mark.parametrize("name", JUDGED)
def test_effects_that_are_known_take_the_proof_from_pieces(name):
    effect, expected = JUDGED[name]
    found = judge_effects(PROVED, Effects(effects=(effect,)), {})
    assert found.outcome is expected
    assert found.is_proved or effect.full_name in found.sentence
