"""Prices what a recorded step takes besides its operators: waits for host or disk, and hooks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from memfit.cost.checkpoints import BACKWARD_OVER_FORWARD, CheckpointedBlock, checkpoint_seconds
from memfit.cost.operator_times import OperatorTimes
from memfit.cost.transfers import DISK_BYTES_PER_SECOND, BlockWork, added_seconds
from memfit.devices.spec import Device
from memfit.prediction.recording import Recording
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.plan import Plan
from memfit.trace.events import ModuleCall, Phase, Trace


def waited_seconds(recording: Recording, device: Device, times: OperatorTimes) -> float:
    """Return the seconds that the steady step stands still for what it moves.

    Disks are written and read while nothing is computed, and so are states that visit the device
    for an update. Other copies to the host run beside the computation, block by block; see
    memfit.cost.transfers.
    """
    spill = recording.spill
    seconds = spill.file_bytes / DISK_BYTES_PER_SECOND
    if spill.link_bytes:
        seconds += spill.link_bytes / device.value("link_bytes_per_second")
    if spill.out_bytes and spill.is_beside_compute:
        seconds += _blocks_wait_seconds(recording, device, times)
    return seconds


def hooks_seconds(recording: Recording, device: Device, plan: Plan, times: OperatorTimes) -> float:
    """Return what a plan's checkpoints take in the steady step, besides what they run again."""
    keeps = {
        block: frozenset(strategy.keep)
        for strategy in plan.strategies
        if isinstance(strategy, ActivationCheckpointing)
        for block in strategy.block_names(recording.facts)
    }
    if not keeps:
        return 0.0
    return sum(
        checkpoint_seconds(_checkpointed(recording.steady, call, times, keeps[call.module]), device)
        for call in recording.steady.calls
        if call.phase is Phase.FORWARD and call.module in keeps
    )


def _checkpointed(
    trace: Trace, call: ModuleCall, times: OperatorTimes, keep: frozenset[str]
) -> CheckpointedBlock:
    """Take all that is not kept to be run again; that nobody needs some of it changes little."""
    operations = trace.operations[call.first_operation : call.last_operation]
    num_calls: Counter[str] = Counter()
    forward_seconds = kept_seconds = 0.0
    for operation in operations:
        seconds = times.seconds(operation)
        forward_seconds += seconds
        if f"{operation.name}.{num_calls[operation.name]}" in keep:
            kept_seconds += seconds
        num_calls[operation.name] += 1
    return CheckpointedBlock(
        num_operators=len(operations),
        forward_seconds=forward_seconds,
        again_seconds=forward_seconds - kept_seconds,
        chooses=bool(keep),
    )


def _blocks_wait_seconds(recording: Recording, device: Device, times: OperatorTimes) -> float:
    """Return the seconds that blocks stand still for the copies beside their computation."""
    trace, spill = recording.steady, recording.spill
    calls = {module: _forward_calls(trace, module) for module in spill.out_bytes}
    num_pieces = max(1, *(len(found) for found in calls.values()))
    blocks = []
    for module, found in calls.items():
        seconds = sum(_seconds(trace, call, times) for call in found) / num_pieces
        blocks.append(
            BlockWork(
                forward_seconds=seconds,
                backward_seconds=BACKWARD_OVER_FORWARD * seconds,
                out_bytes=spill.out_bytes[module] // num_pieces,
                in_bytes=spill.in_bytes.get(module, 0) // num_pieces,
            )
        )
    # The last block keeps what it has, and covers the copies of the one before it.
    blocks.append(replace(blocks[-1], out_bytes=0, in_bytes=0))
    link = device.value("link_bytes_per_second")
    return added_seconds(blocks, link) * num_pieces


def _forward_calls(trace: Trace, module: str) -> list[ModuleCall]:
    return [c for c in trace.calls if c.module == module and c.phase is Phase.FORWARD]


def _seconds(trace: Trace, call: ModuleCall, times: OperatorTimes) -> float:
    operations = trace.operations[call.first_operation : call.last_operation]
    return sum(times.seconds(operation) for operation in operations)
