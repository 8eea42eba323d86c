"""Shared memory, through which loader workers hand over batches and NCCL exchanges data."""

from __future__ import annotations

from collections.abc import Iterator

from memfit.units import GIB, format_bytes

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine

_LITTLE_BYTES = GIB


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Check how much ``/dev/shm`` holds; Docker gives a container 64 MiB unless it is told."""
    name = "shared memory"
    space = machine.space_of(machine.at("/dev/shm")) if machine.system == "linux" else None
    if space is None:
        yield not_applicable(name, "this system has no /dev/shm")
    elif space.free_bytes >= _LITTLE_BYTES:
        yield fine(name, f"{format_bytes(space.free_bytes)} free in /dev/shm")
    else:
        total = format_bytes(space.total_bytes)
        yield Finding(
            name=name,
            status=Status.WARNING,
            found=f"{format_bytes(space.free_bytes)} of {total} free in /dev/shm",
            needed="1 GiB or more: batches of loader workers, and some MiB per NCCL channel; "
            "without it workers die of a bus error and NCCL cannot create its segments",
            remedy="Start the container with --shm-size=8g or --ipc=host, or enlarge the mount; "
            "until then use num_workers=0.",
            command="mount -o remount,size=8g /dev/shm",
        )
