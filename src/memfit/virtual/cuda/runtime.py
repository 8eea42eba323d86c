"""Answers the questions that code asks of ``torch.cuda`` as the virtual card would."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.kernels.cuda.card import Card
from memfit.trace.streams import (
    DEFAULT_STREAM,
    current_stream,
    streams_left_as_they_are,
    work_on,
)
from memfit.virtual.cuda.placement import CARD, device_meant

_RANDOM_STATE_BYTES = 16
"""Seed and offset of the Philox generator (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)."""
_CUDNN_VERSION = 91900
"""Of the wheels of torch 2.11 and later; code compares it with much older ones."""
_THREADS_PER_WARP = 32
_THREADS_PER_BLOCK = 1024
_AMPERE = 8
"""The first major compute capability with bf16 and TF32."""
_NOTHING_TO_DO = (
    "_lazy_init",
    "_sleep",
    "empty_cache",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
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
    answers = _answers(card)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        for name, answer in answers.items():
            if hasattr(module, name):
                yield patch.object(module, name, answer)
    yield from _streams()
    yield from _cached_memory()
    yield from _accelerator()
    yield patch.object(torch._C, "_cuda_getCurrentRawStream", _always(0), create=True)
    yield patch.object(torch, "get_device_module", _device_module(torch.get_device_module))
    yield patch.object(torch.cuda.nvtx, "_nvtx", _Inert())
    yield patch.object(torch.backends.cudnn, "is_available", _always(True))
    yield patch.object(torch.backends.cudnn, "version", _always(_CUDNN_VERSION))
    yield patch.object(torch.random, "fork_rng", _no_fork)
    yield patch.object(torch.nn.RNNBase, "flatten_parameters", _always(None))
    yield from _optimizers()


def _cached_memory() -> Iterator[Any]:
    """Send every way to ``empty_cache`` through ``torch.cuda.empty_cache``, where it is noted."""

    def release() -> None:
        torch.cuda.empty_cache()

    yield patch.object(torch.cuda.memory, "empty_cache", release)
    yield patch.object(torch._C, "_cuda_emptyCache", release, create=True)
    if hasattr(torch.accelerator, "empty_cache"):
        yield patch.object(torch.accelerator, "empty_cache", release)


def _accelerator() -> Iterator[Any]:
    """Yield the replacements that make ``torch.accelerator`` answer for the card."""
    answers: dict[str, Any] = {
        "is_available": _always(True),
        "current_accelerator": _always(torch.device("cuda")),
        "device_count": _always(1),
        "current_device_index": _always(0),
        "current_device_idx": _always(0),
        "set_device_index": _use_only_the_card,
        "set_device_idx": _use_only_the_card,
        "device_index": _Guard,
        "memory_stats": lambda *_args: defaultdict(int),
        **dict.fromkeys(_NOTHING_TO_DO, _always(None)),
        **dict.fromkeys(_NO_BYTES, _always(0)),
    }
    for name, answer in answers.items():
        if name != "empty_cache" and hasattr(torch.accelerator, name):
            yield patch.object(torch.accelerator, name, answer)


def _answers(card: Card) -> dict[str, Any]:
    """Return what replaces functions of ``torch.cuda``, by name."""
    answers: dict[str, Any] = dict.fromkeys(_NOTHING_TO_DO, _always(None))
    answers.update(dict.fromkeys(_NO_BYTES, _always(0)))
    is_ampere = card.capability[0] >= _AMPERE
    properties = _Properties(card)
    # A card notes what it is asked, so nothing is asked of it here.
    answers.update(
        is_available=_always(True),
        is_initialized=_always(True),
        is_bf16_supported=lambda including_emulation=True: including_emulation or is_ampere,
        is_tf32_supported=_always(is_ampere),
        is_current_stream_capturing=_always(False),
        device_count=_always(1),
        current_device=_always(0),
        current_blas_handle=_always(0),
        initial_seed=_always(0),
        set_device=_use_only_the_card,
        get_device_name=lambda *_args, **_kwargs: card.title,
        get_device_capability=_always(card.capability),
        get_device_properties=_always(properties),
        mem_get_info=lambda *_args, **_kwargs: (card.memory_bytes, card.memory_bytes),
        memory_stats=lambda *_args, **_kwargs: defaultdict(int),
        memory_stats_as_nested_dict=lambda *_args, **_kwargs: {},
        memory_snapshot=lambda *_args, **_kwargs: [],
        memory_summary=_always(""),
        get_rng_state=_random_state,
        get_rng_state_all=lambda: [_random_state()],
        set_rng_state_all=_always(None),
        device=_Guard,
        device_of=_Inert,
    )
    return answers


class _Properties:
    """Stand in for a device's properties; each is asked of the card when it is looked at."""

    warp_size = _THREADS_PER_WARP
    max_threads_per_block = _THREADS_PER_BLOCK
    is_integrated = 0
    is_multi_gpu_board = 0

    def __init__(self, card: Card) -> None:
        self._card = card
        self.major, self.minor = card.capability

    name = property(lambda self: self._card.title)
    total_memory = property(lambda self: self._card.memory_bytes)
    multi_processor_count = property(lambda self: self._card.likely_multiprocessors)
    max_threads_per_multi_processor = property(lambda self: self._card.threads_per_multiprocessor)


class _Inert(nullcontext[None]):
    """Stand in for events and device guards: entering, waiting and timing do nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def elapsed_time(self, _end: object) -> float:
        """Return no time: nothing runs."""
        return 0.0

    def query(self) -> bool:
        """Say that everything is done."""
        return True

    def record_event(self, event: _Inert | None = None) -> _Inert:
        """Return an event, which FSDP2 holds on to together with what waits for it."""
        return event or _Inert()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class _Guard(_Inert):
    """Stand in for guards that name a device."""

    def __init__(self, device: Any = None) -> None:
        super().__init__()
        _use_only_the_card(device)


def _use_only_the_card(device: Any = None) -> None:
    """Refuse another GPU; a negative number means no device at all."""
    if device is not None and not (isinstance(device, int) and device < 0):
        device_meant(device)


def _device_module(find: Callable[..., Any]) -> Callable[..., Any]:
    """Find ``torch.cuda`` where torch would look for the accelerator of the machine."""

    def device_module(device: Any = None) -> Any:
        return find(CARD if device is None else device)

    return device_module


def _optimizers() -> Iterator[Any]:
    """Let optimizers choose as they do on CUDA: they look at the type and the device of tensors."""
    # Hidden behind torch.optim's own names.
    optimizer: Any = sys.modules["torch.optim.optimizer"]
    foreach: Any = sys.modules["torch.utils._foreach_utils"]
    clipping: Any = sys.modules["torch.nn.utils.clip_grad"]
    supported = [*optimizer._foreach_supported_types, FakeTensor]
    yield patch.object(optimizer, "_foreach_supported_types", supported)
    yield patch.object(foreach, "_foreach_supported_types", supported)
    in_optimizer = torch.optim.Optimizer._group_tensors_by_device_and_dtype
    yield patch.object(
        torch.optim.Optimizer,
        "_group_tensors_by_device_and_dtype",
        staticmethod(_grouped(in_optimizer)),
    )
    name = "_group_tensors_by_device_and_dtype"
    yield patch.object(clipping, name, _grouped(getattr(clipping, name)))


def _grouped(group: Callable[..., Any]) -> Callable[..., Any]:
    """Name the device that is meant: C++ groups by the one that it was told."""

    @functools.wraps(group)
    def grouped(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        groups = group(*args, **kwargs)
        return {(_meant(device), dtype): value for (device, dtype), value in groups.items()}

    return grouped


def _meant(device: torch.device | None) -> torch.device | None:
    return None if device is None else device_meant(device)


def _no_fork(*_args: Any, **_kwargs: Any) -> nullcontext[None]:
    """Leave the random state alone: fake tensors draw nothing."""
    return nullcontext()


def _random_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(_RANDOM_STATE_BYTES, dtype=torch.uint8)


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that takes anything and returns ``value``."""

    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


class _Stream(_Inert):
    """Stand in for a stream: a number, and a context in which memory is taken on it.

    The caching allocator serves each stream from a pool of its own
    (c10/cuda/CUDACachingAllocator.cpp), so what code allocates under ``torch.cuda.stream`` is
    reserved beside what it allocates elsewhere.
    """

    numbers: Any = count(DEFAULT_STREAM + 1)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.stream_id: int = next(_Stream.numbers)
        self._before: list[int] = []

    @classmethod
    def numbered(cls, number: int) -> _Stream:
        """Return a stream that there is already."""
        stream = cls.__new__(cls)
        _Inert.__init__(stream)
        stream.stream_id, stream._before = number, []
        return stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> None:
        self._before.append(current_stream())
        work_on(self.stream_id)

    def __exit__(self, *_error: object) -> None:
        work_on(self._before.pop())


def _streams() -> Iterator[Any]:
    """Yield the replacements of ``torch.cuda`` and ``torch.accelerator`` that concern streams."""
    yield streams_left_as_they_are()
    yield patch.object(_Stream, "numbers", count(DEFAULT_STREAM + 1))
    answers: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Inert,
        "stream": _on,
        "set_stream": _set,
        "current_stream": lambda *_args, **_kwargs: _Stream.numbered(current_stream()),
        "default_stream": lambda *_args, **_kwargs: _Stream.numbered(DEFAULT_STREAM),
    }
    for name, answer in answers.items():
        yield patch.object(torch.cuda, name, answer)
    for name in ("current_stream", "set_stream"):
        if hasattr(torch.accelerator, name):
            yield patch.object(torch.accelerator, name, answers[name])


def _on(stream: Any = None) -> Any:
    """Return the context in which memory is taken on a stream; without one nothing changes."""
    return stream if isinstance(stream, _Stream) else _Inert()


def _set(stream: Any = None) -> None:
    if isinstance(stream, _Stream):
        work_on(stream.stream_id)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, whatever is asked."""
