"""The strategy linear-cross-entropy on language models: what it saves, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.builders import near_peak
from tests.zoo.small_transformers import config_of, model_of
from torch import nn

import memfit
from memfit import Job, Plan, Total
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules
from memfit.prediction.recording import record
from memfit.strategies import build_strategy
from memfit.strategies.linear_cross_entropy import LargestHead, LinearCrossEntropy

VOCABULARY, TOKENS, BATCH_SIZE = 2048, 32, 8
NUM_ROWS = BATCH_SIZE * TOKENS
FLOAT, HALF = 4, 2
EACH_MODEL = pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])


def language_model(name, loss=None) -> Job:
    """Return a model of transformers, which computes the loss of its own outputs."""
    config = config_of(name, vocab_size=VOCABULARY)

    def batch(size):
        ids = torch.randint(3, VOCABULARY, (size, TOKENS))
        return {"input_ids": ids, "labels": torch.where(ids % 3 == 0, -100, ids)}

    return Job(
        model=lambda: model_of(name, config),
        batch=batch,
        loss=loss or (lambda model, batch: model(**batch).loss),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=BATCH_SIZE,
    )


def total_over_tokens(model, batch):
    """Return transformers' sum over tokens, and how many count."""
    loss = model(**batch, num_items_in_batch=1).loss
    return Total(loss, (batch["labels"][:, 1:] != -100).sum())


def plan_of(num_rows, **others) -> Plan:
    strategies = [LinearCrossEntropy(num_rows=num_rows)]
    for name, settings in others.items():
        strategies.append(build_strategy(name.replace("_", "-"), settings))
    return Plan(strategies=tuple(strategies))


@pytest.mark.slow
@EACH_MODEL
def test_models_of_transformers_are_known_for_their_logits(name):
    facts = record(language_model(name)).facts
    assert facts.of(LargestHead) == LargestHead(VOCABULARY, NUM_ROWS)


@pytest.mark.slow
@EACH_MODEL
def test_models_of_transformers_train_as_before(name):
    job, plan = language_model(name), plan_of(50)
    assert memfit.verify(job, plan, dtype=torch.float32).largest_error < 1e-5
    # The loss of causal models is computed in float32, whatever the model is.
    assert memfit.verify(job, plan).largest_error < (1e-12 if name == "bert" else 1e-6)


@pytest.mark.slow
@EACH_MODEL
def test_models_of_transformers_hold_no_logits(name):
    job = language_model(name)
    plain, planned = memfit.predict(job), memfit.predict(job, plan=plan_of(32))
    chunk_bytes, logits_bytes = (rows * VOCABULARY * FLOAT for rows in (32, NUM_ROWS))
    # A whole computation holds logits, their logarithms and a gradient of either.
    saved_bytes = plain.peak_allocated_bytes - planned.peak_allocated_bytes
    assert saved_bytes > 2 * (logits_bytes - chunk_bytes)
    measured = memfit.measure(job, plan_of(32))
    assert planned.peak_allocated_bytes == near_peak(measured.peak_allocated_bytes)


@pytest.mark.slow
@EACH_MODEL
@pytest.mark.parametrize("precision", [None, "bf16", "pure_bf16"])
def test_models_of_transformers_hold_no_logits_on_a_gpu(name, precision):
    job, others = language_model(name), {precision: {}} if precision else {}
    plain = Plan(strategies=plan_of(32, **others).strategies[1:])
    allocated = [
        memfit.predict(job, "a100-40gb", plan).peak_allocated_bytes
        for plan in (plain, plan_of(32, **others))
    ]
    assert allocated[0] - allocated[1] > 2 * VOCABULARY * FLOAT * (NUM_ROWS - 2 * 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "others",
    [
        {"micro_batching": {"micro_batch_size": 3}},
        {"activation_checkpointing": {}},
        {"activation_checkpointing": {}, "micro_batching": {"micro_batch_size": 3}},
        {"optimizer_in_backward": {}},
        {"activation_offload": {"to": "disk"}},
    ],
    ids=lambda others: "+".join(others),
)
def test_it_goes_together_with_others(name, others):
    job = language_model(name, total_over_tokens)
    found = memfit.verify(job, plan_of(50, **others), dtype=torch.float32)
    assert found.largest_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "pure_bf16"])
def test_lower_precision_is_no_worse_with_it_than_without(precision):
    job = language_model("llama")
    plan = plan_of(50, **{precision: {}})
    errors = [
        memfit.verify(job, each, dtype=torch.float32)
        for each in (plan, Plan(strategies=plan.strategies[1:]))
    ]
    assert errors[0].largest_error < 1.3 * errors[1].largest_error
    if is_beyond_rules("float16" if precision == "fp16" else "bfloat16"):
        return  # what oneDNN's kernels take on such processors is not known
    predicted = memfit.predict(job, plan=plan).peak_allocated_bytes
    measured = memfit.measure(job, plan).peak_allocated_bytes
    assert predicted == near_peak(measured)


# --- a head that lies inside a checkpointed block --------------------------------------------------


class Stage(nn.Module):
    """A block that scores all words."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 1100)

    def forward(self, hidden):
        return self.head(torch.tanh(self.inner(hidden)))


class Staged(nn.Module):
    """Several blocks, each with logits of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage() for _ in range(2))

    def forward(self, hidden):
        return [stage(hidden) for stage in self.stages]


def staged() -> Job:
    def loss(model, batch):
        hidden, labels = batch
        return sum(F.cross_entropy(logits, labels) for logits in model(hidden))

    return Job(
        model=Staged,
        batch=lambda size: (torch.randn(size, 16), torch.randint(0, 1100, (size,))),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=6,
    )


@pytest.mark.parametrize("others", [{}, {"activation_checkpointing": {}}], ids=["alone", "blocks"])
def test_heads_inside_blocks_keep_their_results(others):
    found = memfit.verify(staged(), plan_of(4, **others))
    assert found.largest_error < 1e-10


# --- settings and facts ----------------------------------------------------------------------------


def tokens_against(vocabulary, *, num_rows=1024, use=lambda logits: logits) -> Job:
    """Return one layer that scores words, and do something with its outputs."""

    def loss(model, batch):
        return F.cross_entropy(use(model(batch[0])), batch[1])

    return Job(
        model=lambda: nn.Linear(16, vocabulary),
        batch=lambda size: (torch.randn(size, 16), torch.randint(0, vocabulary, (size,))),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=num_rows,
    )


@pytest.mark.parametrize(("num_rows", "offered"), [(64, []), (1024, [128]), (8192, [512])])
def test_a_sixteenth_of_the_rows_is_offered_down_to_a_useful_size(num_rows, offered):
    facts = record(tokens_against(1030, num_rows=num_rows)).facts
    assert [option.num_rows for option in LinearCrossEntropy.options(facts)] == offered


@pytest.mark.parametrize(
    "job",
    [
        tokens_against(1000),
        tokens_against(1030, use=lambda logits: logits / 2),
        tokens_against(1030, use=lambda logits: logits + 0 * logits.detach().exp().sum()),
    ],
    ids=["few words", "scaled", "used twice"],
)
def test_a_step_without_logits_to_save_is_refused(job):
    facts = record(job).facts
    assert facts.of(LargestHead).num_classes == 0
    assert not list(LinearCrossEntropy.options(facts))
    assert "no logits to do without" in str(LinearCrossEntropy(num_rows=8).obstacle(facts))


@pytest.mark.slow
def test_the_planner_finds_it():
    job = tokens_against(4096)
    plain = memfit.predict(job)
    plan = memfit.plan(job, budget=plain.peak_allocated_bytes // 2, forbid=["micro-batching"])
    assert "linear-cross-entropy" in {strategy.name for strategy in plan.strategies}


@pytest.mark.slow
def test_noting_logits_leaves_a_recorded_step_alone():
    """The plain step is watched by more than its recorder, so it must not show."""
    job = language_model("gpt2")
    measured = memfit.measure(job).peak_allocated_bytes
    assert memfit.predict(job).peak_allocated_bytes == pytest.approx(measured, rel=1e-5)
