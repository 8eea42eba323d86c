"""What is said of the flags of placement: what they do on one process, and what they save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memfit.units import format_bytes

from .four_bit import four_bit_figures, num_weights
from .host_branches import saved_bytes
from .offload_folder import lies_in_memory
from .placement import PlacementSettings
from .placement_arguments import AUTO, BALANCED, CUSTOM
from .settings import ADAMW, TridentSettings
from .sizes import DOCUMENT

_STATES_PER_WEIGHT, _EIGHT_BIT_STATES_PER_WEIGHT = 8.0, 2.03
"""Of each weight, under AdamW and in 8 bits with their scales."""
_BYTES_PER_WEIGHT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    settings: TridentSettings
    is_on_cpu: bool

    @property
    def placement(self) -> PlacementSettings:
        return self.settings.placement

    @property
    def is_eight_bit(self) -> bool:
        return self.settings.optimizer != ADAMW

    @property
    def states_per_weight(self) -> float:
        """Return the bytes of the optimizer's states to a weight."""
        return _EIGHT_BIT_STATES_PER_WEIGHT if self.is_eight_bit else _STATES_PER_WEIGHT

    def states(self) -> str:
        """Say what the optimizer's states take, here and at the document's size."""
        both = (num_weights(sizes) for sizes in (self.settings.sizes, DOCUMENT))
        here, there = (format_bytes(round(number * self.states_per_weight)) for number in both)
        return f"{here} ({there} at the document's size)"


def placement_lines(settings: TridentSettings, *, is_on_cpu: bool) -> list[str]:
    """Return a line for each flag of placement that does something else than its name says."""
    run = _Run(settings=settings, is_on_cpu=is_on_cpu)
    return [
        *settings.placement.remarks,
        *_of_zero(run),
        *_of_file(run),
        *_of_device_map(run),
        *_of_host(run),
        *_of_four_bit(run),
    ]


def _of_zero(run: _Run) -> Iterator[str]:
    placement = run.placement
    if not placement.zero_stage:
        return
    begin = f"--zero-stage {placement.zero_stage}: one process, so there is nothing to divide"
    if not placement.offloads_states:
        yield f"{begin}, and the configuration offloads no states."
    elif run.is_eight_bit:
        yield (
            f"{begin}; states stay on the device in 8 bits, as eight-bit-optimizer and "
            "optimizer-offload exclude each other. Moving them would have saved "
            f"{run.states()}."
        )
    elif not run.is_on_cpu:
        yield f"{begin}; optimizer-offload, exact, keeps {run.states()} of states on the host."
    elif placement.offload_folder is not None:
        yield (
            f"{begin}; on a CPU the host is the device, so optimizer-offload, exact, keeps "
            f"{run.states()} of states on disk."
        )
    else:
        yield (
            f"{begin}; on a CPU the host is the device, so states stay: {run.states()}. "
            "--offload-folder DIR puts them on disk."
        )
    if placement.zero_stage == 3 or placement.offloads_weights:
        weight_bytes = num_weights(run.settings.sizes) * _BYTES_PER_WEIGHT
        yield f"weights stay on the device: {format_bytes(weight_bytes)}, which no rank can share."


def _of_file(run: _Run) -> Iterator[str]:
    if run.placement.between_ranks:
        names = ", ".join(run.placement.between_ranks)
        yield f"{run.placement.deepspeed_config}: {names}: between ranks, of which there is one."


def _of_device_map(run: _Run) -> Iterator[str]:
    name = run.placement.device_map
    if name is None:
        return
    begin = f"--device-map {name}: "
    if name == CUSTOM:
        yield f"{begin}{_on_host(run)}."
        return
    if name == BALANCED:
        begin += f"spreads over several devices, and there is one, so it is {AUTO}: "
    yield (
        f"{begin}{_reach(run)}. It is not Accelerate's dispatch, which cannot train "
        "(accelerate#3785)."
    )


def _on_host(run: _Run) -> str:
    """Say which modules compute on the host, and what that keeps off the device."""
    if run.is_on_cpu:
        return "nothing is moved, as the host is the device"
    names = run.placement.host_modules
    sizes = (run.settings.sizes, DOCUMENT)
    here, there = (format_bytes(saved_bytes(each, names, run.states_per_weight)) for each in sizes)
    return (
        f"host-modules, exact, computes {', '.join(names)} on the host, with {here} ({there} at "
        "the document's size) of weights, gradients and states; a step waits for it and for copies"
    )


def _reach(run: _Run) -> str:
    """Say where the planner may move what waits."""
    has_folder = run.placement.offload_folder is not None
    if run.is_on_cpu and not has_folder:
        return "nothing is moved, as the host is the device; --offload-folder DIR adds disk"
    places = [*([] if run.is_on_cpu else ["the host"]), *(["disk"] if has_folder else [])]
    return f"the planner may move what waits to {' and '.join(places)}"


def _of_host(run: _Run) -> Iterator[str]:
    placement = run.placement
    if placement.host_bytes is not None and run.is_on_cpu:
        yield (
            f"--cpu-mem {format_bytes(placement.host_bytes)}: the host is the device here, so "
            "--max-gpu-mem is what bounds it."
        )
    folder = placement.offload_folder
    if folder is not None and lies_in_memory(folder):
        yield f"--offload-folder {folder}: lies in memory (tmpfs), which saves nothing on the host."


def _of_four_bit(run: _Run) -> Iterator[str]:
    if not run.placement.is_qlora:
        return
    sizes = (run.settings.sizes, DOCUMENT)
    here, there = (four_bit_figures(each, run.states_per_weight) for each in sizes)
    yield (
        f"--qlora: {here.num_packed} of {here.num_weights} weights are packed into 4 bits beside "
        "adapters, all else is trained; numerics different, and the packed weights are random ones "
        f"that no pretraining made. Saves {format_bytes(here.saved_bytes)} of weights, gradients "
        f"and states ({format_bytes(there.saved_bytes)} at the document's size)."
    )
