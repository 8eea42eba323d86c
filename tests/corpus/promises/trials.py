"""Steps that the walk cannot follow to the end, so that pieces are tried; and odd optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.corpus.promises.case import WIDTH, case, layers, make_job, rows, squared_error
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from memfit import Job


class Counts(nn.Module):
    """Counts its calls and does nothing with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Hand ``x`` on."""
        self.calls += 1
        return x


class CountsAndScales(Counts):
    """Scales by its count."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        return super().forward(x) * (1 + 0.1 * self.calls)


class LogsByNumpy(nn.Module):
    """Keeps a mean for a log, computed outside of torch."""

    mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Hand ``x`` on."""
        self.mean = float(x.detach().cpu().numpy().mean())
        return x


class BranchesOnValue(nn.Module):
    """Takes one of two ways by the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x``."""
        return x * 2 if x.mean() > 0 else x * 0.5


class Recurrent(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Map sequences (B, T, 8) of given lengths to values (B, 1)."""
        x, lengths = batch
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(output.sum(1))


def sequences(size: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Draw sequences (B, 12, 8) with their lengths, and targets (B, 1)."""
    lengths = torch.randint(1, 12, (size,))
    lengths[0] = 12
    return (torch.randn(size, 12, 8), lengths), torch.randn(size, 1)


@case
def counting_layer() -> Job:
    """Count calls, as many loggers do."""
    return make_job(lambda: layers(Counts(), depth=12))


@case
def counting_layer_that_scales() -> Job:
    """Count calls, and use the count."""
    return make_job(lambda: layers(CountsAndScales()))


@case
def logged_by_numpy() -> Job:
    """Log a mean through numpy."""
    return make_job(lambda: layers(LogsByNumpy(), depth=12))


@case
def branch_on_a_value() -> Job:
    """Branch on the batch's mean."""
    return make_job(lambda: layers(BranchesOnValue()))


@case
def packed_sequences() -> Job:
    """Pack sequences of unlike lengths."""
    return make_job(Recurrent, sequences)


@case
def sampled_rows() -> Job:
    """Choose rows by a mask of the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        chosen = batch[1].squeeze(1) > 0
        return (model(batch[0][chosen]) - batch[1][chosen]).square().sum() / len(batch[0])

    return make_job(lambda: layers(depth=12), loss=loss)


class _Plain(torch.optim.Optimizer):
    """An optimizer whose update is written in Python, parameter by parameter."""

    def __init__(self, parameters: Iterable[Any], **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        raise NotImplementedError


class Momentum(_Plain):
    """SGD with momentum."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        state["m"] = state.get("m", 0) * 0.9 + gradient
        parameter -= lr * state["m"]


class Adam(_Plain):
    """Adam with whole temporaries."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        state["t"] = state.get("t", 0) + 1
        state["m"] = state.get("m", torch.zeros_like(gradient)) * 0.9 + 0.1 * gradient
        state["v"] = state.get("v", torch.zeros_like(gradient)) * 0.99 + 0.01 * gradient**2
        mean, variance = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.99 ** state["t"])
        parameter -= lr * mean / (variance.sqrt() + 1e-8)


class Lion(_Plain):
    """The sign of a mixed momentum."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        mean = state.get("m", torch.zeros_like(gradient))
        parameter -= 0.1 * lr * (mean * 0.9 + gradient * 0.1).sign()
        state["m"] = mean * 0.99 + gradient * 0.01


class Lars(_Plain):
    """A rate for each layer by norms, read as Python numbers."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        del state
        rate = parameter.norm().item() / (gradient.norm().item() + 1e-6)
        parameter -= lr * min(rate, 1.0) * gradient


class Lookahead(_Plain):
    """Slow weights, met every fifth step."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        state.setdefault("slow", parameter.clone())
        state["t"] = state.get("t", 0) + 1
        parameter -= lr * gradient
        if state["t"] % 5 == 0:
            state["slow"] += 0.5 * (parameter - state["slow"])
            parameter.copy_(state["slow"])


class Noisy(_Plain):
    """Adds noise to each update."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        del state
        parameter -= lr * (gradient + 0.01 * torch.randn_like(gradient))


class Centred(_Plain):
    """Centres gradients of matrices and keeps the last three."""

    def update(self, parameter: Tensor, gradient: Tensor, state: Any, lr: float) -> None:
        """Update one parameter."""
        if gradient.dim() > 1:
            gradient = gradient - gradient.mean(1, keepdim=True)
        state["last"] = [*state.get("last", [])[-2:], gradient]
        parameter -= lr * sum(state["last"]) / len(state["last"])


def _with(optimizer: type[_Plain], depth: int = 12) -> Job:
    return make_job(lambda: layers(depth=depth), rows, squared_error, optimizer)


@case
def momentum_in_python() -> Job:
    """Momentum."""
    return _with(Momentum)


@case
def adam_in_python() -> Job:
    """Adam."""
    return _with(Adam)


@case
def lion_in_python() -> Job:
    """Lion."""
    return _with(Lion)


@case
def lars_in_python() -> Job:
    """LARS."""
    return _with(Lars)


@case
def lookahead_in_python() -> Job:
    """Lookahead."""
    return _with(Lookahead)


@case
def noisy_in_python() -> Job:
    """Noise in the update."""
    return _with(Noisy)


@case
def centred_in_python() -> Job:
    """A history of gradients."""
    return _with(Centred)


@case
def adam_of_a_wide_layer() -> Job:
    """Temporaries of one wide layer stand out."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 2048), nn.GELU(), nn.Linear(2048, 1))

    return make_job(model, optimizer=Adam)
