"""Tensors outside the device: in pinned memory of the host, or in a file that is mapped.

Parameters can lie in their memory, and be left where they are when their model moves.
"""

from __future__ import annotations

import abc
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memfit.session.spill import Spill, nameless_file, no_room
from memfit.units import MIB

_FEWEST_MAPPED_BYTES = 256 * MIB
"""Addresses alone: the disk is taken tensor by tensor."""
_ALIGNMENT = 64


class HostMemory(abc.ABC):
    """Give tensors outside the device.

    Args:
        spill: counts them.
        what: they hold, for messages.
    """

    is_on_disk: ClassVar[bool]

    def __init__(self, spill: Spill, what: str) -> None:
        self._spill = spill
        self._what = what

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor with the sizes, strides and type of another one, that fills its memory.

        While a step is recorded it has no memory.
        """
        sizes, strides, dtype = tensor.size(), tensor.stride(), tensor.dtype
        with _disable_current_modes():  # those that count would take it for one on the device
            if isinstance(tensor, FakeTensor):
                made = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
            else:
                made = self._made(tensor)
        self._spill.hold(made, self._taken_bytes(tensor.nbytes), is_on_disk=self.is_on_disk)
        return made

    @abc.abstractmethod
    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor like a real one."""

    def _taken_bytes(self, num_bytes: int) -> int:
        return num_bytes


class PinnedMemory(HostMemory):
    """Give tensors in memory of the host that a GPU copies from and to by itself.

    Args:
        spill: counts them.
        what: they hold, for messages.
        pins: whether what comes from the host itself is meant for a GPU, too.
    """

    is_on_disk = False

    def __init__(self, spill: Spill, what: str, *, pins: bool = False) -> None:
        super().__init__(spill, what)
        self._pins = pins

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(
            tensor.size(),
            tensor.stride(),
            dtype=tensor.dtype,
            device="cpu",
            pin_memory=tensor.is_cuda or self._pins,
        )

    def _taken_bytes(self, num_bytes: int) -> int:
        """Torch rounds pinned memory to powers of two."""
        return 1 << (num_bytes - 1).bit_length()


class MappedFile(HostMemory):
    """Give tensors in a file without a name, which the system writes and reads as it needs to.

    The file is made with the first tensor, in the folder that TMPDIR names, and is gone when the
    last tensor is, or the process ends in whatever way.
    """

    is_on_disk = True

    def __init__(self, spill: Spill, what: str) -> None:
        super().__init__(spill, what)
        self._file: IO[bytes] | None = None
        self._mapped: Any = None
        self._mapped_from = self._mapped_to = self._end = 0

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a part of the file.

        Raises:
            DataError: if the folder cannot be written to, or the disk is full.
        """
        try:
            offset = self._take(tensor.nbytes)
        except OSError as error:
            raise no_room(self._what, tensor.nbytes, self._end, error) from error
        flat = torch.frombuffer(
            self._mapped, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        )
        # No view of another tensor: it has a storage and a version of its own.
        whole = flat.untyped_storage()
        return flat.new_empty(0).set_(whole, 0, tensor.size(), tensor.stride())

    def _take(self, num_bytes: int) -> int:
        """Take room on the disk, which must not be missing when it is written to; return where."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if self._file is None:
            self._file = nameless_file(self)
        if start + num_bytes > self._mapped_to:
            start = self._mapped_to
            self._map(max(num_bytes, start, _FEWEST_MAPPED_BYTES))
        os.posix_fallocate(self._file.fileno(), start, num_bytes)
        self._end = start + num_bytes
        return start - self._mapped_from

    def _map(self, num_bytes: int) -> None:
        """Map a new part of the file; what was mapped before lives on in its tensors."""
        assert self._file is not None, "it is made before"
        num_bytes = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._mapped_from, self._mapped_to = self._mapped_to, self._mapped_to + num_bytes
        self._file.truncate(self._mapped_to)
        self._mapped = mmap.mmap(self._file.fileno(), num_bytes, offset=self._mapped_from)


def give_memory(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Have a parameter lie where another tensor does; a fake one says itself on which device.

    The parameter stays the same object, and keeps its version.

    Args:
        parameter: a leaf.
        data: of its size and type.
    """
    parameter.data = data
    if isinstance(parameter, FakeTensor) and isinstance(data, FakeTensor):
        parameter.fake_device = data.fake_device


@contextmanager
def left_behind(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave parameters and buffers of a model where they are, while the rest moves inside."""
    chosen = {id(each) for each in tensors}
    parameters, buffers = (
        [
            (module, key, tensor)
            for module in model.modules()
            for key, tensor in getattr(module, kind).items()
            if id(tensor) in chosen
        ]
        for kind in ("_parameters", "_buffers")
    )
    for module, key, _ in parameters:
        module._parameters[key] = None
    for module, key, _ in buffers:
        module._buffers[key] = None
    try:
        yield
    finally:
        for module, key, parameter in parameters:
            setattr(module, key, parameter)  # recurrent layers note it in their lists, too
        for module, key, buffer in buffers:
            module._buffers[key] = buffer
