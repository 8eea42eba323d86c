"""Gives virtual tensors the memory of a file that is mapped: one block for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from memfit.trace.lent_memory import lend
from memfit.virtual.with_values import TensorsWithValues

MOST_KNOWN_VALUES = 4096
"""Of floating-point tensors whose values are kept: schedules and scales, but no weights."""


class MappedFiles:
    """Take the memory of mapped files, and make the tensors that lie in them.

    Args:
        mode: whose fake tensors are made.
        elsewhere: entered around what takes no memory here.
    """

    def __init__(
        self, mode: TensorsWithValues, elsewhere: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._mode = mode
        self._elsewhere = elsewhere

    def take(self, num_bytes: int) -> torch.UntypedStorage:
        """Take the memory of a file."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()

    def storage_in(self, mapped: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of its own address that lies in a file's memory."""
        with self._elsewhere():
            own = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        lend(own, mapped)
        return own

    def tensor_in(
        self,
        storage: torch.UntypedStorage,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        stride: Sequence[int] | None = None,
        offset: int = 0,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a tensor on a storage; its values are kept unless it is a weight.

        Args:
            storage: of `storage_in`.
            shape: of the tensor.
            dtype: of its elements.
            stride: in elements; contiguous without one.
            offset: of the first element, in elements.
            values: a real tensor of the host, of that shape, where they are known.
        """
        steps = torch.empty(shape, device="meta").stride() if stride is None else stride
        with self._elsewhere(), torch.no_grad():
            tensor = torch.empty(0, dtype=dtype, device="cpu")
            tensor.set_(storage, offset, tuple(shape), tuple(steps))
        is_weight = dtype.is_floating_point and tensor.numel() > MOST_KNOWN_VALUES
        if values is not None and not is_weight:
            self._mode.keep_values(tensor, values)
        return tensor

    def copies(self, mapped: torch.UntypedStorage) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes virtual tensors of real ones that lie in a mapped file.

        Args:
            mapped: of the file, of `take`.
        """
        storages: dict[int, torch.UntypedStorage] = {}

        def copy(real: torch.Tensor) -> torch.Tensor:
            storage = real.untyped_storage()
            own = storages.get(storage._cdata)
            if own is None:
                own = storages[storage._cdata] = self.storage_in(mapped, storage.nbytes())
            tensor = self.tensor_in(
                own,
                real.shape,
                real.dtype,
                stride=real.stride(),
                offset=int(real.storage_offset()),
                values=real.detach(),
            )
            if isinstance(real, torch.nn.Parameter):
                return torch.nn.Parameter(tensor, real.requires_grad)
            return tensor.requires_grad_(real.requires_grad)

        return copy
