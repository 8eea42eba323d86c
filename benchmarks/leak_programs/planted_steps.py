"""Programs that keep metrics, graphs, outputs of evaluations, hooks and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn

from memfit.observe.leaks import LeakFinder

from .training import ROWS, WIDTH, optimizer_of, planted, small_model, train_step, trained

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
        """Return logits."""
        return self.body(x)[:, 0]


@planted("metric-state", "model.head.metrics.auroc.preds", "model.head.metrics.update(scores")
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


@planted("metric-state", "model.head.metrics.auroc.preds", "model.head.metrics.update(scores")
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


@planted("metric-state", "model.metric.scores", "self.scores.append(scores.detach().clone())")
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


@planted("autograd-graph", "losses", "loss = model(torch.randn(64, WIDTH)).square().mean()")
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


@planted("autograd-graph", "total", "total = total + train_step(model, optimizer)")
def total_loss(finder: LeakFinder) -> None:
    """Add losses up with their graphs."""
    model = small_model()
    optimizer = optimizer_of(model)
    total: Any = 0.0
    for step in range(NUM_STEPS):
        total = total + train_step(model, optimizer)
        finder.boundary("train", step)
    finder.finish()


@planted("autograd-graph", "hidden", "hidden = model(torch.randn(8, WIDTH), hidden)")
def carried_hidden_state(finder: LeakFinder) -> None:
    """Carry the hidden state of a recurrent network on without detaching it."""
    model = nn.GRUCell(WIDTH, WIDTH)
    hidden = torch.zeros(8, WIDTH)
    for step in range(NUM_STEPS):
        hidden = model(torch.randn(8, WIDTH), hidden)
        finder.boundary("train", step)
    finder.finish()


@planted("list", "predictions", "predictions.append(model(torch.randn(ROWS, WIDTH)))")
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


@planted("autograd-graph", "outputs", "outputs.append(model(torch.randn(ROWS, WIDTH)))")
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


@planted("hooks", "model[0]._forward_hooks", "model[0].register_forward_hook(")
def forward_hooks(finder: LeakFinder) -> None:
    """Register a hook in each step."""
    model = small_model()
    for _ in trained(finder, NUM_STEPS, model):
        model[0].register_forward_hook(lambda *_: None)


@planted("optimizer-groups", "optimizer.param_groups")
def parameter_groups(finder: LeakFinder) -> None:
    """Add a group of parameters in each step."""
    model = small_model()
    optimizer = optimizer_of(model)
    for _ in trained(finder, NUM_STEPS, model, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(ROWS, WIDTH))]})
