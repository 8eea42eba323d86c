"""Programs that do not leak, though much in them grows for a while."""

from __future__ import annotations

import copy
import functools
from collections import deque
from typing import Any

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

from memfit.runtime.leaks import LeakFinder

from .training import ROWS, WIDTH, Program, optimizer_of, small_model, train_step

NUM_STEPS = 240


def _train(finder: LeakFinder, steps: range, model: nn.Module, optimizer: Any) -> None:
    for step in steps:
        train_step(model, optimizer)
        finder.boundary("train", step)


def plain(finder: LeakFinder) -> None:
    """Train, nothing else."""
    model = small_model()
    _train(finder, range(NUM_STEPS), model, optimizer_of(model))
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
    model = small_model()
    optimizer = optimizer_of(model)
    recent: deque[torch.Tensor] = deque(maxlen=150)
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        recent.append(torch.randn(ROWS, WIDTH))
        finder.boundary("train", step)
    finder.finish()


def trimmed_list(finder: LeakFinder) -> None:
    """Keep the last outputs in a list that is trimmed."""
    model = small_model()
    optimizer = optimizer_of(model)
    recent: list[torch.Tensor] = []
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        recent.append(torch.randn(ROWS, WIDTH))
        if len(recent) > 60:
            recent.pop(0)
        finder.boundary("train", step)
    finder.finish()


@functools.lru_cache(maxsize=128)
def mask_of(length: int) -> torch.Tensor:
    """Give a mask, cached by its length."""
    return torch.ones(length, WIDTH)


def bounded_cache(finder: LeakFinder) -> None:
    """Fill a cache that has a bound."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        mask_of(100 + step)
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()
    mask_of.cache_clear()


@functools.cache
def positions_of(length: int) -> torch.Tensor:
    """Give positions, cached by their length."""
    return torch.ones(length, WIDTH)


def cache_of_lengths(finder: LeakFinder) -> None:
    """Fill a cache without a bound, of which the keys come again."""
    model = small_model()
    optimizer = optimizer_of(model)
    generator = np.random.default_rng(0)
    for step in range(NUM_STEPS):
        positions_of(int(generator.integers(100, 160)))
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()
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
        _train(finder, range(60 * passes, 60 * passes + 60), model, optimizer)
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
        _train(finder, range(60 * passes, 60 * passes + 60), model[:3], optimizer)
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
        _train(finder, range(60 * passes, 60 * passes + 60), model[:3], optimizer)
        model.metrics.reset()
        for step in range(20 + passes):
            model.metrics.update(torch.rand(ROWS), torch.randint(0, 2, (ROWS,)))
            finder.boundary("validation", step)
    finder.finish()


def outputs_of_an_epoch(finder: LeakFinder) -> None:
    """Keep the outputs of a training epoch until its end."""
    model = small_model()
    optimizer = optimizer_of(model)
    for _ in range(4):
        outputs = []
        for step in range(80):
            train_step(model, optimizer)
            outputs.append(torch.randn(ROWS, WIDTH))
            finder.boundary("train", step)
        torch.cat(outputs).mean()
    finder.finish()


def outputs_of_one_evaluation(finder: LeakFinder) -> None:
    """Collect the predictions of one long evaluation."""
    model = small_model()
    optimizer = optimizer_of(model)
    _train(finder, range(40), model, optimizer)
    outputs = []
    with torch.no_grad():
        for step in range(90):
            outputs.append(model(torch.randn(ROWS, WIDTH)))
            finder.boundary("validation", step)
    finder.finish()


def moving_average(finder: LeakFinder) -> None:
    """Keep a moving average of the weights, and the best ones."""
    model = small_model()
    optimizer = optimizer_of(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    best: dict[str, torch.Tensor] = {}
    for step in range(NUM_STEPS):
        loss = train_step(model, optimizer)
        average.update_parameters(model)
        if step % 20 == 0:
            best = copy.deepcopy(model.state_dict())
        finder.boundary("train", step)
        del loss
    assert best
    finder.finish()


def best_checkpoints(finder: LeakFinder) -> None:
    """Keep the last three states in memory, one for each pass."""
    model = nn.Linear(600, 600)
    optimizer = optimizer_of(model)
    states: list[dict[str, torch.Tensor]] = []
    for passes in range(6):
        for step in range(30):
            model(torch.randn(16, 600)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            finder.boundary("train", 30 * passes + step)
        for step in range(5):
            finder.boundary("validation", step)
        states = [*states, copy.deepcopy(model.state_dict())][-3:]
    finder.finish()


def key_value_cache(finder: LeakFinder) -> None:
    """Generate text after each pass, with a cache of keys and values that is dropped."""
    model = small_model()
    optimizer = optimizer_of(model)
    for passes in range(3):
        _train(finder, range(50 * passes, 50 * passes + 50), model, optimizer)
        cache = torch.empty(0, WIDTH)
        for step in range(40):
            cache = torch.cat([cache, torch.randn(64, WIDTH)])
            finder.boundary("generation", step)
    finder.finish()


def truncated_sequences(finder: LeakFinder) -> None:
    """Carry the hidden state over windows, detached."""
    model = nn.GRU(WIDTH, WIDTH)
    optimizer = optimizer_of(model)
    hidden = torch.zeros(1, 8, WIDTH)
    for step in range(NUM_STEPS):
        output, hidden = model(torch.randn(6, 8, WIDTH), hidden.detach())
        output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        finder.boundary("train", step)
    finder.finish()


def accumulated_gradients(finder: LeakFinder) -> None:
    """Add up the losses of 32 micro-batches, with one backward pass for all."""
    model = small_model()
    optimizer = optimizer_of(model)
    count = 0
    for step in range(12):
        total: Any = 0.0
        for _ in range(32):
            finder.boundary("loader", count)
            total = total + model(torch.randn(32, WIDTH)).square().mean()
            count += 1
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
        finder.boundary("train", step)
    finder.finish()


def replay_buffer(finder: LeakFinder) -> None:
    """Fill a ring of tensors made beforehand."""
    model = small_model()
    optimizer = optimizer_of(model)
    ring: list[Any] = [None] * 120
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        ring[step % 120] = torch.randn(ROWS, WIDTH)
        finder.boundary("train", step)
    finder.finish()


def growing_model(finder: LeakFinder) -> None:
    """Thaw layers one after the other, so that optimizer states come late."""
    model = small_model()
    optimizer = torch.optim.AdamW(model[0].parameters())
    for step in range(NUM_STEPS):
        if step == 80:
            optimizer.add_param_group({"params": list(model[2].parameters())})
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


def collected_cycles(finder: LeakFinder) -> None:
    """Make cycles that the collector frees."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        ring: dict[str, Any] = {"rows": torch.randn(64, WIDTH)}
        ring["me"] = ring
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


def hooks_with_handles(finder: LeakFinder) -> None:
    """Register a hook in each step and remove it."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        handle = model[0].register_forward_hook(lambda *_: None)
        train_step(model, optimizer)
        handle.remove()
        finder.boundary("train", step)
    finder.finish()


def sanity_check_first(finder: LeakFinder) -> None:
    """Validate two batches before training, and reset properly."""
    model = small_model()
    model.scores = []
    optimizer = optimizer_of(model)
    for passes in range(4):
        for step in range(15 if passes else 2):
            model.scores.append(torch.randn(ROWS))
            finder.boundary("validation", step)
        model.scores.clear()
        _train(finder, range(50 * passes, 50 * passes + 50), model, optimizer)
    finder.finish()


CLEAN = tuple(
    Program(name=(program.__doc__ or "").strip().rstrip("."), run=program)
    for program in (
        plain,
        varying_lengths,
        ever_longer_batches,
        history_of_floats,
        small_detached_losses,
        bounded_queue,
        trimmed_list,
        bounded_cache,
        cache_of_lengths,
        dataset_cache,
        dataset_cache_of_a_loader,
        validation_cache,
        metric_with_reset,
        metric_reset_at_the_start,
        outputs_of_an_epoch,
        outputs_of_one_evaluation,
        moving_average,
        best_checkpoints,
        key_value_cache,
        truncated_sequences,
        accumulated_gradients,
        replay_buffer,
        growing_model,
        collected_cycles,
        hooks_with_handles,
        sanity_check_first,
    )
)
