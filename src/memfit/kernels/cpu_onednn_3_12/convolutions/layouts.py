"""The bytes of a convolution's tensors in oneDNN's layouts, and who says which are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """The bytes of one kernel's tensors in its layouts; 0 for one that is used as it is.

    ``num_returns`` says how often what it computes is copied on its way back into torch's layout.
    """

    image: int = 0
    weight: int = 0
    result: int = 0
    scratchpad: int = 0
    num_returns: int = 1

    @property
    def total(self) -> int:
        """Add up what lives while the kernel runs."""
        return self.image + self.weight + self.result + self.scratchpad

    def with_more(self, num_bytes: int) -> Self:
        """Add bytes to the scratchpad."""
        return replace(self, scratchpad=self.scratchpad + num_bytes)

    def result_peak(self, num_bytes: int) -> int:
        """Return the most that lives at once, given what torch's own result takes."""
        if not self.result:
            return self.total + num_bytes
        return max(self.total, self.result + self.num_returns * num_bytes)

    def image_peak(self, num_bytes: int) -> int:
        """Return the most that lives at once, given what torch's own gradient of it takes."""
        if not self.image:
            return self.total + num_bytes
        return max(self.total, self.image + self.num_returns * num_bytes)

    def weight_peak(self, num_bytes: int, bias_bytes: int) -> int:
        """Return the most that lives at once, given what torch's own gradients take."""
        returned = self.weight + 2 * bias_bytes + self.num_returns * num_bytes
        return max(self.total + bias_bytes, returned)


class Kernels(Protocol):
    """Says which of oneDNN's kernels may serve, most often one; a module per instruction set.

    ``is_last``: whether images and results have their channels last in torch too, and are used as
    they are.
    """

    def forward_layouts(
        self, shape: Convolution, num_threads: int, *, is_last: bool
    ) -> list[Layouts]:
        """List the kernels that may compute the result."""

    def data_layouts(
        self, shape: Convolution, num_threads: int, *, is_last: bool, has_bias: bool
    ) -> list[Layouts]:
        """List the kernels that may compute the image's gradient.

        A transposed convolution is such a gradient, to which a bias may be added.
        """

    def weight_layouts(
        self, shape: Convolution, num_threads: int, *, is_last: bool
    ) -> list[Layouts]:
        """List the kernels that may compute the weight's gradient."""
