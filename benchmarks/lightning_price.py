"""What a step costs under the callback, beside Lightning's own loop."""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.integrations.lightning import MemfitCallback
from memfit.strategies.plan import Plan

_ROUNDS, _STEPS, _FIRST = 4, 300, 150


class _Perceptron(L.LightningModule):
    """Eight layers; a step takes about 20 ms on one core."""

    def __init__(self) -> None:
        super().__init__()
        layers = [part for _ in range(8) for part in (nn.Linear(512, 512), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(512, 10))

    def training_step(self, batch: Any) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class _Clock(L.Callback):
    """Note the processor time of every batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._began)


def of_a_step() -> dict[str, Any]:
    """Return the processor time of steps with and without the callback, of rounds in turns."""
    times: dict[str, list[float]] = {"alone": [], "guarded": []}
    for number in range(_ROUNDS):
        order = ["alone", "guarded"] if number % 2 else ["guarded", "alone"]
        for name in order:
            callbacks = [MemfitCallback(plan=Plan())] if name == "guarded" else []
            times[name].append(_seconds(callbacks))
    ratios = sorted(g / a for g, a in zip(times["guarded"], times["alone"], strict=True))
    return {
        "alone_step_seconds": round(statistics.median(times["alone"]), 5),
        "guarded_step_seconds": round(statistics.median(times["guarded"]), 5),
        "ratio": round(statistics.median(ratios), 4),
        "ratios_of_rounds": [round(each, 4) for each in ratios],
    }


def _seconds(callbacks: list[Any]) -> float:
    torch.manual_seed(0)
    clock = _Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, clock],
    )
    data = TensorDataset(torch.randn(64 * _STEPS, 512), torch.randint(0, 10, (64 * _STEPS,)))
    trainer.fit(_Perceptron(), DataLoader(data, batch_size=64))
    later = clock.seconds[_FIRST:]
    return sum(later) / len(later)
