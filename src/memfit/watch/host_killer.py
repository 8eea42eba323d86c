"""Looks for signs that the host's out-of-memory killer ended a process.

The killer leaves a process no word. Its signs are counters that grow (of control groups, and of
the whole system), a line in the kernel's log, and memory that was nearly used up. They are read
when a command begins and when it has ended.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from memfit.units import KIB, format_bytes

_NEARLY_FULL_FRACTION = 0.9
_NEARLY_NONE_FRACTION = 0.05
_LOG_BYTES = 8 * KIB
"""A record of the kernel's log is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSample:
    """The memory shortly before the end."""

    process_ids: frozenset[int]
    """Of all processes that were ever seen below the command."""
    resident_bytes: int
    """Of the processes there were, together."""
    available_bytes: int | None = None
    """On the host; None where it does not say."""


class KillerSigns(Protocol):
    """Tell whether a process was ended by the host's out-of-memory killer."""

    def available_bytes(self) -> int | None:
        """Return the memory that the host still has."""

    def found(self, sample: LastSample) -> tuple[str, ...]:
        """Return the signs there are since this was made, each as a sentence."""


class HostKillerSigns:
    """Read the signs where Linux has them; ``root`` is another place in tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = tuple(_memory_groups(root))
        self._before = self._counters()
        self._log = _open_at_end(root / "dev" / "kmsg")

    def available_bytes(self) -> int | None:
        """Return the memory that the host still has."""
        return _meminfo(self._root).get("MemAvailable")

    def found(self, sample: LastSample) -> tuple[str, ...]:
        """Return the signs there are since this was made, each as a sentence."""
        return (*self._grown(), *self._logged(sample.process_ids), *self._nearly_full(sample))

    def close(self) -> None:
        """Let go of the kernel's log."""
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _grown(self) -> Iterator[str]:
        now = self._counters()
        for name, count in now.items():
            before = self._before.get(name, count)
            if count > before:
                yield f"{name} grew from {before} to {count}"

    def _counters(self) -> Mapping[str, int]:
        """Read every counter of killed processes that there is."""
        files = [self._root / "proc" / "vmstat"]
        files += [group / name for group in self._groups for name in _COUNTER_FILES]
        counts = {file: _named_number(file, "oom_kill") for file in files}
        return {
            f"oom_kill in /{file.relative_to(self._root)}": count
            for file, count in counts.items()
            if count is not None
        }

    def _logged(self, process_ids: Collection[int]) -> Iterator[str]:
        for line in _new_records(self._log):
            match = re.search(r"Killed process (\d+)", line)
            if match and int(match[1]) in process_ids:
                yield f"the kernel's log has: {line[match.start() :].strip()}"

    def _nearly_full(self, sample: LastSample) -> Iterator[str]:
        limit_bytes, name = self._limit()
        if limit_bytes and sample.resident_bytes > _NEARLY_FULL_FRACTION * limit_bytes:
            resident, limit = format_bytes(sample.resident_bytes), format_bytes(limit_bytes)
            yield f"{resident} were resident at the last look, of {limit} {name}"
        total_bytes, available_bytes = _meminfo(self._root).get("MemTotal"), sample.available_bytes
        if not total_bytes or available_bytes is None:
            return
        if available_bytes < _NEARLY_NONE_FRACTION * total_bytes:
            yield f"the host had {format_bytes(available_bytes)} left at the last look"

    def _limit(self) -> tuple[int | None, str]:
        """Return the lowest limit on this process's memory, and whose it is."""
        limits = [(_meminfo(self._root).get("MemTotal"), "on the host")]
        for group in self._groups:
            limits += [(_number(group / name), "in the control group") for name in _LIMIT_FILES]
        known = [(num_bytes, name) for num_bytes, name in limits if num_bytes is not None]
        return min(known, default=(None, ""))


_COUNTER_FILES = ("memory.events", "memory.oom_control")
"""Of control groups in version 2 and in version 1."""
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")


def _memory_groups(root: Path) -> Iterator[Path]:
    """Yield the control groups that bound this process's memory, with all above them."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounts / "memory" if controllers else mounts
        group = top / path.lstrip("/")
        yield from dict.fromkeys(
            each for each in (group, *group.parents) if each.is_relative_to(top)
        )


def _meminfo(root: Path) -> dict[str, int]:
    """Read the kernel's table of memory in bytes."""
    rows = (line.split() for line in _lines(root / "proc" / "meminfo"))
    return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows if row[2:] == ["kB"]}


def _named_number(path: Path, name: str) -> int | None:
    for line in _lines(path):
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    """Read the lines of a file that may be absent or forbidden."""
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _open_at_end(path: Path) -> int | None:
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        os.lseek(log, 0, os.SEEK_END)
    except OSError:
        return None  # not readable without special rights, on many systems
    return log


def _new_records(log: int | None) -> Iterator[str]:
    """Yield what the kernel has logged since."""
    if log is None:
        return
    while True:
        try:
            record = os.read(log, _LOG_BYTES)
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # records were overwritten before they were read; the next read goes on
        if not record:
            return
        yield from record.decode("utf-8", errors="replace").splitlines()
