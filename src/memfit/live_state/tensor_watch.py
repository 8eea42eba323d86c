"""Looks again and again at many tensors at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from memfit.live_state.findings import Obstacle, Place
from memfit.live_state.tensors import (
    Copied,
    KeptGrad,
    KeptTensor,
    bytes_of,
    has_content,
    keep,
)
from memfit.units import MIB, format_bytes

MOST_BYTES = 64 * MIB
"""More than this is not copied before every step."""

_Tensors = Sequence[tuple[torch.Tensor, Place, bool]]
_REQUIRES_GRAD = attrgetter("requires_grad")


@dataclass(frozen=True, slots=True)
class TensorsThen:
    """Tensors as they were at one moment."""

    kept: Sequence[KeptTensor]
    contents: Sequence[tuple[Sequence[int], torch.Tensor]]
    """Which of them have their bytes one after the other in one tensor."""
    grads: Sequence[KeptGrad | None] | None
    """None where gradients are not kept."""

    def each(self) -> Iterator[KeptTensor]:
        """Yield every tensor with its content, where that was kept."""
        found: dict[int, torch.Tensor] = {}
        for indices, content in self.contents:
            start = 0
            for index in indices:
                end = start + self.kept[index].num_bytes
                found[index] = content[start:end]
                start = end
        for index, kept in enumerate(self.kept):
            yield kept if index not in found else kept.with_content(found[index])

    def put_grads_back(self) -> None:
        """Give every tensor the gradient that it had."""
        for kept, was in zip(self.kept, self.grads or (), strict=False):
            if kept.tensor.is_leaf:
                kept.tensor.grad = None if was is None else was.grad
            if was is not None:
                was.put_back()

    def changed_grads(self) -> Iterator[int]:
        """Yield which tensors have another gradient."""
        for index, was in enumerate(self.grads or ()):
            tensor = self.kept[index].tensor
            now = tensor.grad if tensor.is_leaf else None
            is_same = now is (None if was is None else was.grad)
            if not is_same or (was is not None and not was.has_same_values()):
                yield index


class TensorWatch:
    """Keep many tensors.

    Args:
        tensors: with their places, and whether their content is to be kept.
        with_grad: whether ``.grad`` is.
        most_bytes: how many bytes of content at most; the largest tensors are left out.
        copied: copies content.
    """

    def __init__(
        self, tensors: _Tensors, *, with_grad: bool, most_bytes: int, copied: Copied
    ) -> None:
        self._all = [tensor for tensor, _, _ in tensors]
        self.places = [place for _, place, _ in tensors]
        self.obstacles: list[Obstacle] = []
        self._with_grad = with_grad
        self._copied_bytes = copied
        self._most_bytes = most_bytes
        self._formed: list[int] = []
        self._loose: list[int] = []
        self._left_out: set[int] = set()
        for index, (tensor, _, with_content) in enumerate(tensors):
            if not with_content:
                self._left_out.add(index)
            else:
                (self._formed if has_content(tensor) else self._loose).append(index)
        self._copied = self._that_fit(most_bytes)
        self._formed_tensors = [self._all[index] for index in self._formed]
        self._with_strides = [tensor for tensor in self._formed_tensors if tensor.dim() > 1]
        self._kept = [self._keep(index) for index in range(len(self._all))]
        self._seen = self._flags(), self._forms()
        self._aliases = self._aliased()

    def look(self) -> TensorsThen:
        """Keep the tensors as they are now."""
        flags, forms = self._flags(), self._forms()
        if (flags, forms) != self._seen:
            self._refresh(flags)
        if self._loose:
            self._kept = [*self._kept]
            for index in self._loose:
                self._kept[index] = self._keep(index)
        contents = [(each, self._copied_bytes(parts)) for each, parts in self._aliases]
        return TensorsThen(self._kept, contents, self._grads() if self._with_grad else None)

    def has_new_hooks(self) -> bool:
        """Return whether any tensor has other hooks than when it was last looked at."""
        if RemovableHandle.next_id == self._seen[0][-1]:
            return False
        before = [kept.flags for kept in self._kept]
        self._refresh(self._flags())
        return any(
            old.hooks is not kept.flags.hooks or old.late_hooks is not kept.flags.late_hooks
            for old, kept in zip(before, self._kept, strict=True)
        )

    def _grads(self) -> list[KeptGrad | None]:
        grads = [tensor.grad if tensor.is_leaf else None for tensor in self._all]
        num_bytes = sum(grad.nbytes for grad in grads if grad is not None)
        copied = self._copied_bytes if num_bytes <= self._most_bytes else None
        return [None if grad is None else KeptGrad.of(grad, copied) for grad in grads]

    def _that_fit(self, most_bytes: int) -> list[int]:
        """List the tensors whose content is small enough to be copied, smallest first."""
        fitting, num_bytes = [], 0
        for index in sorted(self._formed, key=lambda index: self._all[index].nbytes):
            num_bytes += self._all[index].nbytes
            if num_bytes > most_bytes:
                self.obstacles.append(self._too_large(index, most_bytes))
            else:
                fitting.append(index)
        return sorted(fitting)

    def _too_large(self, index: int, most_bytes: int) -> Obstacle:
        place, size = self.places[index], format_bytes(self._all[index].nbytes)
        sentence = (
            f"{place.text} has {size}: too large to be copied before every step beside the rest, "
            f"of which {format_bytes(most_bytes)} are."
        )
        return Obstacle(place.owner, "size", sentence)

    def _keep(self, index: int) -> KeptTensor:
        return keep(self._all[index], with_form=index not in self._left_out)

    def _flags(self) -> list[Any]:
        # Every hook takes a number from one counter, so that new ones need not be looked for.
        return [*map(_REQUIRES_GRAD, self._all), RemovableHandle.next_id]

    def _forms(self) -> list[Any]:
        tensors = self._formed_tensors
        return [
            [*map(torch.Tensor.data_ptr, tensors)],
            [*map(torch.Tensor.size, tensors)],
            [tensor.stride() for tensor in self._with_strides],
        ]

    def _refresh(self, flags: list[Any]) -> None:
        """Keep all tensors anew: some have another form, other flags or other hooks."""
        self._kept = [self._keep(index) for index in range(len(self._all))]
        self._with_strides = [tensor for tensor in self._formed_tensors if tensor.dim() > 1]
        self._seen = flags, self._forms()
        self._aliases = self._aliased()

    def _aliased(self) -> list[tuple[list[int], list[torch.Tensor]]]:
        by_device: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for index in self._copied:
            tensor = self._all[index]
            indices, parts = by_device.setdefault(tensor.device, ([], []))
            indices.append(index)
            parts.append(bytes_of(tensor))
            self._kept[index].num_bytes = parts[-1].numel()
        return [*by_device.values()]
