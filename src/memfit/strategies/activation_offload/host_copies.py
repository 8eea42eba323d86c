"""Copies between a GPU and the host beside the computation: the streams' order, and the buffers.

Three rules keep the bytes right, over many steps. The computing stream is asked for before the
copy stream becomes the current one. Memory of the device is made and given back on the computing
stream alone, and given back only after that stream has been told to wait for the copy. Until then
the device's side of a copy is held here, so that nothing else can be put there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from memfit.session.spill import Spill


class CopyStream:
    """Copy on a stream of its own, ordered by events against the stream that computes.

    Args:
        cuda: gives streams and events as ``torch.cuda`` does.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._stream: Any = None
        self._under_way: dict[int, tuple[torch.Tensor, Any]] = {}

    def send(self, on_device: torch.Tensor, on_host: torch.Tensor) -> Any:
        """Begin a copy to the host, and give the event of its end."""
        return self._copy(on_host, on_device, held=on_device)

    def bring(self, on_device: torch.Tensor, on_host: torch.Tensor) -> Any:
        """Begin a copy to the device, and give the event of its end."""
        return self._copy(on_device, on_host, held=on_device)

    def finish(self, on_device: torch.Tensor) -> None:
        """Have the computing stream wait for a copy, so that its tensor may be used or given up."""
        _, event = self._under_way.pop(id(on_device))
        self._cuda.current_stream().wait_event(event)

    def finish_all(self) -> None:
        """Finish what nobody asked for, as when a step fails or backward leaves out a part."""
        for on_device, _ in list(self._under_way.values()):
            self.finish(on_device)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, held: torch.Tensor) -> Any:
        """Copy after all that has been asked of the device so far."""
        compute = self._cuda.current_stream()
        if self._stream is None:
            self._stream = self._cuda.Stream()
        self._stream.wait_event(self._event_on(compute))
        with self._cuda.stream(self._stream):
            destination.copy_(source, non_blocking=True)
        event = self._event_on(self._stream)
        self._under_way[id(held)] = (held, event)
        return event

    def _event_on(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event


@dataclass(slots=True, eq=False)
class HostBuffer:
    """Memory of the host, and the last copy from it or into it."""

    content: torch.Tensor
    last_copy: Any = None

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Look at as much of the buffer as a flat tensor takes, in the tensor's type."""
        num_bytes = tensor.numel() * tensor.element_size()
        return self.content[:num_bytes].view(tensor.dtype)


class BufferPool:
    """Keep buffers of the host for later use, by their size.

    Sizes are powers of two: torch's allocator of pinned memory rounds to them in any case
    (``CachingHostAllocator.h`` of torch 2.13), so the same buffers serve batches of all sizes.

    Args:
        spill: counts the buffers.
        is_pinned: whether copies need not wait, which takes a real GPU.
    """

    def __init__(self, spill: Spill, *, is_pinned: bool) -> None:
        self._spill = spill
        self._is_pinned = is_pinned
        self._is_open = True
        self._free: dict[int, list[HostBuffer]] = {}

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least so many bytes. Its last copy may be under way still."""
        rounded_bytes = 1 << (num_bytes - 1).bit_length()
        if buffers := self._free.get(rounded_bytes):
            return buffers.pop()
        self._spill.add_host(rounded_bytes)
        content = torch.empty(
            rounded_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned
        )
        return HostBuffer(content)

    def give_back(self, buffer: HostBuffer) -> None:
        """Keep a buffer for later."""
        num_bytes = buffer.content.numel()
        if self._is_open:
            self._free.setdefault(num_bytes, []).append(buffer)
        else:
            self._spill.add_host(-num_bytes)

    def close(self) -> None:
        """Release the buffers that are not in use; the others follow when they come back."""
        self._is_open = False
        for num_bytes, buffers in self._free.items():
            self._spill.add_host(-num_bytes * len(buffers))
        self._free.clear()
