"""Counts the bytes that strategies keep outside the device's memory, and what they move."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Spill:
    """Count what lies on the host and on disk instead of on the device.

    Peaks and moved bytes are those since the last ``begin_step``.
    """

    host_bytes: int = 0
    disk_bytes: int = 0
    peak_host_bytes: int = 0
    peak_disk_bytes: int = 0
    out_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that left the device, by the module that they belong to, first one first."""
    in_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that came back, by the module that they belong to."""

    def begin_step(self) -> None:
        """Forget what earlier steps moved; what lies outside stays there."""
        self.peak_host_bytes = self.host_bytes
        self.peak_disk_bytes = self.disk_bytes
        self.out_bytes.clear()
        self.in_bytes.clear()

    def add_host(self, num_bytes: int) -> None:
        """Count bytes that were taken on the host, or given back where negative."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def add_disk(self, num_bytes: int) -> None:
        """Count bytes that were taken on disk, or given back where negative."""
        self.disk_bytes += num_bytes
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.disk_bytes)

    def note_out(self, module: str, num_bytes: int) -> None:
        """Count bytes of a module that left the device."""
        self.out_bytes[module] = self.out_bytes.get(module, 0) + num_bytes

    def note_in(self, module: str, num_bytes: int) -> None:
        """Count bytes of a module that came back."""
        self.in_bytes[module] = self.in_bytes.get(module, 0) + num_bytes
