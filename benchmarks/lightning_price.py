"""What a step costs under the callback, beside Lightning's own loop.

Both trainings go on side by side, a few steps of one and a few of the other in turns, so that they
see the same machine at the same time; each is a process of its own, and both are on the same core.
Where the memory of a process happens to lie makes up to a tenth of its speed, so there are several
pairs of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memfit.integrations.lightning import MemfitCallback
from memfit.strategies.plan import Plan

_PAIRS, _TURNS, _STEPS_PER_TURN, _FIRST_TURNS = 7, 16, 15, 4
_WIDTHS = {"20 ms": 640, "nothing": 8}
"""Of the layers: with the first a step takes about 20 ms on one core, with the second it does next
to nothing, so that what is left is the loops' own."""


class _Perceptron(L.LightningModule):
    """Eight layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [part for _ in range(8) for part in (nn.Linear(width, width), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 10))

    def training_step(self, batch: Any) -> Any:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class _Clock(L.Callback):
    """Note the processor time of the batches of every turn, and wait for the next turn."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._turn_seconds = 0.0
        self._num_steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self._num_steps % _STEPS_PER_TURN == 0:
            self._pipe.recv()
            self._turn_seconds = 0.0
        self._began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self._turn_seconds += time.process_time() - self._began
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_TURN == 0:
            self._pipe.send(self._turn_seconds / _STEPS_PER_TURN)


def of_a_step() -> dict[str, Any]:
    """Return the processor time of steps with and without the callback."""
    return {name: _of_width(width) for name, width in _WIDTHS.items()}


def _of_width(width: int) -> dict[str, Any]:
    pairs = [_pair(width) for _ in range(_PAIRS)]
    ratios = [guarded / alone for alone, guarded in pairs]
    return {
        "alone_step_seconds": round(statistics.median(each[0] for each in pairs), 5),
        "guarded_step_seconds": round(statistics.median(each[1] for each in pairs), 5),
        "ratio": round(statistics.median(ratios), 4),
        "quartiles_of_ratio": [round(each, 4) for each in statistics.quantiles(ratios, n=4)],
    }


def _pair(width: int) -> tuple[float, float]:
    """Return the seconds of a step without and with the callback, of one process each."""
    context = multiprocessing.get_context("spawn")
    pipes, fits = [], []
    for is_guarded in (False, True):
        here, there = context.Pipe()
        pipes.append(here)
        fits.append(context.Process(target=_fit, args=(width, is_guarded, there)))
        fits[-1].start()
    turns = [_turns(pipes, number) for number in range(_TURNS)][_FIRST_TURNS:]
    for fit in fits:
        fit.join()
    return statistics.median(each[0] for each in turns), statistics.median(
        each[1] for each in turns
    )


def _turns(pipes: list[Any], number: int) -> tuple[float, float]:
    """Let both run some steps, another first each time; return the seconds of a step of each."""
    seconds = [0.0, 0.0]
    for which in (0, 1) if number % 2 else (1, 0):
        pipes[which].send(None)
        seconds[which] = pipes[which].recv()
    return seconds[0], seconds[1]


def _fit(width: int, is_guarded: bool, pipe: Connection) -> None:
    """Train in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # cores of one machine may differ
    torch.manual_seed(0)
    callbacks: list[Any] = [MemfitCallback(plan=Plan())] if is_guarded else []
    num_steps = _TURNS * _STEPS_PER_TURN
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=num_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, _Clock(pipe)],
    )
    rows = 64 * num_steps
    data = TensorDataset(torch.randn(rows, width), torch.randint(0, 10, (rows,)))
    trainer.fit(_Perceptron(width), DataLoader(data, batch_size=64))
