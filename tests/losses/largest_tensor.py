"""Sees the largest tensor of a computation."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Note how many elements there is room for in the largest tensor that any operator gives."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                room = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.num_elements = max(self.num_elements, room)
        return result
