"""``memfit predict train.py -- ARGS``: the script's own words, output and files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import argparse
    import torch
    from neighbour import width

    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json")
    args = parser.parse_args()
    print("training", args.steps, args.json, device)
    model = torch.nn.Linear(width(), width(), device=device)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(args.steps):
        loss = model(torch.randn(64, width(), device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{step}: {loss.item():.3f}")
        torch.save(model.state_dict(), "model.pt")
        open("log.txt", "a").write("line")
"""


@pytest.fixture
def folder(tmp_path):
    """Write a script with a neighbour."""
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "neighbour.py").write_text("def width():\n    return 512\n")
    return tmp_path


def _memfit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memfit", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_script_is_predicted_unchanged_and_leaves_nothing(folder):
    words = ["predict", "train.py", "--device", "t4", "--json", "--", "--steps", "9", "--json", "x"]
    done = _memfit(folder, *words)

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "training 9 x cuda" in done.stderr
    assert answer["device"] == "t4"
    assert answer["script"] == "python train.py --steps 9 --json x"
    assert len(answer["step_peaks_bytes"]) == 3
    assert answer["by_category"]["optimizer state"] >= 2 * 512 * 512 * 4
    assert {"load", "first step", "steady step", "checkpoint"} <= {
        phase["phase"] for phase in answer["phases"]
    }
    named = {line["source_line"].partition(":")[0]: line["function"] for line in answer["lines"]}
    assert named == {"train.py": "<module>"}
    assert any(
        block["source_line"].endswith("train.py:15") and block["category"] == "saved activations"
        for moment in answer["moments"]
        for block in moment["blocks"]
    )
    assert answer["num_diverted_files"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["neighbour.py", "train.py"]


@pytest.mark.slow
def test_a_module_is_named_as_python_names_it_and_a_budget_is_judged(folder):
    words = ["predict", "-m", "train", "--budget", "1MiB", "--verbose", "--html", "step.html"]
    done = _memfit(folder, *words, "--", "--steps", "4")

    assert done.returncode == 3, done.stderr
    assert "python -m train --steps 4 on cpu" in done.stdout
    assert "answered 1.0" in done.stdout
    assert "Wrote step.html." in done.stdout
    page = (folder / "step.html").read_text("utf-8")
    assert "<h1>python -m train --steps 4</h1>" in page
    assert '<td class="word">steady step</td>' in page
    assert re.search(r'"names":\[[^]]*train\.py:\d+"', page), "the lines that hold the bytes"


@pytest.mark.slow
def test_a_script_that_fails_is_told_with_its_line(folder):
    done = _memfit(folder, "predict", "train.py")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("memfit: error: The step cannot be recorded")
    assert "TypeError" in done.stderr.splitlines()[-1]
    assert "train.py, line" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Name what is predicted"),
        (["train.py", "-m", "train"], "two things"),
        (["train.py", "--steps", "0", "--", "--steps", "3"], "--steps must be at least 1"),
    ],
)
def test_words_that_make_no_sense_are_refused(folder, capsys, monkeypatch, words, says):
    from memfit.cli.main import main

    monkeypatch.chdir(folder)
    assert main(["predict", *words]) == 2
    assert says in capsys.readouterr().err
