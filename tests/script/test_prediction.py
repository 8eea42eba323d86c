"""What is said of a recorded script: phases, the largest steady step, and the worst of all."""

from __future__ import annotations

import io
import json
import textwrap

import pytest
from tests.script.running import predicted, recorded

from memfit.devices.catalogue import load_device
from memfit.prediction.budget import MemoryBudget
from memfit.reports.script_text import script_text
from memfit.script.prediction import predict_recorded_script
from memfit.units import MIB

SCRIPT = """
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(256, 256, device=device)
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 256, device=device))
    model.train()
    optimizer = torch.optim.Adam(model.parameters())
    for step, size in enumerate((64, 512, 128, 64)):
        loss = model(torch.randn(size, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        if loss < 0.5:
            optimizer.zero_grad()
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return what records the script and says what it takes."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))

    def ask(device="cpu", **judged):
        recording = recorded(path, device=device, num_steps=3)
        answer = predict_recorded_script(
            "python train.py", recording, load_device(device), **judged
        )
        return recording, answer

    return ask


def test_the_steady_step_is_the_largest_of_those_recorded(found):
    recording, answer = found()

    first, second, third = answer.step_peaks_bytes
    assert second > third
    assert answer.prediction.peak_allocated_bytes == second
    assert answer.prediction.first_step_peak_bytes == first
    phases = {phase.phase: phase.peak_allocated_bytes for phase in answer.phases}
    assert phases["steady step"] == second
    assert answer.worst.phase == "steady step"
    assert dict(predicted(recording))["load"] == phases["load"]


def test_an_evaluation_before_the_steps_counts_what_they_leave(found):
    recording, answer = found()

    seen = dict(predicted(recording))["evaluation"]
    phases = {phase.phase: phase.peak_allocated_bytes for phase in answer.phases}
    states_and_gradients = 3 * (256 + 1) * 256 * 4
    assert phases["evaluation"] - seen == pytest.approx(states_and_gradients, rel=0.03)


@pytest.mark.slow
def test_the_worst_phase_is_judged(found):
    _, answer = found(budget=MemoryBudget(num_bytes=4 * MIB))
    assert answer.prediction.fits is True
    _, answer = found(budget=MemoryBudget(num_bytes=MIB))
    assert answer.prediction.fits is False


@pytest.mark.slow
def test_a_card_has_reserved_and_process_bytes_for_each_phase(found):
    _, answer = found("t4")

    for phase in answer.phases:
        assert phase.peak_allocated_bytes <= phase.peak_reserved_bytes < phase.process_bytes
    values = json.loads(json.dumps(answer.to_json()))
    assert values["worst_phase"] == answer.worst.phase
    assert values["script"] == "python train.py"
    assert values["answers"][0]["given"] == "True"


@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_it_is_shown_with_its_phases_first(found, device):
    from rich.console import Console

    _, answer = found(device)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(script_text(answer, top=3))
    text = console.export_text()

    assert text.startswith(f"python train.py on {device}")
    assert (
        text.index("Peaks of its phases") < text.index("The largest steady") < text.index("by cat")
    )
    assert "train.py:14: answered True, 4 times;" in " ".join(text.split())
    assert ("reserved" in text.partition("first step")[0]) is (device == "t4")
