"""``--device-map custom``: small branches compute on the host, and what that saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memfit.errors import UsageError

from .branches import FP16
from .four_bit import on_meta
from .settings import ADAMW, TridentSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memfit.strategies.host_modules import HostModules

    from .sizes import TridentSizes

_BYTES_PER_WEIGHT = 4 + 4
"""A weight and its gradient, in fp32; the optimizer's states come on top."""


def host_branches(settings: TridentSettings) -> HostModules:
    """Return the strategy, for a run on a GPU.

    Raises:
        UsageError: if other flags ask for what does not go with it.
    """
    from memfit.strategies.host_modules import HostModules

    for flag, strategy in _against(settings):
        msg = (
            f"--device-map custom and {flag} exclude each other ({strategy}: "
            f"{HostModules.excludes[strategy]}); leave one of them out."
        )
        raise UsageError(msg)
    return HostModules(modules=settings.placement.host_modules)


def _against(settings: TridentSettings) -> Iterator[tuple[str, str]]:
    """Yield the flags that ask for a strategy which is excluded, and its name."""
    if settings.placement.is_qlora:
        yield "--qlora", "four-bit-base"
    if settings.optimizer != ADAMW:
        yield f"--optimizer {settings.optimizer}", "eight-bit-optimizer"
    if settings.branches.autocast == FP16:
        yield "float16 (--use-fp16, --precision)", "fp16"
    if settings.placement.offloads_states:
        yield "the offloading of optimizer states (--zero-stage)", "optimizer-offload"


def saved_bytes(sizes: TridentSizes, names: tuple[str, ...], states_per_weight: float) -> int:
    """Count weights, gradients and optimizer states of modules of a model of these sizes."""
    model = on_meta(sizes)
    num_weights = sum(
        weight.numel() for name in names for weight in model.get_submodule(name).parameters()
    )
    return round(num_weights * (_BYTES_PER_WEIGHT + states_per_weight))
