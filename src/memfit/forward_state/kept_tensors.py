"""Keeps what tensors hold, and shows it to a second run of the same code without overwriting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_set_versions: Any = torch._C._autograd._unsafe_set_version_counter


@dataclass(frozen=True, slots=True)
class Memories:
    """Which memory tensors lie in, and which version of its content autograd takes it for."""

    tensors: Sequence[torch.Tensor]
    memories: Sequence[torch.Tensor]
    versions: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Memories:
        """Note where tensors lie."""
        memories = [tensor.data for tensor in tensors]
        return cls(tensors, memories, [tensor._version for tensor in tensors])

    def put_back(self) -> None:
        """Let the tensors lie there again."""
        for tensor, memory in zip(self.tensors, self.memories, strict=True):
            tensor.data = memory
        _set_versions(tuple(self.tensors), tuple(self.versions))


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """Tensors, the memory that they lay in and copies of what they held."""

    tensors: Sequence[torch.Tensor]
    memories: Sequence[torch.Tensor]
    """Tensors of the same shapes in that memory."""
    copies: Sequence[torch.Tensor]
    versions: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KeptTensors:
        """Copy what tensors hold.

        While a step is recorded, a tensor that holds values (one in a log, say) is left alone: the
        step cannot write to it, and its copy would be fake.
        """
        pairs = [
            (tensor, copy)
            for tensor, copy in zip(tensors, copies_of(tensors), strict=True)
            if isinstance(tensor, FakeTensor) is isinstance(copy, FakeTensor)
        ]
        kept = [tensor for tensor, _ in pairs]
        memories = [tensor.data for tensor in kept]
        versions = [tensor._version for tensor in kept]
        return cls(kept, memories, [copy for _, copy in pairs], versions)

    def changed(self) -> list[torch.Tensor]:
        """List the tensors that autograd was told of a change of."""
        pairs = zip(self.tensors, self.versions, strict=True)
        return [tensor for tensor, version in pairs if tensor._version != version]

    def show(self) -> None:
        """Let the tensors hold what they held, in other memory.

        Whatever was saved for backward lies in the memory that they had, so it is left alone, and
        what is saved from now on stays as it is when they go back.
        """
        for tensor, copy in zip(self.tensors, copies_of(self.copies), strict=True):
            tensor.data = copy

    def put_back(self) -> None:
        """Write what the tensors held into the memory that they were in."""
        for tensor, memory, copy in zip(self.tensors, self.memories, self.copies, strict=True):
            memory.copy_(copy)
            tensor.data = memory


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy what tensors hold; those that share memory share that of their copies."""
    if len(tensors) == 1:
        return [tensors[0].detach().clone()]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    if len({*storages}) == len(storages):
        return [tensor.detach().clone() for tensor in tensors]
    whole: dict[int, torch.Tensor] = {}
    copies = []
    for tensor, storage in zip(tensors, storages, strict=True):
        if storages.count(storage) == 1:
            copies.append(tensor.detach().clone())
            continue
        if storage not in whole:
            whole[storage] = _whole_storage(tensor).clone()
        form = (tensor.size(), tensor.stride(), tensor.storage_offset())
        copies.append(whole[storage].view(tensor.dtype).as_strided(*form))
    return copies


def _whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all the memory that a tensor is a part of, as one line."""
    num_elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((num_elements,), (1,), 0)
