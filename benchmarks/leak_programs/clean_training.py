"""Clean programs: outputs, averages, checkpoints, recurrence, accumulation, hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from memfit.observe.leaks import LeakFinder

from .training import ROWS, WIDTH, optimizer_of, small_model, train, train_step, trained

NUM_STEPS = 240


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
    train(finder, range(40), model, optimizer)
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
        train(finder, range(50 * passes, 50 * passes + 50), model, optimizer)
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
    ring: list[Any] = [None] * 120
    for step in trained(finder, NUM_STEPS):
        ring[step % 120] = torch.randn(ROWS, WIDTH)


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
    for _ in trained(finder, NUM_STEPS):
        ring: dict[str, Any] = {"rows": torch.randn(64, WIDTH)}
        ring["me"] = ring


def hooks_with_handles(finder: LeakFinder) -> None:
    """Register a hook in each step and remove it."""
    model = small_model()
    for _ in trained(finder, NUM_STEPS, model):
        handle = model[0].register_forward_hook(lambda *_: None)
        handle.remove()


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
        train(finder, range(50 * passes, 50 * passes + 50), model, optimizer)
    finder.finish()
