"""Trainings that import Lightning by its old name, ``pytorch_lightning``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("pytorch_lightning")
_TRAINING = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(),
                                       torch.nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        self.log("perplexity", loss.exp())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make(*callbacks):
    pl.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(40, 16).double(), torch.randint(0, 4, (40,)))
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False,
                         precision="64-true", enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False,
                         callbacks=[*callbacks])
    return trainer, Module(), DataLoader(data, batch_size=16)
"""
_COMPARED = """
import json
from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

found = []
split = Plan(strategies=(MicroBatching(micro_batch_size=6),))
for callbacks in ((), (MemfitCallback(plan=split),)):
    trainer, module, data = make(*callbacks)
    trainer.fit(module, data)
    weights = torch.cat([each.detach().flatten() for each in module.parameters()])
    found.append((weights, trainer.callback_metrics))
(one, plain), (other, cut) = found
print(json.dumps({"weights": float((one - other).abs().max()),
                  "logs": max(abs(float(plain[n]) - float(cut[n])) for n in plain | cut),
                  "both": "lightning" in sys.modules}))
"""
_FITTED = """
if __name__ == "__main__":
    trainer, module, data = make()
    trainer.fit(module, data)
    print([type(each).__name__ for each in trainer.callbacks])
"""


def run(script: Path, text: str, *command: str) -> str:
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, *command, *([] if command else [str(script)])],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("first", ["", "import lightning.pytorch\n"], ids=["alone", "both"])
def test_pieces_add_up_under_the_old_name(tmp_path: Path, first: str) -> None:
    out = run(tmp_path / "train.py", first + _TRAINING + _COMPARED)
    found = json.loads(out.splitlines()[-1])

    assert found["both"] is bool(first)
    assert 0 < found["weights"] < 1e-12
    assert found["logs"] < 1e-6


def test_the_command_plans_for_a_trainer_of_the_old_name(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    words = ("-m", "memfit", "plan", f"{script}:make", "--budget", "1GiB", "--json")
    out = run(script, _TRAINING, *words)

    assert json.loads(out[out.index("{") :])["fits"] is True


def test_a_script_of_the_old_name_is_planned(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    words = ("--fit", "--budget", "1GiB", "--folder", str(tmp_path / "run"), "--json")
    command = ("-m", "memfit", "run", *words, "--", sys.executable, str(script))

    assert "MemfitCallback" in run(script, _TRAINING + _FITTED, *command)
