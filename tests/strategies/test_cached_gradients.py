"""Representations computed in pieces give the gradients of the whole batch, for losses of any kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.entries_cached_gradients import contrast_by_label
from tests.zoo.coupled_jobs import (
    EXACT,
    WIDTH,
    assert_exact,
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
from memfit.errors import NothingToVerifyError


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
    """A transformer over steps, and an average over steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        return self.head(self.layer(x).mean(dim=1))


def labelled(size: int):
    return torch.randn(size, WIDTH), torch.arange(size) % 4


# --- Losses, each of which couples the samples of a batch ---


def unit_info_nce(queries, documents):
    return info_nce(15 * queries, documents)


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
    return contrast_by_label(z, labels)


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
    "supervised-contrastive": job_of(Encoder, of_labelled(contrast_by_label), labelled),
    "info-nce": job_of(Encoder, of_views(unit_info_nce), two_views),
    "views-at-once": job_of(Encoder, simclr, two_views),
    "clip": job_of(TwoTowers, clip, images_and_texts),
    "batch-hard-triplet": job_of(Encoder, of_labelled(batch_hard_triplet), labelled),
    "barlow-twins": job_of(Encoder, of_views(barlow_twins), two_views),
    "vicreg": job_of(Encoder, of_views(vicreg), two_views),
    "hardest-quarter": job_of(Encoder, hardest, labelled),
    "dice": job_of(segmenter, dice, images_and_masks),
    "mmd": job_of(Encoder, of_views(mmd), two_views),
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4, 7, 13])
@pytest.mark.parametrize("job", COUPLED.values(), ids=COUPLED.keys())
def test_gradients_are_those_of_the_whole_batch(job, size):
    found = memfit.verify(job, plan_of(size))
    assert found.numerics == found.earned == "exact"
    assert found.largest_error <= EXACT


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


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["info-nce", "supervised-contrastive"])
def test_with_dropout_they_are_those_of_one_pass_with_the_same_masks(loss):
    """The reference runs the pieces one after the other with all that backward needs."""
    of_batch = {
        "info-nce": lambda z, batch: unit_info_nce(*z.chunk(2)),
        "supervised-contrastive": lambda z, batch: contrast_by_label(z, batch[1]),
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
    cut = step_of(job_of(model, planned, batch_of, 17), plan_of(5), batch)
    expected = step_of(job_of(model, reference, batch_of, 17), Plan(), batch)
    assert_same(cut, expected, 1e-12)


@pytest.mark.slow
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
        job = job_of(doubled(Masked), loss)
        return step_of(job, plan, torch.randn(14, WIDTH, generator=fixed()).double())

    def in_one_pass(model, batch):
        z = torch.cat([model(piece) for piece in batch.split(4)])
        return whitening(z)

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
        return unit_info_nce(*found["pair"]) + found["steps"].std(1).sum()

    def batch(size):
        return {"a": samples(size), "b": samples(size), "mask": torch.rand(size, 1)}

    assert_exact(job_of(Nested, loss, batch), plan_of(4, ""))


@pytest.mark.slow
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
        return whitening(found.z) + found.norm.std()

    assert_exact(job_of(Model, loss), plan_of(5))


@pytest.mark.slow
def test_an_lstm_is_cut_too():
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(WIDTH, 6, batch_first=True)

        def forward(self, x):
            return self.cells(x)[0][:, -1]

    job = job_of(Recurrent, whitened, lambda n: torch.randn(n, 5, WIDTH))
    for name in ("", "cells"):
        assert_exact(job, plan_of(4, name))


@pytest.mark.slow
def test_a_batch_no_larger_than_a_piece_is_left_as_it_is():
    job, batch = COUPLED["info-nce"], two_views(14)
    assert_same(step_of(job, plan_of(64), batch), step_of(job, Plan(), batch), 0.0)
    with pytest.raises(NothingToVerifyError, match="leaves a batch of 14 samples as it is"):
        memfit.verify(job, plan_of(64))


@pytest.mark.slow
def test_a_batch_larger_than_the_job_s_stays_whole():
    job = COUPLED["info-nce"]
    batch = tuple(part.double() for part in two_views(31))
    double = job_of(doubled(Encoder), job.loss, two_views)
    larger = job_of(doubled(Encoder), job.loss, two_views, 31)
    assert_same(step_of(double, plan_of(4), batch), step_of(larger, Plan(), batch))
