"""Weights that a device map keeps elsewhere are refused where they would silently stay untrained."""

from __future__ import annotations

import sys

import pytest
import torch
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit import Job
from memfit.errors import JobError, WeightsNotHereError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that dispatch


def two_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))


def job_of(model) -> Job:
    return mean_square_job(model, 8, batch_size=4)


def dispatched(tmp_path, device_map, *, frozen=()) -> nn.Module:
    """Have accelerate place a model as it does for inference."""
    accelerate = pytest.importorskip("accelerate")
    model = two_blocks()
    for index in frozen:
        model[index].requires_grad_(requires_grad=False)
    return accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )


def test_trainable_weights_on_disk_are_refused_by_name(tmp_path):
    job = job_of(lambda: dispatched(tmp_path, {"0": "cpu", "1": "disk"}))
    with pytest.raises(
        WeightsNotHereError, match=r"\(1\.0\.weight, 1\.0\.bias\): accelerate"
    ) as caught:
        memfit.start(job)
    assert isinstance(caught.value, JobError)
    assert "requires_grad_(False)" in str(caught.value)
    assert "activation-offload" in str(caught.value)


def test_without_the_check_they_would_stay_as_they_are(tmp_path, monkeypatch):
    """Shows what is refused: the loss falls, and half of the model never changes."""
    monkeypatch.setattr("memfit.session.session.check_weights_are_here", lambda model: None)
    run = memfit.start(job_of(lambda: dispatched(tmp_path, {"0": "cpu", "1": "disk"})))
    elsewhere = run.model[1][0]._hf_hook.weights_map
    before = elsewhere["weight"].clone()
    batch = torch.randn(4, 8)
    losses = [float(run.step(batch).loss) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert torch.equal(elsewhere["weight"], before)


def test_frozen_weights_may_lie_elsewhere(tmp_path):
    run = memfit.start(job_of(lambda: dispatched(tmp_path, {"0": "cpu", "1": "disk"}, frozen=(1,))))
    first = run.model[0][0].weight.detach().clone()
    run.step(torch.randn(4, 8))
    assert not torch.equal(run.model[0][0].weight, first)


def test_a_device_map_that_moves_nothing_away_is_no_obstacle(tmp_path):
    run = memfit.start(job_of(lambda: dispatched(tmp_path, {"0": "cpu", "1": "cpu"})))
    run.step(torch.randn(4, 8))


def test_offload_hooks_are_seen_among_several(tmp_path):
    hooks = pytest.importorskip("accelerate.hooks")

    def model():
        built = dispatched(tmp_path, {"0": "cpu", "1": "disk"})
        hooks.add_hook_to_module(built[1][0], hooks.ModelHook(), append=True)
        return built

    with pytest.raises(WeightsNotHereError, match="accelerate brings them in"):
        memfit.start(job_of(model))


def test_weights_without_values_are_refused():
    def model():
        with torch.device("meta"):
            return two_blocks()

    with pytest.raises(WeightsNotHereError, match=r"4 of .* and 1 more\): they lie on the meta"):
        memfit.start(job_of(model))


def test_the_check_imports_no_accelerate(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    memfit.start(job_of(two_blocks))
    assert "accelerate" not in sys.modules
