"""Which candidates count as true for which rows: padded lists of equal length, or single pairs.

Shape suffixes: B rows, C columns of scores, T positives per row, P pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_NO_ROW = 2**62
_MOST_COMPARED = 2**21
"""How many candidates are compared with a positive at a time."""


class PositivePairs(NamedTuple):
    """Rows and candidates that belong together.

    A padded table (B, T) is as wide as the longest list. Where one row in thousands has very many
    positives, pairs take a fraction of it.

    Example:
        >>> pairs = PositivePairs(rows=torch.tensor([0, 1, 1]), candidates=torch.tensor([4, 0, 2]))
    """

    rows: Tensor
    """(P,) int64, from 0 to below B."""
    candidates: Tensor
    """(P,) int64; -1 fills up, so that all batches have as many pairs."""


class Listed(NamedTuple):
    """Positives in either form, as columns of scores whose column 0 is a place for padding."""

    rows: Tensor | None
    """(P,) int64; None for padded lists."""
    candidates: Tensor
    """(P,) int64, or (B, T) of padded lists."""

    def __str__(self) -> str:
        """Describe the shapes."""
        if self.rows is None:
            return f"{tuple(self.candidates.shape)} {self.candidates.dtype}"
        return (
            f"pairs of {tuple(self.rows.shape)} {self.rows.dtype} and "
            f"{tuple(self.candidates.shape)} {self.candidates.dtype}"
        )

    def fits(self, num_rows: int) -> bool:
        """Return whether shapes and types can be those of so many rows."""
        if self.candidates.dtype != torch.int64:
            return False
        if self.rows is None:
            return self.candidates.dim() == 2 and len(self.candidates) == num_rows
        return (
            self.rows.dtype == torch.int64
            and self.rows.dim() == 1
            and self.rows.shape == self.candidates.shape
        )

    def columns(self, start: int, num_columns: int, *, is_last: bool) -> Tensor:
        """Return the columns of the positives in scores of so many candidates from ``start``.

        Padding and the positives of other chunks are in column 0. In the last chunk an index of N
        or more stays too large for the scores, so that reading it is an error.
        """
        columns = (self.candidates - (start - 1)).clamp_(min=0)
        return columns if is_last else columns.masked_fill_(columns > num_columns, 0)

    def read(self, scores_BC: Tensor, columns: Tensor) -> Tensor:
        """Return the entries in these columns."""
        if self.rows is None:
            return scores_BC.gather(1, columns)
        return scores_BC[self.rows, columns]

    def write(self, scores_BC: Tensor, columns: Tensor, values: Tensor | float) -> None:
        """Put entries into these columns; what column 0 holds then is of no meaning."""
        if self.rows is not None:
            scores_BC[self.rows, columns] = values
        elif isinstance(values, Tensor):
            scores_BC.scatter_(1, columns, values)
        else:  # another overload
            scores_BC.scatter_(1, columns, values)

    def holds(self, candidates: Tensor, num_candidates: int) -> Tensor:
        """Return for each row which of its own candidates (B, S) are positives: (B, S) bool.

        Beyond that it takes a few tensors as long as the positives, and at most 2 MiB of bools.
        """
        if self.rows is not None:
            return self._pairs_hold(self.rows, candidates, num_candidates)
        is_listed = torch.zeros_like(candidates, dtype=torch.bool)
        num_each = max(1, _MOST_COMPARED // candidates.numel())
        for listed_BT in self.candidates.split(num_each, dim=1):
            is_listed |= (candidates[:, :, None] == listed_BT[:, None]).any(dim=2)
        return is_listed

    def _pairs_hold(self, rows: Tensor, candidates: Tensor, num_candidates: int) -> Tensor:
        """Look for pairs among all pairs, both as one number each."""
        width = num_candidates + 1  # -1 becomes a candidate of its own
        known = (rows * width + self.candidates.clamp(min=-1) + 1).sort().values
        row_B1 = torch.arange(len(candidates), device=candidates.device)[:, None]
        wanted = row_B1 * width + candidates + 1
        if not len(known):
            return torch.zeros_like(wanted, dtype=torch.bool)
        place = torch.searchsorted(known, wanted).clamp_(max=len(known) - 1)
        return known[place] == wanted


def listed(positives: Tensor | PositivePairs) -> Listed:
    """Read positives in the form that they have."""
    if not isinstance(positives, PositivePairs):
        return Listed(rows=None, candidates=positives)
    rows = positives.rows
    if rows.dtype == torch.int64:
        # Indexing counts negative rows from the end; here they are to be an error.
        rows = rows.masked_fill(rows < 0, _NO_ROW)
    return Listed(rows=rows, candidates=positives.candidates)
