"""Clean programs: batches of all lengths, histories, queues, caches and metrics."""

from __future__ import annotations

import functools
from collections import deque

import numpy as np
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset

from memfit.observe.leaks import LeakFinder

from .training import ROWS, WIDTH, optimizer_of, small_model, train, train_step, trained

NUM_STEPS = 240


def plain(finder: LeakFinder) -> None:
    """Train, nothing else."""
    model = small_model()
    train(finder, range(NUM_STEPS), model, optimizer_of(model))
    finder.finish()


def varying_lengths(finder: LeakFinder) -> None:
    """Take batches of other lengths in each step."""
    model = small_model()
    optimizer = optimizer_of(model)
    generator = np.random.default_rng(0)
    for step in range(NUM_STEPS):
        rows = int(generator.integers(8, 1024))
        loss = train_step(model, optimizer, rows)
        batch = torch.randn(rows, WIDTH)
        finder.boundary("train", step, batch.nbytes)
        del loss
    finder.finish()


def ever_longer_batches(finder: LeakFinder) -> None:
    """Take longer batches in each step, as a curriculum does."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        batch = torch.randn(16 + 8 * step, WIDTH)
        outputs = model(batch)
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finder.boundary("train", step, batch.nbytes)
    finder.finish()


def history_of_floats(finder: LeakFinder) -> None:
    """Keep the loss of each step as a number."""
    model = small_model()
    optimizer = optimizer_of(model)
    losses, by_step = [], {}
    for step in range(2 * NUM_STEPS):
        losses.append(train_step(model, optimizer).item())
        by_step[step] = {"loss": losses[-1], "step": step}
        finder.boundary("train", step)
    finder.finish()


def small_detached_losses(finder: LeakFinder) -> None:
    """Keep the loss of each step as a detached tensor."""
    model = small_model()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(train_step(model, optimizer).detach())
        finder.boundary("train", step)
    finder.finish()


def bounded_queue(finder: LeakFinder) -> None:
    """Keep the last outputs in a deque."""
    recent: deque[torch.Tensor] = deque(maxlen=150)
    for _ in trained(finder, NUM_STEPS):
        recent.append(torch.randn(ROWS, WIDTH))


def trimmed_list(finder: LeakFinder) -> None:
    """Keep the last outputs in a list that is trimmed."""
    recent: list[torch.Tensor] = []
    for _ in trained(finder, NUM_STEPS):
        recent.append(torch.randn(ROWS, WIDTH))
        if len(recent) > 60:
            recent.pop(0)


@functools.lru_cache(maxsize=128)
def mask_of(length: int) -> torch.Tensor:
    """Return a mask, cached by its length."""
    return torch.ones(length, WIDTH)


def bounded_cache(finder: LeakFinder) -> None:
    """Fill a cache that has a bound."""
    for step in trained(finder, NUM_STEPS):
        mask_of(100 + step)
    mask_of.cache_clear()


@functools.cache
def positions_of(length: int) -> torch.Tensor:
    """Return positions, cached by their length."""
    return torch.ones(length, WIDTH)


def cache_of_lengths(finder: LeakFinder) -> None:
    """Fill a cache without a bound, of which the keys come again."""
    generator = np.random.default_rng(0)
    for _ in trained(finder, NUM_STEPS):
        positions_of(int(generator.integers(100, 160)))
    positions_of.cache_clear()


class Cached(Dataset):
    """A dataset that reads each item once."""

    def __init__(self) -> None:
        self.items: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.items:
            self.items[index] = torch.randn(ROWS, WIDTH)
        return self.items[index]


def dataset_cache(finder: LeakFinder) -> None:
    """Fill a dataset's cache in the first pass, in order, without a loader."""
    model = small_model()
    optimizer = optimizer_of(model)
    dataset = Cached()
    for _ in range(3):
        for step in range(90):
            dataset[step]
            train_step(model, optimizer)
            finder.boundary("train", step)
        finder.end_of_pass("train")
    finder.finish()


def dataset_cache_of_a_loader(finder: LeakFinder) -> None:
    """Fill a dataset's cache through a shuffling loader; nobody tells of passes."""
    model = small_model()
    optimizer = optimizer_of(model)
    loader = DataLoader(Cached(), batch_size=4, shuffle=True)
    step = 0
    for _ in range(3):
        for batch in loader:
            finder.boundary("loader", step, batch.nbytes)
            train_step(model, optimizer)
            finder.boundary("train", step)
            step += 1
    finder.finish()


def validation_cache(finder: LeakFinder) -> None:
    """Fill a cache in the first validation pass."""
    model = small_model()
    optimizer = optimizer_of(model)
    dataset = Cached()
    for passes in range(3):
        train(finder, range(60 * passes, 60 * passes + 60), model, optimizer)
        for step in range(20):
            dataset[step]
            finder.boundary("validation", step)
    finder.finish()


def metric_with_reset(finder: LeakFinder) -> None:
    """Reset a collection after each validation pass."""
    model = small_model()
    model.metrics = torchmetrics.MetricCollection([torchmetrics.classification.BinaryAUROC()])
    optimizer = optimizer_of(model[:3])
    for passes in range(4):
        train(finder, range(60 * passes, 60 * passes + 60), model[:3], optimizer)
        for step in range(20):
            model.metrics.update(torch.rand(ROWS), torch.randint(0, 2, (ROWS,)))
            finder.boundary("validation", step)
        model.metrics.compute()
        model.metrics.reset()
    finder.finish()


def metric_reset_at_the_start(finder: LeakFinder) -> None:
    """Reset a collection before each validation pass, so that it is full in between."""
    model = small_model()
    model.metrics = torchmetrics.MetricCollection([torchmetrics.classification.BinaryAUROC()])
    optimizer = optimizer_of(model[:3])
    for passes in range(4):
        train(finder, range(60 * passes, 60 * passes + 60), model[:3], optimizer)
        model.metrics.reset()
        for step in range(20 + passes):
            model.metrics.update(torch.rand(ROWS), torch.randint(0, 2, (ROWS,)))
            finder.boundary("validation", step)
    finder.finish()
