"""Metrics against scikit-learn and torchmetrics, and the picture of the calibration."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memfit.errors import MissingExtraError
from memfit_workloads.trident import calibration
from memfit_workloads.trident.evaluation import (
    NUM_BINS,
    Answers,
    auroc,
    branch_aurocs,
    calibration_bins,
    calibration_error,
    outcome_metrics,
)


def answers(event: Tensor, true_event: Tensor, severe: Tensor, true_severe: Tensor) -> Answers:
    """Put answers together, with embeddings that say something in one branch only."""
    num_clips = len(event)
    draw = torch.Generator().manual_seed(5)
    names = ("rgb", "infrared", "kinematics", "class")
    embeddings = {name: torch.randn(num_clips, 3, generator=draw) for name in names}
    embeddings["rgb"][:, 0] += 3 * true_event
    return Answers(
        event=event,
        severe=severe,
        severe_alone=severe,
        true_event=true_event,
        true_severe=true_severe,
        embeddings=embeddings,
    )


def drawn(num_clips: int, seed: int = 0) -> Answers:
    """Draw answers that are right more often than not."""
    draw = torch.Generator().manual_seed(seed)
    likely = torch.rand(num_clips, generator=draw)
    true_event = (torch.rand(num_clips, generator=draw) < likely).float()
    true_severe = true_event * (torch.rand(num_clips, generator=draw) < 0.4)
    return answers((1.3 * likely - 0.1).clamp(0, 1), true_event, 0.5 * likely, true_severe)


@pytest.fixture(scope="module")
def others() -> tuple[Any, Any]:
    """Import those who compute the same; it takes a while."""
    from sklearn import metrics
    from torchmetrics.functional import classification

    return metrics, classification


@pytest.mark.parametrize("num_clips", [3, 15, 400])
def test_metrics_are_those_of_others(num_clips, others):
    sklearn, torchmetrics = others
    said = drawn(num_clips)
    found = outcome_metrics(said)
    for name in ("event", "severe"):
        probability, truth = getattr(said, name), getattr(said, f"true_{name}")
        whole = truth.int()
        if truth.unique().numel() == 2:
            assert found[f"{name}_auroc"] == pytest.approx(
                sklearn.roc_auc_score(truth, probability)
            )
            assert found[f"{name}_auroc"] == pytest.approx(
                float(torchmetrics.binary_auroc(probability, whole))
            )
        else:
            assert found[f"{name}_auroc"] is None
        f1 = sklearn.f1_score(truth, probability >= 0.5, zero_division=0.0)
        assert found[f"{name}_f1"] == pytest.approx(f1)
        # torchmetrics counts what lies at the threshold as below it; nothing does here
        assert found[f"{name}_f1"] == pytest.approx(
            float(torchmetrics.binary_f1_score(probability, whole))
        )
        brier = sklearn.brier_score_loss(truth, probability, pos_label=1)
        assert found[f"{name}_brier"] == pytest.approx(brier)
        ece = float(
            torchmetrics.binary_calibration_error(probability, whole, n_bins=NUM_BINS, norm="l1")
        )
        assert found[f"{name}_ece"] == pytest.approx(ece, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_clips_of_one_class_have_no_auroc_and_all_else(value):
    truth = torch.full((6,), value)
    said = answers(torch.linspace(0.05, 0.95, 6), truth, torch.linspace(0.01, 0.2, 6), truth)
    found = outcome_metrics(said)
    assert (found["event_auroc"], found["severe_auroc"]) == (None, None)
    assert found["event_brier"] == pytest.approx(float((said.event - truth).square().mean()))
    assert found["event_ece"] == pytest.approx(float((said.event - truth).abs().mean()), abs=1e-6)
    assert found["event_f1"] == pytest.approx(2 / 3 if value else 0.0)
    branches = branch_aurocs(said, said)
    assert branches == dict.fromkeys(branches)


def test_scores_that_are_equal_are_worth_a_half():
    assert auroc(torch.full((4,), 0.3), torch.tensor([0.0, 1, 1, 0])) == 0.5


def test_a_branch_that_says_something_is_told_from_those_that_do_not():
    said = drawn(200)
    found = branch_aurocs(said, said)
    assert found["rgb"] > 0.95
    assert max(found[name] for name in ("infrared", "kinematics", "class")) < 0.7


def test_the_bounds_of_bins_belong_to_the_lower_bin_and_zero_to_the_first():
    probability = torch.tensor([0.0, 1 / 15, 2 / 15, 1.0])
    truth = torch.tensor([0.0, 1.0, 0.0, 1.0])
    shares = [share for _, _, share in calibration_bins(probability, truth)]
    assert shares == [0.5, 0.25, 0.25]
    assert calibration_error(torch.ones(3), torch.ones(3)) == 0.0


def pixels(picture: bytes) -> np.ndarray:
    """Read a PNG file."""
    from matplotlib.image import imread

    return imread(io.BytesIO(picture), format="png")


@pytest.mark.slow
def test_the_picture_shows_every_bin_with_its_clips(monkeypatch):
    from matplotlib.axes import Axes

    said, shown, placed = drawn(400), [], []
    bar = Axes.bar

    def noted(axes: Axes, places, heights, **more):
        shown.append(list(heights))
        placed.append(list(places))
        return bar(axes, places, heights, **more)

    monkeypatch.setattr(Axes, "bar", noted)
    picture = pixels(calibration.calibration_picture(said))
    assert picture.shape[:2] == (528, 990)
    assert picture[..., :3].std() > 0.05
    for name, heights, places in zip(("event", "severe"), shown, placed, strict=True):
        counts, bounds = np.histogram(getattr(said, name).numpy(), NUM_BINS, (0, 1))
        assert heights == counts[counts > 0].tolist()
        middles = (bounds[:-1] + bounds[1:])[counts > 0] / 2
        assert places == pytest.approx(middles.tolist())


@pytest.mark.slow
def test_one_answer_of_one_class_can_be_drawn():
    one = torch.ones(1)
    assert calibration.calibration_picture(answers(one, one, 0 * one, 0 * one))[:4] == b"\x89PNG"


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[trident\]'"):
        calibration.calibration_picture(drawn(5))
