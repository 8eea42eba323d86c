"""Answers the questions that code asks of ``torch.cuda`` as the virtual card would."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.trace.cuda.card import Card
from memfit.trace.cuda.placement import device_meant

_RANDOM_STATE_BYTES = 16
"""Seed and offset of the Philox generator (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)."""
_NOTHING_TO_DO = (
    "_lazy_init",
    "empty_cache",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "synchronize",
)
_NO_BYTES = (
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
)


def runtime(card: Card) -> Iterator[Any]:
    """Yield the replacements that make ``torch.cuda`` answer for a card."""
    for name, answer in _answers(card).items():
        if hasattr(torch.cuda, name):
            yield patch.object(torch.cuda, name, answer)
    yield patch.object(torch.accelerator, "is_available", _always(True))
    yield patch.object(torch.accelerator, "current_accelerator", _always(torch.device("cuda")))
    yield patch.object(torch.accelerator, "device_count", _always(1))
    for name in ("current_stream", "current_device_index", "current_device_idx", "synchronize"):
        if hasattr(torch.accelerator, name):
            yield patch.object(torch.accelerator, name, _always(_Inert()))
    yield patch.object(torch.backends.cudnn, "is_available", _always(True))
    yield patch.object(torch.random, "fork_rng", _no_fork)
    yield patch.object(torch.nn.RNNBase, "flatten_parameters", _always(None))
    yield from _optimizers()
    yield from _gradient_scaler()


def _answers(card: Card) -> dict[str, Any]:
    """Give what replaces functions of ``torch.cuda``, by name."""
    answers: dict[str, Any] = dict.fromkeys(_NOTHING_TO_DO, _always(None))
    answers.update(dict.fromkeys(_NO_BYTES, _always(0)))
    inert = _Inert()
    answers.update(
        is_available=_always(True),
        is_initialized=_always(True),
        is_bf16_supported=_always(True),
        device_count=_always(1),
        current_device=_always(0),
        get_device_name=_always(card.title),
        get_device_capability=_always(card.capability),
        get_device_properties=_always(_properties(card)),
        mem_get_info=_always((card.memory_bytes, card.memory_bytes)),
        memory_stats=_always({}),
        get_rng_state=_random_state,
        get_rng_state_all=lambda: [_random_state()],
        set_rng_state_all=_always(None),
        device=_Inert,
        device_of=_Inert,
        stream=_Inert,
        Stream=_Inert,
        Event=_Inert,
        current_stream=_always(inert),
        default_stream=_always(inert),
    )
    return answers


def _properties(card: Card) -> SimpleNamespace:
    return SimpleNamespace(
        name=card.title,
        total_memory=card.memory_bytes,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=card.num_multiprocessors,
    )


class _Inert(nullcontext[None]):
    """Stand in for streams, events and device guards: entering, waiting and timing do nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def elapsed_time(self, _end: object) -> float:
        """Give no time: nothing runs."""
        return 0.0

    def query(self) -> bool:
        """Say that everything is done."""
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _always(None)


def _optimizers() -> Iterator[Any]:
    """Let optimizers choose as they do on CUDA: they look at the type and the device of tensors."""
    module: Any = sys.modules["torch.optim.optimizer"]  # hidden behind torch.optim's own names
    supported = [*module._foreach_supported_types, FakeTensor]
    yield patch.object(module, "_foreach_supported_types", supported)
    group = torch.optim.Optimizer._group_tensors_by_device_and_dtype

    @functools.wraps(group)
    def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        # C++ groups by the device that it was told; optimizers look the device up in tables.
        groups = group(*args, **kwargs)
        return {(_meant(device), dtype): value for (device, dtype), value in groups.items()}

    yield patch.object(
        torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(grouped)
    )


def _gradient_scaler() -> Iterator[Any]:
    """Have GradScaler take every step: whether one is skipped depends on values."""

    def step(
        _scaler: object, optimizer: torch.optim.Optimizer, _state: object, *args: Any, **kwargs: Any
    ) -> Any:
        return optimizer.step(*args, **kwargs)

    yield patch.object(torch.amp.GradScaler, "_maybe_opt_step", step)


def _meant(device: torch.device | None) -> torch.device | None:
    return None if device is None else device_meant(device)


def _no_fork(*_args: Any, **_kwargs: Any) -> nullcontext[None]:
    """Leave the random state alone: fake tensors draw nothing."""
    return nullcontext()


def _random_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _always(value: Any) -> Callable[..., Any]:
    """Give a function that takes anything and returns ``value``."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer
