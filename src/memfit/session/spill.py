"""Counts the bytes that strategies keep outside the device's memory, and what they move."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memfit.errors import DataError
from memfit.units import format_bytes


def no_room(what: str, num_bytes: int, written_bytes: int, error: OSError) -> DataError:
    """Return what to tell of bytes that could not be written to the folder for temporary files."""
    try:
        folder = tempfile.gettempdir()
    except OSError:
        folder = "the folder for temporary files"
    return DataError(
        folder,
        f"{format_bytes(num_bytes)} of {what} cannot be written there after "
        f"{format_bytes(written_bytes)} ({error.strerror or error}). Needed is a disk with room "
        f"for the {what} of one step: set TMPDIR to a folder on one.",
    )


def nameless_file(owner: object) -> IO[bytes]:
    """Make a file that is gone when its owner is, or the process ends in whatever way."""
    # Not closed by a with statement: it lives as long as its owner.
    file: Any = tempfile.TemporaryFile(buffering=0, prefix="memfit-")  # noqa: SIM115
    weakref.finalize(owner, file.close)
    return file  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a part of a step has moved, and how much more than at its end lay outside meanwhile."""

    more_host_bytes: int
    more_disk_bytes: int
    out_bytes: Mapping[str, int]
    in_bytes: Mapping[str, int]
    link_bytes: int
    file_bytes: int


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
    is_beside_compute: bool = False
    """Whether these go over the link while blocks compute, and not to disk."""
    link_bytes: int = 0
    """Bytes that were copied to the host or back while nothing was computed."""
    file_bytes: int = 0
    """Bytes that were written to disk or read from it; nothing is computed meanwhile."""
    _elsewhere: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    def begin_step(self) -> None:
        """Forget what earlier steps moved; what lies outside stays there."""
        self.peak_host_bytes = self.host_bytes
        self.peak_disk_bytes = self.disk_bytes
        self.out_bytes.clear()
        self.in_bytes.clear()
        self.link_bytes = self.file_bytes = 0

    def add_host(self, num_bytes: int) -> None:
        """Count bytes that were taken on the host, or given back where negative."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def add_disk(self, num_bytes: int) -> None:
        """Count bytes that were taken on disk, or given back where negative."""
        self.disk_bytes += num_bytes
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.disk_bytes)

    def hold(self, tensor: torch.Tensor, num_bytes: int, *, is_on_disk: bool) -> None:
        """Count a tensor outside the device for as long as it lives."""
        add = self.add_disk if is_on_disk else self.add_host
        add(num_bytes)
        self._elsewhere[tensor] = num_bytes
        weakref.finalize(tensor, add, -num_bytes).atexit = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies outside the device's memory."""
        return tensor in self._elsewhere

    def mark(self, tensor: torch.Tensor, *, is_elsewhere: bool) -> None:
        """Say whether a tensor that lives on lies outside; its bytes are counted with ``hold``."""
        if is_elsewhere:
            self._elsewhere[tensor] = tensor.nbytes
        else:
            self._elsewhere.pop(tensor, None)

    @property
    def has_moved(self) -> bool:
        """Return whether bytes left the device or came back since the last ``begin_step``."""
        return bool(self.out_bytes or self.in_bytes or self.link_bytes or self.file_bytes)

    @property
    def moved(self) -> Moved:
        """Return what was moved since the last ``begin_step``."""
        return Moved(
            more_host_bytes=self.peak_host_bytes - self.host_bytes,
            more_disk_bytes=self.peak_disk_bytes - self.disk_bytes,
            out_bytes=dict(self.out_bytes),
            in_bytes=dict(self.in_bytes),
            link_bytes=self.link_bytes,
            file_bytes=self.file_bytes,
        )

    def move_again(self, moved: Moved) -> None:
        """Count what was moved before once more, in a step that has moved nothing yet."""
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes + moved.more_host_bytes)
        self.peak_disk_bytes = max(self.peak_disk_bytes, self.disk_bytes + moved.more_disk_bytes)
        self.out_bytes.update(moved.out_bytes)
        self.in_bytes.update(moved.in_bytes)
        self.link_bytes += moved.link_bytes
        self.file_bytes += moved.file_bytes

    def note_waited(self, num_bytes: int, *, is_on_disk: bool) -> None:
        """Count bytes that moved while nothing was computed."""
        if is_on_disk:
            self.file_bytes += num_bytes
        else:
            self.link_bytes += num_bytes

    def note_out(self, module: str, num_bytes: int, *, is_on_disk: bool) -> None:
        """Count bytes of a module that left the device."""
        self.is_beside_compute = not is_on_disk
        self.out_bytes[module] = self.out_bytes.get(module, 0) + num_bytes

    def note_in(self, module: str, num_bytes: int) -> None:
        """Count bytes of a module that came back."""
        self.in_bytes[module] = self.in_bytes.get(module, 0) + num_bytes
