"""DreaMS: a transformer over tandem mass spectra, pre-trained and fine-tuned under Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memfit_workloads.workload import Workload

from .arguments import add_arguments, settings_of

if TYPE_CHECKING:
    from .callbacks import log_memory_usage as log_memory_usage
    from .ms_data import MSData as MSData

WORKLOAD = Workload(
    name="dreams",
    summary="DreaMS: pre-train and fine-tune a transformer on tandem mass spectra",
    add_arguments=add_arguments,
    settings_from=settings_of,
    package=__name__,
)


def __getattr__(name: str) -> Any:
    """Import what needs torch or HDF5 when it is first used."""
    import importlib

    homes = {"log_memory_usage": "callbacks", "MSData": "ms_data"}
    if name not in homes:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(importlib.import_module(f"{__name__}.{homes[name]}"), name)
