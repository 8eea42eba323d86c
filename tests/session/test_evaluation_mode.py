"""A model in evaluation mode when the step calls it is said, whoever put it there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.cli.main import main
from memfit.session.evaluation_mode import ModesSeen

SCRIPT = """
from dataclasses import replace

import torch
from torch import nn
import memfit


def model():
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1))


def loss_in_eval(model, batch):
    return model.eval()(batch).square().mean()


def loss_in_train(model, batch):
    return model.train()(batch).square().mean()


training = memfit.Job(
    model=model,
    batch=lambda size: torch.randn(size, 16),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
evaluating = replace(training, model=lambda: model().eval())
switched_off = replace(evaluating, loss=loss_in_train)
switched_on = replace(training, loss=loss_in_eval)


class Teacher(nn.Sequential):
    pass


def build():
    trained, teacher = model().cuda().eval(), Teacher(model()).cuda().eval().requires_grad_(False)
    batch = torch.randn(8, 16, device="cuda")
    return lambda: (trained(batch) - teacher(batch)).square().mean().backward()


def build_in_train():
    trained = model().cuda().eval()
    batch = torch.randn(8, 16, device="cuda")
    return lambda: trained.train()(batch).square().mean().backward()
"""
SAID = "the model is in eval mode: dropout and batch normalisation act as in evaluation"


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return lambda name: f"{path}:{name}"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["predict", "plan", "measure"])
@pytest.mark.parametrize(
    ("job", "modules"),
    [
        ("training", []),
        ("evaluating", ["the model"]),
        ("switched_off", []),
        ("switched_on", ["the model"]),
    ],
)
def test_the_mode_at_the_time_of_the_step_is_in_the_json(ask, script, command, job, modules):
    found = ask(command, script(job))
    assert found["modules_in_evaluation"] == modules
    assert any(note.startswith(SAID) for note in found["notes"]) == bool(modules)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["predict"], ["plan"], ["measure"], ["predict", "--device", "t4", "--device", "l4"]]
)
def test_it_is_one_line_on_the_terminal(script, capsys, words):
    assert main([words[0], script("evaluating"), *words[1:]]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(SAID) == 1
    assert "call .train() first if that is not meant" in shown


@pytest.mark.slow
def test_a_function_that_builds_a_step_is_looked_at_as_well(ask, script):
    found = ask("predict", script("build"), "--device", "t4")
    assert found["modules_in_evaluation"] == ["Sequential"]
    assert found["notes"][0].startswith("Sequential is in eval mode")
    assert ask("predict", script("build_in_train"), "--device", "t4")["notes"] == []


def test_parts_are_named_and_normalisations_are_left_alone():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4))
    model[0].eval()
    with ModesSeen(model) as modes:
        model(torch.zeros(2, 4))
        assert modes.found == ("0",)
    model[0].train()
    model[0][1].eval()
    with ModesSeen(model) as modes:
        model(torch.zeros(2, 4))
    assert modes.found == ()


def test_a_model_that_is_not_called_as_a_module_is_judged_by_its_state():
    model = nn.Linear(4, 4).eval()
    with ModesSeen(model) as modes:
        nn.functional.linear(torch.zeros(2, 4), model.weight)
    assert modes.found == ("the model",)


def test_calls_without_gradients_do_not_count():
    model = nn.Sequential(nn.Linear(4, 4))
    with ModesSeen(model) as modes:
        model(torch.zeros(2, 4))
        model.eval()
        with torch.no_grad():
            model(torch.zeros(2, 4))
    assert modes.found == ()
