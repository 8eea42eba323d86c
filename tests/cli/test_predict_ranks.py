"""``memfit predict --ranks``: one rank of several, and refusals of numbers that make no sense."""

from __future__ import annotations

import json

import pytest

from memfit.cli.main import main

JOB = """
import torch
import torch.distributed as dist
from memfit import Job
from torch import nn

WIDTH = 64


def wrapped():
    dist.init_process_group("gloo")
    return nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))


job = Job(
    model=wrapped,
    batch=lambda n: torch.randn(n, WIDTH),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=torch.optim.SGD,
    batch_size=2,
)
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(JOB)
    return str(file)


@pytest.mark.slow
def test_the_answer_says_of_which_rank_it_is(path, capsys):
    words = ["predict", f"{path}:job", "--ranks", "6", "--rank", "4", "--devices-per-node", "3"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["rank"]) == (6, 4)
    assert found["by_category"]["communication buffers"] == 4 * (64 * 64 + 64)
    assert main(words) == 0
    assert "rank 4 of 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "4", "--rank", "4"], "no rank 4 among 4"),
        (["--rank", "1"], "--ranks N"),
        (["--devices-per-node", "8"], "--ranks N"),
        (["--ranks", "6", "--devices-per-node", "4"], "do not fill nodes of 4"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(path, capsys, words, message):
    assert main(["predict", f"{path}:job", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_script_is_one_process(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("import torch\n\ntorch.nn.Linear(2, 2)\n")
    assert main(["predict", str(script), "--ranks", "2"]) == 2
    assert "Leave --ranks out" in " ".join(capsys.readouterr().err.split())
