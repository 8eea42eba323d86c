"""Steps that mix the samples of a batch are told from those that keep them apart, and named."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from tests.conformance import builders
from tests.separation.linear_jobs import found_in, job_with, rows, separation_of
from tests.zoo.small_jobs import mean_square_job
from torch import nn

from memfit import Total
from memfit.analysis.separability import NeverHolds, Outcome
from memfit.separation import separation


def counted_rows(size):
    return (*rows(size), torch.randint(1, 9, (size,)), torch.randint(1, 9, (size,)))


def padded_tokens(size):
    ids = torch.randint(0, 11, (size, 9))
    lengths = torch.randint(1, 10, (size, 1))
    return {"ids": ids, "targets": torch.where(torch.arange(9) < lengths, ids, -100)}


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
NORMALISED = {
    "with running statistics": builders.batch_normalised(rate=0.3),
    "without them": job_with(
        builders.squared_error, model=lambda: Normalised(track_running_stats=False)
    ),
}
COUNTED = {
    "weights": job_with(weighted_mean, counted_rows),
    "two of them": job_with(two_weighted_means, counted_rows),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", MEANS.values(), ids=MEANS)
def test_means_over_samples_are_proved(job):
    assert found_in(job).outcome is Outcome.PROVED


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_losses_are_not_proved_and_but_for_one_refuted(name):
    found = found_in(COUPLED[name])
    assert not found.is_settled
    assert found.is_refuted or name == "an even number of samples"
    assert found.sentence.endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize("job", NORMALISED.values(), ids=NORMALISED)
def test_batch_normalisation_keeps_samples_apart_only_with_given_statistics(job):
    separation = separation_of(job)
    assert separation.of(4).is_refuted
    assert separation.of(4, given_statistics=True).is_proved


def test_statistics_of_what_has_no_samples_are_not_merged_from_pieces():
    """Its rows would count once per piece, and the running variance be corrected for too many."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(7, 6))
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return x @ self.norm(self.rows).T

    job = job_with(lambda model, batch: model(batch[0]).square().mean(), model=Weighted)
    found = separation_of(job).of(4, given_statistics=True)
    assert found.is_refuted
    assert "every piece would count again" in found.sentence


class Doubled(nn.BatchNorm1d):
    """Normalises, and does more in the same forward."""

    def forward(self, x):
        return 2 * super().forward(x)


def fourth_powers(model, batch):
    return model(batch[0]).pow(4).mean()


def normalised_by_hand(model, batch):
    return F.batch_norm(model(batch[0]), None, None, training=True).pow(4).mean()


@pytest.mark.parametrize(
    "job",
    [
        job_with(fourth_powers, model=lambda: nn.Sequential(Normalised(), Doubled(6))),
        job_with(normalised_by_hand, model=Normalised),
    ],
    ids=["a subclass's forward", "a function"],
)
def test_only_torchs_own_layers_are_given_their_statistics(job):
    """Nothing stands in for others: pieces would normalise by themselves, or lose what is done."""
    given = separation_of(job_with(fourth_powers, model=Normalised))
    assert given.of(4, given_statistics=True).is_proved
    assert separation_of(job).of(4, given_statistics=True).is_refuted


@pytest.mark.parametrize("job", COUNTED.values(), ids=COUNTED)
def test_means_over_unequal_counts_are_named(job):
    found = found_in(job)
    assert found.is_refuted
    assert "Total" in found.sentence


@pytest.mark.slow
def test_a_mean_over_tokens_holds_while_none_is_left_out():
    found = found_in(job_with(mean_over_tokens, padded_tokens, builders.TiedLanguageModel))
    assert found.is_proved
    assert found.conditions == (NeverHolds(leaf=1, value=-100),)


def test_a_sum_is_no_mean():
    found = found_in(job_with(lambda model, batch: errors_of_rows(model, batch).sum()))
    assert found.is_refuted
    assert "sum over samples" in found.sentence


def test_refusals_name_operator_and_line():
    found = found_in(job_with(hardest_half))
    assert found.culprit.operator == "topk"
    assert "topk at separation/test_separation.py:" in found.sentence


@pytest.mark.slow
def test_the_contents_of_a_batch_do_not_matter():
    def batch(size):
        return {name: torch.zeros(size, 9, dtype=torch.long) for name in ("ids", "targets")}

    assert found_in(job_with(mean_over_tokens, batch, builders.TiedLanguageModel)).is_proved


@pytest.mark.slow
def test_a_batch_function_that_looks_at_values_is_run_on_its_own_tensors():
    widths = torch.tensor([6, 6])

    def batch(size):
        return torch.randn(size, int(widths.max())), torch.randn(size, 6)

    found = found_in(job_with(lambda model, batch: errors_of_rows(model, batch).mean(), batch))
    assert found.is_proved, found


def test_a_loss_that_cannot_be_recorded_is_not_known():
    found = found_in(
        job_with(lambda model, batch: model(batch[0]).mean() * len(batch[1].nonzero()))
    )
    assert found.outcome is Outcome.NOT_KNOWN
    assert "cannot be recorded" in found.sentence


@pytest.mark.slow
def test_random_states_models_and_settings_are_left_alone():
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    found_in(builders.residual_with_dropout())
    after = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_few_samples_that_refute_every_size_are_looked_at_once(monkeypatch):
    job = job_with(hardest_half, batch_size=64)
    sizes = []
    record = separation.record_step

    def noting(job, layout, size, **settings):
        sizes.append(size)
        return record(job, layout, size, **settings)

    monkeypatch.setattr(separation, "record_step", noting)
    found = separation_of(job)
    assert all(found.of(size).is_refuted for size in (32, 16, 8, 4, 2, 1))
    assert sorted(sizes) == [2, 64]


@pytest.mark.slow
def test_a_model_copied_from_a_template_with_buffers_is_followed():
    template = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    job = mean_square_job(lambda: copy.deepcopy(template), 4, batch_size=8)
    assert found_in(job).is_proved


class Positioned(nn.Module):
    """Looks for packed sequences by its positions, as decoders of transformers do.

    The positions of few samples have values while a step is recorded, and those of many do not.
    """

    def __init__(self, length: int, weigh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(length, 2)
        self.weigh = weigh

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(values.shape[1])
        of_all = positions.unsqueeze(0).expand(len(values), -1)
        breaks = torch.diff(of_all, prepend=of_all[:, :1] - 1, dim=-1) != 1
        is_first = (breaks.cumsum(-1) == 0).float()
        weights = self.weigh(positions.unsqueeze(0), of_all)
        return self.embedding(of_all).sum(-1) * is_first * values * weights


def positioned_job(length, weigh):
    def batch(size):
        return torch.randn(size, length)

    return job_with(
        lambda model, batch: model(batch).mean(),
        batch,
        model=lambda: Positioned(length, weigh),
        batch_size=8,
    )


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096])
def test_positions_whose_values_are_known_of_few_samples_alone_are_followed(length):
    separation = separation_of(positioned_job(length, lambda one, _: one + 1))
    assert all(separation.of(size).is_proved for size in (4, 2, 1))


@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_what_positions_of_all_samples_add_up_to_is_no_constant(length):
    separation = separation_of(positioned_job(length, lambda _, of_all: of_all.sum(0) + 1))
    assert not any(separation.of(size).is_proved for size in (4, 2, 1))


def test_of_a_long_step_one_size_tells_where_samples_meet(monkeypatch):
    monkeypatch.setattr(separation, "_MANY_CALLS", 0)
    looked_into = separation_of(job_with(in_batch_negatives))
    found = looked_into.of(4)
    assert found.is_refuted
    recorded = dict(looked_into._recordings)
    assert [looked_into.of(size) for size in (2, 1)] == [found, found]
    assert looked_into._recordings == recorded
