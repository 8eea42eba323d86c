"""Models of transformers are switched from eager attention to sdpa without a change of results."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.builders import near_peak
from tests.zoo import small_transformers
from tests.zoo.installed_transformers import part_of_transformers
from tests.zoo.small_jobs import facts_of, session_of
from tests.zoo.small_transformers import EACH_MODEL, model_of
from torch import nn
from torch.overrides import TorchFunctionMode

import memfit
from memfit import Job, Plan, Total
from memfit.errors import StrategyError
from memfit.prediction.recording import record
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.fused_attention import AttentionToFuse, FusedAttention
from memfit.strategies.micro_batching import MicroBatching

pytest.importorskip("transformers")

FUSED = Plan(strategies=(FusedAttention(),))
EXACT = 1e-10
VOCABULARY, TOKENS = 50, 10


def config_of(name, **options):
    return small_transformers.config_of(name, **{"attn_implementation": "eager", **options})


def job_for(build, num_tokens=TOKENS, batch_size=4, **call):
    """Return padded sequences of different lengths, and a loss over true tokens."""

    def batch(size):
        ids = torch.randint(3, VOCABULARY, (size, num_tokens))
        lengths = torch.randint(3, num_tokens, (size, 1))
        return {"input_ids": ids, "attention_mask": (torch.arange(num_tokens) < lengths).long()}

    def loss(model, batch):
        targets = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
        logits = model(**batch, labels=targets, **call).logits.flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        return Total(total, (targets != -100).sum())

    return Job(
        model=build,
        batch=batch,
        loss=loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=batch_size,
    )


def job_of(name, config=None, **options):
    config = config or config_of(name)
    return job_for(lambda: model_of(name, config), **options)


class _InDoubles(TorchFunctionMode):
    """Compute in float64 what a model computes in float32 whatever its own type is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if arg is torch.float32 else arg for arg in args]
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def verified_in_doubles(job, plan=FUSED):
    def loss(model, batch):
        with _InDoubles():
            return job.loss(model, batch)

    return memfit.verify(replace(job, loss=loss), plan)


# --- results --------------------------------------------------------------------------------------


@pytest.mark.slow
@EACH_MODEL
def test_results_with_padding_are_those_of_eager_attention(name):
    found = verified_in_doubles(job_of(name))
    assert found.numerics == "exact"
    assert found.largest_error <= EXACT, found.worst_gradient


@pytest.mark.slow
def test_a_model_that_rounds_its_softmax_to_float32_is_compared_in_doubles():
    found = memfit.verify(job_of("llama"), FUSED)
    assert found.largest_error <= EXACT


@pytest.mark.slow
@EACH_MODEL
def test_results_without_padding_are_those_of_eager_attention(name):
    job = job_of(name)

    def loss(model, batch):
        return job.loss(model, {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})

    found = verified_in_doubles(replace(job, loss=loss))
    assert found.largest_error <= EXACT, found.worst_gradient


CHECKPOINTING, SPLITTING = ActivationCheckpointing(), MicroBatching(micro_batch_size=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("bert", (CHECKPOINTING, SPLITTING)),
        ("gpt2", (CHECKPOINTING, SPLITTING)),
        ("llama", (SPLITTING,)),  # recomputation would be in float32 again
    ],
)
def test_together_with_others_it_is_as_exact(name, others):
    # With a cache of keys and values, recomputed blocks would add theirs again.
    job = job_of(name, config_of(name, use_cache=False))
    found = verified_in_doubles(job, Plan(strategies=(FusedAttention(), *others)))
    assert found.largest_error <= EXACT


class Around(nn.Module):
    """A module of one's own with a model inside."""

    def __init__(self, inner) -> None:
        super().__init__()
        self.encoders = nn.ModuleList([inner])
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, labels=None, **inputs):
        output = self.encoders[0](**inputs)
        output.logits = output.logits * self.scale
        return output


@pytest.mark.slow
def test_a_model_inside_a_bigger_module_is_found():
    config = config_of("bert")
    job = job_for(lambda: Around(model_of("bert", config)))
    assert facts_of(job).of(AttentionToFuse).names == ("encoders.0",)
    assert memfit.verify(job, FUSED).largest_error <= EXACT


@EACH_MODEL
def test_dropout_of_attention_weights_makes_it_same_in_law(name):
    key = {"bert": "attention_probs_dropout_prob", "gpt2": "attn_pdrop", "t5": "dropout_rate"}
    config = config_of(name, **{key.get(name, "attention_dropout"): 0.2})
    facts = facts_of(job_of(name, config))
    assert str(FusedAttention().numerics_for(facts)) == "same-in-law"


@pytest.mark.slow
def test_dropout_elsewhere_leaves_it_exact():
    job = job_of("bert", config_of("bert", hidden_dropout_prob=0.2))
    found = memfit.verify(job, FUSED)
    assert found.numerics == "exact"
    assert found.largest_error <= EXACT


# --- what is switched, and back -------------------------------------------------------------------


@EACH_MODEL
def test_undo_gives_every_module_its_own_configuration_back(name):
    session = session_of(job_of(name))
    configs = [(module, vars(module).get("config")) for module in session.model.modules()]
    undo = FusedAttention().apply(session)
    switched = [module.config for module, config in configs if config is not None]
    assert {config._attn_implementation for config in switched} == {"sdpa"}
    undo()
    assert all(vars(module).get("config") is config for module, config in configs)
    assert {c._attn_implementation for _, c in configs if c is not None} == {"eager"}
    assert not any(module._forward_pre_hooks for module in session.model.modules())


@pytest.mark.slow
def test_a_model_built_meanwhile_from_the_same_configuration_stays_eager():
    config = config_of("bert")
    job = job_of("bert", config)
    run = memfit.start(job, FUSED)
    assert config._attn_implementation == "eager"
    assert record(job).facts.of(AttentionToFuse).names == ("",)
    run.close()


@pytest.mark.parametrize(
    ("options", "is_offered"),
    [
        ({}, True),
        ({"attn_implementation": "sdpa"}, False),
        ({"attn_implementation": None}, False),
        ({"output_attentions": True}, False),
    ],
    ids=["eager", "sdpa", "default", "asked for weights"],
)
def test_only_eager_models_that_are_asked_for_no_weights_are_switched(options, is_offered):
    facts = facts_of(job_of("bert", config_of("bert", **options)))
    assert (FusedAttention().obstacle(facts) is None) == is_offered


@pytest.mark.slow
def test_a_model_without_sdpa_is_left_alone_but_not_what_is_inside_it():
    base = part_of_transformers("PreTrainedModel")

    class Wrapper(base):
        _supports_sdpa = False

        def __init__(self, config) -> None:
            super().__init__(config)
            self.inner = model_of("bert", config)

        def forward(self, labels=None, **inputs):
            return self.inner(**inputs)

    job = job_for(lambda: Wrapper(config_of("bert")))
    assert facts_of(job).of(AttentionToFuse).names == ("inner",)
    assert memfit.verify(job, FUSED).largest_error <= EXACT


@pytest.mark.slow
def test_a_step_that_asks_for_attention_weights_is_refused():
    job = job_of("bert", output_attentions=True)
    expected = r"asks the model for attention weights.*--forbid fused-attention"
    with pytest.raises(StrategyError, match=expected):
        memfit.predict(job, plan=FUSED)
    run = memfit.start(job, FUSED)
    with pytest.raises(StrategyError, match=expected):
        run.step(job.batch(4))
    run.close()
    assert len(run.model(**job.batch(2), output_attentions=True).attentions) == 2


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_scores_are_not_stored_and_the_peak_is_the_predicted_one(name):
    config = config_of(name, max_position_embeddings=512)
    job = job_of(name, config, num_tokens=256)
    plain, planned = memfit.predict(job), memfit.predict(job, plan=FUSED)
    assert planned.peak_allocated_bytes < 0.7 * plain.peak_allocated_bytes
    measured = memfit.measure(job, FUSED).peak_allocated_bytes
    assert planned.peak_allocated_bytes == near_peak(measured)


@pytest.mark.slow
@EACH_MODEL
def test_less_is_stored_on_a_virtual_gpu(name):
    job = job_of(name, num_tokens=256)
    plain = memfit.predict(job, device="a100-40gb")
    planned = memfit.predict(job, device="a100-40gb", plan=FUSED)
    assert planned.peak_allocated_bytes < plain.peak_allocated_bytes
