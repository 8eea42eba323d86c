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
        _ATEN.indices.default,
        _ATEN.values.default,
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
        most = 1
        for extent in tensor.shape[: tensor.sparse_dim()]:
            most *= extent
        count = self._num_different(tensor._nnz(), most)
        new_indices, new_values = _new_parts(tensor)
        kept = new_indices.narrow(1, 0, count), new_values.narrow(0, 0, count)
        return _made_like(tensor, *kept, is_coalesced=True)

    def copy(self, tensor: torch.Tensor, **_kwargs: Any) -> Any:
        """Take a gradient over as autograd does where nothing watches it; no other copies.

        Indices that lie apart, as those of a column, are copied with their rows, and so are rows
        that lie apart. Source: ``AccumulateGrad::accumulateGrad`` in
        torch/csrc/autograd/functions/accumulate_grad.h.
        """
        if not _is_asked_by("AccumulateGrad"):
            raise sparse_refusal(_COPIED, tensor)
        indices, values = tensor._indices(), tensor._values()
        if not (indices.is_contiguous() and values.is_contiguous()):
            return _made_like(tensor, *_new_parts(tensor))
        return _made_like(tensor, indices, values)

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
        return self._replace(first, self.add(first, second))

    def _replace(self, tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Have a sparse tensor consist of what another does; keep its old parts until the next."""
        self._replaced = (tensor._indices(), tensor._values())
        tensor.data = new
        return tensor

    def scale(self, tensor: torch.Tensor, number: Any) -> Any:
        """Multiply or divide by one number: indices and rows are new.

        Source: ``div_out_sparse_zerodim`` and ``_mul_dense_sparse_out`` in
        aten/src/ATen/native/sparse/SparseTensorMath.cpp.
        """
        return self.negate(tensor) if _is_scaled(tensor, number) else NotImplemented

    def multiply_in_place(self, tensor: torch.Tensor, number: Any) -> Any:
        """Do the same, and let go of the old indices and rows; torch forgets that they differ."""
        if not _is_scaled(tensor, number):
            return NotImplemented
        return self._replace(tensor, _made_like(tensor, *_new_parts(tensor)))

    def divide_in_place(self, tensor: torch.Tensor, number: Any) -> Any:
        """Divide the rows where they lie."""
        return tensor if _is_scaled(tensor, number) else NotImplemented

    def negate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make rows anew out of each of the old ones, with indices of their own."""
        return _made_like(tensor, *_new_parts(tensor), is_coalesced=tensor.is_coalesced())

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let go of all rows: zeros take none."""
        indices, values = tensor._indices(), tensor._values()
        none = indices.new_empty((indices.shape[0], 0)), values.new_empty((0, *values.shape[1:]))
        return self._replace(tensor, _made_like(tensor, *none))

    def norm(
        self,
        tensor: torch.Tensor,
        _power: Any = None,
        dims: Sequence[int] = (),
        keepdim: bool = False,
        **others: Any,
    ) -> Any:
        """Give one number, that of the rows once they are added up."""
        is_whole = len(dims) in (0, tensor.dim())
        if tensor.layout is not torch.sparse_coo or not is_whole or keepdim or others:
            return NotImplemented
        return tensor._values().new_empty(())

    def lay_out(self, tensor: torch.Tensor, dtype: Any = None, **_kwargs: Any) -> Any:
        """Make a dense tensor, as large as the table."""
        if dtype is not None:
            return NotImplemented
        return tensor._values().new_empty(tensor.shape)

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
    _ATEN._to_dense.default: SparseGradients.lay_out,
    _ATEN.add.Tensor: SparseGradients.add,
    _ATEN.add_.Tensor: SparseGradients.add_in_place,
    _ATEN.clone.default: SparseGradients.copy,
    _ATEN.div.Tensor: SparseGradients.scale,
    _ATEN.div_.Tensor: SparseGradients.divide_in_place,
    _ATEN.mul.Tensor: SparseGradients.scale,
    _ATEN.mul_.Tensor: SparseGradients.multiply_in_place,
    _ATEN.neg.default: SparseGradients.negate,
    _ATEN.norm.ScalarOpt_dim: SparseGradients.norm,
    _ATEN.sparse_mask.default: SparseGradients.mask,
    _ATEN.zero_.default: SparseGradients.empty,
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


def _is_scaled(tensor: Any, number: Any) -> bool:
    """Return whether a sparse tensor and one number are given, in this order."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is not torch.sparse_coo:
        return False
    if isinstance(number, torch.Tensor):
        return number.layout is torch.strided and not number.dim() and not number.is_complex()
    return isinstance(number, (int, float))


def _new_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make indices and values like those of a sparse tensor, in memory of their own."""
    indices = torch.empty_like(tensor._indices(), memory_format=torch.contiguous_format)
    values = torch.empty_like(tensor._values(), memory_format=torch.contiguous_format)
    return indices, values


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
