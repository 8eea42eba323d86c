"""Programs that keep tensors and objects in all sorts of holders."""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from memfit.observe.leaks import LeakFinder

from .training import ROWS, WIDTH, optimizer_of, small_model, train_step

HISTORY: list[torch.Tensor] = []
NUM_STEPS = 160


def global_list(finder: LeakFinder) -> None:
    """Keep outputs in a list of the module."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        HISTORY.append(model(torch.randn(ROWS, WIDTH)).detach())
        finder.boundary("train", step)
    finder.finish()
    HISTORY.clear()


def local_list(finder: LeakFinder) -> None:
    """Keep outputs in a list of the main function."""
    model = small_model()
    optimizer = optimizer_of(model)
    kept = []
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        kept.append(torch.randn(ROWS, WIDTH))
        finder.boundary("train", step)
    finder.finish()


class Trainer:
    """A trainer that remembers too much."""

    shared: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        self.model = small_model()
        self.optimizer = optimizer_of(self.model)
        self.outputs: list[torch.Tensor] = []

    def step(self) -> None:
        """Run a step."""
        train_step(self.model, self.optimizer)
        self.outputs.append(torch.randn(ROWS, WIDTH))


def trainer_attribute(finder: LeakFinder) -> None:
    """Keep outputs in an attribute of a trainer."""
    trainer = Trainer()
    for step in range(NUM_STEPS):
        trainer.step()
        finder.boundary("train", step)
    finder.finish()


def closure_cell(finder: LeakFinder) -> None:
    """Keep outputs in a variable of a closure."""

    def make_step() -> Any:
        seen = []
        model = small_model()
        optimizer = optimizer_of(model)

        def take_step() -> None:
            train_step(model, optimizer)
            seen.append(torch.randn(ROWS, WIDTH))

        return take_step

    take_step = make_step()
    for step in range(NUM_STEPS):
        take_step()
        finder.boundary("train", step)
    finder.finish()


def dict_by_step(finder: LeakFinder) -> None:
    """Keep outputs under the number of their step."""
    model = small_model()
    optimizer = optimizer_of(model)
    by_step = {}
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        by_step[step] = {"output": torch.randn(ROWS, WIDTH)}
        finder.boundary("train", step)
    finder.finish()


def class_attribute(finder: LeakFinder) -> None:
    """Keep outputs in an attribute of a class."""
    trainer = Trainer()
    for step in range(NUM_STEPS):
        train_step(trainer.model, trainer.optimizer)
        Trainer.shared.append(torch.randn(ROWS, WIDTH))
        finder.boundary("train", step)
    finder.finish()
    Trainer.shared.clear()


@functools.cache
def embedded(batch: torch.Tensor) -> torch.Tensor:
    """Return features, cached under the tensor object."""
    return batch.cos()


def cached_function(finder: LeakFinder) -> None:
    """Call a cached function with tensors."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        embedded(torch.randn(ROWS, WIDTH))
        finder.boundary("train", step)
    finder.finish()
    embedded.cache_clear()


def numpy_arrays(finder: LeakFinder) -> None:
    """Keep arrays in a list."""
    model = small_model()
    optimizer = optimizer_of(model)
    arrays = []
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        arrays.append(np.ones((ROWS, WIDTH), dtype=np.float32))
        finder.boundary("train", step)
    finder.finish()


class Logging(Dataset):
    """A dataset that writes down all that it gave."""

    def __init__(self) -> None:
        self.served: list[dict[str, str]] = []

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        for item in range(200):
            self.served.append({"id": f"row-{index}-{item}", "text": "x" * 300})
        return torch.randn(WIDTH)


def dataset_objects(finder: LeakFinder) -> None:
    """Keep Python objects in a dataset over several passes."""
    model = small_model()
    optimizer = optimizer_of(model)
    dataset = Logging()
    for passes in range(4):
        for step in range(50):
            dataset[step]
            train_step(model, optimizer)
            finder.boundary("train", step)
        finder.end_of_pass("train")
        assert passes < 4
    finder.finish()


def kept_tracebacks(finder: LeakFinder) -> None:
    """Keep exceptions, and with them the frames that they went through."""
    model = small_model()
    optimizer = optimizer_of(model)
    errors = []

    def fail() -> None:
        rows = torch.randn(ROWS, WIDTH)
        raise ValueError(rows.shape)

    for step in range(NUM_STEPS):
        try:
            fail()
        except ValueError as error:
            errors.append(error)
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


class Ring:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, WIDTH)
        self.me = self


def reference_cycle(finder: LeakFinder) -> None:
    """Make cycles while the collector is off."""
    model = small_model()
    optimizer = optimizer_of(model)
    gc.disable()
    try:
        for step in range(3 * NUM_STEPS):
            Ring()
            train_step(model, optimizer)
            finder.boundary("train", step)
        finder.finish()
    finally:
        gc.enable()
        gc.collect()


def list_beside_a_loader(finder: LeakFinder) -> None:
    """Keep outputs over several passes of a loader; nobody tells where a pass ends."""
    model = small_model()
    optimizer = optimizer_of(model)
    loader = DataLoader(TensorDataset(torch.randn(480, WIDTH)), batch_size=8)
    kept, step = [], 0
    for _ in range(5):
        for (batch,) in loader:
            finder.boundary("loader", step, batch.nbytes)
            train_step(model, optimizer)
            kept.append(torch.randn(ROWS, WIDTH))
            finder.boundary("train", step)
            step += 1
    finder.finish()


def growing_text(finder: LeakFinder) -> None:
    """Add to a text in each step."""
    model = small_model()
    optimizer = optimizer_of(model)
    log = {"text": ""}
    for step in range(NUM_STEPS):
        train_step(model, optimizer)
        log["text"] += "a line of the log\n" * 5000
        finder.boundary("train", step)
    finder.finish()
