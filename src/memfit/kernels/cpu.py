"""The CPU's kernels: what those of torch 2.13 with oneDNN 3.12 take, whatever version runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from memfit.kernels.cpu_onednn_3_12 import CPU_OPERATORS
from memfit.kernels.cpu_onednn_3_12.convolutions import is_beyond_rules
from memfit.kernels.gloo import GLOO_SOURCE, staging_bytes
from memfit.kernels.registration import call_rule
from memfit.kernels.scratch import Scratch

_FROM_ONEDNN = (
    *("convolution", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "_addmm", "linear"),
    "mkldnn_rnn_layer",
)


class CpuKernels:
    """The CPU's kernels; every tensor counts.

    Args:
        has_gloo: whether collectives go through gloo, which stages them in memory of torch's.
    """

    def __init__(self, *, has_gloo: bool = False) -> None:
        self._has_gloo = has_gloo

    def is_counted(self, tensor: torch.Tensor) -> bool:
        """Count every tensor but those of the meta device, which have no memory."""
        return tensor.device.type != "meta"

    def around(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> tuple[Sequence[int], Scratch | None]:
        """Look the scratch up in the CPU's rules; there are no workspaces."""
        if self._has_gloo and (staged_bytes := staging_bytes(func, args)):
            return (), replace(Scratch.exact(GLOO_SOURCE, (staged_bytes,)), is_staging=True)
        num_bytes = scratch_bytes(func, args, kwargs, out)
        return (), Scratch.exact(__name__, (num_bytes,)) if num_bytes else None


def scratch_bytes(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> int:
    """Return the bytes that a CPU kernel takes besides its outputs; 0 where no rule is known."""
    operator = CPU_OPERATORS.find(func)
    if operator is None or operator.scratch is None:
        return 0
    num_bytes = call_rule(operator.scratch, func, args, kwargs, operands=args, out=out)
    return 0 if num_bytes is NotImplemented else int(num_bytes)


def unknown_kernel_notes(operators: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Say of which operators no rule describes the memory that they take on this processor.

    Args:
        operators: names of operators, each with the type that it computes in, as torch names it.
    """
    dtypes = {dtype for name, dtype in operators if name.startswith(_FROM_ONEDNN)}
    return tuple(
        f"the memory that convolutions, matrix products and recurrent layers in {dtype} take here "
        "is a guess: oneDNN has kernels for this processor that memfit has no rules for, and those "
        "of AVX-512 are taken for them. `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` has oneDNN use "
        "what is known"
        for dtype in sorted(dtypes)
        if is_beyond_rules(dtype)
    )
