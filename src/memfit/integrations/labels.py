"""Finds the labels that a loss is a mean over, so that pieces count by those it does not ignore.

``cross_entropy`` leaves labels of one value out of its mean. A batch whose samples have unlike
numbers of them cannot be put together from pieces that count by their samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional

from memfit.errors import MemfitError
from memfit.job import Job
from memfit.prediction.recording import record
from memfit.session.leaves import leaves_of

_IGNORED = -100
"""What ``cross_entropy`` and ``nll_loss`` ignore where they are not told otherwise."""
_PLACE = 4
"""Of ``ignore_index`` among the arguments of both."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Where in a batch the labels lie, and which value a loss ignores."""

    leaf: int
    ignored: int

    def __call__(self, batch: Any) -> Any:
        """Count the labels of a batch that are not ignored."""
        return (leaves_of(batch)[self.leaf] != self.ignored).sum()

    def are_ignored_in(self, batch: Any) -> bool:
        """Return whether any label of a batch is."""
        leaf: torch.Tensor = leaves_of(batch)[self.leaf]
        return bool((leaf == self.ignored).any())


def find_labels(step: Any, job: Job) -> Labels | None:
    """Find the labels that a loss is a mean over, where the batch has any that it ignores.

    The step is recorded to see which part of the batch its loss takes for labels.

    Args:
        step: of a framework, with its batch, that notes the labels of the losses inside it.
        job: that is made of it.
    """
    step.labels_seen = LabelsSeen()
    with suppress(MemfitError):  # whoever plans will say why it cannot be recorded
        record(job, repeats_pass=True)  # one pass has all losses
    found, step.labels_seen = step.labels_seen.labels, None
    return found if found is not None and found.are_ignored_in(step.reference) else None


class LabelsSeen:
    """Note which part of a batch the losses of a step take for labels."""

    def __init__(self) -> None:
        self._leaves: dict[int, int] = {}
        self._found: set[Labels] = set()

    @property
    def labels(self) -> Labels | None:
        """Return the labels, where all losses that were seen have the same."""
        return next(iter(self._found)) if len(self._found) == 1 else None

    @contextmanager
    def noting(self, batch: Any) -> Iterator[None]:
        """Note the labels of the losses inside that are a part of a batch."""
        leaves = enumerate(leaves_of(batch))
        self._leaves = {
            leaf.untyped_storage()._cdata: number
            for number, leaf in leaves
            if isinstance(leaf, torch.Tensor)
        }
        with ExitStack() as stack:
            for name in ("cross_entropy", "nll_loss"):
                function = self._noting(getattr(functional, name))
                stack.enter_context(patch.object(functional, name, function))
            yield

    def _noting(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def noting(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch
            if kwargs.get("reduction", "mean") == "mean" and not target.is_floating_point():
                ignored = args[_PLACE - 1] if len(args) >= _PLACE else _IGNORED
                leaf = self._leaves.get(target.untyped_storage()._cdata)
                if leaf is not None:
                    self._found.add(Labels(leaf, kwargs.get("ignore_index", ignored)))
            return loss(input, target, *args, **kwargs)

        return noting
