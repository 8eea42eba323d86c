"""``memfit predict`` for several devices: what is written, and what stays when one fails or ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.cli.device_by_device import for_each_device
from memfit.cli.main import main
from memfit.devices.several import devices_meant
from memfit.errors import RecordingError, UsageError

STEP = """
import torch

def build():
    name = torch.cuda.get_device_name()
    if "T4" in name:
        raise ValueError("it wants bf16")
    model = torch.nn.Linear(8, 8).cuda()
    return lambda: model(torch.randn(2, 8, device="cuda")).sum().backward()
"""
TRAINS = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
DEVICES = devices_meant(["t4", "a100-40gb", "h100-80gb"])


@pytest.fixture
def step(tmp_path: Path) -> str:
    (tmp_path / "step.py").write_text(STEP)
    return f"{tmp_path / 'step.py'}:build"


@pytest.mark.slow
def test_a_device_that_fails_is_told_and_the_others_are_answered(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "cards.html"
    command = ["predict", step, "--device", "t4,a100-*"]

    assert main([*command, "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "No answer - t4: " in " ".join(shown.split())
    assert "it wants bf16" in page.read_text("utf-8")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["device"] for entry in found] == ["a100-80gb", "a100-40gb", "t4"]
    assert found[0]["largest_batch_size"] is None
    assert "it wants bf16" in found[2]["error"]


@pytest.mark.slow
def test_a_script_is_recorded_once_for_cards_that_answer_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)

    assert main(["predict", str(script), "--device", "a100-*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["device"] for entry in found} == {"a100-40gb", "a100-80gb"}
    assert len({entry["recorded_for"] for entry in found}) == 1
    assert len({entry["peak_allocated_bytes"] for entry in found}) == 1


# --- One after the other ---


def failing(*names: str, error: type[BaseException] = RecordingError):
    def answer(device, _tell) -> str:
        if device.name in names:
            raise error("it broke", "") if error is RecordingError else error("it broke")
        return device.name

    return answer


def ask(answer, **options):
    return for_each_device(DEVICES, answer, lambda _text: None, **options)


def test_those_of_one_generation_come_after_each_other() -> None:
    assert ask(failing()).answers == ["t4", "a100-40gb", "h100-80gb"]


def test_with_ctrl_c_what_was_found_stays() -> None:
    found = ask(failing("a100-40gb", error=KeyboardInterrupt))
    assert (found.answers, found.num_left_out) == (["t4"], 2)
    with pytest.raises(KeyboardInterrupt):
        ask(failing("t4", error=KeyboardInterrupt))


def test_what_fails_twice_for_one_reason_fails_everywhere() -> None:
    found = ask(failing("t4"))
    assert found.answers == ["a100-40gb", "h100-80gb"]
    assert [entry["device"] for entry in found.failures_to_json()] == ["t4"]
    with pytest.raises(RecordingError):
        ask(failing("t4", "a100-40gb"))
    with pytest.raises(UsageError):
        ask(failing("t4", error=UsageError), passes_on=(UsageError,))
