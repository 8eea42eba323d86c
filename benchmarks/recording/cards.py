"""The devices of a recording: a CUDA card, and the processor for a try without readings."""

from __future__ import annotations

import gzip
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from memfit.devices.measuring import TorchCard
from memfit.files import write_atomically
from memfit.units import KIB

from .measure import Card, ProcessReading, Step

MOST_SNAPSHOT_BYTES = 300 * KIB
_MOST_HISTORY = 200_000
_COUNTERS = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free")
_LARGE_COUNTERS = ("inactive_split_bytes.all.peak", "requested_bytes.all.peak")


class CudaCard(Card):
    """The first CUDA card of this process."""

    device = "cuda"
    out_of_memory = (torch.OutOfMemoryError,)

    def __init__(self) -> None:
        self._card = TorchCard(torch)

    def start(self) -> None:
        """Make the context."""
        self._card.start()

    def wait(self) -> None:
        """Wait for the card."""
        torch.cuda.synchronize()

    def allocated_bytes(self) -> int:
        """Read what the allocator has handed out now."""
        return torch.cuda.memory_allocated()

    def reserved_bytes(self) -> int:
        """Read what the allocator holds now."""
        return torch.cuda.memory_reserved()

    def peaks(self) -> tuple[int, int]:
        """Read the highest allocated and reserved bytes since the last reset."""
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def reset_peaks(self) -> None:
        """Begin counting peaks anew."""
        torch.cuda.reset_peak_memory_stats()

    def process(self) -> ProcessReading:
        """Read what the process occupies: NVML by process, else by card, else ``mem_get_info``."""
        readings = self._card.occupied_in_every_way()
        name = next(iter(readings))
        return ProcessReading(
            process_bytes=readings[name],
            source=_SOURCES[name],
            every_way={f"{each}_bytes": value for each, value in readings.items()},
        )

    def further(self) -> dict[str, Any]:
        """Read counters and settings of the allocator."""
        stats = torch.cuda.memory_stats()
        found = {f"allocator_{name}": stats.get(name) for name in _COUNTERS}
        found |= {name.replace(".", "_"): stats.get(name) for name in _LARGE_COUNTERS}
        return found | {
            "cudnn_version": torch.backends.cudnn.version(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "compute_capability": ".".join(map(str, torch.cuda.get_device_capability())),
        }

    def record_history(self) -> None:
        """Begin to note every allocation, without stacks: they are many times as large."""
        torch.cuda.memory._record_memory_history(context=None, max_entries=_MOST_HISTORY)

    def save_history(self, path: Path) -> None:
        """Save what was noted, unless it is too large, and stop noting."""
        with tempfile.TemporaryDirectory() as folder:
            raw = Path(folder) / "snapshot.pickle"
            torch.cuda.memory._dump_snapshot(str(raw))
            packed = gzip.compress(raw.read_bytes(), compresslevel=9, mtime=0)
        if len(packed) <= MOST_SNAPSHOT_BYTES:
            write_atomically(path, packed)
        torch.cuda.memory._record_memory_history(enabled=None)

    def seconds(self, step: Step) -> float:
        """Time one step from an idle card to an idle card."""
        return self._card.seconds(step, 1)


_SOURCES = {
    "nvml_process": "NVML, memory of this process",
    "nvml_card": "NVML, used memory of the card minus what was used before this process began",
    "mem_get_info": (
        "torch.cuda.mem_get_info, total - free; what other processes hold is included"
    ),
}


class Processor(Card):
    """The processor, for trying a row where there is no card; nothing is read."""

    def further(self) -> dict[str, Any]:
        """Return how many threads worked."""
        return {"num_threads": torch.get_num_threads(), "pid": os.getpid()}
