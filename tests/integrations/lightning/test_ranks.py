"""Trainings on several ranks: DDP is exact, what shards parameters is refused with the way out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
from lightning.pytorch.strategies import ModelParallelStrategy
from tests.zoo.lightning_modules import Classifier, samples, trainer
from torch.utils.data import DataLoader

from memfit.errors import MemfitError
from memfit.integrations.lightning import MemfitCallback
from memfit.integrations.lightning.training_step import check_supported

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[3]
_RANKS = """
import json, os, sys, warnings
sys.path.insert(0, {root!r})
warnings.simplefilter("ignore")
import lightning as L
import torch
from tests.integrations.lightning.test_guarded_updates import BACKWARD, Shortage
from tests.zoo.lightning_modules import Classifier, samples, trainer
from torch.utils.data import DataLoader
from memfit.integrations.lightning import MemfitCallback
from memfit.strategies import MicroBatching
from memfit.strategies.plan import Plan

SPLIT = Plan(strategies=(MicroBatching(micro_batch_size=12),))


class Module(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("perplexity", loss.exp(), on_step=True, on_epoch=True, sync_dist=True)
        return loss


class OnOneRank(Shortage):
    def on_train_batch_start(self, trainer, *others):
        if trainer.global_rank == 1:
            super().on_train_batch_start(trainer, *others)

    def on_train_batch_end(self, trainer, *others):
        if trainer.global_rank == 1:
            super().on_train_batch_end(trainer, *others)


class Keep(L.Callback):
    def on_train_end(self, trainer, pl_module):
        logs = {{name: float(value) for name, value in trainer.callback_metrics.items()}}
        plans = [each.plan.labels() for each in trainer.callbacks if hasattr(each, "plan")]
        if trainer.is_global_zero:
            torch.save((pl_module.state_dict(), logs, plans), {kept!r})


def trained(*callbacks, **flags):
    os.environ.pop("MASTER_PORT", None)  # each training has its own
    L.seed_everything(0, verbose=False)
    module = Module()
    made = trainer(*callbacks, Keep(), devices=2, strategy="ddp_fork", precision="64-true",
                   **flags)
    data = DataLoader(samples(100, torch.float64), batch_size=32, shuffle=True)
    made.fit(module, data)
    return torch.load({kept!r})


if __name__ == "__main__":
    flags = json.loads(sys.argv[1])
    plain = trained(**flags)
    found = []
    for callbacks in ([MemfitCallback(plan=SPLIT)],
                      [MemfitCallback("1GiB", require=["micro-batching"])],
                      [MemfitCallback(plan=SPLIT, rehearse=False), OnOneRank(BACKWARD, batch=1)]):
        weights, logs, plans = trained(*callbacks, **flags)
        found.append({{
            "weights": max(float((weights[n] - plain[0][n]).abs().max()) for n in weights),
            "logs": max(abs(logs[n] - plain[1][n]) for n in plain[1]),
            "plan": plans[0][-1],
        }})
    print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
def test_two_ranks_have_the_weights_and_the_logs_of_two_plain_ones(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RANKS.format(root=str(ROOT), kept=str(tmp_path / "kept.pt")))
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(flags)],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])

    assert len(found) == 3
    for each in found:
        assert 0 < each["weights"] < 1e-12
        assert each["logs"] < 1e-6
    assert found[2]["plan"] == "micro-batching(6)"  # both ranks took the smaller plan


@pytest.fixture
def alone() -> Iterator[None]:
    """Leave no process group behind, and no words to one."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


@pytest.mark.usefixtures("alone")
def test_a_real_strategy_that_shards_is_refused() -> None:
    class Configured(Classifier):
        def configure_model(self) -> None:
            pass

    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    made = trainer(MemfitCallback("1GiB"), strategy=strategy, max_epochs=1)
    with pytest.raises(MemfitError, match="Job whose model function calls fully_shard"):
        made.fit(Configured(), DataLoader(samples(64), batch_size=32))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FSDPStrategy", "Job whose model function calls fully_shard"),
        ("DeepSpeedStrategy", "Micro-batches, checkpointing and offload are settings"),
    ],
)
def test_engines_that_need_a_gpu_are_refused_by_name(name: str, words: str) -> None:
    strategy = type(name, (), {"handles_gradient_accumulation": name.startswith("Deep")})()
    module = SimpleNamespace(automatic_optimization=True)

    with pytest.raises(MemfitError, match=f"under {name} .*{words}"):
        check_supported(SimpleNamespace(strategy=strategy), module)
