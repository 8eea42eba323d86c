"""Programs that leak, each in another way."""

from __future__ import annotations

import functools
import gc
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from memfit.runtime.leaks import LeakFinder

from .training import ROWS, WIDTH, Program, optimizer_of, small_model, train_step

HISTORY: list[torch.Tensor] = []
NUM_STEPS = 160


class Classifier(nn.Module):
    """A module with a head that owns metrics, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()
        self.head = nn.Module()
        self.head.metrics = torchmetrics.MetricCollection(
            {"auroc": torchmetrics.classification.BinaryAUROC()}
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give logits."""
        return self.body(x)[:, 0]


def metric_collection(finder: LeakFinder) -> None:
    """Never reset a collection; two validation passes and the first step after them."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    for passes in range(2):
        for step in range(100):
            train_step(model, optimizer)
            finder.boundary("train", 100 * passes + step)
        for step in range(20):
            scores = model(torch.randn(ROWS, WIDTH)).detach().sigmoid()
            model.head.metrics.update(scores, torch.randint(0, 2, (ROWS,)))
            finder.boundary("validation", step)
    train_step(model, optimizer)
    finder.boundary("train", 200)
    finder.finish()


def metric_ended_by_finish(finder: LeakFinder) -> None:
    """Never reset a collection; the run ends with the second validation pass."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters())
    for passes in range(2):
        for step in range(50):
            train_step(model, optimizer)
            finder.boundary("train", 50 * passes + step)
        for step in range(10):
            scores = model(torch.randn(ROWS, WIDTH)).detach().sigmoid()
            model.head.metrics.update(scores, torch.randint(0, 2, (ROWS,)))
            finder.boundary("validation", step)
    finder.finish()


class HandWritten(nn.Module):
    """A metric that somebody wrote, without a reset."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []

    def update(self, scores: torch.Tensor) -> None:
        """Keep scores."""
        self.scores.append(scores.detach().clone())


def hand_written_metric(finder: LeakFinder) -> None:
    """Keep the scores of each validation pass in a module."""
    model = small_model()
    model.metric = HandWritten()
    optimizer = optimizer_of(model[:3])
    for passes in range(3):
        for step in range(40):
            train_step(model[:3], optimizer)
            finder.boundary("train", 40 * passes + step)
        for step in range(12):
            model.metric.update(torch.randn(ROWS))
            finder.boundary("validation", step)
    finder.finish()


def losses_with_graph(finder: LeakFinder) -> None:
    """Append losses as they are."""
    model = small_model()
    optimizer = optimizer_of(model)
    losses = []
    for step in range(NUM_STEPS):
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        finder.boundary("train", step)
    finder.finish()


def total_loss(finder: LeakFinder) -> None:
    """Add losses up with their graphs."""
    model = small_model()
    optimizer = optimizer_of(model)
    total: Any = 0.0
    for step in range(NUM_STEPS):
        total = total + train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


def carried_hidden_state(finder: LeakFinder) -> None:
    """Carry the hidden state of a recurrent network on without detaching it."""
    model = nn.GRUCell(WIDTH, WIDTH)
    hidden = torch.zeros(8, WIDTH)
    for step in range(NUM_STEPS):
        hidden = model(torch.randn(8, WIDTH), hidden)
        finder.boundary("train", step)
    finder.finish()


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
        """Carry out a step."""
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


def evaluation_outputs(finder: LeakFinder) -> None:
    """Keep what an evaluation gives from one pass to the next."""
    model = small_model()
    optimizer = optimizer_of(model)
    predictions = []
    for passes in range(3):
        for step in range(40):
            train_step(model, optimizer)
            finder.boundary("train", 40 * passes + step)
        with torch.no_grad():
            for step in range(15):
                predictions.append(model(torch.randn(ROWS, WIDTH)))
                finder.boundary("validation", step)
    finder.finish()


def evaluation_with_graph(finder: LeakFinder) -> None:
    """Evaluate without no_grad and keep the outputs of one long pass."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(20):
        train_step(model, optimizer)
        finder.boundary("train", step)
    outputs = []
    for step in range(60):
        outputs.append(model(torch.randn(ROWS, WIDTH)))
        finder.boundary("validation", step)
    finder.finish()


def forward_hooks(finder: LeakFinder) -> None:
    """Register a hook in each step."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        model[0].register_forward_hook(lambda *_: None)
        train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


def parameter_groups(finder: LeakFinder) -> None:
    """Add a group of parameters in each step."""
    model = small_model()
    optimizer = optimizer_of(model)
    for step in range(NUM_STEPS):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(ROWS, WIDTH))]})
        train_step(model, optimizer)
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
    """Give features, cached under the tensor object."""
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


PLANTED = (
    Program(
        name="torchmetrics collection, two validation passes",
        run=metric_collection,
        kind="metric-state",
        holder="model.head.metrics.auroc.preds",
        line="model.head.metrics.update(scores",
    ),
    Program(
        name="torchmetrics collection, ended by finish()",
        run=metric_ended_by_finish,
        kind="metric-state",
        holder="model.head.metrics.auroc.preds",
        line="model.head.metrics.update(scores",
    ),
    Program(
        name="hand-written metric in a module",
        run=hand_written_metric,
        kind="metric-state",
        holder="model.metric.scores",
        line="self.scores.append(scores.detach().clone())",
    ),
    Program(
        name="losses kept with their graphs",
        run=losses_with_graph,
        kind="autograd-graph",
        holder="losses",
        line="loss = model(torch.randn(64, WIDTH)).square().mean()",
    ),
    Program(
        name="total loss with its graph",
        run=total_loss,
        kind="autograd-graph",
        holder="total",
        line="total = total + train_step(model, optimizer)",
    ),
    Program(
        name="hidden state carried without detach()",
        run=carried_hidden_state,
        kind="autograd-graph",
        holder="hidden",
        line="hidden = model(torch.randn(8, WIDTH), hidden)",
    ),
    Program(
        name="list of the module",
        run=global_list,
        kind="list",
        holder="HISTORY",
        line="HISTORY.append(model(torch.randn(ROWS, WIDTH)).detach())",
    ),
    Program(
        name="list of the main function",
        run=local_list,
        kind="list",
        holder="kept",
        line="kept.append(torch.randn(ROWS, WIDTH))",
    ),
    Program(
        name="attribute of a trainer",
        run=trainer_attribute,
        kind="list",
        holder="trainer.outputs",
        line="self.outputs.append(torch.randn(ROWS, WIDTH))",
    ),
    Program(
        name="variable of a closure",
        run=closure_cell,
        kind="closure",
        holder="seen",
        line="seen.append(torch.randn(ROWS, WIDTH))",
    ),
    Program(
        name="dict by step",
        run=dict_by_step,
        kind="dict",
        holder="by_step",
        line='by_step[step] = {"output": torch.randn(ROWS, WIDTH)}',
    ),
    Program(
        name="outputs of three evaluations",
        run=evaluation_outputs,
        kind="list",
        holder="predictions",
        line="predictions.append(model(torch.randn(ROWS, WIDTH)))",
    ),
    Program(
        name="outputs of an evaluation with their graphs",
        run=evaluation_with_graph,
        kind="autograd-graph",
        holder="outputs",
        line="outputs.append(model(torch.randn(ROWS, WIDTH)))",
    ),
    Program(
        name="forward hooks registered each step",
        run=forward_hooks,
        kind="hooks",
        holder="model[0]._forward_hooks",
        line="model[0].register_forward_hook(",
    ),
    Program(
        name="parameter groups added each step",
        run=parameter_groups,
        kind="optimizer-groups",
        holder="optimizer.param_groups",
    ),
    Program(
        name="attribute of a class",
        run=class_attribute,
        kind="class-attribute",
        holder="Trainer.shared",
        line="Trainer.shared.append(torch.randn(ROWS, WIDTH))",
    ),
    Program(
        name="lru_cache with tensor arguments",
        run=cached_function,
        kind="lru-cache",
        holder="embedded",
        line="return batch.cos()",
    ),
    Program(
        name="numpy arrays in a list",
        run=numpy_arrays,
        kind="list",
        holder="arrays",
        line="arrays.append(np.ones((ROWS, WIDTH), dtype=np.float32))",
    ),
    Program(
        name="Python objects in a dataset",
        run=dataset_objects,
        kind="dataset",
        holder="dataset.served",
        line='self.served.append({"id"',
    ),
    Program(
        name="exceptions kept with their frames",
        run=kept_tracebacks,
        kind="traceback",
        holder="errors",
        line="raise ValueError(rows.shape)",
    ),
    Program(
        name="cycles with the collector off",
        run=reference_cycle,
        kind="reference-cycle",
        holder="Ring.rows",
    ),
    Program(
        name="list beside a loader",
        run=list_beside_a_loader,
        kind="list",
        holder="kept",
        line="kept.append(torch.randn(ROWS, WIDTH))",
    ),
    Program(
        name="text that is added to",
        run=growing_text,
        kind="text",
        holder="log['text']",
        line='log["text"] += "a line of the log\\n" * 5000',
    ),
)
