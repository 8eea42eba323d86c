"""Small modules of Lightning, their data, and trainers that say nothing."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
NUM_FEATURES, NUM_CLASSES = 16, 4


class Classifier(L.LightningModule):
    """A perceptron, with batch normalisation if asked for, that notes what its hooks are told."""

    def __init__(self, *, has_norm: bool = False, width: int = 32) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(NUM_FEATURES, width, bias=not has_norm),
            norm,
            nn.ReLU(),
            nn.Linear(width, NUM_CLASSES),
        )
        self.losses: list[float] = []
        self.hooks: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean cross entropy, which is logged as well."""
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("on_before_zero_grad")

    def on_before_backward(self, loss: Any) -> None:
        self.hooks.append("on_before_backward")

    def on_after_backward(self) -> None:
        self.hooks.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Measured(Classifier):
    """One that logs metrics, a sum, and returns what it has predicted."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torchmetrics.classification
        self.accuracy = kinds.MulticlassAccuracy(NUM_CLASSES)
        self.f1 = kinds.MulticlassF1Score(NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return loss and predictions."""
        inputs, labels = batch
        logits = self.net(inputs)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("f1", self.f1(logits, labels), on_step=True, on_epoch=False)
        self.log("num_samples", float(len(inputs)), reduce_fx="sum")
        return {"loss": F.cross_entropy(logits, labels), "predicted": logits.argmax(-1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert outputs["predicted"].shape == batch[1].shape


class Tagger(L.LightningModule):
    """The mean over labels of which some are ignored, unlike many in each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean over real labels."""
        inputs, labels = batch
        logits = self.net(inputs)
        real = labels != -100
        self.log("accuracy", (logits.argmax(-1) == labels)[real].float().mean(), on_step=True)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(num_samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return features and labels, the same every time."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=dtype)
    return TensorDataset(inputs, torch.randint(0, NUM_CLASSES, (num_samples,), generator=generator))


def tagged(num_samples: int, dtype: torch.dtype = torch.float32) -> TensorDataset:
    """Return sequences whose labels are ignored behind a random length."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, 6, NUM_FEATURES, generator=generator, dtype=dtype)
    labels = torch.randint(0, NUM_CLASSES, (num_samples, 6), generator=generator)
    lengths = torch.randint(1, 7, (num_samples, 1), generator=generator)
    labels[torch.arange(6) >= lengths] = -100
    return TensorDataset(inputs, labels)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples that come one after the other, and once."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __iter__(self) -> Any:
        return iter([self._dataset[n] for n in range(len(self._dataset))])


def trainer(*callbacks: Any, **flags: Any) -> Any:
    """Return a trainer on the CPU without logger, checkpoints and progress."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=[*callbacks], **{**quiet, **flags})


def fitted(kind: Any, *callbacks: Any, data: Any = None, **flags: Any) -> tuple[Any, Any]:
    """Train a module from a fixed seed in fp64 unless told otherwise; give it and its trainer."""
    flags.setdefault("precision", "64-true")
    dtype = torch.float64 if flags["precision"] == "64-true" else torch.float32
    L.seed_everything(0, verbose=False)
    module = kind()
    loader = DataLoader(
        samples(100, dtype) if data is None else data(100, dtype), batch_size=32, shuffle=True
    )
    made = trainer(*callbacks, **flags)
    made.fit(module, loader)
    return module, made


def difference(one: Any, other: Any) -> float:
    """Return the largest difference between the weights of two modules."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)
