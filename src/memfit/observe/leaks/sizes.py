"""Says how many bytes tensors, arrays and autograd graphs take, without running hooks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from memfit.trace.subclasses import is_hollow

_WRAPPER_BYTES = 600
"""Of a tensor besides its storage: the C++ objects and the Python one, as measured with glibc."""
_NODE_BYTES = 400
"""Of one node of an autograd graph."""
_LARGE_BYTES = 4096
"""Rows are counted from here on."""
_MOST_NODES = 20_000
"""Of autograd graphs that one look counts."""


@dataclass(slots=True)
class LeafSize:
    """What a value takes itself."""

    num_bytes: int = 0
    num_graph_nodes: int = 0
    place: str = "host"
    is_pinned: bool = False
    num_rows: int = 0


class Storages:
    """Count each storage and each graph node once within one look."""

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._nodes: set[int] = set()
        self._kept: list[Any] = []
        self._saved_names: dict[type, tuple[str, ...]] = {}
        self._asks_pinned = _asks_pinned()

    def of_tensor(self, tensor: torch.Tensor) -> LeafSize:
        """Return a tensor's size, with what its graph holds."""
        with torch._C.DisableTorchFunction():
            size = self._of_storage(tensor)
            function = tensor.grad_fn
            if size.num_bytes >= _LARGE_BYTES and not tensor.is_nested and tensor.dim():
                size.num_rows = int(tensor.shape[0])
        if function is not None:
            self._add_graph(function, size)
        return size

    def of_array(self, array: Any) -> LeafSize:
        """Return the size of a numpy array; a view counts as its base."""
        for _ in range(8):
            base = type(array).base.__get__(array)
            if type(base) is not type(array):
                break
            array = base
        if id(array) in self._storages:
            return LeafSize()
        self._storages.add(id(array))
        return LeafSize(num_bytes=int(array.nbytes) + 100)

    def _of_storage(self, tensor: torch.Tensor) -> LeafSize:
        try:
            storage = torch.Tensor.untyped_storage(tensor)
            key, num_bytes = storage._cdata, 0 if is_hollow(tensor) else storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, quantized or wrapped tensors
            key, num_bytes = id(tensor), 0
        size = LeafSize(num_bytes=_WRAPPER_BYTES)
        if key not in self._storages:
            self._storages.add(key)
            size.num_bytes += num_bytes
        device = tensor.device
        if device.type != "cpu":
            size.place = str(device)
        elif self._asks_pinned:
            size.is_pinned = bool(torch.Tensor.is_pinned(tensor))
        return size

    def _add_graph(self, function: Any, leaf: LeafSize) -> None:
        """Count the nodes behind a tensor that were not counted yet, and what they saved."""
        waiting = [function]
        while waiting and len(self._nodes) < _MOST_NODES:
            node = waiting.pop()
            if id(node) in self._nodes:
                continue
            self._nodes.add(id(node))
            self._kept.append(node)  # its Python object, whose id would be used again otherwise
            leaf.num_graph_nodes += 1
            leaf.num_bytes += _NODE_BYTES + self._saved_bytes(node)
            waiting += [each for each, _ in node.next_functions if each is not None]

    def _saved_bytes(self, node: Any) -> int:
        """Add up the storages that a node saved for backward."""
        kind = type(node)
        names = self._saved_names.get(kind)
        if names is None:
            names = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
            self._saved_names[kind] = names
        total_bytes = 0
        for name in names:
            try:
                total_bytes += self._raw_bytes(getattr(node, name))
            except RuntimeError:
                continue  # freed by backward
        return total_bytes

    def _raw_bytes(self, saved: Any) -> int:
        if type(saved) is tuple:
            return sum(self._raw_bytes(each) for each in saved)
        data: Any = getattr(
            saved, "data", None
        )  # not unpacked: hooks of the program are left alone
        if type(data) not in {torch.Tensor, torch.nn.Parameter}:
            return 0
        with torch._C.DisableTorchFunction():
            return self._of_storage(data).num_bytes - _WRAPPER_BYTES


def _asks_pinned() -> bool:
    """Return whether there can be pinned memory; asking for it would start CUDA otherwise."""
    return bool(torch.cuda.is_initialized())


def is_array(value: Any) -> bool:
    """Return whether a value is exactly a numpy array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray
