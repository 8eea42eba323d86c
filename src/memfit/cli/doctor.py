"""``memfit doctor``: what works here, what does not, and what to do about it."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import MemfitError
from memfit.units import GIB, format_bytes

from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.devices.detect import Host

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 11)
_LITTLE_DISK_BYTES = GIB
# A lock lives as long as one build; few extensions take this long to compile.
_STALE_LOCK_SECONDS = 600.0
# Extras for working on memfit itself, and the one that only names the others.
_EXTRAS_NOT_SHOWN = frozenset({"all", "dev", "docs", "test"})


class Status(StrEnum):
    """Say how bad a finding is; only a problem makes the command fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding: what was looked at, what was found and what to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""


class DoctorCommand:
    """Check this machine and this installation: Python, torch, devices, extras, disk, memory.

    Ends with exit code 1 when something that memfit needs is missing or broken.
    """

    example = "memfit doctor --json"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare ``--json``."""
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Make all checks and show them."""
        from memfit.devices.detect import host

        machine = host()
        checks = tuple(all_checks(machine))
        is_ok = all(check.status is not Status.PROBLEM for check in checks)
        if args.json:
            write_json({"ok": is_ok, "host": asdict(machine), "checks": list(map(asdict, checks))})
        else:
            _show(checks, console)
        return 0 if is_ok else 1


COMMAND: Command = DoctorCommand()


def all_checks(machine: Host) -> Iterator[Check]:
    """Make every check, in the order in which they are shown."""
    yield check_python(sys.version_info[:2], machine.python_version)
    yield check_torch(machine)
    yield from check_cuda_devices(machine)
    yield from check_packages(_requirements())
    yield check_catalogue()
    yield check_memory(machine)
    yield check_disk(Path.cwd())
    yield from check_build_locks(_extension_folders())


def check_python(found: tuple[int, ...], shown: str) -> Check:
    """Check that Python is new enough."""
    return _check_version("python", found, shown, _OLDEST_PYTHON)


def check_torch(machine: Host) -> Check:
    """Check that torch is there, works and is new enough."""
    if machine.torch_version is None:
        return Check(
            name="torch",
            status=Status.PROBLEM,
            found=f"cannot be imported: {machine.torch_problem}",
            remedy="Install PyTorch for this machine: https://pytorch.org/get-started/locally/",
        )
    numbers = tuple(map(int, re.findall(r"\d+", machine.torch_version)[:2]))
    return _check_version("torch", numbers, machine.torch_version, _OLDEST_TORCH)


def _check_version(name: str, found: tuple[int, ...], shown: str, oldest: tuple[int, int]) -> Check:
    """Compare a version with the oldest that memfit runs on."""
    if found >= oldest:
        return Check(name=name, status=Status.OK, found=shown)
    needed = ".".join(map(str, oldest))
    return Check(
        name=name,
        status=Status.PROBLEM,
        found=f"{shown}; needed is {needed} or newer",
        remedy=f"Upgrade {name} to {needed} or newer.",
    )


def check_cuda_devices(machine: Host) -> Iterator[Check]:
    """List the CUDA devices with their names in the catalogue."""
    from memfit.devices.catalogue import catalogue_name

    if not machine.cuda_devices:
        yield Check(
            name="cuda",
            status=Status.NOTE,
            found="no CUDA device; predicting for one needs none, measuring uses the CPU",
        )
    for index, device in enumerate(machine.cuda_devices):
        name = catalogue_name(device)
        found = f"{device.name}, {format_bytes(device.memory_bytes)}"
        yield Check(
            name=f"cuda:{index}",
            status=Status.WARNING if name is None else Status.OK,
            found=f"{found}, not in the catalogue" if name is None else f"{found}: {name}",
            remedy="Name the nearest device with --device." if name is None else "",
        )


def check_packages(requirements: Sequence[str] | None) -> Iterator[Check]:
    """Check the packages that memfit requires, and those of each optional extra."""
    if requirements is None:
        yield Check(
            name="packages",
            status=Status.NOTE,
            found="memfit runs from a source folder, so its extras are unknown",
            remedy="Run: pip install -e .",
        )
        return
    for extra, packages in sorted(_packages_by_extra(requirements).items()):
        missing = [package for package in packages if not _is_installed(package)]
        name = f"extra {extra}" if extra else "packages"
        if not missing:
            yield Check(name=name, status=Status.OK, found=", ".join(packages))
            continue
        target = f"'memfit[{extra}]'" if extra else "memfit"
        yield Check(
            name=name,
            status=Status.NOTE if extra else Status.PROBLEM,
            found=f"missing: {', '.join(missing)}",
            remedy=f"Run: pip install {target}",
        )


def _requirements() -> Sequence[str] | None:
    """Read what the installed package requires; None when it is not installed."""
    try:
        return metadata.requires("memfit") or ()
    except metadata.PackageNotFoundError:
        return None


def _packages_by_extra(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Sort requirement lines by their extra; the packages always needed are under ``""``."""
    packages: dict[str, list[str]] = {}
    for line in requirements:
        requirement, _, marker = line.partition(";")
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        if marker.strip() and extra is None:
            continue  # needed on some systems only; pip has decided that already
        name = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
        key = extra[1] if extra else ""
        if name is None or name[0] == "memfit" or key in _EXTRAS_NOT_SHOWN:
            continue
        packages.setdefault(key, []).append(name[0])
    return packages


def _is_installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def check_catalogue() -> Check:
    """Check that every device file can be read."""
    from memfit.devices.catalogue import all_devices

    try:
        num_devices = len(all_devices())
    except MemfitError as error:
        return Check(
            name="catalogue",
            status=Status.PROBLEM,
            found=str(error),
            remedy="Put that file right or delete it; one of memfit's own comes back with "
            "pip install --force-reinstall --no-deps memfit",
        )
    return Check(name="catalogue", status=Status.OK, found=f"{num_devices} devices")


def check_memory(machine: Host) -> Check:
    """Show how much memory a process here may use."""
    if machine.memory_bytes is None:
        return Check(
            name="memory",
            status=Status.WARNING,
            found="this system does not tell",
            remedy="Give a budget with --budget when the device is cpu.",
        )
    found = f"{format_bytes(machine.memory_bytes)} for {machine.num_cpus} processors"
    return Check(name="memory", status=Status.OK, found=found)


def check_disk(folder: Path) -> Check:
    """Check that plans and runs can be saved in this folder."""
    free_bytes = shutil.disk_usage(folder).free
    is_little = free_bytes < _LITTLE_DISK_BYTES
    return Check(
        name="disk",
        status=Status.WARNING if is_little else Status.OK,
        found=f"{format_bytes(free_bytes)} free here",
        remedy="Free some space before training: checkpoints need it." if is_little else "",
    )


def check_build_locks(folders: Iterable[Path]) -> Iterator[Check]:
    """Find locks left behind by an extension build that was interrupted.

    torch waits without end for the lock of a build in progress, so a stale one hangs every
    program that uses the extension.
    Source: torch/utils/file_baton.py and cpp_extension.py, torch 2.13, read 2026-11-21.
    """
    for lock in (lock for folder in folders for lock in sorted(folder.glob("**/lock"))):
        try:
            age_seconds = time.time() - lock.stat().st_mtime
        except OSError:
            continue  # the build has just ended
        if age_seconds > _STALE_LOCK_SECONDS:
            yield Check(
                name="build lock",
                status=Status.WARNING,
                found=f"{lock} is {age_seconds / 60:.0f} minutes old",
                remedy=f"If no extension is being built now, delete {lock}.",
            )


def _extension_folders() -> tuple[Path, ...]:
    """Return the folders in which torch builds extensions, as far as they exist."""
    home = Path.home()
    caches = (
        Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache"),
        home / "Library" / "Caches",  # macOS
    )
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    folders = [Path(chosen)] if chosen else [cache / "torch_extensions" for cache in caches]
    return tuple(folder for folder in folders if folder.is_dir())


def _show(checks: Sequence[Check], console: Console) -> None:
    """Show the checks as a table, with the remedy under each finding."""
    from rich.table import Table
    from rich.text import Text

    colours = {
        Status.OK: "green",
        Status.NOTE: "cyan",
        Status.WARNING: "yellow",
        Status.PROBLEM: "red",
    }
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = "\n".join(filter(None, (check.found, check.remedy)))
        status = Text(check.status.value, style=colours[check.status])
        table.add_row(status, check.name, Text(found))
    console.print(table)
