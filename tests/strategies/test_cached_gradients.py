"""Representations computed in pieces give the gradients of the whole batch, for losses of any kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memfit
from memfit import Job, Plan
from memfit.errors import NothingToVerifyError, StrategyError
from memfit.strategies.cached_gradients import CachedGradients
from memfit.strategies.micro_batching import MicroBatching

EXACT = 1e-10
WIDTH = 12


class Encoder(nn.Module):
    """An MLP whose outputs have unit length."""

    def __init__(self, width: int = WIDTH, out: int = 6, rate: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(width, 20), nn.GELU(), nn.Dropout(rate), nn.LayerNorm(20), nn.Linear(20, out)
        )

    def forward(self, x):
        return F.normalize(self.body(x), dim=-1)


class Sequences(nn.Module):
    """A transformer over steps, without dropout unless asked for, and an average over steps."""

    def __init__(self, rate: float = 0.0, *, batch_first: bool = True) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 24, dropout=rate, batch_first=batch_first, norm_first=True
        )
        self.head = nn.Linear(WIDTH, 6)
        self.steps = 1 if batch_first else 0

    def forward(self, x):
        return self.head(self.layer(x).mean(dim=self.steps))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def job_of(model, batch, loss, batch_size: int = 14) -> Job:
    return Job(model=model, batch=batch, loss=loss, optimizer=sgd, batch_size=batch_size)


def plan_of(size: int = 4, *representations: str, others=()) -> Plan:
    cut = CachedGradients(micro_batch_size=size, representations=representations)
    return Plan(strategies=(*others, cut))


def samples(size: int):
    return torch.randn(size, WIDTH)


def two_views(size: int):
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def labelled(size: int):
    return torch.randn(size, WIDTH), torch.arange(size) % 4


# --- Losses, each of which couples the samples of a batch ---


def info_nce(queries, documents):
    return F.cross_entropy(queries @ documents.T / 0.2, torch.arange(len(queries)))


def supervised_contrastive(z, labels):
    scores = z @ z.T / 0.3
    itself = torch.eye(len(z), dtype=torch.bool)
    logs = scores - scores.masked_fill(itself, -torch.inf).logsumexp(1, keepdim=True)
    positives = (labels[:, None] == labels) & ~itself
    return -((logs * positives).sum(1) / positives.sum(1).clamp(min=1)).mean()


def batch_hard_triplet(z, labels):
    distances = (z[:, None] - z).square().sum(-1)
    same = labels[:, None] == labels
    furthest = distances.masked_fill(~same, -torch.inf).amax(1)
    nearest = distances.masked_fill(same, torch.inf).amin(1)
    return F.relu(furthest - nearest + 0.5).mean()


def barlow_twins(first, second):
    first, second = ((z - z.mean(0)) / z.std(0) for z in (first, second))
    correlation = first.T @ second / len(first)
    return (correlation - torch.eye(len(correlation))).square().sum()


def vicreg(first, second):
    def spread(z):
        centred = z - z.mean(0)
        covariance = centred.T @ centred / (len(z) - 1)
        off_diagonal = covariance - covariance.diagonal().diag()
        return F.relu(1.0 - (z.var(0) + 1e-4).sqrt()).mean() + off_diagonal.square().sum()

    return F.mse_loss(first, second) + spread(first) + spread(second)


def mmd(first, second):
    def kernel(a, b):
        return torch.exp(-(a[:, None] - b).square().sum(-1)).mean()

    return kernel(first, first) + kernel(second, second) - 2 * kernel(first, second)


def of_labelled(loss):
    return lambda model, batch: loss(model(batch[0]), batch[1])


def of_views(loss):
    return lambda model, batch: loss(model(batch[0]), model(batch[1]))


def simclr(model, batch):
    """Return both views to the model at once, so that a call has twice as many rows as the batch."""
    z = model(torch.cat(batch))
    labels = torch.arange(len(batch[0])).repeat(2)
    return supervised_contrastive(z, labels)


def hardest(model, batch):
    """Train on the hardest quarter of the samples."""
    inputs, labels = batch
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    return losses.topk(len(losses) // 4).values.mean()


class TwoTowers(nn.Module):
    """Two encoders and a temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Encoder(), Sequences()
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images, texts):
        images, texts = self.image(images), F.normalize(self.text(texts), dim=-1)
        return self.log_scale.exp() * images @ texts.T


def clip(model, batch):
    scores = model(*batch)
    targets = torch.arange(len(scores))
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def images_and_texts(size: int):
    return torch.randn(size, WIDTH), torch.randn(size, 5, WIDTH)


def dice(model, batch):
    images, masks = batch
    chances = model(images).sigmoid()
    return 1 - (2 * (chances * masks).sum() + 1) / (chances.sum() + masks.sum() + 1)


def images_and_masks(size: int):
    return torch.randn(size, 2, 9, 9), (torch.rand(size, 1, 9, 9) > 0.6).float()


def segmenter():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU(), nn.Conv2d(6, 1, 3, padding=1)
    )


COUPLED = {
    "supervised-contrastive": job_of(Encoder, labelled, of_labelled(supervised_contrastive)),
    "info-nce": job_of(Encoder, two_views, of_views(info_nce)),
    "views-at-once": job_of(Encoder, two_views, simclr),
    "clip": job_of(TwoTowers, images_and_texts, clip),
    "batch-hard-triplet": job_of(Encoder, labelled, of_labelled(batch_hard_triplet)),
    "barlow-twins": job_of(Encoder, two_views, of_views(barlow_twins)),
    "vicreg": job_of(Encoder, two_views, of_views(vicreg)),
    "hardest-quarter": job_of(Encoder, labelled, hardest),
    "dice": job_of(segmenter, images_and_masks, dice),
    "mmd": job_of(Encoder, two_views, of_views(mmd)),
}


@pytest.mark.parametrize("size", [1, 4, 7, 13])
@pytest.mark.parametrize("job", COUPLED.values(), ids=COUPLED.keys())
def test_gradients_are_those_of_the_whole_batch(job, size):
    found = memfit.verify(job, plan_of(size))
    assert found.numerics == found.earned == "exact"
    assert found.largest_error <= EXACT


@pytest.mark.parametrize("name", ["info-nce", "clip", "dice", "views-at-once"])
def test_the_losses_do_couple_samples(name):
    """Micro-batches of the same losses train something else, so the tests above could fail."""
    job = COUPLED[name]
    with pytest.raises(StrategyError, match="couples the samples of a batch"):
        memfit.start(job, Plan(strategies=(MicroBatching(micro_batch_size=7),)))
    torch.manual_seed(0)
    model, batch = job.model(), job.batch(job.batch_size)
    halves = [tuple(part.chunk(2)[number] for part in batch) for number in (0, 1)]
    whole = gradients_of(model, job.loss(model, batch))
    pieces = gradients_of(model, sum(job.loss(model, half) for half in halves) / 2)
    assert float((whole - pieces).norm() / whole.norm()) > 1e-3


def gradients_of(model, loss) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


def step_of(job: Job, plan: Plan, batch, seed: int = 3) -> dict[str, torch.Tensor]:
    """Run one step; return the parameters after it."""
    torch.manual_seed(0)
    run = memfit.start(job, plan)
    torch.manual_seed(seed)
    run.step(batch)
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.close()
    return state


def assert_same(first, second, tolerance: float = EXACT) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.allclose(value, second[name], rtol=tolerance, atol=tolerance), name


def doubled(model):
    return lambda: model().double()


@pytest.mark.parametrize("loss", ["info-nce", "supervised-contrastive"])
def test_with_dropout_they_are_those_of_one_pass_with_the_same_masks(loss):
    """The reference runs the pieces one after the other with all that backward needs."""
    of_batch = {
        "info-nce": lambda z, batch: info_nce(*z.chunk(2)),
        "supervised-contrastive": lambda z, batch: supervised_contrastive(z, batch[1]),
    }[loss]

    def inputs(batch):
        return torch.cat(batch) if loss == "info-nce" else batch[0]

    def planned(model, batch):
        return of_batch(model(inputs(batch)), batch)

    def reference(model, batch):
        return of_batch(torch.cat([model(piece) for piece in inputs(batch).split(5)]), batch)

    batch_of = two_views if loss == "info-nce" else labelled
    batch = tuple(part.double() if part.is_floating_point() else part for part in batch_of(17))
    model = doubled(lambda: Encoder(rate=0.4))
    cut = step_of(job_of(model, batch_of, planned, 17), plan_of(5), batch)
    expected = step_of(job_of(model, batch_of, reference, 17), Plan(), batch)
    assert_same(cut, expected, 1e-12)


def test_dropout_makes_it_same_in_law():
    job = job_of(lambda: Sequences(rate=0.3), lambda n: torch.randn(n, 5, WIDTH), whitened)
    found = memfit.verify(job, plan_of(3))
    assert found.numerics == found.earned == "same-in-law"
    assert found.stilled_error <= EXACT
    assert found.slope_error <= 1e-4


def whitened(model, batch):
    z = model(batch)
    return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()


@pytest.mark.filterwarnings("ignore:cached-gradients.* could not be proved")
@pytest.mark.parametrize("source", ["numpy", "random", "generator"])
def test_masks_from_elsewhere_are_drawn_again(source):
    import random

    import numpy as np

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, 6)
            self.generator = torch.Generator().manual_seed(5)

        def forward(self, x):
            hidden = self.first(x).tanh()
            if source == "numpy":
                mask = torch.from_numpy(np.random.rand(*hidden.shape) > 0.4)
            elif source == "random":
                mask = torch.tensor([random.random() for _ in range(16)]) > 0.4
            else:
                mask = torch.rand(hidden.shape, generator=self.generator) > 0.4
            return self.last(hidden * mask)

    def at(plan, loss):
        random.seed(1)
        np.random.seed(1)
        job = job_of(doubled(Masked), samples, loss)
        return step_of(job, plan, torch.randn(14, WIDTH, generator=fixed()).double())

    def in_one_pass(model, batch):
        z = torch.cat([model(piece) for piece in batch.split(4)])
        return (z.T @ z / len(z) - torch.eye(z.shape[1])).square().sum()

    assert_same(at(plan_of(4, ""), whitened), at(Plan(), in_one_pass), 1e-12)


def fixed() -> torch.Generator:
    return torch.Generator().manual_seed(11)


# --- What a call may look like ---


def test_arguments_and_results_may_be_nested_and_hold_other_things():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.shift = Encoder(), nn.Parameter(torch.ones(6))

        def forward(self, views, *, mask=None, scale=1.0, table=None, names=()):
            first, second = (self.body(view["x"]) * scale for view in views)
            return {
                "pair": (first * mask, second + self.shift),
                "steps": second.unsqueeze(0),
                "names": names,
                "table": table,
                "none": None,
            }

    def loss(model, batch):
        views = [{"x": batch["a"]}, {"x": batch["b"]}]
        table = torch.arange(3.0)
        found = model(views, mask=batch["mask"], scale=0.5, table=table, names=("a", 2))
        assert found["names"] == ("a", 2)
        assert found["none"] is None
        assert found["table"].shape == (3,)
        assert found["steps"].shape == (1, len(batch["a"]), 6)
        return info_nce(*found["pair"]) + found["steps"].std(1).sum()

    def batch(size):
        return {"a": samples(size), "b": samples(size), "mask": torch.rand(size, 1)}

    assert memfit.verify(job_of(Nested, batch, loss), plan_of(4, "")).largest_error <= EXACT


def test_results_may_be_dataclasses():
    from dataclasses import dataclass

    @dataclass
    class Encoded:
        z: torch.Tensor
        norm: torch.Tensor
        width: int

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Encoder()

        def forward(self, x):
            z = self.body(x)
            return Encoded(z, z.square().sum(1), 6)

    def loss(model, batch):
        found = model(batch)
        assert type(found) is Encoded
        assert found.width == 6
        return whitened(lambda z: z, found.z) + found.norm.std()

    assert memfit.verify(job_of(Model, samples, loss), plan_of(5)).largest_error <= EXACT


def test_samples_may_lie_in_the_second_dimension():
    job = job_of(
        lambda: Sequences(batch_first=False), lambda n: torch.randn(5, n, WIDTH), whitened, 10
    )
    assert memfit.verify(job, plan_of(3)).largest_error <= EXACT


def test_an_lstm_is_cut_too():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(WIDTH, 6, batch_first=True)

        def forward(self, x):
            return self.cells(x)[0][:, -1]

    job = job_of(Recurrent, lambda n: torch.randn(n, 5, WIDTH), whitened)
    for name in ("", "cells"):
        assert memfit.verify(job, plan_of(4, name)).largest_error <= EXACT


def test_a_batch_no_larger_than_a_piece_is_left_as_it_is():
    job, batch = COUPLED["info-nce"], two_views(14)
    assert_same(step_of(job, plan_of(64), batch), step_of(job, Plan(), batch), 0.0)
    with pytest.raises(NothingToVerifyError, match="leaves a batch of 14 samples as it is"):
        memfit.verify(job, plan_of(64))


def test_a_batch_larger_than_the_job_s_stays_whole():
    job = COUPLED["info-nce"]
    batch = tuple(part.double() for part in two_views(31))
    double = job_of(doubled(Encoder), two_views, job.loss)
    larger = job_of(doubled(Encoder), two_views, job.loss, 31)
    assert_same(step_of(double, plan_of(4), batch), step_of(larger, Plan(), batch))
