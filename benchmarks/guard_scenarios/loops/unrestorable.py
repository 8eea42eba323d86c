"""State that nobody can put back: it has to be said when the run starts."""

from __future__ import annotations

import itertools
import queue
import tempfile
from pathlib import Path

import torch
from torch import nn

from guard_scenarios.training import classifier, cross_entropy, scenario, training_of


@scenario("log file written in the loss", must_say="log")
def log_file():
    folder = tempfile.mkdtemp(prefix="memfit-scenario-")
    log = Path(folder, "log.txt").open("w+")  # noqa: SIM115 - kept open

    def loss(model, batch):
        value = cross_entropy(model, batch)
        log.write(f"{value.item():.6f}\n")
        return value

    return training_of(classifier(), loss=loss, closed=log.close)


@scenario("generator advanced in the loss", must_say="schedule")
def generator():
    def temperatures():
        value = 1.0
        while True:
            yield value
            value *= 0.9

    class Loss:
        def __init__(self):
            self.schedule = temperatures()

        def __call__(self, model, batch):
            return cross_entropy(model, batch) * next(self.schedule)

    return training_of(classifier(), loss=Loss())


@scenario("iterator over a list, advanced in forward", must_say="rates", of="layer")
class WithRates(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = map(float, [n / 10 for n in range(1, 40)])

    def forward(self, x):
        return x * (1 + next(self.rates))


@scenario("itertools.cycle in the loss's closure", must_say="signs")
def cycle():
    signs = itertools.cycle([1.0, 0.9, 0.8])
    return training_of(
        classifier(), loss=lambda model, batch: cross_entropy(model, batch) * next(signs)
    )


@scenario("queue of a thread's in the loss", must_say="inbox")
def thread_queue():
    inbox = queue.Queue()
    for number in range(40):
        inbox.put(1 + 0.01 * number)
    return training_of(
        classifier(), loss=lambda model, batch: cross_entropy(model, batch) * inbox.get()
    )


@scenario("second loader that the loss draws from", must_say="unlabelled")
def second_loader():
    data = torch.utils.data.DataLoader(torch.randn(64, 6), batch_size=8, shuffle=True)
    unlabelled = iter(data)

    def loss(model, batch):
        return cross_entropy(model, batch) + 0.1 * model(next(unlabelled)).square().mean()

    return training_of(classifier(), loss=loss)
