"""Cached gradients together with other strategies, on models of transformers, and their memory."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.coupled_jobs import (
    EXACT,
    WIDTH,
    Encoder,
    contrasted,
    info_nce,
    job_of,
    plan_of,
    two_views,
    whitening,
)
from tests.zoo.installed_transformers import part_of_transformers
from tests.zoo.small_transformers import config_of
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import MemfitWarning, NotSeparableError
from memfit.strategies import build_strategy

# --- Together with others ---


class Blocks(nn.Module):
    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(rate) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.dropout = nn.Dropout(rate)

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


OTHERS = {
    "optimizer-in-backward": {},
    "activation-checkpointing": {},
    "tiling": {"num_tiles": 3},
    "optimizer-implementation": {"implementation": "foreach"},
    "activation-offload": {"to": "disk", "min_tensor_bytes": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_keep_their_promises_beside_it(name):
    other = build_strategy(name, OTHERS[name])
    job = job_of(Blocks, contrasted, lambda n: (torch.randn(n, 3, WIDTH), torch.randn(n, 3, WIDTH)))
    flat = job_of(Blocks, contrasted, two_views)
    for some_job in (flat,) if name != "tiling" else (job_of(Blocks, tokens, job.batch),):
        found = memfit.verify(some_job, plan_of(4, others=(other,)))
        assert found.keeps_promise
        assert found.deciding_error <= EXACT


class Looking(Encoder):
    """Looks at values, so that it cannot be followed."""

    def forward(self, x):
        return super().forward(x) * (1.0 if float(x.detach()[0, 0]) < 1e6 else 0.5)


class _CentredBackward(torch.autograd.Function):
    """Takes the rows' mean off their gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


class MixingBackward(Looking):
    def forward(self, x):
        return _CentredBackward.apply(super().forward(x))


IN_BACKWARD = pytest.mark.parametrize("others", [(), ("optimizer-in-backward",)])


@pytest.mark.slow
@IN_BACKWARD
def test_what_cannot_be_followed_is_tried_once(others):
    job = job_of(Looking, contrasted, two_views)
    plan = plan_of(4, others=tuple(build_strategy(name, {}) for name in others))
    with memfit.start(job, plan) as run, memfit.start(job) as plain:
        plain.model.load_state_dict(run.model.state_dict())
        batches = [job.batch(14) for _ in range(2)]
        with pytest.warns(MemfitWarning, match=r"its gradients are those of cached-gradients\(2\)"):
            run.step(batches[0])
        run.step(batches[1])  # which would warn again if it were tried again
        for batch in batches:
            plain.step(batch)
        for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@IN_BACKWARD
def test_a_backward_that_mixes_rows_is_seen_when_it_is_tried(others):
    """Its forward does not, so results of fewer rows and losses are the same."""
    job = job_of(MixingBackward, contrasted, two_views)
    plan = plan_of(4, others=tuple(build_strategy(name, {}) for name in others))
    with memfit.start(job, plan) as run:
        before = [parameter.detach().clone() for parameter in run.model.parameters()]
        with pytest.raises(NotSeparableError, match="its gradients are not those of"):
            run.step(job.batch(14))
        assert all(map(torch.equal, run.model.parameters(), before))


def tokens(model, batch):
    return info_nce(model(batch[0]).mean(1), model(batch[1]).mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 5e-2), ("fp16", 5e-2)])
def test_autocast_is_the_same_inside(name, tolerance):
    plan = plan_of(4, others=(build_strategy(name, {}),))
    job = job_of(lambda: Blocks(0.0), contrasted, two_views, 30)
    found = memfit.verify(job, plan)
    assert found.keeps_promise
    alone = memfit.verify(job, Plan(strategies=(build_strategy(name, {}),)))
    assert found.gradient_error <= max(tolerance, 1.5 * alone.gradient_error)


# --- Models of transformers ---


def bert(rate: float):
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), rate)
    return part_of_transformers("BertModel")(config_of("bert", **rates))


def texts(size: int):
    lengths = torch.randint(3, 9, (size, 1))
    return {
        side: {
            "input_ids": torch.randint(1, 50, (size, 8)),
            "attention_mask": (torch.arange(8) < lengths).long(),
        }
        for side in ("query", "document")
    }


def pooled(model, batch):
    found = [
        model(**batch[side], output_hidden_states=True, return_dict=True)
        for side in ("query", "document")
    ]
    first, second = (each.last_hidden_state[:, 0] for each in found)
    assert found[0].hidden_states[-1] is found[0].last_hidden_state
    return info_nce(first, second) + found[0].pooler_output.std(0).sum()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_bert_encodes_queries_and_documents_in_pieces(rate):
    found = memfit.verify(job_of(lambda: bert(rate), pooled, texts, 10), plan_of(3))
    assert found.keeps_promise
    assert found.deciding_error <= EXACT


@pytest.mark.slow
def test_a_decoder_that_would_keep_a_cache_is_an_encoder_like_any_other():
    def loss(model, batch):
        sides = (model(**batch[side]).last_hidden_state[:, -1] for side in batch)
        return info_nce(*sides)

    job = job_of(lambda: part_of_transformers("GPT2Model")(config_of("gpt2")), loss, texts, 10)
    found = memfit.verify(job, plan_of(3))
    assert found.keeps_promise
    assert found.deciding_error <= EXACT


# --- Memory ---


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8)
        )

    def forward(self, x):
        return self.body(x)


def of_both(model, batch):
    return whitening(model(batch[0])) + whitening(model(batch[1]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [contrasted, of_both])
def test_the_predicted_peak_is_the_measured_one(loss):
    job = job_of(Wide, loss, two_views, 1024)
    predicted = memfit.predict(job, plan=plan_of(32))
    measured = memfit.measure(job, plan_of(32))
    assert predicted.peak_allocated_bytes == pytest.approx(
        measured.peak_allocated_bytes, rel=1e-3, abs=64
    )


@pytest.mark.slow
def test_what_is_kept_between_forward_and_backward_is_that_of_no_piece():
    job = job_of(Wide, of_both, two_views, 1024)
    planned, plain = memfit.predict(job, plan=plan_of(32)), memfit.predict(job)
    assert planned.peak_allocated_bytes < 0.35 * plain.peak_allocated_bytes
    saved = planned.by_category["saved activations"]
    assert 0 < saved < 0.1 * plain.by_category["saved activations"]


@pytest.mark.slow
def test_what_is_found_out_about_networks_of_convolutions_leaves_no_stand_ins_behind():
    """Convolution tiling follows modules with other members in them; 64 KiB are watched."""

    def network():
        layers = nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()
        return nn.Sequential(*layers, nn.AvgPool2d(12))

    job = memfit.Job(
        model=network,
        batch=lambda size: torch.randn(size, 3, 16, 16),
        loss=lambda model, batch: model(batch).flatten(1).cov().square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    plan = Plan(strategies=(build_strategy("cached-gradients", {"micro_batch_size": 2}),))
    predicted = memfit.predict(job, "cpu", plan)
    assert predicted.peak_allocated_bytes == memfit.measure(job, plan).peak_allocated_bytes
