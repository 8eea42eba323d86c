"""Attention layers of torch are fused without a change of results, or not at all."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.conformance.builders import near_peak
from tests.zoo.small_jobs import facts_of, mean_square_job, session_of
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import StrategyError
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.fused_attention import AttentionToFuse, FusedAttention, UncomputedWeights
from memfit.strategies.micro_batching import MicroBatching

WIDTH, HEADS, TOKENS, SAMPLES = 8, 2, 5, 3
FUSED = Plan(strategies=(FusedAttention(),))
EXACT = 1e-10


def fused(model):
    """Return a copy of a model with the strategy applied."""
    model = copy.deepcopy(model)
    FusedAttention().apply(session_of(mean_square_job(lambda: model, 3)))
    return model


def facts_of_model(model):
    return facts_of(mean_square_job(lambda: model, 3))


def explicit(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(WIDTH, HEADS, **options).double()


# --- results --------------------------------------------------------------------------------------

LATER = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDING = torch.arange(TOKENS) >= torch.tensor([[5], [3], [4]])


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.double)


PER_HEAD = numbers(SAMPLES * HEADS, TOKENS, TOKENS)
CAUSAL_HINT = {"attn_mask": LATER, "is_causal": True}
CASES = {
    "self-attention": ({}, {}),
    "batch first": ({"batch_first": True}, {}),
    "no bias": ({"bias": False}, {}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "padding in numbers": ({}, {"key_padding_mask": numbers(SAMPLES, TOKENS)}),
    "mask": ({}, {"attn_mask": LATER}),
    "mask in numbers": ({}, {"attn_mask": numbers(TOKENS, TOKENS)}),
    "learnt mask": ({}, {"attn_mask": numbers(TOKENS, TOKENS).requires_grad_()}),
    "mask per head": ({}, {"attn_mask": PER_HEAD > 1}),
    "mask per head in numbers": ({}, {"attn_mask": PER_HEAD}),
    "mask and padding": ({}, {"attn_mask": LATER, "key_padding_mask": PADDING}),
    "mask and padding in numbers": (
        {"batch_first": True},
        {"attn_mask": PER_HEAD, "key_padding_mask": numbers(SAMPLES, TOKENS)},
    ),
    "causal hint": ({}, CAUSAL_HINT),
    "causal hint and padding": ({}, {**CAUSAL_HINT, "key_padding_mask": PADDING}),
    "hint that the mask belies": ({}, {"attn_mask": LATER.T, "is_causal": True}),
    "weights of every head": ({}, {"average_attn_weights": False}),
    "weights asked for": ({}, {"need_weights": True, "attn_mask": LATER}),
    "bias of keys and values": ({"add_bias_kv": True}, {"attn_mask": LATER}),
    "a key of zeros": ({"add_zero_attn": True}, {"key_padding_mask": PADDING}),
    "both": (
        {"add_zero_attn": True, "add_bias_kv": True, "batch_first": True},
        {"attn_mask": LATER, "key_padding_mask": PADDING},
    ),
    "other widths": ({"kdim": 6, "vdim": 4}, {"key_padding_mask": PADDING}),
    "other widths, batch first": ({"kdim": 6, "vdim": 4, "batch_first": True}, {}),
}


def inputs_for(layer):
    """Return queries, keys and values; all the same where their widths allow it."""
    outer = (SAMPLES, TOKENS) if layer.batch_first else (TOKENS, SAMPLES)
    query = numbers(*outer, WIDTH).requires_grad_()
    if layer.kdim == WIDTH:
        return query, query, query
    return query, *(numbers(*outer, dim).requires_grad_() for dim in (layer.kdim, layer.vdim))


def outcome(layer, inputs, options):
    """Return an output and every gradient."""
    layer.zero_grad()
    leaves = [leaf for leaf in (*inputs, *options.values()) if getattr(leaf, "requires_grad", 0)]
    for leaf in leaves:
        leaf.grad = None
    output, _ = layer(*inputs, **options)
    output.square().sum().backward()
    return [output, *(leaf.grad for leaf in (*leaves, *layer.parameters()))]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).detach().abs().max()) <= 1e-12


@pytest.mark.parametrize(("options", "call"), CASES.values(), ids=CASES)
def test_output_and_gradients_are_those_of_the_explicit_computation(options, call):
    layer = explicit(**options)
    inputs = inputs_for(layer)
    expected = [part.detach().clone() for part in outcome(layer, inputs, call)]
    assert_equal(outcome(fused(layer), inputs, call), expected)


def test_arguments_by_position_mean_what_they_meant():
    layer = explicit()
    x = numbers(TOKENS, SAMPLES, WIDTH)
    expected, _ = layer(x, x, x, PADDING, True, LATER)
    found, weights = fused(layer)(x, x, x, PADDING, True, LATER)
    assert_equal([found], [expected])
    assert type(weights) is UncomputedWeights


def test_a_sample_alone_needs_no_batch_dimension():
    layer = explicit()
    x = numbers(TOKENS, WIDTH)
    call = {"key_padding_mask": PADDING[1], "attn_mask": LATER.repeat(HEADS, 1, 1)}
    assert_equal([fused(layer)(x, x, x, **call)[0]], [layer(x, x, x, **call)[0]])


def test_a_query_that_may_look_nowhere_gives_zeros_where_torch_gives_none():
    layer = explicit(bias=False)
    x = numbers(TOKENS, SAMPLES, WIDTH)
    nowhere = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    nowhere[2] = True
    assert layer(x, x, x, attn_mask=nowhere)[0][2].isnan().all()
    assert (fused(layer)(x, x, x, attn_mask=nowhere)[0][2] == 0).all()


def test_a_call_that_wants_no_weights_stays_as_it_is():
    layer = explicit()
    x = numbers(TOKENS, SAMPLES, WIDTH)
    call = {"attn_mask": LATER, "is_causal": True, "need_weights": False}
    expected, nothing = layer(x, x, x, **call)
    found, weights = fused(layer)(x, x, x, **call)
    assert torch.equal(found, expected)
    assert weights is nothing is None


def test_calls_that_torch_refuses_are_refused_alike():
    x = numbers(TOKENS, SAMPLES, WIDTH)
    for layer in (explicit(), fused(explicit())):
        with pytest.raises(RuntimeError, match="Need attn_mask"):
            layer(x, x, x, is_causal=True)
        with pytest.raises(TypeError, match="no_such_argument"):
            layer(x, x, x, no_such_argument=1)


def test_a_copy_of_a_fused_model_computes_with_its_own_parameters():
    layer = fused(explicit())
    twin = copy.deepcopy(layer)
    x = numbers(TOKENS, SAMPLES, WIDTH)
    with torch.no_grad():
        twin.out_proj.weight.zero_()
        twin.out_proj.bias.zero_()
    assert twin(x, x, x)[0].abs().max() == 0
    assert layer(x, x, x)[0].abs().max() > 0


# --- weights that are not there -------------------------------------------------------------------

USES = {
    "method": lambda w: w.mean(),
    "attribute": lambda w: w.shape,
    "function": torch.sum,
    "functional": lambda w: nn.functional.mse_loss(w, torch.zeros(1)),
    "in a list": lambda w: torch.cat([torch.zeros(1), w]),
    "index": lambda w: w[0],
    "assignment": lambda w: w.__setitem__(0, 1),
    "plus": lambda w: w + 1,
    "plus, the other way round": lambda w: 1 + w,
    "in place": lambda w: torch.zeros(1).add_(w),
    "times a tensor": lambda w: torch.zeros(1) * w,
    "product": lambda w: w @ torch.zeros(1),
    "minus": lambda w: -w,
    "comparison": lambda w: w > 0,
    "equality": lambda w: w == 0,
    "truth": bool,
    "number": float,
    "length": len,
    "loop": list,
    "format": lambda w: f"{w:.2f}",
    "array": np.asarray,
    "question": lambda w: hasattr(w, "device"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_of_the_weights_is_refused_with_the_layer_and_the_way_out(use):
    with pytest.raises(StrategyError) as caught:
        use(UncomputedWeights("blocks.0.attention"))
    assert "blocks.0.attention" in str(caught.value)
    assert "--forbid fused-attention" in str(caught.value)


def test_weights_that_are_only_kept_do_no_harm():
    weights = UncomputedWeights("blocks.0.attention")
    holder = nn.Module()
    holder.weights = weights
    assert holder.weights is weights
    assert isinstance(weights, torch.Tensor)  # code that looks for tensors must find it
    assert "not computed" in repr(weights)
    for twin in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert type(twin) is UncomputedWeights
        assert repr(twin) == repr(weights)
    assert len({weights, weights}) == 1


class Block(nn.Module):
    """A residual block; what it does with its weights is up to a subclass."""

    def __init__(self, width=32, rate=0.0, hidden_rate=0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=rate, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width)
        )
        self.dropout = nn.Dropout(hidden_rate)

    def forward(self, x):
        attended, weights = self.attention(x, x, x)
        x = x + self.dropout(self.treated(attended, weights))
        return x + self.wide(x)

    def treated(self, attended, weights):
        return attended


class Keeping(Block):
    """Keep the weights for whoever may want to look at them."""

    def treated(self, attended, weights):
        self.last_weights = weights
        return attended


class Using(Block):
    """Have the weights in the results."""

    def treated(self, attended, weights):
        return attended * weights.square().sum()


class Looking(Block):
    """Have the weights in the results where they are tensors."""

    def treated(self, attended, weights):
        return attended + weights.mean() if isinstance(weights, torch.Tensor) else attended


class UnlessNone(Looking):
    """Have the weights in the results where there are any."""

    def treated(self, attended, weights):
        return attended if weights is None else attended + weights.mean()


def job_of(block, num_tokens=9, batch_size=4, num_blocks=3, width=32):
    return mean_square_job(
        lambda: nn.Sequential(*(block() for _ in range(num_blocks))),
        *(num_tokens, width),
        batch_size=batch_size,
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", [Using, Looking, UnlessNone])
def test_a_step_that_uses_the_weights_is_refused_when_recorded_and_when_run(block):
    job = job_of(block)
    expected = r"attention weights that 0\.attention returns.*--forbid fused-attention"
    for device in ("cpu", "a100-40gb"):
        with pytest.raises(StrategyError, match=expected):
            memfit.predict(job, device=device, plan=FUSED)
    run = memfit.start(job, FUSED)
    with pytest.raises(StrategyError, match=expected):
        run.step(job.batch(job.batch_size))
    run.close()
    run.model(job.batch(2))


@pytest.mark.slow
def test_a_step_that_keeps_the_weights_can_be_fused_and_verify_says_what_it_lacks():
    found = memfit.verify(job_of(Keeping), FUSED)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= EXACT
    assert "last_weights" in found.worst
    assert not found.keeps_promise


# --- which layers ---------------------------------------------------------------------------------


class WithWeights(nn.TransformerEncoderLayer):
    """Ask for weights where torch does not."""

    def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
        return self.self_attn(x, x, x)[0]


class Own(nn.MultiheadAttention):
    """Compute something else."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=True)[1]


class Renamed(nn.MultiheadAttention):
    """Compute the same."""


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(3, 3)), ()),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2), ()),
        (nn.TransformerDecoderLayer(8, 2), ()),
        (nn.Sequential(Own(8, 2)), ()),
        (nn.MultiheadAttention(8, 2), ("",)),
        (nn.Sequential(WithWeights(8, 2), nn.Linear(3, 3)), ("0.self_attn",)),
        (nn.Sequential(Renamed(8, 2), Block(8)), ("0", "1.attention")),
    ],
    ids=["none", "encoder", "decoder", "own forward", "itself", "overridden", "two"],
)
def test_layers_that_may_compute_weights_are_found(model, names):
    facts = facts_of_model(model)
    assert facts.of(AttentionToFuse).names == names
    assert (FusedAttention().obstacle(facts) is None) == bool(names)


def test_a_forward_of_the_users_own_is_left_alone():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    model[0].forward = lambda x: x
    assert facts_of_model(model).of(AttentionToFuse).names == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "hidden_rate", "numerics"),
    [(0.0, 0.0, "exact"), (0.0, 0.3, "exact"), (0.3, 0.0, "same-in-law")],
)
def test_only_dropout_of_the_weights_may_draw_other_masks(rate, hidden_rate, numerics):
    found = memfit.verify(job_of(partial(Block, rate=rate, hidden_rate=hidden_rate)), FUSED)
    assert found.numerics == numerics
    if numerics == "exact":
        assert found.largest_error <= EXACT


def test_a_layer_that_is_not_training_draws_nothing():
    model = nn.Sequential(nn.MultiheadAttention(8, 2, dropout=0.5))
    assert facts_of_model(model).of(AttentionToFuse).may_drop
    assert not facts_of_model(model.eval()).of(AttentionToFuse).may_drop


@pytest.mark.slow
def test_transformers_is_not_imported():
    code = (
        "import sys, torch, memfit\n"
        "from memfit.strategies.fused_attention import FusedAttention\n"
        "job = memfit.Job(model=lambda: torch.nn.MultiheadAttention(8, 2),\n"
        "    batch=lambda size: torch.randn(3, size, 8),\n"
        "    loss=lambda model, x: model(x, x, x)[0].square().mean(),\n"
        "    optimizer=lambda ps: torch.optim.SGD(ps), batch_size=2)\n"
        "memfit.predict(job, plan=memfit.Plan(strategies=(FusedAttention(),)))\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- memory, and other strategies -----------------------------------------------------------------

LARGE = job_of(partial(Block, 64), num_tokens=256, batch_size=6, width=64)


@pytest.mark.slow
def test_scores_are_not_stored_and_the_peak_is_the_predicted_one():
    plain, planned = memfit.predict(LARGE), memfit.predict(LARGE, plan=FUSED)
    assert planned.peak_allocated_bytes < 0.7 * plain.peak_allocated_bytes
    measured = memfit.measure(LARGE, FUSED).peak_allocated_bytes
    assert planned.peak_allocated_bytes == near_peak(measured)


@pytest.mark.slow
def test_scores_are_not_stored_on_a_virtual_gpu():
    plain = memfit.predict(LARGE, device="a100-40gb")
    planned = memfit.predict(LARGE, device="a100-40gb", plan=FUSED)
    assert planned.peak_allocated_bytes < 0.7 * plain.peak_allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        (ActivationCheckpointing(),),
        (MicroBatching(micro_batch_size=3),),
        (ActivationCheckpointing(), MicroBatching(micro_batch_size=3)),
    ],
    ids=["checkpointing", "micro-batches", "both"],
)
def test_together_with_others_it_is_as_exact_and_smaller_than_they_are_alone(others):
    together = Plan(strategies=(FusedAttention(), *others))
    small = replace(LARGE, batch=lambda size: torch.randn(size, 8, 64), batch_size=4)
    assert memfit.verify(small, together).largest_error <= EXACT
    for device in ("cpu", "a100-40gb"):
        alone = memfit.predict(LARGE, device=device, plan=Plan(strategies=others))
        planned = memfit.predict(LARGE, device=device, plan=together)
        assert planned.peak_allocated_bytes < alone.peak_allocated_bytes
