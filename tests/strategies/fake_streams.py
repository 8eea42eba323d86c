"""Streams without a GPU, which run as unluckily as the rules of CUDA allow.

Computation is done at once, copies on other streams only when somebody waits for them. A copy holds
no memory: where its source is gone by then, something else would lie there, so it brings NaN; where
its destination is gone, it would spoil something else, which is noted.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class FakeStream:
    def __init__(self, cuda, name):
        self.name = name
        self._cuda = cuda
        self._copies = []
        self._num_done = 0

    def wait_event(self, event):
        self._cuda.log.append((self.name, "waits for", event.stream.name))
        event.stream.run_until(event.position)

    def put(self, destination, source):
        self._copies.append((_Place(destination), _Place(source)))

    def num_asked(self):
        return len(self._copies)

    def run_until(self, count):
        while self._num_done < count:
            destination, source = self._copies[self._num_done]
            self._num_done += 1
            self._cuda.copy_now(destination.found(), source.found())


class _Place:
    """Where a tensor lies, without keeping it alive."""

    def __init__(self, tensor):
        self._storage = weakref.ref(tensor.untyped_storage())
        self._view = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._dtype = tensor.dtype

    def found(self):
        storage = self._storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class FakeEvent:
    def __init__(self, cuda):
        self._cuda = cuda
        self.stream = None
        self.position = 0

    def record(self, stream):
        self.stream = stream
        self.position = stream.num_asked()

    def synchronize(self):
        self._cuda.log.append(("host", "waits for", self.stream.name))
        self.stream.run_until(self.position)


class _Delayed(TorchDispatchMode):
    def __init__(self, stream):
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.copy_.default, "only copies are done on a copy stream"
        assert args[2:] == (True,), "copies on another stream do not wait"
        self._stream.put(*args[:2])
        return args[0]


class FakeCuda:
    """What ``torch.cuda`` gives: a current stream, new streams and events."""

    def __init__(self):
        self.log = []
        self.spoiled = []
        self._current = FakeStream(self, "compute")
        self._num_streams = 0

    def current_stream(self):
        return self._current

    def Stream(self):  # noqa: N802 - the name in torch.cuda
        self._num_streams += 1
        return FakeStream(self, f"copy {self._num_streams}")

    def Event(self):  # noqa: N802 - the name in torch.cuda
        return FakeEvent(self)

    @contextmanager
    def stream(self, stream):
        before, self._current = self._current, stream
        self.log.append((stream.name, "copies", ""))
        try:
            with _Delayed(stream):
                yield
        finally:
            self._current = before

    def copy_now(self, destination, source):
        if destination is None:
            self.spoiled.append("a copy came after its destination was given back")
        elif source is None:
            destination.view(torch.uint8).fill_(255)  # NaN in every floating-point type
        else:
            destination.copy_(source)
