"""Batches of a script for a job: drawn once for predictions, and again for training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from memfit.errors import JobError


class DrawnBatches:
    """Make a job's ``batch`` of a script's own batches.

    The first window is drawn at once. ``of_size`` cuts batches of any size from it, repeating
    samples for larger ones; ``windows`` draws anew, to train with.

    Limits: samples are counted along the first dimension. Batches of a window have to be alike in
    all other dimensions, but for what ``padding`` names.

    Args:
        batches: yields the script's batches: pytrees of tensors.
        window: how many of them one update sees.
        padding: what batches of one window are filled up with to one length, at the end, by the key
            or the place of a tensor in its batch.

    Raises:
        JobError: if there are too few batches, no samples in them, or they cannot be joined.
    """

    def __init__(
        self,
        batches: Callable[[], Iterable[Any]],
        window: int = 1,
        padding: Mapping[str | int, float] = MappingProxyType({}),
    ) -> None:
        self._batches = batches
        self._window = window
        self._padding = dict(padding)
        first = next(self.windows(), None)
        if first is None:
            msg = f"The script gives fewer than {window} batches, and one update needs as many."
            raise JobError(msg)
        self._first = first
        self.num_samples = _num_samples(first)
        """Samples of the first window."""

    def of_size(self, batch_size: int) -> Any:
        """Return a batch of this size, cut out of the first window or repeating it.

        Args:
            batch_size: how many samples, of at least 1.
        """
        with unset_fake_temporarily():
            rows = torch.arange(batch_size) % self.num_samples
            return _of_rows(self._first, rows, self.num_samples)

    def windows(self) -> Iterator[Any]:
        """Yield what each update sees, until the script's batches end.

        A last window of fewer batches is left out.
        """
        source = map(plain_batch, self._batches())
        while len(window := list(islice(source, self._window))) == self._window:
            yield self.joined(window)

    def joined(self, window: Sequence[Any]) -> Any:
        """Join the batches of one update along their samples.

        Raises:
            JobError: if they differ in other dimensions, and nothing is known to fill them up with.
        """
        if len(window) == 1:
            return window[0]
        flat = [tree_flatten(batch)[0] for batch in window]
        paths, spec = tree_flatten_with_path(window[0])
        names = [place_of(path) for path, _ in paths]
        leaves = [
            _joined_leaf(parts, self._padding.get(name))
            for name, parts in zip(names, zip(*flat, strict=True), strict=True)
        ]
        return tree_unflatten(leaves, spec)


def plain_batch(batch: Any) -> Any:
    """Return a batch with dictionaries in place of mappings that only look like them.

    Those of tokenizers and collators are such, and are no pytrees.
    """
    if isinstance(batch, Mapping):
        return {key: plain_batch(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(map(plain_batch, batch))
    return batch


def _num_samples(batch: Any) -> int:
    """Return the extent of the first dimension that most tensors share."""
    extents = Counter(len(leaf) for leaf in tree_flatten(batch)[0] if _has_rows(leaf))
    if not extents:
        msg = "A batch of the script holds no tensor with a dimension for samples."
        raise JobError(msg)
    return extents.most_common(1)[0][0]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _of_rows(batch: Any, rows: torch.Tensor, num_samples: int) -> Any:
    leaves, spec = tree_flatten(batch)
    whole = len(rows) == num_samples
    chosen = [
        leaf[rows] if _has_rows(leaf) and len(leaf) == num_samples and not whole else leaf
        for leaf in leaves
    ]
    return tree_unflatten(chosen, spec)


def place_of(path: Sequence[Any]) -> str | int:
    """Return the key of a tensor in its batch, or its place; 0 where it is the batch."""
    last = path[-1] if path else None
    found: str | int = getattr(last, "key", getattr(last, "idx", 0))
    return found


def _joined_leaf(parts: Sequence[Any], filler: float | None) -> Any:
    if not _has_rows(parts[0]):
        return parts[0]
    shapes = [tuple(part.shape[1:]) for part in parts]
    if len(set(shapes)) == 1:
        return torch.cat(list(parts))
    if filler is None or len({len(shape) for shape in shapes}) > 1:
        found = ", ".join(str(list(part.shape)) for part in parts)
        msg = (
            f"Batches of one update differ in more than their samples ({found}), and their "
            "mean is not that of one batch. Pad all of them to one length."
        )
        raise JobError(msg)
    longest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    return torch.cat([_filled_up(part, longest, filler) for part in parts])


def _filled_up(part: torch.Tensor, sizes: Sequence[int], filler: float) -> torch.Tensor:
    """Fill a tensor up to these sizes of all dimensions but the first."""
    missing = [wanted - size for wanted, size in zip(sizes, part.shape[1:], strict=True)]
    pairs = [number for more in reversed(missing) for number in (0, more)]
    return torch.nn.functional.pad(part, pairs, value=filler)
