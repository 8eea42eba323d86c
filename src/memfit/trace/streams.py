"""The stream of the card that code works on: the caching allocator keeps a pool for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DEFAULT_STREAM = 0
_CURRENT: ContextVar[int] = ContextVar("stream", default=DEFAULT_STREAM)


def current_stream() -> int:
    """Return the number of the stream on which memory is taken now."""
    return _CURRENT.get()


def work_on(stream: int) -> None:
    """Take memory on a stream from now on, as ``torch.cuda.set_stream`` does."""
    _CURRENT.set(stream)


@contextmanager
def streams_left_as_they_are() -> Iterator[None]:
    """Go back to the stream of before, whatever was set inside; inside it begins anew."""
    token = _CURRENT.set(DEFAULT_STREAM)
    try:
        yield
    finally:
        _CURRENT.reset(token)
