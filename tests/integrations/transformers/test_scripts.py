"""`memfit run --fit` plans the Trainer of a script that knows nothing of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]
_SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import warnings
warnings.simplefilter("ignore")
import torch
from tests.zoo.trainers import texts, trainer

if __name__ == "__main__":
    made = trainer("bert", train_dataset=texts(24), dtype=torch.float32)
    made.train()
    torch.save(made.model.state_dict(), {weights!r})
    print("planned" if "_memfit" in vars(made) else "alone")
"""


def run(folder: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(_SCRIPT.format(root=str(ROOT), weights=str(folder / name)))
    command = [sys.executable, "-m", "memfit", "run", *words, "--folder", str(folder / f"r{name}")]
    return subprocess.run(
        [*command, "--json", "--", sys.executable, str(script)],
        check=False,
        capture_output=True,
        text=True,
    )


def test_a_trainer_in_a_script_is_planned(tmp_path: Path) -> None:
    alone = run(tmp_path, "alone")
    done = run(tmp_path, "planned", "--fit", "--budget", "280KiB")

    assert done.returncode == 0, done.stderr
    assert "alone" in alone.stdout
    assert "planned" in done.stdout
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["num_steps"] in {3, 4}  # the rehearsal is a step that is undone
    one, other = (torch.load(tmp_path / name) for name in ("alone", "planned"))
    assert 0 < max((one[name] - other[name]).abs().max().item() for name in one) < 1e-6
