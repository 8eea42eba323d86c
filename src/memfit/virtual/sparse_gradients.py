"""Sparse gradients as fake tensors: indices and values, and what training does with these two.

Embeddings give a row of values for each index, and nothing is added up before an optimizer asks for
that. How many rows remain then depends on values: the bound above is that all of them differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.errors import RecordingError
from memfit.trace.operators import tensors_in
from memfit.units import format_bytes
from memfit.virtual.assumptions import Assumptions

_ATEN = torch.ops.aten
_BAGS_BACK = _ATEN._embedding_bag_backward.default
_PICK = _ATEN.index.Tensor
_SOURCES = frozenset({_BAGS_BACK, _PICK})
"""What may make sparse tensors of others, or is on the way there."""
_MAKE = _ATEN._sparse_coo_tensor_with_dims_and_tensors.default
_AS_TORCH_DOES = frozenset(
    {
        _ATEN._has_compatible_shallow_copy_type.default,
        _ATEN._indices.default,
        _ATEN._values.default,
        _ATEN._nnz.default,
        _ATEN.dense_dim.default,
        _ATEN.detach.default,
        _ATEN.is_coalesced.default,
        _ATEN.sparse_dim.default,
    }
)
"""What torch's fake tensors do without values; all of it shares memory with what it is given."""
_COPIED = (
    "A sparse gradient is copied. SGD with momentum does so, and adds the rows of each step to "
    "those of all steps before, without an end"
)
_FAILS = "in torch either, so the step fails when it is run as well"


class SparseGradients:
    """Carry out operators on the sparse tensors of one fake mode.

    Args:
        assumptions: say how many rows differ, and hear of it.
        has_card: whether there is a virtual GPU, whose kernels nobody has measured.
    """

    def __init__(self, assumptions: Assumptions, *, has_card: bool = False) -> None:
        self._num_different = assumptions.num_different
        self._num_joined = assumptions.num_joined
        self._has_card = has_card
        self._are_there = False
        self._replaced: Sequence[torch.Tensor] = ()

    def meet(self, func: Any, made: torch.Tensor) -> None:
        """Hear of a tensor in another layout that an operator gives.

        Raises:
            RecordingError: if it is not a sparse one of the CPU, by coordinates.
        """
        if self._has_card or made.layout is not torch.sparse_coo:
            where = "on a GPU" if self._has_card else f"in the layout {made.layout}"
            reason = f"The operator {func} gives a sparse tensor, which is not followed {where}"
            raise sparse_refusal(reason, made)
        self._are_there = True

    def carry_out(
        self, mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Carry out an operator; ``NotImplemented`` where torch's own fake version will do.

        Raises:
            RecordingError: if nothing is known of the operator on sparse tensors.
        """
        is_source = func in _SOURCES and not self._has_card
        if not (is_source or self._are_there) or func in _AS_TORCH_DOES:
            return NotImplemented
        self._replaced = ()
        given = tensors_in((*args, *kwargs.values()))
        sparse = [each for each in given if each.layout is torch.sparse_coo]
        if not sparse and not is_source:
            return NotImplemented
        with mode:
            out = _RULES.get(func, _unknown)(self, *args, **kwargs)
        if out is NotImplemented and not is_source:
            raise sparse_refusal(_reason(func), sparse[0])
        return out

    def coalesce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up the rows with the same index, in memory for all rows as the CPU's kernel does."""
        indices, values = tensor._indices(), tensor._values()
        most = 1
        for extent in tensor.shape[: tensor.sparse_dim()]:
            most *= extent
        count = self._num_different(tensor._nnz(), most)
        new_indices = torch.empty_like(indices, memory_format=torch.contiguous_format)
        new_values = torch.empty_like(values, memory_format=torch.contiguous_format)
        kept = new_indices.narrow(1, 0, count), new_values.narrow(0, 0, count)
        return _made_like(tensor, *kept, is_coalesced=True)

    def copy(self, tensor: torch.Tensor, **_kwargs: Any) -> Any:
        """Take a gradient over as autograd does where nothing watches it; no other copies."""
        if not _is_asked_by("AccumulateGrad"):
            raise sparse_refusal(_COPIED, tensor)
        return _made_like(tensor, tensor._indices(), tensor._values())

    def add(self, first: torch.Tensor, second: torch.Tensor, **_kwargs: Any) -> Any:
        """Join the rows of two sparse tensors, or add them to a dense one.

        Neighbours with the same index become one row, in memory for all of them. Source:
        ``add_out_sparse_contiguous`` in aten/src/ATen/native/sparse/SparseTensorMath.cpp.
        """
        if first.layout is not torch.sparse_coo:
            return torch.empty_like(first)
        if second.layout is not torch.sparse_coo:
            raise sparse_refusal(
                f"A sparse gradient takes no dense one, as of weight_decay, {_FAILS}", first
            )
        count = self._num_joined(first._nnz(), second._nnz())
        indices = torch.cat([first._indices(), second._indices()], 1).narrow(1, 0, count)
        values = torch.cat([first._values(), second._values()]).narrow(0, 0, count)
        return _made_like(first, indices, values)

    def add_in_place(self, first: torch.Tensor, second: torch.Tensor, **_kwargs: Any) -> Any:
        """Do the same to the first; what it consisted of lives until the kernel has ended."""
        if first.layout is not torch.sparse_coo:
            return first
        joined = self.add(first, second)
        self._replaced = (first._indices(), first._values())
        first.data = joined
        return first

    def mask(self, tensor: torch.Tensor, mask: torch.Tensor) -> Any:
        """Take the rows of a dense tensor that a sparse one has."""
        if tensor.layout is not torch.strided:
            return NotImplemented
        values = torch.empty_like(mask._values(), dtype=tensor.dtype)
        is_coalesced = mask.is_coalesced()
        return _made_like(mask, mask._indices().clone(), values, is_coalesced=is_coalesced)

    def without_padding(self, tensor: torch.Tensor, places: Sequence[Any], *_: Any) -> Any:
        """Leave padding out of the gradient of an embedding: none, or in the other way nearly all.

        Source: ``embedding_sparse_backward`` in aten/src/ATen/native/Embedding.cpp, torch 2.13.
        """
        mask = places[0] if len(places) == 1 else None
        if mask is None or mask.dtype is not torch.bool or not _is_asked_by("EmbeddingBackward"):
            return NotImplemented
        count = self._num_different(mask.numel(), mask.numel())
        return tensor.new_empty((count, *tensor.shape[mask.dim() :]))

    def gradient_of_bags(self, gradient: torch.Tensor, indices: torch.Tensor, *others: Any) -> Any:
        """Give each index in a bag a row; bags with a dense gradient are left to torch.

        Source: ``_embedding_bag_sparse_backward`` in aten/src/ATen/native/EmbeddingBag.cpp.
        """
        num_weights, _, _, is_sparse, _, padding = (*others, -1)[4:10]
        if not is_sparse:
            return NotImplemented
        values = gradient.new_empty((indices.numel(), gradient.shape[1]))
        if padding >= 0:
            count = self._num_different(indices.numel(), indices.numel())
            indices, values = indices.new_empty(count), values.narrow(0, 0, count).clone()
        self._are_there = True
        shape = (num_weights, gradient.shape[1])
        return _made((1, 1), shape, indices.reshape(1, -1), values)


_RULES: Mapping[Any, Callable[..., Any]] = {
    _ATEN._coalesce.default: SparseGradients.coalesce,
    _ATEN.add.Tensor: SparseGradients.add,
    _ATEN.add_.Tensor: SparseGradients.add_in_place,
    _ATEN.clone.default: SparseGradients.copy,
    _ATEN.sparse_mask.default: SparseGradients.mask,
    _BAGS_BACK: SparseGradients.gradient_of_bags,
    _PICK: SparseGradients.without_padding,
}


def sparse_refusal(reason: str, tensor: torch.Tensor) -> RecordingError:
    """Say what to do where a sparse tensor cannot be followed, with what a dense one takes."""
    dense = format_bytes(tensor.numel() * tensor.element_size())
    others = "" if _FAILS in reason else " Or use `memfit measure`, which really runs the step."
    return RecordingError(
        reason,
        f"Use dense gradients (for embeddings, sparse=False): this one takes {dense} then, and "
        f"SparseAdam gives way to an optimizer such as Adam.{others}",
    )


def _unknown(*_args: Any, **_kwargs: Any) -> Any:
    return NotImplemented


def _reason(func: Any) -> str:
    """Say why an operator on a sparse tensor is refused."""
    keys = ("SparseCPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys):
        return f"It is not known what {func} takes for a sparse tensor"
    return f"Sparse tensors have no {func} {_FAILS}"


def _made_like(
    tensor: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    """Make a sparse tensor of indices and values, of the shape of another one."""
    dims = tensor.sparse_dim(), tensor.dense_dim()
    return _made(dims, tensor.shape, indices, values, is_coalesced=is_coalesced)


def _made(
    dims: tuple[int, int],
    shape: Sequence[int],
    indices: torch.Tensor,
    values: torch.Tensor,
    *,
    is_coalesced: bool | None = None,
) -> torch.Tensor:
    made: torch.Tensor = _MAKE(
        *dims,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return made


def _is_asked_by(name: str) -> bool:
    """Return whether backward is at a node of the graph with such a name."""
    node = torch._C._current_autograd_node()
    return node is not None and name in node.name()
