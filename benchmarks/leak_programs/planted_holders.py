"""Programs that keep tensors and objects in all sorts of holders."""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from memfit.observe.leaks import LeakFinder

from .training import ROWS, WIDTH, optimizer_of, planted, small_model, train_step, trained

HISTORY: list[torch.Tensor] = []
NUM_STEPS = 160


@planted("list", "HISTORY", "HISTORY.append(model(torch.randn(ROWS, WIDTH)).detach())")
def global_list(finder: LeakFinder) -> None:
    """Keep outputs in a list of the module."""
    model = small_model()
    for _ in trained(finder, NUM_STEPS, model):
        HISTORY.append(model(torch.randn(ROWS, WIDTH)).detach())
    HISTORY.clear()


@planted("list", "kept", "kept.append(torch.randn(ROWS, WIDTH))")
def local_list(finder: LeakFinder) -> None:
    """Keep outputs in a list of the main function."""
    kept = []
    for _ in trained(finder, NUM_STEPS):
        kept.append(torch.randn(ROWS, WIDTH))


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


@planted("list", "trainer.outputs", "self.outputs.append(torch.randn(ROWS, WIDTH))")
def trainer_attribute(finder: LeakFinder) -> None:
    """Keep outputs in an attribute of a trainer."""
    trainer = Trainer()
    for step in range(NUM_STEPS):
        trainer.step()
        finder.boundary("train", step)
    finder.finish()


@planted("closure", "seen", "seen.append(torch.randn(ROWS, WIDTH))")
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


@planted("dict", "by_step", 'by_step[step] = {"output": torch.randn(ROWS, WIDTH)}')
def dict_by_step(finder: LeakFinder) -> None:
    """Keep outputs under the number of their step."""
    by_step = {}
    for step in trained(finder, NUM_STEPS):
        by_step[step] = {"output": torch.randn(ROWS, WIDTH)}


@planted("class-attribute", "Trainer.shared", "Trainer.shared.append(torch.randn(ROWS, WIDTH))")
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


@planted("lru-cache", "embedded", "return batch.cos()")
def cached_function(finder: LeakFinder) -> None:
    """Call a cached function with tensors."""
    for _ in trained(finder, NUM_STEPS):
        embedded(torch.randn(ROWS, WIDTH))
    embedded.cache_clear()


@planted("list", "arrays", "arrays.append(np.ones((ROWS, WIDTH), dtype=np.float32))")
def numpy_arrays(finder: LeakFinder) -> None:
    """Keep arrays in a list."""
    arrays = []
    for _ in trained(finder, NUM_STEPS):
        arrays.append(np.ones((ROWS, WIDTH), dtype=np.float32))


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


@planted("dataset", "dataset.served", 'self.served.append({"id"')
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


@planted("traceback", "errors", "raise ValueError(rows.shape)")
def kept_tracebacks(finder: LeakFinder) -> None:
    """Keep exceptions, and with them the frames that they went through."""
    errors = []

    def fail() -> None:
        rows = torch.randn(ROWS, WIDTH)
        raise ValueError(rows.shape)

    for _ in trained(finder, NUM_STEPS):
        try:
            fail()
        except ValueError as error:
            errors.append(error)


class Ring:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, WIDTH)
        self.me = self


@planted("reference-cycle", "Ring.rows")
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


@planted("list", "kept", "kept.append(torch.randn(ROWS, WIDTH))")
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


@planted("text", "log['text']", 'log["text"] += "a line of the log\\n" * 5000')
def growing_text(finder: LeakFinder) -> None:
    """Add to a text in each step."""
    log = {"text": ""}
    for _ in trained(finder, NUM_STEPS):
        log["text"] += "a line of the log\n" * 5000
