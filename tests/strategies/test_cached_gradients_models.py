"""Which models cached gradients take as they are, which they refuse, and what they leave behind."""

from __future__ import annotations

import pytest
import torch
from tests.zoo.coupled_jobs import (
    WIDTH,
    Encoder,
    assert_exact,
    contrasted,
    info_nce,
    job_of,
    plan_of,
    samples,
    two_views,
    whitened,
    whitening,
)
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.errors import StrategyError
from memfit.prediction.recording import record


def assert_refused(job: Job, plan: Plan, fragment: str) -> None:
    with pytest.raises(StrategyError, match=fragment):
        memfit.start(job, plan)


def assert_refused_in_step(job: Job, plan: Plan, fragment: str) -> None:
    run = memfit.start(job, plan)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    with pytest.raises(StrategyError, match=fragment):
        run.step(job.batch(job.batch_size))
    after = run.model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(parameter.grad is None for parameter in run.model.parameters())


# --- Parameters ---


class Tied(nn.Module):
    """The loss uses the embedding as well as the encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.body = Encoder()

    def forward(self, ids):
        return self.body(self.embedding(ids).mean(1))


@pytest.mark.slow
def test_a_weight_may_be_used_by_the_encoder_and_by_the_loss():
    def loss(model, ids):
        z = model(ids)
        centres = model.body(model.embedding.weight[:5])
        return whitening(z) + info_nce(z[:5], centres) + model.embedding.weight.square().mean()

    assert_exact(job_of(Tied, loss, lambda n: torch.randint(0, 20, (n, 3))), plan_of(4))


@pytest.mark.slow
def test_a_weight_that_is_only_referred_to_gets_its_gradient():
    class Borrowing(nn.Module):
        def __init__(self, lender) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, 6)
            self.lenders = [lender]  # a list hides it from torch

        def forward(self, x):
            return self.own(x) @ self.lenders[0].weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender = nn.Linear(6, 6)
            self.encoder = Borrowing(self.lender)

    def loss(model, batch):
        return whitening(model.encoder(batch))

    for names in ((), ("encoder",)):
        assert_exact(job_of(Model, loss), plan_of(4, *names))


@pytest.mark.slow
def test_hooks_on_parameters_fire_once_with_the_whole_gradient():
    """A hook that is not linear gives something else if it sees the gradients of pieces."""
    calls = []

    def signed(parameter):
        parameter.grad.sign_()

    def model():
        made = Encoder()
        made.first.weight.register_hook(lambda gradient: calls.append(1) or gradient.clamp(-1e-3))
        made.last.weight.register_post_accumulate_grad_hook(signed)
        return made

    job = job_of(model, contrasted, two_views)
    run = memfit.start(job, plan_of(4))
    run.step(job.batch(14))
    calls.clear()
    run.step(job.batch(14))
    assert len(calls) == 1

    def gradients(plan):
        torch.manual_seed(0)
        run = memfit.start(job, plan)
        run.step(tuple(part for part in two_views(14)))
        return [value.clone() for value in run.model.state_dict().values()]

    for planned, plain in zip(gradients(plan_of(4)), gradients(Plan()), strict=True):
        assert torch.allclose(planned, plain, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["first", "last"])
def test_parameters_may_be_frozen(frozen):
    def model():
        made = Encoder()
        getattr(made, frozen).requires_grad_(False)
        return made

    assert_exact(job_of(model), plan_of(4))
    run = memfit.start(job_of(model), plan_of(4))
    before = getattr(run.model, frozen).weight.clone()
    run.step(samples(14))
    assert torch.equal(before, getattr(run.model, frozen).weight)


@pytest.mark.slow
def test_a_frozen_encoder_between_trained_ones_passes_gradients_on():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.adapter = nn.Linear(WIDTH, WIDTH)
            self.encoder = Encoder().requires_grad_(False)

    def loss(model, batch):
        return whitening(model.encoder(model.adapter(batch)))

    for names in ((), ("encoder",), ("adapter", "encoder")):
        assert_exact(job_of(Model, loss), plan_of(4, *names))


@pytest.mark.slow
def test_parameters_that_a_step_does_not_use_keep_no_gradient():
    class Model(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)

    assert_exact(job_of(Model), plan_of(4))
    session_parameters = {}

    def loss(model, batch):
        session_parameters["unused"] = model.unused.weight
        return whitened(model, batch)

    run = memfit.start(job_of(Model, loss), plan_of(4))
    before = run.model.unused.weight.clone()
    run.step(samples(14))
    assert torch.equal(before, session_parameters["unused"])


@pytest.mark.slow
def test_the_global_norm_is_clipped_once_all_gradients_are_there():
    assert_exact(job_of(Encoder, contrasted, two_views, clip=0.01), plan_of(4))


# --- Where representations end ---


class InsideModel(nn.Module):
    """The model gives the loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, batch):
        z = self.encoder(batch)
        return whitening(z) * self.log_scale.exp()


@pytest.mark.slow
def test_a_model_that_gives_the_loss_is_looked_into():
    job = job_of(InsideModel, lambda model, batch: model(batch))
    assert_exact(job, plan_of(4))
    plain = memfit.predict(job)
    assert memfit.predict(job, plan=plan_of(4)).num_flops > plain.num_flops, "nothing was cut"


class WithLoss(InsideModel):
    def forward(self, batch):
        z = self.encoder(batch)
        return {"loss": whitening(z) * self.log_scale.exp(), "z": z}


@pytest.mark.slow
def test_a_result_without_rows_beside_others_is_not_taken_for_one_of_each_piece():
    def loss(model, batch):
        return model(batch)["loss"]

    assert_exact(job_of(WithLoss, loss), plan_of(4))
    assert_refused(job_of(WithLoss, loss), plan_of(4, ""), "the model mixes rows of the batch: pow")


def test_a_loss_among_results_is_seen_by_its_values_where_it_cannot_be_followed():
    class Looking(WithLoss):
        def forward(self, batch):
            self.largest = float(batch.amax())  # nobody can follow what depends on that
            return super().forward(batch)

    def loss(model, batch):
        return model(batch)["loss"]

    fragment = "has no rows and differs from piece"
    assert_refused_in_step(job_of(Looking, loss), plan_of(4, ""), fragment)


@pytest.mark.slow
def test_a_result_without_rows_may_be_the_same_for_all_pieces():
    class WithScale(InsideModel):
        def forward(self, batch):
            return self.encoder(batch), self.log_scale.exp()

    def loss(model, batch):
        z, scale = model(batch)
        return whitening(z * scale)

    for names in ((), ("",)):
        assert_exact(job_of(WithScale, loss), plan_of(4, *names))


@pytest.mark.slow
def test_a_momentum_encoder_without_gradients_is_left_alone():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = Encoder(), Encoder().requires_grad_(False)

    def loss(model, batch):
        with torch.no_grad():
            targets = model.target(batch[1])
        return info_nce(model.online(batch[0]), targets)

    assert_exact(job_of(Model, loss, two_views), plan_of(4))


class Pairs(nn.Module):
    """Mixes the rows of a batch, in a result that has one row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x):
        z = self.encoder(x)
        return (z @ z.T).softmax(1) @ z


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_a_module_that_mixes_rows_is_refused_by_name_and_looked_into_without(size):
    refusal = "the model mixes rows of the batch: mm at "
    assert_refused(job_of(Pairs), plan_of(size, ""), refusal)
    assert_exact(job_of(Pairs), plan_of(size))
    assert_exact(job_of(Pairs), plan_of(size, "encoder"))


class _Mean(Encoder):
    def forward(self, x):
        z = super().forward(x)
        return z - z.mean(0)


class _Largest(Encoder):
    def forward(self, x):
        z = super().forward(x)
        return z / z.detach().abs().max()


class _FirstRow(Encoder):
    def forward(self, x):
        return super().forward(x - x[:1])


class _Neighbour(Encoder):
    def forward(self, x):
        return super().forward(x + 1e-2 * x.roll(1, 0))


class _Count(Encoder):
    def forward(self, x):
        return super().forward(x) / len(x)


class _Order(Encoder):
    def forward(self, x):
        return super().forward(x).sort(dim=0).values


_MIXING = [_Mean, _Largest, _FirstRow, _Neighbour, _Count, _Order]


@pytest.mark.slow
@pytest.mark.parametrize("model", _MIXING)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_what_one_row_takes_from_others_is_seen(model, size):
    assert_refused(job_of(model), plan_of(size, ""), "the model mixes rows of the batch")
    assert_exact(job_of(model), plan_of(size))


@pytest.mark.parametrize("names", [(), ("",)], ids=["found", "named"])
@pytest.mark.parametrize("model", _MIXING)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_what_cannot_be_followed_is_seen_by_its_values(model, size, names):
    class Looking(model):
        def forward(self, x):
            return super().forward(x) * (1.0 if float(x.detach()[0, 0]) < 1e6 else 0.5)

    fragment = "the model cannot be run in pieces of its rows: it mixes rows"
    assert_refused_in_step(job_of(Looking), plan_of(size, *names), fragment)


@pytest.mark.slow
def test_rounding_is_not_taken_for_mixing():
    class Deep(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*(nn.Sequential(nn.Linear(96, 96), nn.LeakyReLU()) for _ in range(30)))

    job = job_of(Deep, whitened, lambda n: torch.randn(n, 96), 40)
    for size in (2, 5, 16, 33):
        memfit.start(job, plan_of(size)).step(job.batch(40))


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        (("nothing",), "no module named 'nothing'"),
        (("", "first"), "first lies inside the model"),
    ],
)
def test_names_that_make_no_sense_are_refused(names, fragment):
    with pytest.raises(StrategyError, match=fragment):
        memfit.start(job_of(Encoder), plan_of(4, *names))


@pytest.mark.slow
def test_batch_normalisation_is_refused_by_name_where_it_lies_inside():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.head = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    def loss(model, batch):
        return whitening(model.head(model.encoder(batch)))

    refusal = r"statistics over the whole batch \(head.1\)"
    assert_refused(job_of(Model, loss), plan_of(4, "head"), refusal)
    assert_exact(job_of(Model, loss), plan_of(4))
    assert_exact(job_of(Model, loss), plan_of(4, "encoder"))


def test_a_step_in_which_nothing_can_be_cut_is_refused():
    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH))

        def forward(self, x):
            return whitening(x @ self.weight)

    job = job_of(Coupling, lambda model, batch: model(batch))
    assert_refused_in_step(job, plan_of(4), "no call of a module could be run in pieces")
    with pytest.raises(StrategyError, match="the model: none of its results has the rows"):
        record(job, plan_of(4))


def test_a_named_module_without_rows_is_refused():
    def loss(model, batch):
        return whitening(model.last(model.first(batch).mean(0).tanh()[None] * torch.ones(3, 1)))

    assert_refused_in_step(job_of(Encoder, loss), plan_of(4, "last"), "no argument of it has rows")


@pytest.mark.slow
def test_a_named_module_may_also_be_called_on_other_things():
    def loss(model, batch):
        return info_nce(model(batch), model(batch)) + model(torch.eye(WIDTH)[:5]).square().mean()

    assert_exact(job_of(Encoder, loss), plan_of(4, ""))


@pytest.mark.parametrize("names", [(), ("",)])
def test_arguments_that_are_changed_in_place_are_not_changed_twice(names):
    class Centring(Encoder):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    def loss(model, batch):
        return whitening(model(batch.clone()))

    if names:
        assert_refused_in_step(
            job_of(Centring, loss), plan_of(4, *names), "changes its arguments in place"
        )
    else:
        assert_exact(job_of(Centring, loss), plan_of(4))


@pytest.mark.slow
def test_hooks_on_gradients_inside_would_see_pieces():
    def model():
        made = Encoder()
        made.last.register_full_backward_hook(lambda module, gave, got: None)
        return made

    assert_refused_in_step(
        job_of(model), plan_of(4, ""), "hooks of its last would see the gradients"
    )
    assert_exact(job_of(model), plan_of(4))


def test_arguments_with_different_numbers_of_rows_are_refused():
    class Model(Encoder):
        def forward(self, x, y):
            return super().forward(x), super().forward(y)

    def loss(model, batch):
        x, y = model(batch.clone(), torch.cat([batch, batch]))
        return whitening(x) + whitening(y)

    assert_refused_in_step(job_of(Model, loss), plan_of(4, ""), "14 and 28 rows")


@pytest.mark.slow
def test_gradients_of_gradients_are_those_of_the_whole_batch():
    def loss(model, batch):
        batch = batch.clone().requires_grad_()
        value = whitened(model, batch)
        (slope,) = torch.autograd.grad(value, batch, create_graph=True)
        return value + slope.square().sum()

    assert_exact(job_of(Encoder, loss), plan_of(4))


# --- Effects ---


@pytest.mark.slow
def test_spectral_norm_takes_one_power_iteration_a_step():
    def model():
        made = Encoder()
        nn.utils.parametrizations.spectral_norm(made.first)
        return made

    assert_exact(job_of(model), plan_of(4))
    assert_exact(job_of(model), plan_of(1, ""))


@pytest.mark.slow
def test_weight_norm_on_a_representation_itself_gets_its_gradients():
    def model():
        return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 6))

    assert_exact(job_of(model), plan_of(4))


@pytest.mark.slow
def test_a_counter_counts_calls_not_pieces():
    class Counting(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("num_calls", torch.zeros(()))

        def forward(self, x):
            self.num_calls += 1
            return super().forward(x)

    job = job_of(Counting, contrasted, two_views)
    assert_exact(job, plan_of(4))
    run = memfit.start(job, plan_of(4))
    kept = run.model.num_calls
    for _ in range(3):
        run.step(two_views(14))
    assert float(run.model.num_calls) == 6.0
    assert run.model.num_calls is kept


@pytest.mark.slow
def test_a_module_with_a_buffer_that_takes_in_rows_is_not_cut_and_those_inside_it_are():
    class Codebook(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            z = super().forward(x)
            self.mean.lerp_(z.detach().mean(0), 0.1)
            return z

    assert_exact(job_of(Codebook), plan_of(4))
    assert_refused(job_of(Codebook), plan_of(4, ""), "the model mixes rows of the batch: lerp at")


def test_running_statistics_are_refused_though_rows_are_normalised_apart():
    def model():
        return nn.InstanceNorm1d(3, track_running_stats=True, affine=True)

    job = job_of(model, in_rows, lambda n: torch.randn(n, 3, 5))
    assert_refused_in_step(job, plan_of(4), "depends on the rows")


def in_rows(model, batch):
    return whitening(model(batch).flatten(1))


# --- Where rows lie ---


class Steps(nn.Module):
    """Steps come first, samples second."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, 6)

    def forward(self, x, table=None):
        z = self.last(x).tanh()
        return z if table is None else (z @ table.T).softmax(-1) @ table


def of_steps(model, batch):
    return whitening(model(batch).mean(0))


@pytest.mark.slow
def test_samples_in_the_second_dimension_are_proved_where_they_are_cut():
    plan = plan_of(4, "")
    job = job_of(Steps, of_steps, lambda n: torch.randn(5, n, WIDTH))
    assert memfit.predict(job, plan=plan).numerics == "exact"
    assert_exact(job, plan)


@pytest.mark.slow
def test_a_table_of_as_many_rows_as_the_batch_is_not_taken_for_samples_in_silence():
    table = torch.randn(14, 6)

    def loss(model, batch):
        return whitening(model(batch, table.to(batch.dtype)))

    job = job_of(Steps, loss)
    assert memfit.predict(job, plan=plan_of(4, "")).numerics == "unproved"
    assert_refused_in_step(job, plan_of(4, ""), "it mixes rows")
