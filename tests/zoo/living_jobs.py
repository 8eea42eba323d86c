"""Jobs whose functions return objects that already live, with state of many kinds, and their bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from memfit import Job


@dataclass(frozen=True)
class Living:
    """A job, the objects that it returns, and what else its code reaches."""

    job: Job
    model: nn.Module
    optimizer: torch.optim.Optimizer
    others: Mapping[str, Any] = field(default_factory=dict)
    fresh: Job | None = None
    """The same job with functions that build anew."""


def mean_square(model, batch):
    return model(batch).square().mean()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def trained(
    build: Callable[[], nn.Module],
    batch: Callable[[int], Any],
    loss=mean_square,
    optimizer=adam,
    *,
    steps: int = 2,
    **others: Any,
) -> Living:
    """Train a model for some steps, leave the last gradients there, and make a job of it."""
    fresh = Job(model=build, batch=batch, loss=loss, optimizer=optimizer, batch_size=8)
    model = build()
    own = optimizer(model.parameters())
    for _ in range(steps):
        own.zero_grad()
        loss(model, batch(8)).backward()
        own.step()
    job = Job(model=lambda: model, batch=batch, loss=loss, optimizer=lambda _: own, batch_size=8)
    return Living(job, model, own, others, fresh)


def rows(width: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randn(size, width)


def perceptron() -> Living:
    def build():
        return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    return trained(build, rows(10), optimizer=sgd)


def convolutional() -> Living:
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        )

    return trained(build, lambda size: torch.randn(size, 3, 8, 8))


def spectral() -> Living:
    def build():
        return nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(10, 20)),
            nn.ReLU(),
            nn.utils.spectral_norm(nn.Linear(20, 3)),
        )

    return trained(build, rows(10))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


def tied() -> Living:
    def loss(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    return trained(Tied, lambda size: torch.randint(30, (size, 5)), loss)


def own_randomness() -> Living:
    generator = torch.Generator().manual_seed(3)
    numpy_generator = np.random.default_rng(4)

    def loss(model, batch):
        kept = torch.bernoulli(torch.full(batch.shape, 0.5), generator=generator)
        noise = 0.1 * (random.random() + np.random.rand() + numpy_generator.random())
        return (model(batch) * kept + noise).square().mean()

    generators = {"generator": generator, "numpy": numpy_generator}
    return trained(lambda: nn.Linear(6, 6), rows(6), loss, **generators)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 1)
        self.state = None
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        fits = self.state is not None and self.state.shape[1] == x.shape[0]
        output, state = self.layer(x, self.state if fits else None)
        self.state = state.detach()
        return self.head(output)


def recurrent() -> Living:
    return trained(Recurrent, lambda size: torch.randn(size, 5, 4))


def taught() -> Living:
    teacher = nn.Linear(6, 2).requires_grad_(False)

    def loss(model, batch):
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)
        return (model(batch) - teacher(batch) - 1).square().mean()

    return trained(lambda: nn.Linear(6, 2), rows(6), loss, teacher=teacher)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 3), nn.Linear(3, 4)
        self.register_buffer("codes", torch.randn(5, 3))
        self.register_buffer("counts", torch.ones(5))
        self.sums = torch.randn(5, 3)

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        chosen = F.one_hot(nearest, 5).to(z.dtype)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(chosen.t() @ z, alpha=0.1)
            self.codes = self.sums / self.counts[:, None]
        return self.decoder(z + (self.codes[nearest] - z).detach())


def quantised() -> Living:
    return trained(Codebook, rows(4))


def frozen_backbone() -> Living:
    def build():
        backbone = nn.Linear(10, 20).bfloat16().requires_grad_(False).eval()
        return nn.ModuleDict({"backbone": backbone, "head": nn.Linear(20, 3)})

    def loss(model, batch):
        return model["head"](model["backbone"](batch.bfloat16()).float()).square().mean()

    def optimizer(parameters):
        return torch.optim.AdamW([each for each in parameters if each.requires_grad])

    return trained(build, rows(10), loss, optimizer)


def transformer() -> Living:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )

    def loss(model, batch):
        return F.cross_entropy(model(input_ids=batch).logits.flatten(0, 1), batch.flatten())

    def build():
        return transformers.GPT2LMHeadModel(config)

    return trained(build, lambda size: torch.randint(50, (size, 8)), loss)


def hooked() -> Living:
    def halve(parameter):
        parameter.grad.mul_(0.5)

    def build():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        model[2].weight.register_post_accumulate_grad_hook(halve)
        return model

    return trained(build, rows(6))


def noted() -> Living:
    log: list[float] = []

    def build():
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        model[1].register_forward_hook(lambda _m, _i, out: log.append(out.detach().mean()))
        model[2].register_full_backward_hook(lambda _m, _i, out: log.append(len(out)))
        return model

    return trained(build, rows(6), log=log)


ALL = [
    perceptron,
    convolutional,
    spectral,
    tied,
    own_randomness,
    recurrent,
    taught,
    quantised,
    frozen_backbone,
    transformer,
    hooked,
    noted,
]


def bits_of(living: Living) -> dict[str, Any]:
    """Describe everything of a living job to the bit; two descriptions compare with ``==``."""
    return {
        "modules": [_module_bits(name, each) for name, each in living.model.named_modules()],
        "tensors": {
            name: (_bits(tensor), _bits(tensor.grad), id(tensor.grad), _hooks(tensor))
            for name, tensor in living.model.named_parameters()
        },
        "states": [_bits(dict(state)) for state in living.optimizer.state.values()],
        "stateful": [id(each) for each in living.optimizer.state],
        "groups": _bits(living.optimizer.param_groups),
        "others": {name: _bits(each) for name, each in living.others.items()},
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": _bits(np.random.get_state()),
        "default": torch.get_default_dtype(),
    }


def _module_bits(name: str, module: nn.Module) -> Any:
    return (
        name,
        id(module),
        module.training,
        {key: _bits(value) for key, value in vars(module).items()},
    )


def _bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            id(value),
            type(value),
            value.dtype,
            value.requires_grad,
            value.data_ptr(),
            value.detach().contiguous().view(torch.uint8).tolist() if value.dim() else value.item(),
        )
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return {str(key): _bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_bits(each) for each in value]
    if isinstance(value, nn.Module):
        return id(value), {name: _bits(each) for name, each in value.named_parameters()}
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return copy.deepcopy(value.bit_generator.state)
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def _hooks(tensor: torch.Tensor) -> Any:
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return _bits(tensor._backward_hooks or {}), _bits(after or {})
