"""Finds the rows of a call's arguments and results: what is cut, where, and how it is joined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfit.strategies.cached_gradients.structures import Structure, taken_apart


class CannotCutError(Exception):
    """Say why a call of a module cannot be run in pieces of its rows."""


class RowsMixedError(CannotCutError):
    """Say by how much the results of some rows depend on the others."""


@dataclass(frozen=True, slots=True)
class RowDims:
    """The dimension of each leaf that counts rows; None for leaves that are passed whole."""

    num_rows: int
    dims: tuple[int | None, ...]

    def selected(self, leaves: Sequence[Any], start: int, count: int) -> list[Any]:
        """Return the leaves of some rows, those with rows as views."""
        return [
            leaf if dim is None else leaf.narrow(dim, start, count)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]

    def pieces(self, leaves: Sequence[Any], rows_per_piece: int) -> Iterator[list[Any]]:
        """Yield the leaves of each piece; the last may be smaller.

        Each tensor is split by one operator, so that the gradients of its pieces are joined once.
        """
        columns = [
            None if dim is None else leaf.split(rows_per_piece, dim)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]
        for number in range(-(-self.num_rows // rows_per_piece)):
            yield [
                leaf if column is None else column[number]
                for leaf, column in zip(leaves, columns, strict=True)
            ]


def find_rows(
    leaves: Sequence[Any], batch_size: int, known: Mapping[int, int | None]
) -> RowDims | None:
    """Find the rows of a call; None if no argument has any.

    Rows lie in dimension 0 where its extent is the batch size or a multiple of it (several views of
    each sample). Where no tensor has that, they lie in the first dimension of the batch size,
    as where steps of sequences come first. Parts of the batch have theirs where the batch does.

    Args:
        leaves: of the arguments.
        batch_size: samples of the batch.
        known: the dimension of rows of the batch's own tensors, by ``id``; None for those without.

    Raises:
        CannotCutError: if tensors have different numbers of rows.
    """
    tensors = {place: leaf for place, leaf in enumerate(leaves) if _has_dims(leaf)}
    unknown = {place: leaf for place, leaf in tensors.items() if id(leaf) not in known}
    found = _known_dims(tensors, known) or _first_dims(unknown, batch_size)
    found = found or _later_dims(unknown, batch_size)
    extents = {tensors[place].shape[dim] for place, dim in found.items()}
    if not extents:
        return None
    if len(extents) > 1:
        numbers = " and ".join(str(extent) for extent in sorted(extents))
        raise CannotCutError(f"its arguments have {numbers} rows, so it is not clear which to cut")
    num_rows = extents.pop()
    for place, tensor in unknown.items():
        if tensor.shape[0] == num_rows:
            found.setdefault(place, 0)
    return RowDims(num_rows, tuple(found.get(place) for place in range(len(leaves))))


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.dim() > 0


def _known_dims(
    tensors: Mapping[int, torch.Tensor], known: Mapping[int, int | None]
) -> dict[int, int]:
    dims = {place: known.get(id(tensor)) for place, tensor in tensors.items()}
    return {place: dim for place, dim in dims.items() if dim is not None}


def _first_dims(tensors: Mapping[int, torch.Tensor], batch_size: int) -> dict[int, int]:
    return {
        place: 0
        for place, tensor in tensors.items()
        if tensor.shape[0] > 0 and tensor.shape[0] % batch_size == 0
    }


def _later_dims(tensors: Mapping[int, torch.Tensor], batch_size: int) -> dict[int, int]:
    return {
        place: list(tensor.shape).index(batch_size)
        for place, tensor in tensors.items()
        if batch_size in tensor.shape
    }


@dataclass(frozen=True, slots=True)
class ResultForm:
    """How the results of pieces are joined: the dimension of rows of each leaf, or None."""

    structure: Structure
    dims: tuple[int | None, ...]

    @property
    def has_rows(self) -> bool:
        """Return whether any result has rows."""
        return any(dim is not None for dim in self.dims)

    def has_others(self, result: Any) -> bool:
        """Return whether there are numbers among the results that belong to no row."""
        leaves = taken_apart(result)[0]
        return any(
            dim is None and isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            for leaf, dim in zip(leaves, self.dims, strict=True)
        )

    def like(self, result: Any) -> Any:
        """Return a result of the same shapes, with nothing in it, for a piece that is left out."""
        leaves = self._leaves(result)
        empty = [
            leaf if dim is None else torch.empty_like(leaf)
            for leaf, dim in zip(leaves, self.dims, strict=True)
        ]
        return self.structure.filled(empty)

    def joined(self, results: Sequence[Any]) -> Any:
        """Put the results of all pieces together.

        Raises:
            CannotCutError: if a piece gave something else than the others.
        """
        parts = [self._leaves(result) for result in results]
        known: dict[tuple[int, ...], Any] = {}
        whole = []
        for column, dim in zip(zip(*parts, strict=True), self.dims, strict=True):
            # What a result holds twice (a last hidden state) is joined once.
            key = tuple(map(id, column))
            if key not in known:
                known[key] = column[0] if dim is None else _joined(column, dim)
            whole.append(known[key])
        return self.structure.filled(whole)

    def _leaves(self, result: Any) -> list[Any]:
        leaves, structure = taken_apart(result)
        if structure != self.structure:
            raise CannotCutError("its pieces give results of different structures")
        return leaves


def _joined(column: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    try:
        return torch.cat(list(column), dim)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in column[:3])
        raise CannotCutError(f"the results of its pieces do not fit together: {shapes}") from error


def find_result_form(result: Any, num_rows: int, other: Any, other_num_rows: int) -> ResultForm:
    """Find the rows of results by comparing those of two calls with different numbers of rows.

    Raises:
        CannotCutError: if they differ in another way than by their rows.
    """
    leaves, structure = taken_apart(result)
    others, other_structure = taken_apart(other)
    if structure != other_structure:
        raise CannotCutError(_OTHER_STRUCTURE)
    dims = tuple(
        _row_dim((leaf, num_rows), (its_other, other_num_rows))
        for leaf, its_other in zip(leaves, others, strict=True)
    )
    return ResultForm(structure, dims)


def _row_dim(first: tuple[Any, int], second: tuple[Any, int]) -> int | None:
    """Find the one dimension whose extent follows the number of rows; None if none changes."""
    (leaf, num_rows), (other, other_num_rows) = first, second
    if not (isinstance(leaf, torch.Tensor) and isinstance(other, torch.Tensor)):
        _check_plain(leaf, other)
        return None
    mine, its = tuple(leaf.shape), tuple(other.shape)
    shapes = f"{mine} for {num_rows} rows and {its} for {other_num_rows}"
    if leaf.dim() != other.dim():
        raise CannotCutError(f"one of its results is of shape {shapes}")
    changed = [dim for dim in range(leaf.dim()) if leaf.shape[dim] != other.shape[dim]]
    if not changed:
        return None
    dim = changed[0]
    per_row, rest = divmod(leaf.shape[dim], num_rows)
    if len(changed) > 1 or rest or other.shape[dim] != per_row * other_num_rows:
        raise CannotCutError(f"one of its results is of shape {shapes}")
    return dim


def _check_plain(leaf: Any, other: Any) -> None:
    """Refuse results that are neither tensors nor the same for all rows."""
    if leaf is other:
        return
    if isinstance(leaf, (bool, int, float, str, torch.dtype, torch.device)) and leaf == other:
        return
    what = f"a {type(leaf).__name__}"
    if isinstance(leaf, (bool, int, float, str)):
        what += f" that differs from rows to rows ({leaf!r} and {other!r})"
    raise CannotCutError(f"one of its results is {what}, which cannot be joined")


_OTHER_STRUCTURE = "its results have another structure for other numbers of rows"
