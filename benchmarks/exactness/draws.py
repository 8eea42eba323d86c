"""Holds random draws still: what the whole batch drew, each piece draws again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SEED = 3
RANDOM_OPERATORS = frozenset(
    [
        "bernoulli",
        "bernoulli_",
        "rand",
        "randn",
        "randint",
        "randperm",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal",
        "normal_",
        "uniform_",
        "exponential_",
        "multinomial",
        "poisson",
        "random_",
        "geometric_",
        "log_normal_",
        "cauchy_",
        "native_dropout",
        "binomial",
        "_sample_dirichlet",
        "_standard_gamma",
    ]
)
VALUE_OPERATORS = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "equal",
        "bincount",
    ]
)

Layout = Literal["sample", "view"]


def seed_all() -> None:
    """Seed torch on the CPU, numpy and ``random``."""
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed notes a traceback for CUDA
    np.random.seed(SEED)
    random.seed(SEED)


def global_states() -> tuple[bytes, ...]:
    """Return the states of the generators that a process has anyway, to be compared."""
    return (
        torch.get_rng_state().numpy().tobytes(),
        np.random.get_state(legacy=False)["state"]["key"].tobytes(),
        str(np.random.get_state(legacy=False)["state"]["pos"]).encode(),
        repr(random.getstate()).encode(),
    )


def name_of(operator: Any) -> str:
    """Return an operator's name without its namespace and overload."""
    return operator._schema.name.rpartition("::")[2]


@dataclass
class Tape:
    """The random tensors of one forward of the whole batch, in order."""

    tensors: list[Tensor] = field(default_factory=list)
    reads_values: bool = False
    """Whether forward or backward asked what is in a tensor."""


class Record(TorchDispatchMode):
    """Keeps what is drawn, and notes reads of values."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and keep what it drew."""
        name = name_of(func)
        out = func(*args, **(kwargs or {}))
        if name in RANDOM_OPERATORS and isinstance(out, Tensor):
            self.tape.tensors.append(out.detach().clone())
        if name in VALUE_OPERATORS or (name in ("index", "index_put_") and _by_mask(args)):
            self.tape.reads_values = True
        return out


def _by_mask(args: Any) -> bool:
    return any(
        isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]
    )


class Replay(TorchDispatchMode):
    """Gives a piece of the batch its part of what the whole batch drew.

    Limits: a draw is cut along the first dimension in which the piece's draw is shorter.
    """

    def __init__(self, tape: Tape, samples: range, batch_size: int, layout: Layout) -> None:
        super().__init__()
        self.tape, self.samples, self.batch_size, self.layout = tape, samples, batch_size, layout
        self.next = 0
        self.num_shared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; where it draws, put the tape's values in place of its own."""
        out = func(*args, **(kwargs or {}))
        if name_of(func) not in RANDOM_OPERATORS or not isinstance(out, Tensor):
            return out
        whole = self.tape.tensors[self.next]
        self.next += 1
        return out.copy_(self._part(whole, out))

    def _part(self, whole: Tensor, own: Tensor) -> Tensor:
        if whole.shape == own.shape:
            self.num_shared += 1
            return whole
        dim = next(d for d in range(own.dim()) if own.shape[d] != whole.shape[d])
        times = whole.shape[dim] // self.batch_size
        count = len(self.samples)
        if self.layout == "sample":
            return whole.narrow(dim, self.samples.start * times, count * times)
        views = whole.unflatten(dim, (times, self.batch_size))
        return views.narrow(dim + 1, self.samples.start, count).flatten(dim, dim + 1)


def states_of(sources: list[Any]) -> list[Any]:
    """Return the states of generators that belong to the job."""
    return [_state(source) for source in sources]


def _state(source: Any) -> Any:
    if isinstance(source, torch.Generator):
        return source.get_state().clone()
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    if isinstance(source, np.random.RandomState):
        return source.get_state()
    return source.getstate()


def put_back(sources: list[Any], states: list[Any]) -> None:
    """Put generators that belong to the job back into earlier states."""
    for source, state in zip(sources, states, strict=True):
        if isinstance(source, np.random.Generator):
            source.bit_generator.state = state
        elif isinstance(source, (torch.Generator, np.random.RandomState)):
            source.set_state(state)
        else:
            source.setstate(state)


@contextmanager
def doubles() -> Iterator[None]:
    """Make new tensors in fp64 meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
