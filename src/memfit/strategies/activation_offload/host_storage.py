"""Storages outside the device, where saved tensors wait until backward asks for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from memfit.strategies.activation_offload.host_copies import BufferPool, CopyStream, HostBuffer
from memfit.strategies.activation_offload.spill_file import Slot, SpillFile


@dataclass(slots=True, eq=False)
class Kept:
    """A flat tensor outside the device: what it was like, and where its bytes are."""

    num_elements: int
    dtype: torch.dtype
    device: torch.device
    buffer: HostBuffer | None = None
    slot: Slot | None = None

    def make_room(self) -> torch.Tensor:
        """Make a tensor on the device for the bytes to come back to."""
        return torch.empty(self.num_elements, dtype=self.dtype, device=self.device)


class Storage(Protocol):
    """Keep flat tensors outside the device."""

    comes_ahead: bool
    """Whether bytes can come back beside the computation, so that it pays to ask early."""
    is_on_disk: bool

    def send(self, flat: torch.Tensor) -> Kept:
        """Begin to move a tensor out; it must live until ``settle``."""

    def settle(self, kept: Kept, flat: torch.Tensor) -> None:
        """See to it that the memory of a tensor that was sent may be used again."""

    def bring(self, kept: Kept) -> torch.Tensor:
        """Begin to move a tensor back; it may be used after ``claim``."""

    def claim(self, flat: torch.Tensor) -> None:
        """See to it that a tensor has come back before anything uses it."""

    def forget(self, kept: Kept) -> None:
        """Let the place be used again."""

    def begin_forward(self) -> None:
        """Release what the last backward left."""

    def close(self) -> None:
        """Release everything."""


class FileStorage:
    """Keep tensors of the CPU in a file; every move is done when it returns."""

    comes_ahead = False
    is_on_disk = True

    def __init__(self, file: SpillFile) -> None:
        self._file = file

    def send(self, flat: torch.Tensor) -> Kept:
        """Write the tensor."""
        return Kept(flat.numel(), flat.dtype, flat.device, slot=self._file.write(flat))

    def settle(self, kept: Kept, flat: torch.Tensor) -> None:
        """Leave everything as it is: the bytes are written."""

    def bring(self, kept: Kept) -> torch.Tensor:
        """Read the tensor into new memory."""
        assert kept.slot is not None, "it was written when it was sent"
        flat = kept.make_room()
        self._file.read(kept.slot, flat)
        return flat

    def claim(self, flat: torch.Tensor) -> None:
        """Leave everything as it is: the bytes are read."""

    def forget(self, kept: Kept) -> None:
        """Let the place in the file be used again."""
        assert kept.slot is not None, "it was written when it was sent"
        self._file.free(kept.slot)

    def begin_forward(self) -> None:
        """Leave everything as it is: nothing is under way."""

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class HostStorage:
    """Keep tensors of a GPU in buffers of the host."""

    comes_ahead = True
    is_on_disk = False

    def __init__(self, pool: BufferPool, stream: CopyStream) -> None:
        self._pool = pool
        self._stream = stream

    def send(self, flat: torch.Tensor) -> Kept:
        """Begin a copy into a buffer."""
        buffer = self._pool.take(flat.numel() * flat.element_size())
        # Behind the buffer's last copy: all copies are on one stream.
        buffer.last_copy = self._stream.send(flat, buffer.like(flat))
        return Kept(flat.numel(), flat.dtype, flat.device, buffer=buffer)

    def settle(self, kept: Kept, flat: torch.Tensor) -> None:
        """Have the computation wait for the copy."""
        self._stream.finish(flat)

    def bring(self, kept: Kept) -> torch.Tensor:
        """Begin a copy out of the buffer."""
        assert kept.buffer is not None, "it was given a buffer when it was sent"
        flat = kept.make_room()
        kept.buffer.last_copy = self._stream.bring(flat, kept.buffer.like(flat))
        return flat

    def claim(self, flat: torch.Tensor) -> None:
        """Have the computation wait for the copy."""
        self._stream.finish(flat)

    def forget(self, kept: Kept) -> None:
        """Let the buffer be used again."""
        if kept.buffer is not None:
            self._pool.give_back(kept.buffer)

    def begin_forward(self) -> None:
        """Release what was brought and never used."""
        self._stream.finish_all()

    def close(self) -> None:
        """Release the buffers."""
        self._stream.finish_all()
        self._pool.close()


class HostThenFileStorage(HostStorage):
    """Keep tensors of a GPU in a file, by way of buffers of the host."""

    is_on_disk = True

    def __init__(self, pool: BufferPool, stream: CopyStream, file: SpillFile) -> None:
        super().__init__(pool, stream)
        self._file = file

    def settle(self, kept: Kept, flat: torch.Tensor) -> None:
        """Wait for the copy, write it and give the buffer back."""
        super().settle(kept, flat)
        buffer = kept.buffer
        assert buffer is not None, "it was given a buffer when it was sent"
        buffer.last_copy.synchronize()
        kept.slot = self._file.write(buffer.content[: _num_bytes(kept)])
        kept.buffer = None
        self._pool.give_back(buffer)

    def bring(self, kept: Kept) -> torch.Tensor:
        """Read the bytes into a buffer, and begin a copy out of it."""
        if kept.slot is None:
            return super().bring(kept)
        buffer = self._pool.take(_num_bytes(kept))
        if buffer.last_copy is not None:  # the file is read by the host, which knows no streams
            buffer.last_copy.synchronize()
        self._file.read(kept.slot, buffer.content[: _num_bytes(kept)])
        flat = kept.make_room()
        buffer.last_copy = self._stream.bring(flat, buffer.like(flat))
        self._pool.give_back(buffer)
        return flat

    def forget(self, kept: Kept) -> None:
        """Let the place in the file be used again."""
        super().forget(kept)
        if kept.slot is not None:
            self._file.free(kept.slot)

    def close(self) -> None:
        """Release the buffers and remove the file."""
        super().close()
        self._file.close()


def _num_bytes(kept: Kept) -> int:
    return kept.num_elements * kept.dtype.itemsize
