"""Losses that couple the samples of a batch are told from means over them, and named."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from tests.conformance import builders
from torch import nn

from memfit import Job, Total
from memfit.devices import detect
from memfit.session import coupling
from memfit.session.batches import find_layout
from memfit.session.coupling import CouplingKind, find_coupling


def rows(size):
    return torch.randn(size, 6), torch.randn(size, 6)


def counted_rows(size):
    return (*rows(size), torch.randint(1, 9, (size,)), torch.randint(1, 9, (size,)))


def padded_tokens(size):
    ids = torch.randint(0, 11, (size, 9))
    lengths = torch.randint(1, 10, (size, 1))
    return {"ids": ids, "targets": torch.where(torch.arange(9) < lengths, ids, -100)}


def job_with(loss, batch=rows, model=lambda: nn.Linear(6, 6), batch_size=8):
    return Job(model=model, batch=batch, loss=loss, optimizer=builders.sgd, batch_size=batch_size)


def found_in(job):
    return find_coupling(job, find_layout(job))


def errors_of_rows(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(dim=1)


def in_batch_negatives(model, batch):
    left, right = (F.normalize(model(part), dim=-1) for part in batch)
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def standardised_by_hand(model, batch):
    hidden = model(batch[0])
    hidden = (hidden - hidden.mean(0)) / (hidden.std(0) + 1e-5)
    return (hidden - batch[1]).square().mean()


def variance_penalty(model, batch):
    spread = model(batch[0]).var(0, unbiased=False).sum()
    return errors_of_rows(model, batch).mean() + 0.01 * spread


def hardest_half(model, batch):
    errors = errors_of_rows(model, batch)
    return errors.topk(max(1, len(errors) // 2)).values.mean()


def ranking(model, batch):
    scores = model(batch[0]).mean(1)
    return F.softplus(scores[:, None] - scores[None]).mean()


def mixed_up(model, batch):
    order = torch.randperm(len(batch[0]))
    return errors_of_rows(model, (0.3 * batch[0] + 0.7 * batch[0][order], batch[1])).mean()


def mean_over_tokens(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["targets"].flatten())


def weighted_mean(model, batch):
    return (errors_of_rows(model, batch) * batch[2]).sum() / batch[2].sum()


def two_weighted_means(model, batch):
    errors = errors_of_rows(model, batch)
    return sum((errors * weights).sum() / weights.sum() for weights in batch[2:])


def diffusion(model, batch):
    times = torch.randint(0, 100, (len(batch[0]), 1))
    noise = torch.randn_like(batch[0])
    return (model(batch[0] + noise * times / 100) - noise).square().mean()


def dropped_by_function(model, batch):
    return (F.dropout(model(batch[0]), 0.5) - batch[1]).square().mean()


def with_penalty(model, batch):
    return errors_of_rows(model, batch).mean() + model.weight.square().sum()


def gradient_penalty(model, batch):
    inputs = batch[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs).tanh().sum(), inputs, create_graph=True)
    return gradient.square().mean()


def insists_on_fp32(model, batch):
    return (model(batch[0].float()).float() - batch[1]).square().mean()


class Normalised(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6, **settings)

    def forward(self, x):
        return self.norm(self.linear(x))


def zeros():
    layer = nn.Linear(6, 6)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


MEANS = {
    "ragged tokens as a Total": builders.ragged_tokens(),
    "samples in the second dimension": builders.samples_in_second_dimension(),
    "dropout modules": builders.residual_with_dropout(),
    "dropout function": job_with(dropped_by_function),
    "noise drawn in the loss": job_with(diffusion),
    "streamed candidates": builders.many_candidates(),
    "batch normalisation, which is found by itself": builders.batch_normalised(rate=0.3),
    "batch normalisation without running statistics": job_with(
        builders.squared_error, model=lambda: Normalised(track_running_stats=False)
    ),
    "penalty on weights": job_with(with_penalty),
    "gradient inside the loss": job_with(gradient_penalty),
    "fp32 only": job_with(insists_on_fp32),
    "recurrent": job_with(
        lambda model, batch: model(batch)[0].square().mean(),
        lambda size: torch.randn(size, 5, 8),
        lambda: nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True),
    ),
    "attention with dropout": job_with(
        lambda model, batch: model(batch).square().mean(),
        lambda size: torch.randn(size, 5, 8),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    ),
}
COUPLED = {
    "in-batch negatives": job_with(in_batch_negatives),
    "standardised by hand": job_with(standardised_by_hand),
    "variance penalty": job_with(variance_penalty),
    "hardest half": job_with(hardest_half),
    "ranking": job_with(ranking),
    "mixed samples": job_with(mixed_up),
    "batch statistics of a frozen layer": job_with(
        builders.squared_error, model=lambda: Normalised(track_running_stats=False).eval()
    ),
    "a layer that begins at zero": job_with(variance_penalty, model=zeros),
    "samples that are alike": job_with(
        variance_penalty, lambda size: (torch.ones(size, 6), torch.ones(size, 6))
    ),
    "an even number of samples": job_with(
        lambda model, batch: model(batch[0]).view(2, -1, 6).diff(dim=0).square().mean()
    ),
    "a Total with a penalty": job_with(
        lambda model, batch: Total(
            errors_of_rows(model, batch).sum() + model.weight.square().sum(), len(batch[0])
        )
    ),
    "a Total with a constant count": job_with(
        lambda model, batch: Total(errors_of_rows(model, batch).sum(), 1.0)
    ),
}
UNEQUAL = {
    "tokens": (job_with(mean_over_tokens, padded_tokens, builders.TiedLanguageModel), "Total"),
    "weights": (job_with(weighted_mean, counted_rows), "Total"),
    "two of them": (job_with(two_weighted_means, counted_rows), "each in its own way"),
}


@pytest.mark.parametrize("job", MEANS.values(), ids=MEANS)
def test_means_over_samples_stand_in_nobodys_way(job):
    assert found_in(job) is None


@pytest.mark.parametrize("job", COUPLED.values(), ids=COUPLED)
def test_coupled_losses_are_found(job):
    found = found_in(job)
    assert found.kind is CouplingKind.COUPLED
    assert found.forbids_pieces
    assert found.sentence.endswith(".")


@pytest.mark.parametrize(("job", "advice"), UNEQUAL.values(), ids=UNEQUAL)
def test_means_over_unequal_counts_are_named(job, advice):
    found = found_in(job)
    assert found.kind is CouplingKind.UNEQUAL_COUNTS
    assert found.forbids_pieces
    assert advice in found.sentence


def test_a_sample_without_tokens_is_no_coupling():
    def batch(size):
        made = padded_tokens(size)
        made["targets"][1] = -100
        return made

    job = job_with(mean_over_tokens, batch, builders.TiedLanguageModel)
    assert found_in(job).kind is CouplingKind.UNEQUAL_COUNTS


def test_a_sum_is_no_mean():
    found = found_in(job_with(lambda model, batch: errors_of_rows(model, batch).sum()))
    assert found.kind is CouplingKind.SUM
    assert found.forbids_pieces


def test_whole_numbers_that_are_alike_tell_nothing():
    def batch(size):
        return {name: torch.zeros(size, 9, dtype=torch.long) for name in ("ids", "targets")}

    found = found_in(job_with(mean_over_tokens, batch, builders.TiedLanguageModel))
    assert found.kind is CouplingKind.NOT_CHECKED
    assert not found.forbids_pieces
    assert "alike" in found.sentence


def test_a_loss_with_draws_from_elsewhere_is_not_judged():
    drawn = random.SystemRandom()
    found = found_in(
        job_with(lambda model, batch: errors_of_rows(model, batch).mean() * drawn.random())
    )
    assert found.kind is CouplingKind.NOT_CHECKED
    assert "outside torch" in found.sentence


def test_a_step_that_is_too_long_is_not_checked():
    job = job_with(in_batch_negatives)
    found = find_coupling(job, find_layout(job), most_flops=10.0)
    assert found.kind is CouplingKind.NOT_CHECKED
    assert "operations" in found.sentence


def test_a_step_that_does_not_fit_is_not_checked(monkeypatch):
    monkeypatch.setattr(coupling, "free_memory_bytes", lambda: 100)
    found = found_in(job_with(in_batch_negatives))
    assert found.kind is CouplingKind.NOT_CHECKED
    assert "100 B are free" in found.sentence


def test_a_loss_that_cannot_be_recorded_is_not_checked():
    found = found_in(
        job_with(lambda model, batch: model(batch[0]).mean() * len(batch[1].nonzero()))
    )
    assert found.kind is CouplingKind.NOT_CHECKED


def test_random_states_models_and_settings_are_left_alone():
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    found_in(builders.residual_with_dropout())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), torch.get_default_dtype())


def test_free_memory_is_what_the_tightest_limit_leaves(monkeypatch):
    monkeypatch.setattr(detect, "_free_bytes", lambda: 900)
    limits = [(detect.Path("memory.max"),), (detect.Path("memory.current"),)]
    monkeypatch.setattr(detect, "_CONTAINER_LIMIT_FILES", limits[0])
    monkeypatch.setattr(detect, "_CONTAINER_USAGE_FILES", limits[1])
    monkeypatch.setattr(
        detect, "_limit_bytes", lambda path: {"memory.max": 700, "memory.current": 300}[path.name]
    )
    assert detect.free_memory_bytes() == 400
