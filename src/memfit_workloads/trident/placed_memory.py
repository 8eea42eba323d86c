"""The flags of placement as what the planner is told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memfit_workloads.planned_memory import devices

from .four_bit import four_bit_base
from .host_branches import host_branches
from .offload_folder import room_bytes
from .settings import ADAMW, TridentSettings

if TYPE_CHECKING:
    from memfit.strategies.base import Strategy
    from memfit_workloads.memory_settings import MemorySettings

_OFFLOAD = "optimizer-offload"


def placed_memory(settings: TridentSettings) -> MemorySettings:
    """Return the memory settings with what the flags of placement add to them."""
    memory, placement = settings.memory_settings, settings.placement
    folder = placement.offload_folder
    run_device, _ = devices(memory.device)
    memory = replace(
        memory,
        host_bytes=placement.host_bytes,
        disk_bytes=None if folder is None else room_bytes(folder),
    )
    has_place = run_device != "cpu" or folder is not None
    moves_states = placement.offloads_states and settings.optimizer == ADAMW and has_place
    if moves_states and memory.plan_file is None:
        memory = replace(memory, require=(*memory.require, _OFFLOAD))
    return memory


def fixed_strategies(settings: TridentSettings) -> tuple[Strategy, ...]:
    """Return what is part of the plan whatever the planner chooses.

    Raises:
        UsageError: if flags ask for two strategies that exclude each other.
    """
    fixed: list[Strategy] = []
    run_device, _ = devices(settings.memory_settings.device)
    if settings.placement.host_modules and run_device != "cpu":
        fixed.append(host_branches(settings))
    if settings.placement.is_qlora:
        fixed.append(four_bit_base(settings.sizes))
    return tuple(fixed)
