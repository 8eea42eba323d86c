"""Jobs whose step changes more than gradients, parameters and optimizer states; small and real."""

from __future__ import annotations

import copy
import functools
import os
import random
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from memfit.job import Job

WIDTH, CLASSES = 6, 3
SAMPLES: dict[str, Sample] = {}


@dataclass(frozen=True)
class Sample:
    """A job, what its step is expected to change, and the names of what draws random numbers."""

    name: str
    build: Callable[[], Job]
    changes: tuple[str, ...]
    lines: tuple[str, ...] = ()
    """Pieces of the lines of code where an operator writes."""


def sample(*changes: str, lines: tuple[str, ...] = ()) -> Callable[[Callable[[], Job]], Any]:
    def noted(build: Callable[[], Job]) -> Callable[[], Job]:
        SAMPLES[build.__name__] = Sample(build.__name__, build, changes, lines)
        return build

    return noted


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, WIDTH)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def job(model: Callable[[], nn.Module], **given: Any) -> Job:
    parts: dict[str, Any] = {
        "batch": batch,
        "loss": mean_square,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch_size": 4,
        **given,
    }
    return Job(model=model, **parts)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, CLASSES)


@sample("model.weight", "model.weight_u", "model.weight_v")
def spectral_norm_by_hook() -> Job:
    return job(lambda: torch.nn.utils.spectral_norm(linear()))


@sample("model.parametrizations.weight.0._u", "model.parametrizations.weight.0._v")
def spectral_norm_by_parametrization() -> Job:
    return job(lambda: torch.nn.utils.parametrizations.spectral_norm(linear()))


class Codebook(nn.Module):
    """Vector quantisation with a codebook that follows the codes' means."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = linear()
        self.register_buffer("codes", torch.randn(5, CLASSES))
        self.register_buffer("sizes", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        one_hot = torch.softmax(-torch.cdist(z, self.codes), 1)
        if self.training:
            with torch.no_grad():
                self.sizes.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)  # sizes written here
                self.codes.data.lerp_(one_hot.T @ z, 0.1)  # codes written here
        return z + (one_hot @ self.codes - z).detach()


@sample("model.codes", "model.sizes", lines=("sizes written here", "codes written here"))
def codebook_with_moving_means() -> Job:
    return job(Codebook)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = linear(), 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += len(x)
        return self.layer(x) / (1 + 0.1 * self.calls)


@sample("model.calls", "model.seen")
def counters() -> Job:
    return job(Counting)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.hidden = nn.GRUCell(WIDTH, CLASSES), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.cell(x, self.hidden)
        out = self.hidden
        self.hidden = self.hidden.detach()
        return out


@sample("model.hidden")
def state_between_steps() -> Job:
    return job(Recurrent)


class Queue(nn.Module):
    """Momentum contrast: a slow copy of the encoder fills a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = linear(), linear()
        self.slow.requires_grad_(False)
        self.register_buffer("keys", torch.randn(8, CLASSES))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.fast(x)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            key = self.slow(x)
            self.keys[: len(x)] = key  # keys written here
            self.at.add_(len(x)).remainder_(8)  # position written here
        return query @ self.keys.clone().T


@sample(
    *("model.slow.weight", "model.slow.bias", "model.keys", "model.at"),
    lines=("keys written here", "position written here"),
)
def queue_of_keys() -> Job:
    return job(Queue)


class WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = linear()
        self.others = [copy.deepcopy(self.student).requires_grad_(False)]
        self.register_forward_pre_hook(_follow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x) - 0.5 * self.others[0](x)


def _follow(model: nn.Module, _: object) -> None:
    with torch.no_grad():
        pairs = zip(model.others[0].parameters(), model.student.parameters(), strict=True)
        for slow, fast in pairs:
            slow.lerp_(fast, 0.5)  # teacher written here


@sample("model.others[0].weight", "model.others[0].bias", lines=("teacher written here",))
def teacher_outside_the_modules() -> Job:
    return job(WithTeacher)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.features = linear(), deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.features.append(out.detach().mean(0))
        return out - torch.stack([*self.features]).mean(0)


@sample("model.features")
def queue_of_features() -> Job:
    return job(Remembering)


class OwnGenerator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = linear(), torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape, generator=self.generator)  # own draw here
        return self.layer(x * (mask > 0.3))


@sample("model.generator", lines=("own draw here",))
def own_generator() -> Job:
    return job(OwnGenerator)


class NumpyNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.draws = linear(), np.random.default_rng(0)
        self.old_draws, self.python_draws = np.random.RandomState(0), random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.draws.normal() + self.old_draws.normal() + self.python_draws.random()
        return self.layer(x) * float(scale)


@sample("model.draws", "model.old_draws", "model.python_draws")
def generators_of_numpy_and_python() -> Job:
    return job(NumpyNoise)


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(1)  # global draw here
        return self.layer(x) * noise * float(np.random.rand() + random.random())


@sample("torch", "numpy", "random", lines=("global draw here",))
def global_generators() -> Job:
    return job(Global)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.means, self.by_length = linear(), [], {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        self.means.append(out.detach().mean())
        self.by_length.setdefault(len(self.means), torch.ones(CLASSES))
        return out + self.by_length[len(self.means)]


@sample("model.means", "model.by_length")
def lists_and_dicts_that_grow() -> Job:
    return job(Growing)


@sample("model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked")
def batch_norm() -> Job:
    return job(lambda: nn.Sequential(linear(), nn.BatchNorm1d(CLASSES)))


def _of_sequences(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x[:, :, None] * torch.arange(1.0, 4.0)).square().mean()


@sample("model.running_mean", "model.running_var")
def instance_norm_with_statistics() -> Job:
    def model() -> nn.Module:
        return nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    return job(model, loss=_of_sequences)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "grown"):
            self.register_buffer("grown", torch.zeros(1, CLASSES))
        out = self.layer(x)
        self.grown = torch.cat([self.grown, out[:1].detach()])
        return out + self.grown.mean(0)


@sample("model.grown")
def buffer_that_comes_late_and_grows() -> Job:
    return job(Late)


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in a dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = {id(p): p.detach().clone() for g in self.param_groups for p in g["params"]}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.slow[id(parameter)]
                slow.lerp_(parameter, 0.5)  # slow weights written here
                parameter.copy_(slow)


@sample("optimizer.slow", "optimizer.num_steps", lines=("slow weights written here",))
def optimizer_with_slow_weights() -> Job:
    return job(linear, optimizer=Lookahead)


class Wrapping(torch.optim.Optimizer):
    """Holds another optimizer and notes in a global entry of its state how often it stepped."""

    def __init__(self, parameters: Any) -> None:
        parameters = list(parameters)
        super().__init__(parameters, {"scale": 1.0})
        self.optimizer = torch.optim.Adam(parameters, lr=0.01)

    def step(self, closure: Any = None) -> None:
        self.state["all"] = self.state.get("all", 0) + 1
        for group in self.param_groups:
            group["scale"] *= 0.9
        self.optimizer.step()


@sample("optimizer.state", "optimizer.param_groups[0]")
def optimizer_around_another() -> Job:
    return job(linear, optimizer=Wrapping)


def _scheduled(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


@sample("optimizer.param_groups[0]", "last_epoch")
def scheduler_in_a_hook() -> Job:
    return job(linear, optimizer=_scheduled)


class Metric:
    """A running mean, like those of metric libraries."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), 0

    def update(self, value: torch.Tensor) -> None:
        self.total += value.detach()  # total written here
        self.count += 1


@sample("loss.metric.total", "loss.metric.count", lines=("total written here",))
def metric_in_a_closure() -> Job:
    metric = Metric()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value = model(x).square().mean()
        metric.update(value)
        return value

    return job(linear, loss=loss)


STEP = 0
SETTINGS: dict[str, Any] = {"seen": 0}


def _count_globally(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    global STEP  # noqa: PLW0603 - this is what is tested
    STEP += 1
    SETTINGS["seen"] += len(x)
    return model(x).square().mean() * 0.5**STEP


@sample("STEP", "SETTINGS")
def global_counter() -> Job:
    return job(linear, loss=_count_globally)


@sample("loss.num_calls")
def nonlocal_counter() -> Job:
    num_calls = 0

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return model(x).square().mean() / num_calls

    return job(linear, loss=loss)


def _noting(log: list[float], model: nn.Module, x: torch.Tensor, **settings: Any) -> torch.Tensor:
    log.append(len(x))
    settings["seen"].append(len(log))
    return model(x).square().mean() * len(log)


@sample("loss.args[0]", "loss.keywords['seen']")
def partial_with_lists() -> Job:
    return job(linear, loss=functools.partial(_noting, [], seen=[]))


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@sample("tests.zoo.stateful_modules.SCALE")
def context_variable() -> Job:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        SCALE.set(SCALE.get() * 0.9)
        return mean_square(model, x) * SCALE.get()

    return job(linear, loss=loss)


@sample("os.environ")
def environment() -> Job:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        os.environ["OF_A_SAMPLE"] = f"{os.environ.get('OF_A_SAMPLE', '')}I"
        return mean_square(model, x) * len(os.environ["OF_A_SAMPLE"])

    return job(linear, loss=loss)


@sample("torch.backends.cudnn.benchmark")
def settings_of_the_process() -> Job:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
        return mean_square(model, x) * (1 + torch.backends.cudnn.benchmark)

    return job(linear, loss=loss)


class Loss:
    """A callable with a moving centre, as in self-distillation."""

    scale = 1.0

    def __init__(self) -> None:
        self.centre = torch.zeros(CLASSES)

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        value = (out - self.centre).square().mean() * self.scale
        self.centre = self.centre * 0.9 + out.detach().mean(0) * 0.1
        type(self).scale *= 0.9
        return value


@sample("loss.centre", "Loss.scale")
def callable_loss_with_a_centre() -> Job:
    Loss.scale = 1.0
    return job(linear, loss=Loss())


class Shrinking(nn.Module):
    """Freezes a part and drops its hook after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), linear()
        self.handle = self.first.register_forward_hook(self._leave)

    def _leave(self, *_: object) -> None:
        self.handle.remove()
        self.first.eval()
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@sample("model.first._forward_hooks", "model.first.training", "model.first.weight")
def hook_that_removes_itself() -> Job:
    return job(Shrinking)
