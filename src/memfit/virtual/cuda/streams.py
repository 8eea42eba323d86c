"""Streams, events and guards of the virtual card: nothing waits, but memory is taken on a stream.

The caching allocator serves each stream from a pool of its own (c10/cuda/CUDACachingAllocator.cpp),
so what code allocates under ``torch.cuda.stream`` is reserved beside what it allocates elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any
from unittest.mock import patch

import torch

from memfit.trace.streams import (
    DEFAULT_STREAM,
    current_stream,
    streams_left_as_they_are,
    work_on,
)


class Inert(nullcontext[None]):
    """Stand in for events and device guards: entering, waiting and timing do nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()

    def elapsed_time(self, _end: object) -> float:
        """Return no time: nothing runs."""
        return 0.0

    def query(self) -> bool:
        """Say that everything is done."""
        return True

    def record_event(self, event: Inert | None = None) -> Inert:
        """Return an event, which FSDP2 holds on to together with what waits for it."""
        return event or Inert()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


class Stream(Inert):
    """Stand in for a stream: a number, and a context in which memory is taken on it."""

    numbers: Any = count(DEFAULT_STREAM + 1)

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.stream_id: int = next(Stream.numbers)
        self._before: list[int] = []

    @classmethod
    def numbered(cls, number: int) -> Stream:
        """Return a stream that there is already."""
        stream = cls.__new__(cls)
        Inert.__init__(stream)
        stream.stream_id, stream._before = number, []
        return stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> None:
        self._before.append(current_stream())
        work_on(self.stream_id)

    def __exit__(self, *_error: object) -> None:
        work_on(self._before.pop())


def streams() -> Iterator[Any]:
    """Yield the replacements of ``torch.cuda`` and ``torch.accelerator`` that concern streams."""
    yield streams_left_as_they_are()
    yield patch.object(Stream, "numbers", count(DEFAULT_STREAM + 1))
    answers: dict[str, Any] = {
        "Stream": Stream,
        "Event": Inert,
        "stream": _on,
        "set_stream": _set,
        "current_stream": lambda *_args, **_kwargs: Stream.numbered(current_stream()),
        "default_stream": lambda *_args, **_kwargs: Stream.numbered(DEFAULT_STREAM),
    }
    for name, answer in answers.items():
        yield patch.object(torch.cuda, name, answer)
    for name in ("current_stream", "set_stream"):
        if hasattr(torch.accelerator, name):
            yield patch.object(torch.accelerator, name, answers[name])


def _on(stream: Any = None) -> Any:
    """Return the context in which memory is taken on a stream; without one nothing changes."""
    return stream if isinstance(stream, Stream) else Inert()


def _set(stream: Any = None) -> None:
    if isinstance(stream, Stream):
        work_on(stream.stream_id)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, whatever is asked."""
