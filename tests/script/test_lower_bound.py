"""A script whose recording ends before a steady step: its peak is a lower bound."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.script.running import recorded

from memfit.cli.card_comparison import exit_code_of
from memfit.devices.catalogue import load_device
from memfit.errors import DataError, RecordingError
from memfit.peak_changes.saved import SavedPrediction
from memfit.peak_changes.sides import side_of
from memfit.prediction.budget import MemoryBudget
from memfit.reports.script_text import brief_script
from memfit.reports.wording import verdict
from memfit.script.prediction import predict_recorded_script
from memfit.units import MIB

SCRIPT = """
import time, torch
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.Adam(model.parameters())
for step in range({num_steps}):
    time.sleep({seconds} * (step > 0))
    model(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Return what records a script and judges it by a budget."""
    monkeypatch.chdir(tmp_path)

    def judge(budget_bytes, *, num_recorded=3, late=False, num_steps=5):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.format(num_steps=num_steps, seconds=4 if late else 0))
        most_seconds = 4 if late else 300
        found = recorded(path, num_steps=num_recorded, most_seconds=most_seconds)
        budget = MemoryBudget(num_bytes=budget_bytes)
        return predict_recorded_script("train.py", found, load_device("cpu"), budget=budget)

    return judge


@pytest.mark.parametrize("how", [{"late": True}, {"num_recorded": 1}])
def test_without_a_steady_step_it_is_not_known_whether_a_script_fits(answer, how):
    found = answer(100 * MIB, **how)
    prediction = found.prediction

    assert len(found.step_peaks_bytes) == 1
    assert json.loads(json.dumps(found.to_json()))["fits"] is None
    assert exit_code_of([prediction]) == 1
    assert verdict(prediction) == "uncertain"
    shown = Console(file=io.StringIO(), width=80)
    shown.print(brief_script(found))
    text = " ".join(shown.file.getvalue().split())
    assert "Whether it fits the budget of 100.0 MiB is not known: peak allocated" in text
    assert "at least, as recording ended before a steady step" in text


def test_what_is_too_much_already_does_not_fit(answer):
    prediction = answer(MIB // 2, late=True).prediction
    assert prediction.fits is False
    assert exit_code_of([prediction]) == 3


def test_a_script_that_makes_one_update_is_known_in_full(answer):
    prediction = answer(100 * MIB, num_steps=1).prediction
    assert prediction.fits is True
    assert exit_code_of([prediction]) == 0


def test_of_several_devices_one_that_fits_is_enough(answer):
    known = answer(100 * MIB).prediction
    unknown = replace(known, fits=None)
    too_large = replace(known, fits=False)
    assert exit_code_of([unknown, known]) == 0
    assert exit_code_of([too_large, unknown]) == 1
    assert exit_code_of([replace(unknown, budget_bytes=None)]) == 0


def test_a_lower_bound_is_not_compared(answer):
    found = answer(100 * MIB, num_recorded=1)
    saved = SavedPrediction(
        source="train.py",
        torch_version="",
        prediction=found.prediction,
        phases={},
        moments=found.moments,
    )
    with pytest.raises(DataError, match="recording ended before a steady step"):
        side_of(saved, "before.json")


def test_without_an_update_time_is_named_among_the_reasons(answer):
    with pytest.raises(RecordingError, match=r"or the time for it did.*--most-seconds"):
        answer(MIB, late=True, num_steps=0)
