"""Made-up machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memfit.devices.detect import CudaDevice, Host
from memfit.units import GIB


def machine_with(*cards: CudaDevice, **changes: Any) -> Host:
    """Return a machine in order, with these cards."""
    good = Host(
        python_version="3.11.0",
        torch_version="2.11.0+cpu",
        torch_problem=None,
        num_cpus=2,
        memory_bytes=8 * GIB,
        cuda_devices=cards,
    )
    return replace(good, **changes)
