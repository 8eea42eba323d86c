"""A temporary file that holds the bytes of tensors; it has no name, so nothing is left behind."""

from __future__ import annotations

import ctypes
import tempfile
from typing import IO

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import DataError
from memfit.session.spill import Spill, nameless_file, no_room
from memfit.units import format_bytes

Slot = tuple[int, int]
"""Where bytes lie in the file: the first one, and how many."""


class SpillFile:
    """Write tensors of the CPU to a file and read them back, without memory of torch's allocator.

    The file is made at the first write, in the folder that TMPDIR names, and the system removes it
    when it is closed or the process ends in whatever way. Places of the same size are used again.
    Fake tensors take their places, and no byte is moved.
    """

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._file: IO[bytes] | None = None
        self._free: dict[int, list[int]] = {}
        self._num_in_use = 0
        self._end_bytes = 0
        self._file_bytes = 0

    def write(self, tensor: torch.Tensor) -> Slot:
        """Write a contiguous tensor.

        Raises:
            DataError: if the folder cannot be written to, or the disk is full.
        """
        slot = self._take(tensor.numel() * tensor.element_size())
        self._spill.note_waited(slot[1], is_on_disk=True)
        if not isinstance(tensor, FakeTensor):
            try:
                _write(self._opened(), slot, tensor)
            except OSError as error:
                self.free(slot)
                raise no_room("activations", slot[1], self._end_bytes, error) from error
        return slot

    def read(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor with what was written.

        Raises:
            DataError: if the bytes cannot be read.
        """
        self._spill.note_waited(slot[1], is_on_disk=True)
        if isinstance(tensor, FakeTensor):
            return
        try:
            _read(self._opened(), slot, tensor)
        except OSError as error:
            raise DataError(
                tempfile.gettempdir(),
                f"{format_bytes(slot[1])} of activations cannot be read back from the temporary "
                f"file there ({error.strerror or error}). The step cannot go on; use another "
                "disk by setting TMPDIR.",
            ) from error

    def free(self, slot: Slot) -> None:
        """Let the place of a tensor be used again."""
        start, num_bytes = slot
        self._num_in_use -= 1
        if self._num_in_use:
            self._free.setdefault(num_bytes, []).append(start)
        else:  # batches of other sizes would not fit into the old places
            self._free.clear()
            self._end_bytes = 0

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._spill.add_disk(-self._file_bytes)
        self._file_bytes = 0

    def _take(self, num_bytes: int) -> Slot:
        self._num_in_use += 1
        if places := self._free.get(num_bytes):
            return places.pop(), num_bytes
        start = self._end_bytes
        self._end_bytes += num_bytes
        if self._end_bytes > self._file_bytes:
            self._spill.add_disk(self._end_bytes - self._file_bytes)
            self._file_bytes = self._end_bytes
        return start, num_bytes

    def _opened(self) -> IO[bytes]:
        """Make the file at its first use."""
        if self._file is None:
            self._file = nameless_file(self)
        return self._file


def _write(file: IO[bytes], slot: Slot, tensor: torch.Tensor) -> None:
    file.seek(slot[0])
    left = _bytes_of(tensor)
    while left:
        left = left[file.write(left) :]


def _read(file: IO[bytes], slot: Slot, tensor: torch.Tensor) -> None:
    file.seek(slot[0])
    left = _bytes_of(tensor)
    while left:
        num_read = file.readinto(left)  # type: ignore[attr-defined]  # unbuffered files have it
        if not num_read:
            raise OSError(0, "the file ends early")
        left = left[num_read:]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Look at a tensor's memory as bytes, without NumPy."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
