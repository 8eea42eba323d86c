"""Sets are streamed only where what is done to their members keeps them apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.conformance import builders
from torch import nn

import memfit
from memfit import Plan
from memfit.errors import JobError, MemfitWarning, StrategyError
from memfit.losses import (
    Kernels,
    cached_embeddings,
    chunked,
    mixture_score_matching,
    softmax_mean,
)
from memfit.strategies.base import Numerics
from memfit.strategies.facts import JobFacts
from memfit.strategies.loss_chunking import LossChunking
from memfit_workloads.wpo_sgm import setup_chunked_training, setup_model_parallel_training

NUM_MEMBERS, WIDTH, NUM_SAMPLES = 12, 4, 5


class Prepared(nn.Module):
    """A linear layer, and what a function makes of it."""

    def __init__(self, work, *parts):
        super().__init__()
        self.linear, self.parts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(parts)
        self.work = work
        self.register_buffer("count", torch.ones(1))

    def forward(self, members):
        return self.work(self, members)


class MixedBack(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient - gradient.mean(0)


def normed(net, x):
    return net.parts[0](net.linear(x))


def hooked(net, x):
    out = net.linear(x)
    out.register_hook(lambda gradient: gradient / gradient.norm())
    return out


def counting(net, x):
    net.count.add_(1.0)
    return net.linear(x) * net.count


MEETING = {
    "batch normalisation": Prepared(normed, nn.BatchNorm1d(WIDTH)),
    "centred": Prepared(lambda net, x: net.linear(x - x.mean(0))),
    "softmax": Prepared(lambda net, x: net.linear(x).softmax(0)),
    "summed on": Prepared(lambda net, x: net.linear(x).cumsum(0)),
    "attention": Prepared(
        lambda net, x: F.scaled_dot_product_attention(net.linear(x)[None], x[None], x[None])[0]
    ),
    "positions": Prepared(lambda net, x: net.linear(x) + torch.arange(len(x))[:, None]),
    "size": Prepared(lambda net, x: net.linear(x) * (2 if len(x) > 6 else 1)),
    "one noise": Prepared(lambda net, x: net.linear(x) + torch.randn(WIDTH)),
    "moved": Prepared(lambda net, x: net.linear(x) + x.roll(1, 0)),
    "hook": Prepared(hooked),
    "backward": Prepared(lambda net, x: MixedBack.apply(net.linear(x))),
    "a buffer": Prepared(counting),
    "spectral norm": nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}
APART = {
    "layers": nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH)),
    "frozen statistics": Prepared(normed, nn.BatchNorm1d(WIDTH)).eval(),
    "layer norm": Prepared(normed, nn.LayerNorm(WIDTH)),
    "group norm": Prepared(normed, nn.GroupNorm(2, WIDTH)),
    "softmax of features": Prepared(lambda net, x: net.linear(x).softmax(1)),
    "a loop": Prepared(lambda net, x: torch.stack([net.linear(row) for row in x])),
    "convolution": Prepared(
        lambda net, x: net.parts[0](x.view(-1, 1, 2, 2)).flatten(1), nn.Conv2d(1, 1, 3, padding=1)
    ),
}


def terms(members, samples):
    values = members[None] * samples[:, None]
    return -(samples[:, None] - members[None]).square().sum(-1), values


def results(net, chunk, terms=terms, tile=None):
    """Return loss and gradients."""
    generator = torch.Generator().manual_seed(0)
    net = net.double()
    members = torch.randn(NUM_MEMBERS, WIDTH, generator=generator, dtype=torch.float64)
    samples = torch.randn(NUM_SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    mean = softmax_mean(
        terms,
        (members.requires_grad_(),),
        (samples.requires_grad_(),),
        prepare=lambda some: (net(some),),
        chunk=chunk,
        tile=tile,
    )
    loss = mean.log_sum_exp.square().sum() + mean.means[0].square().sum()
    wanted = [members, samples, *net.parameters()]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [loss.detach(), *(each for each in found if each is not None)]


@pytest.mark.parametrize("name", MEETING)
@pytest.mark.parametrize("chunk", [5, 3])
def test_what_brings_members_together_is_refused_with_operator_and_line(name, chunk):
    with pytest.raises(JobError, match=r"they meet: \w+ at .*test_set_members\.py:\d+"):
        results(MEETING[name], chunk)


@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("chunk", [5, 4])
def test_what_keeps_members_apart_is_streamed_exactly(name, chunk):
    for whole, streamed in zip(
        results(APART[name], None), results(APART[name], chunk), strict=True
    ):
        torch.testing.assert_close(streamed, whole, rtol=1e-11, atol=1e-12)


def test_terms_are_followed_as_well_along_members_and_samples():
    def over_members(members, samples):
        log_weights, values = terms(members, samples)
        return log_weights - log_weights.mean(1, keepdim=True), values

    def over_samples(members, samples):
        log_weights, values = terms(members, samples)
        return log_weights - log_weights.mean(0), values

    with pytest.raises(JobError, match="they meet"):
        results(nn.Linear(WIDTH, WIDTH), 5, over_members)
    results(nn.Linear(WIDTH, WIDTH), 5, over_samples)
    with pytest.raises(JobError, match="they meet"):
        results(nn.Linear(WIDTH, WIDTH), 5, over_samples, tile=2)


def test_a_network_that_is_put_into_training_is_followed_again():
    net = Prepared(normed, nn.BatchNorm1d(WIDTH)).eval()
    results(net, 5)
    net.train()
    with pytest.raises(JobError, match="batch normalisation"):
        results(net, 5)
    with torch.no_grad(), pytest.raises(JobError, match="batch normalisation"):
        softmax_mean(
            terms,
            (torch.randn(6, WIDTH).double(),),
            (torch.randn(2, WIDTH).double(),),
            prepare=lambda some: (net(some),),
            chunk=2,
        )


def test_what_cannot_be_followed_is_said():
    def looks(net, x):
        return net.linear(x) * (2.0 if float(x.detach().sum()) > 0 else 1.0)

    with pytest.warns(MemfitWarning, match="could not be followed"):
        results(Prepared(looks), 5)


def test_following_changes_nothing():
    net = Prepared(normed, nn.BatchNorm1d(WIDTH))
    before = {name: each.clone() for name, each in net.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(JobError):
        results(net, 5)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert all(each.grad is None for each in net.parameters())


def test_embeddings_are_cached_only_of_encoders_that_keep_samples_apart():
    x = torch.randn(8, WIDTH)
    with pytest.raises(JobError, match="batch normalisation"):
        cached_embeddings(Prepared(normed, nn.BatchNorm1d(WIDTH)), x, chunk=3)
    net = nn.Linear(WIDTH, 2)
    torch.testing.assert_close(cached_embeddings(net, x, chunk=3), net(x))


def factor_network(*norm):
    return nn.Sequential(nn.Linear(WIDTH, 8), *norm, nn.Tanh(), nn.Linear(8, 10))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [40, 20, 5])
def test_chunked_training_refuses_batch_normalisation(chunk):
    centers, samples = torch.randn(60, WIDTH), torch.randn(3, WIDTH)
    net = factor_network(nn.BatchNorm1d(8))
    trainer = setup_chunked_training(net, centers, chunk)
    with pytest.raises(JobError, match=r"native_batch_norm .* statistics over the whole set"):
        trainer.compute_loss(samples)
    net.eval()
    whole = setup_chunked_training(net, centers, len(centers)).compute_loss(samples)
    torch.testing.assert_close(trainer.compute_loss(samples), whole)


def test_centres_on_several_devices_are_refused_where_they_meet():
    class Arguments:
        lr = 0.1

    net = factor_network(nn.BatchNorm1d(8))
    trainer, _ = setup_model_parallel_training(
        net, torch.randn(6, WIDTH), ["cpu", "cpu"], Arguments
    )
    with pytest.raises(JobError, match="batch normalisation"):
        trainer.compute_loss(torch.randn(3, WIDTH))


class Mixture(nn.Module):
    def __init__(self, *norm):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 8), *norm, nn.Linear(8, WIDTH))
        self.register_buffer("centres", torch.randn(2000, WIDTH))

    def kernels(self, centres):
        out = self.net(centres)
        spread = F.softplus(out) + 0.1
        return Kernels(centres, out[:, :, None], spread, spread.log().sum(1))

    def forward(self, samples):
        return mixture_score_matching(self.kernels, self.centres, samples)


def mixture_job(*norm):
    return memfit.Job(
        model=lambda: Mixture(*norm),
        batch=lambda size: torch.randn(size, WIDTH),
        loss=lambda model, batch: model(batch),
        optimizer=builders.sgd,
        batch_size=32,
    )


def known_of(*norm):
    with LossChunking.probe() as found:
        Mixture(*norm)(torch.randn(3, WIDTH))
    return JobFacts(
        batch_size=3,
        device_type="cpu",
        batch_norms=(),
        has_dropout=False,
        block_levels=(),
        optimizer="SGD",
        own=(found(),),
    )


def test_the_planner_is_told_what_streaming_does_to_the_results():
    strategy = LossChunking(num_candidates=500)
    apart, drawing = known_of(nn.LayerNorm(8)), known_of(nn.Dropout(0.5))
    assert strategy.obstacle(apart) is None
    assert strategy.numerics_for(apart) is Numerics.EXACT
    assert strategy.numerics_for(drawing) is Numerics.SAME_IN_LAW
    refused = strategy.obstacle(known_of(nn.BatchNorm1d(8)))
    assert refused is not None
    assert "native_batch_norm at" in refused


@pytest.mark.slow
def test_a_plan_does_not_stream_sets_whose_members_meet():
    with pytest.raises(StrategyError, match=r"candidates meet .*native_batch_norm"):
        memfit.plan(mixture_job(nn.BatchNorm1d(8)), device="cpu", require=["loss-chunking"])


def test_a_plan_by_hand_is_an_error_where_members_meet():
    run = memfit.start(
        mixture_job(nn.BatchNorm1d(8)), Plan(strategies=(LossChunking(num_candidates=500),))
    )
    with pytest.raises(memfit.MemfitError, match="batch normalisation"):
        run.step(torch.randn(32, WIDTH))


def test_code_of_ones_own_is_checked_in_a_block_of_chunks():
    with chunked(500), pytest.raises(JobError, match="they meet"):
        Mixture(nn.BatchNorm1d(8))(torch.randn(3, WIDTH))
