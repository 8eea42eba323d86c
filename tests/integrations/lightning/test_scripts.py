"""`memfit run --fit` plans the trainer of a script that knows nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")
ROOT = Path(__file__).parents[3]
_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import warnings
warnings.simplefilter("ignore")
from tests.zoo.lightning_modules import Classifier, samples, trainer
from torch.utils.data import DataLoader

if __name__ == "__main__":
    made = trainer(max_epochs=1)
    made.fit(Classifier(), DataLoader(samples(64), batch_size=16))
    print("planned" if [c for c in made.callbacks if type(c).__name__ == "MemfitCallback"] else "")
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(_SCRIPT.format(root=str(ROOT)))
    command = [sys.executable, "-m", "memfit", "run", *words, "--folder", str(folder / "run")]
    return subprocess.run(
        [*command, "--json", "--", sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_trainer_in_a_script_is_planned(tmp_path: Path) -> None:
    done = run(tmp_path, "--fit", "--budget", "1GiB")

    assert done.returncode == 0, done.stderr
    assert "planned" in done.stdout.splitlines()
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["num_steps"] in {4, 5}  # the rehearsal is a step that is undone


@pytest.mark.slow
def test_without_the_flag_it_is_left_alone(tmp_path: Path) -> None:
    assert "planned" not in run(tmp_path).stdout.splitlines()


def test_allowing_is_for_planning(tmp_path: Path) -> None:
    done = run(tmp_path, "--allow", "bf16")

    assert done.returncode == 2
    assert "--fit" in done.stderr


@pytest.mark.slow
def test_what_cannot_be_planned_is_not_trained(tmp_path: Path) -> None:
    done = run(tmp_path, "--fit", "--budget", "1KiB")

    assert done.returncode == 1
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["sentence"].startswith("Nothing was trained without a plan: the trainer is not")
    assert "No plan fits" in found["unplanned"]
    assert (found["num_steps"], found["budget_bytes"], found["is_planned"]) == (0, 1024, False)
