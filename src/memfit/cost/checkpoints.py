"""What torch's checkpoints take of the host, besides the operators that they run again."""

from __future__ import annotations

from dataclasses import dataclass

from memfit.devices.spec import CPU, Device

_BLOCK_LAUNCHES = 120
_OPERATOR_LAUNCHES = 7
_CHOOSING_BLOCK_LAUNCHES = 45
_CHOOSING_OPERATOR_LAUNCHES = 9
"""In launches of an operator, as measured on two cores with torch 2.13 and a launch of 3.4 us: a
checkpointed block of small operators took 0.41 ms, and 25 us for each of them, longer than it would
as it is and again; one that keeps some results 0.15 ms and 31 us more than that."""
_PLAIN_OPERATOR_LAUNCHES = 11
"""A block as it is, forward and backward, in launches for each operator of its forward. As measured
on two cores: 16 small blocks took 0.67 ms each where a launch took 5.5 us."""
_BESIDE_CARD = 1.35
"""How much longer all of that takes on the host of a card, where each launch is a call of CUDA.

A guess from one job on one H200: 16 blocks of 3.5 ms took 4.0 ms each where torch's selective
checkpoints kept the products and attention, which leaves the card 0.2 ms of work to do again; whole
blocks run again took what the card computed (benchmarks/results/planner_chain_card.json)."""
BACKWARD_OVER_FORWARD = 2.0
"""Two products of matrices in backward for each one in forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointedBlock:
    """What one forward of a block computes, and what is done about it."""

    num_operators: int
    forward_seconds: float
    """What they take on the device."""
    again_seconds: float
    """What those of them take that are run again."""
    chooses: bool
    """Whether the results of some operators are kept, for which each is looked at."""


def checkpoint_seconds(block: CheckpointedBlock, device: Device) -> float:
    """Return by how much the hooks of a checkpointed block hold up a forward and its backward.

    On a processor that is all that they take. The host of a card runs ahead of it: there it is what
    the host takes for the block longer than the card.

    Does not account for a host that is ahead from the blocks before, or behind.
    """
    hooks = _BLOCK_LAUNCHES + _OPERATOR_LAUNCHES * block.num_operators
    if block.chooses:
        hooks += _CHOOSING_BLOCK_LAUNCHES + _CHOOSING_OPERATOR_LAUNCHES * block.num_operators
    launch_seconds = device.value("launch_seconds")
    if device.kind == CPU:
        return hooks * launch_seconds
    plain = _PLAIN_OPERATOR_LAUNCHES * block.num_operators
    plain_seconds = (1 + BACKWARD_OVER_FORWARD) * block.forward_seconds
    late_anyway = max(0.0, _BESIDE_CARD * plain * launch_seconds - plain_seconds)
    host_seconds = _BESIDE_CARD * (plain + hooks) * launch_seconds
    return max(0.0, host_seconds - plain_seconds - block.again_seconds - late_anyway)
