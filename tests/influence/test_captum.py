"""Scores against those of captum, whose code is independent of this one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.influence.models import make
from tests.influence.test_one_to_many import ENTITIES, SMOOTHING, conve, streamed
from torch import nn
from torch.utils.data import TensorDataset

from memfit import influence

captum_influence = pytest.importorskip("captum.influence")
pytestmark = pytest.mark.filterwarnings("ignore")

RATES = (0.5, 0.2)
NEAR = 1e-8


@pytest.fixture(params=["transformer", "convolutions", "lstm"])
def trained(request, tmp_path):
    """Give a case and the files of two checkpoints."""
    case = make(request.param, number=8)
    for place in range(len(RATES)):
        with torch.no_grad():
            for each in case.model.parameters():
                each.add_(0.05 * torch.randn_like(each))
        torch.save(case.model.state_dict(), tmp_path / f"{place}.pt")
    return case, [tmp_path / f"{place}.pt" for place in range(len(RATES))]


def load(model, path) -> float:
    model.load_state_dict(torch.load(path))
    model.eval()
    return RATES[int(path.stem)]


def ours(case, files, **settings):
    checkpoints = [
        influence.Checkpoint.of_file(file, rate) for file, rate in zip(files, RATES, strict=True)
    ]
    test = tuple(each[:3] for each in case.samples)
    found = influence.scores(
        case.model,
        case.loss,
        case.samples,
        test,
        checkpoints=checkpoints,
        train_chunk=3,
        **settings,
    )
    return test, found.scores


def error(found, expected) -> float:
    expected = expected.detach().numpy()
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_scores_are_those_of_captum(trained) -> None:
    case, files = trained
    test, found = ours(case, files)
    theirs = captum_influence.TracInCP(
        case.model,
        TensorDataset(*case.samples),
        files,
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        batch_size=4,
    )

    assert error(found, theirs.influence(test)) < NEAR


def test_scores_of_the_last_layer_are_those_of_captum(trained) -> None:
    case, files = trained
    name, layer = [*case.model.named_modules()][-1]
    assert isinstance(layer, nn.Linear)
    test, found = ours(case, files, parameters=[f"{name}.weight"])  # they leave its bias out
    theirs = captum_influence.TracInCPFast(
        case.model,
        case.model.get_submodule(name),
        TensorDataset(*case.samples),
        files,
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=4,
    )

    assert error(found, theirs.influence(test)) < NEAR


def test_self_influence_is_that_of_captum(trained) -> None:
    case, files = trained
    checkpoints = [
        influence.Checkpoint.of_file(file, rate) for file, rate in zip(files, RATES, strict=True)
    ]
    found = influence.self_influence(case.model, case.loss, case.samples, checkpoints=checkpoints)
    theirs = captum_influence.TracInCP(
        case.model,
        TensorDataset(*case.samples),
        files,
        checkpoints_load_func=load,
        loss_fn=nn.CrossEntropyLoss(reduction="none"),
        batch_size=4,
    )

    assert error(found.scores, theirs.self_influence()) < NEAR


class RowLosses(nn.Module):
    """The loss of rows against all entities, from a matrix of scores."""

    reduction = "none"

    def forward(self, scores, positives):
        listed = scores.new_zeros(len(scores), ENTITIES + 1).scatter_(1, positives + 1, 1.0)[:, 1:]
        listed = listed * (1 - SMOOTHING) + SMOOTHING / ENTITIES
        return F.binary_cross_entropy_with_logits(scores, listed, reduction="none").mean(dim=1)


def test_streamed_scores_of_conve_are_those_of_captum(tmp_path) -> None:
    model, batch = conve()
    file = tmp_path / "0.pt"
    torch.save(model.state_dict(), file)
    theirs = captum_influence.TracInCP(
        model,
        TensorDataset(*batch),
        [file],
        checkpoints_load_func=load,
        loss_fn=RowLosses(),
        batch_size=4,
    )
    checkpoint = influence.Checkpoint.of_file(file, RATES[0])
    found = influence.scores(model, streamed, batch, batch, checkpoints=[checkpoint])

    assert error(found.scores, theirs.influence(batch)) < NEAR
