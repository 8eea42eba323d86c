"""The folders in which compiled code is kept: to be written, with room, and to be run from.

Source: torch/utils/cpp_extension.py and torch/_inductor/runtime/cache_dir_utils.py of torch 2.13;
triton/knobs.py of triton 3.5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memfit.units import GIB, format_bytes

from .extensions import extension_roots
from .finding import Finding, Status, fine, not_applicable
from .machine import Machine

_LITTLE_DISK_BYTES = GIB


def check_caches(machine: Machine) -> Iterator[Finding]:
    """Check the caches of extensions, of Triton's kernels and of ``torch.compile``."""
    set_to = machine.variables.get
    temporary = Path(set_to("TMPDIR") or machine.at("/tmp"))
    triton_home = Path(set_to("TRITON_HOME") or machine.home)
    yield _check("extension cache", extension_roots(machine)[0], "TORCH_EXTENSIONS_DIR", machine)
    if machine.packages.get("triton"):
        triton = Path(set_to("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache")
        yield _check("triton cache", triton, "TRITON_CACHE_DIR", machine)
    else:
        yield not_applicable("triton cache", "triton is not installed")
    inductor = Path(set_to("TORCHINDUCTOR_CACHE_DIR") or temporary)
    yield _check("torch.compile cache", inductor, "TORCHINDUCTOR_CACHE_DIR", machine)


def _check(name: str, folder: Path, variable: str, machine: Machine) -> Finding:
    """Check one cache, in the nearest folder that exists."""
    there = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    space = machine.space_of(there)
    options = _mount_options(machine, there)
    found, needed = "", ""
    if not machine.is_writable(there):
        found, needed = f"{there} cannot be written", "a folder that this user may write"
    elif "ro" in options:
        found, needed = f"{there} is mounted read-only", "a file system that may be written"
    elif "noexec" in options:
        found, needed = f"{there} is mounted noexec", "compiled code can be loaded from there"
    elif space is not None and space.free_bytes < _LITTLE_DISK_BYTES:
        found = f"{there} has {format_bytes(space.free_bytes)} free"
        needed = f"{format_bytes(_LITTLE_DISK_BYTES)} free"
    if not found:
        return fine(name, str(folder))
    return Finding(
        name=name,
        status=Status.WARNING,
        found=found,
        needed=needed,
        remedy="Name a folder on another disk; what compiles at run time fails or starts anew.",
        command=f"export {variable}=FOLDER",
    )


def _mount_options(machine: Machine, folder: Path) -> frozenset[str]:
    """Return the options of the file system that holds a folder; empty where unknown."""
    best, options, real = -1, "", folder.resolve()
    for line in machine.text("/proc/mounts").splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        place = Path(words[1].replace("\\040", " "))
        if len(place.parts) >= best and real.is_relative_to(place):
            best, options = len(place.parts), words[3]  # a later mount hides an earlier one
    return frozenset(options.split(","))
