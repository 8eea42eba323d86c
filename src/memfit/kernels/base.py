"""What a device's kernels take besides what they return, and which tensors lie on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.kernels.cpu.scratch import scratch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Memory that one operator takes and gives back inside.

    ``blocks`` are its separate requests in bytes, at their most likely sizes; the sum lies between
    ``low_bytes`` and ``high_bytes``. ``certainty`` is ``exact``, ``table`` or ``guess``.
    """

    blocks: tuple[int, ...]
    low_bytes: int
    high_bytes: int
    certainty: str
    source: str

    @property
    def num_bytes(self) -> int:
        """Add up the blocks."""
        return sum(self.blocks)


class HiddenMemory(Protocol):
    """Tell what dispatch does not show."""

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on the device."""

    def around(
        self,
        operator: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> tuple[Sequence[int], Scratch | None]:
        """Return the workspaces that an operator makes for good, in bytes, and its scratch."""


class CpuKernels:
    """The CPU's kernels; every tensor counts."""

    def is_counted(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002
        """Count every tensor."""
        return True

    def around(
        self,
        operator: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],  # noqa: ARG002
        out: Any,
    ) -> tuple[Sequence[int], Scratch | None]:
        """Look the scratch up in the CPU's rules; there are no workspaces."""
        num_bytes = scratch_bytes(operator, args, out)
        if not num_bytes:
            return (), None
        return (), Scratch(
            blocks=(num_bytes,),
            low_bytes=num_bytes,
            high_bytes=num_bytes,
            certainty="exact",
            source="memfit.kernels.cpu.scratch",
        )
