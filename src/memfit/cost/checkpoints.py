"""What torch's checkpoints take of the host, besides the operators that they run again."""

from __future__ import annotations

from memfit.devices.spec import CPU, Device

_BLOCK_LAUNCHES = 120
_OPERATOR_LAUNCHES = 7
_CHOOSING_BLOCK_LAUNCHES = 45
_CHOOSING_OPERATOR_LAUNCHES = 9
"""In launches of an operator, as measured on two cores with torch 2.13 and a launch of 3.4 us: a
checkpointed block of small operators took 0.41 ms, and 25 us for each of them, longer than it would
as it is and again; one that keeps some results 0.15 ms and 31 us more than that."""


def checkpoint_seconds(num_operators: int, device: Device, *, chooses: bool) -> float:
    """Return what the hooks of a checkpointed block take in a forward and its backward.

    Args:
        num_operators: that the block's forward runs.
        device: on a card it is 0, since the host runs ahead of it.
        chooses: whether the results of some operators are kept, for which each is looked at.

    Does not account for steps on a card that launches alone hold up.
    """
    if device.kind != CPU:
        return 0.0
    launches = _BLOCK_LAUNCHES + _OPERATOR_LAUNCHES * num_operators
    if chooses:
        launches += _CHOOSING_BLOCK_LAUNCHES + _CHOOSING_OPERATOR_LAUNCHES * num_operators
    return launches * device.value("launch_seconds")
