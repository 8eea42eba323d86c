"""Turns a recorded step into seconds: each operator is bound by arithmetic or by memory traffic.

Source of the model: Williams, Waterman, Patterson, "Roofline: an insightful visual performance
model", CACM 52(4), 2009. Each operator also pays a fixed launch time.
"""

from __future__ import annotations

from memfit.devices.spec import Device
from memfit.trace.events import Operation


def operation_seconds(operation: Operation, device: Device) -> float:
    """Return the roofline time of one operator.

    Does not account for caches, for overlap between operators, or for kernels that reach less than
    the device's dense matrix rate.
    """
    arithmetic = operation.num_flops / device.matrix_flops_per_second(operation.dtype)
    traffic = operation.moved_bytes / device.value("memory_bandwidth_bytes_per_second")
    return max(arithmetic, traffic) + device.value("launch_seconds")
