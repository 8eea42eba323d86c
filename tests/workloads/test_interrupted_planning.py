"""Ctrl-C while a training is planned ends it; how long planning may take of it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.workloads.test_wpo_sgm_training import SMALL
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit.cli.main import main
from memfit.planner.search.search import Search
from memfit_workloads.memory_settings import MemorySettings
from memfit_workloads.planned_memory import most_seconds, plan_memory


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt every search as soon as it has found a plan that fits."""
    notice = Search._notice

    def noticed(self: Search, candidate: object) -> None:
        notice(self, candidate)
        if self.best_so_far is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_notice", noticed)


@pytest.mark.slow
@pytest.mark.usefixtures("interrupted")
def test_a_training_that_is_interrupted_while_it_is_planned_ends(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["train", "wpo-sgm", *SMALL, "--save", str(folder)]) == 130
    shown = capsys.readouterr().out
    assert "Interrupted while planning: nothing was trained or written." in shown
    assert "plan:" not in shown
    assert not folder.exists()


@pytest.mark.usefixtures("interrupted")
def test_the_plan_that_was_found_is_given_where_nothing_is_trained():
    job = mean_square_job(lambda: nn.Linear(8, 8), 8)
    found = memfit.plan(job)
    assert found.was_interrupted
    assert found.prediction.fits
    assert any("was interrupted" in note for note in found.notes)
    with pytest.raises(KeyboardInterrupt):
        found.unless_interrupted()


@pytest.mark.usefixtures("interrupted")
@pytest.mark.filterwarnings("ignore")
def test_a_training_under_lightning_ends_as_well():
    pytest.importorskip("lightning")
    from tests.zoo.lightning_modules import Classifier, samples, trainer
    from torch.utils.data import DataLoader

    from memfit.integrations.lightning import plan

    given = trainer(), Classifier(), DataLoader(samples(64), batch_size=32)
    with pytest.raises(KeyboardInterrupt):
        plan(*given, budget="1GiB").unless_interrupted()


@pytest.mark.filterwarnings("ignore")
def test_lightning_does_not_end_the_process_where_no_plan_was_found(monkeypatch):
    pytest.importorskip("lightning")
    from tests.zoo.lightning_modules import Classifier, samples, trainer
    from torch.utils.data import DataLoader

    from memfit.integrations.lightning import plan

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan(trainer(), Classifier(), DataLoader(samples(64), batch_size=32), budget="1GiB")


def test_planning_takes_a_tenth_of_a_training_and_ten_seconds_of_a_short_one(monkeypatch):
    job = mean_square_job(lambda: nn.Linear(8, 8), 8)
    step = replace(memfit.predict(job), step_seconds=2.0)
    assert most_seconds(step, 1000) == 200.0
    assert most_seconds(step, 3) == 10.0
    assert most_seconds(step, None) is None
    assert most_seconds(step, math.inf) is None
    asked = {}

    def planned(*_: object, **wanted: object) -> memfit.PlanningResult:
        asked.update(wanted)
        return memfit.PlanningResult(prediction=step)

    monkeypatch.setattr(memfit, "plan", planned)
    settings = MemorySettings(
        device="cpu", budget_bytes=None, budget_fraction=None, allow=(), require=(), plan_file=None
    )
    plan_memory(job, replace(settings, num_steps=500), plain=step)
    assert asked["processor_seconds"] == 100.0
