"""A disk that is full is named as one wherever a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memfit.cli.main import main

JOB = """
import torch, memfit
job = memfit.Job(
    model=lambda: torch.nn.Linear(8, 8),
    batch=lambda size: torch.randn(size, 8),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "job.py:job", "--save", "/dev/full"],
        pytest.param(["predict", "job.py:job", "--html", "/dev/full"], marks=pytest.mark.slow),
        pytest.param(["plan", "job.py:job", "--save", "/dev/full"], marks=pytest.mark.slow),
        pytest.param(["plan", "job.py:job", "--html", "/dev/full"], marks=pytest.mark.slow),
        ["verify", "job.py:job", "--plan", "plan.yaml", "--html", "/dev/full"],
        ["table", "job.py:job", "--html", "/dev/full"],
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_command_that_finds_no_room_says_so(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    Path("plan.yaml").write_text("memfit_plan: 1\nstrategies: []\n")
    assert main(words) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("memfit: error: No space left on the disk that holds /dev/full: ")
    assert " needed, " in said
