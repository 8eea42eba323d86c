"""What memfit itself needs: Python, torch, its packages, its catalogue, memory and disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from memfit.devices.catalogue import all_devices, catalogue_name
from memfit.devices.detect import Host
from memfit.errors import MemfitError
from memfit.units import GIB, format_bytes

from .finding import Finding, Status, fine
from .machine import Machine, numbers

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 11)
_LITTLE_DISK_BYTES = GIB
# Extras for working on memfit itself, and the one that only names the others.
_EXTRAS_NOT_SHOWN = frozenset({"all", "dev", "docs", "test"})


def check_installation(machine: Machine) -> Iterator[Finding]:
    """Check what every command needs."""
    host = machine.probe.host
    yield _check_version("python", host.python_version, _OLDEST_PYTHON)
    yield check_torch(host)
    yield from check_cuda_devices(host)
    yield from check_packages(machine)
    yield check_catalogue()
    yield check_memory(host)
    yield check_disk(machine)


def check_torch(host: Host) -> Finding:
    """Check that torch is there, works and is new enough."""
    if host.torch_version is None:
        return Finding(
            name="torch",
            status=Status.PROBLEM,
            found=f"cannot be imported: {host.torch_problem}",
            needed="a torch that can be imported",
            remedy="Install PyTorch for this machine: https://pytorch.org/get-started/locally/",
            command="pip install --force-reinstall torch",
        )
    return _check_version("torch", host.torch_version, _OLDEST_TORCH)


def _check_version(name: str, version: str, oldest: tuple[int, int]) -> Finding:
    """Compare a version with the oldest that memfit runs on."""
    if numbers(version)[:2] >= oldest:
        return fine(name, version)
    needed = ".".join(map(str, oldest))
    return Finding(
        name=name,
        status=Status.PROBLEM,
        found=version,
        needed=f"{needed} or newer",
        remedy=f"Upgrade {name} to {needed} or newer.",
    )


def check_cuda_devices(host: Host) -> Iterator[Finding]:
    """List the CUDA devices with their names in the catalogue."""
    if not host.cuda_devices:
        yield Finding(
            name="cuda",
            status=Status.NOTE,
            found="no CUDA device; predicting for one needs none, measuring uses the CPU",
        )
    for index, device in enumerate(host.cuda_devices):
        name = catalogue_name(device)
        found = f"{device.name}, {format_bytes(device.memory_bytes)}"
        if name is not None:
            yield fine(f"cuda:{index}", f"{found}: {name}")
            continue
        yield Finding(
            name=f"cuda:{index}",
            status=Status.WARNING,
            found=f"{found}, not in the catalogue",
            needed="a device of the catalogue",
            remedy="Write a file with its figures, and give it as --device.",
            command="memfit devices --new my-card.toml",
        )


def check_packages(machine: Machine) -> Iterator[Finding]:
    """Check the packages that memfit requires, and those of each optional extra."""
    installed = machine.packages.get("memfit")
    if installed is None:
        yield Finding(
            name="packages",
            status=Status.NOTE,
            found="memfit runs from a source folder, so its extras are unknown",
            remedy="Install it.",
            command="pip install -e .",
        )
        return
    for extra, packages in sorted(_packages_by_extra(installed.requires).items()):
        missing = [package for package in packages if machine.packages.get(package) is None]
        name = f"extra {extra}" if extra else "packages"
        if not missing:
            yield fine(name, ", ".join(packages))
            continue
        target = f"'memfit[{extra}]'" if extra else "memfit"
        yield Finding(
            name=name,
            status=Status.NOTE if extra else Status.PROBLEM,
            found=f"missing: {', '.join(missing)}",
            needed=", ".join(packages),
            remedy="Install what is missing." if not extra else "Install the extra to use it.",
            command=f"pip install {target}",
        )


def _packages_by_extra(requirements: Iterable[str]) -> dict[str, Sequence[str]]:
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
    return {**packages}


def check_catalogue() -> Finding:
    """Check that every device file can be read."""
    try:
        return fine("catalogue", f"{len(all_devices())} devices")
    except MemfitError as error:
        return Finding(
            name="catalogue",
            status=Status.PROBLEM,
            found=str(error),
            needed="device files that can be read",
            remedy="Put that file right or delete it; the line below brings back memfit's own.",
            command="pip install --force-reinstall --no-deps memfit",
        )


def check_memory(host: Host) -> Finding:
    """Show how much memory a process here may use."""
    if host.memory_bytes is None:
        return Finding(
            name="memory",
            status=Status.WARNING,
            found="this system does not tell",
            needed="the memory that a process here may use",
            remedy="Give a budget with --budget when the device is cpu.",
        )
    return fine("memory", f"{format_bytes(host.memory_bytes)} for {host.num_cpus} processors")


def check_disk(machine: Machine) -> Finding:
    """Check that plans and runs can be saved in this folder."""
    space = machine.space_of(Path.cwd())
    if space is None:
        return fine("disk", "this system does not tell what is free here")
    if space.free_bytes >= _LITTLE_DISK_BYTES:
        return fine("disk", f"{format_bytes(space.free_bytes)} free here")
    return Finding(
        name="disk",
        status=Status.WARNING,
        found=f"{format_bytes(space.free_bytes)} free here",
        needed=f"{format_bytes(_LITTLE_DISK_BYTES)} free",
        remedy="Free some space before training: checkpoints need it.",
        command="du -sh * | sort -h",
    )
