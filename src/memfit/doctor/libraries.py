"""Libraries that LD_LIBRARY_PATH and LD_PRELOAD put before those installed with torch.

The loader takes the first file of a name; ``libcusparse.so.12`` of torch finds an older
``libnvJitLink.so.12`` that way and lacks a symbol. Only files of the same name are in the way: a
``libcudart.so.11`` never stands in for ``libcudart.so.12``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, Version, numbers
from .nccl import required_nccl

_OF_THE_TOOLKIT = ("libcudart", "libcublas", "libnvJitLink")
_STANDS_IN = re.compile(r"lib(nccl|cudart|cublas|cublasLt|cudnn|nvJitLink|cusparse)\.so")


def check_libraries(machine: Machine) -> Iterator[Finding]:
    """Check both variables."""
    if machine.torch is None or not machine.torch.cuda or machine.system != "linux":
        yield not_applicable("LD_LIBRARY_PATH", "torch is not built for CUDA on Linux")
        return
    if not any(name.startswith("nvidia-") for name in machine.packages.by_name):
        reason = "CUDA's libraries are the system's, not packages that these could stand before"
        yield not_applicable("LD_LIBRARY_PATH", reason)
        return
    yield from _check_path(machine)
    yield from _check_preload(machine)


def _wanted(machine: Machine) -> dict[str, Version]:
    """Return the file names that torch's libraries ask for, each with its version."""
    cuda = machine.torch.cuda_version if machine.torch else ()
    wanted = {f"{name}.so.{cuda[0]}": cuda[:2] for name in _OF_THE_TOOLKIT}
    nccl = required_nccl(machine)
    if nccl:
        wanted["libnccl.so.2"] = numbers(nccl[1])
    return wanted


def _check_path(machine: Machine) -> Iterator[Finding]:
    name = "LD_LIBRARY_PATH"
    folders = [Path(each) for each in machine.variables.get(name, "").split(":") if each]
    older, unknown = [], []
    for folder in folders:
        for file, version in _wanted(machine).items():
            real = (folder / file).resolve()
            if not real.is_file() or _is_own(machine, real):
                continue
            has = _version_of(real)
            if not has:
                unknown.append(f"{folder / file}")
            elif has[: len(version)] < version:
                older.append(f"{folder / file} is {'.'.join(map(str, has))}")
    if older:
        wanted = ", ".join(
            f"{file} {'.'.join(map(str, version))}" for file, version in _wanted(machine).items()
        )
        yield Finding(
            name=name,
            status=Status.WARNING,
            found=f"older libraries stand before torch's: {'; '.join(older)}",
            needed=f"{wanted} or newer, which are installed with torch",
            remedy="Take these folders out; torch finds its own libraries without the variable.",
            command=f"unset {name}",
        )
    elif unknown:
        yield Finding(
            name=name,
            status=Status.NOTE,
            found=f"libraries of unknown version stand before torch's: {', '.join(unknown)}",
        )
    else:
        yield fine(name, f"{len(folders)} folders, none with older libraries than torch's")


def _check_preload(machine: Machine) -> Iterator[Finding]:
    name = "LD_PRELOAD"
    entries = [Path(each) for each in re.split("[: ]+", machine.variables.get(name, "")) if each]
    others = [each for each in entries if _STANDS_IN.match(each.name)]
    wrong = [str(each) for each in others if not _is_own(machine, each.resolve())]
    if wrong:
        yield Finding(
            name=name,
            status=Status.WARNING,
            found=f"loaded before torch's own: {', '.join(wrong)}",
            needed="the libraries that are installed with torch",
            remedy="Take these files out of the variable.",
            command=f"unset {name}",
        )
    gone = [str(each) for each in entries if each.is_absolute() and not each.exists()]
    if gone:
        found = f"files that do not exist, of which the loader complains: {', '.join(gone)}"
        yield Finding(name=f"{name} files", status=Status.NOTE, found=found)


def _is_own(machine: Machine, file: Path) -> bool:
    """Return whether a file was installed with torch."""
    places = (path / name for path in machine.search_paths for name in ("nvidia", "torch"))
    return any(file.is_relative_to(place.resolve()) for place in places)


def _version_of(file: Path) -> Version:
    """Read the version in the full name of a library; empty where the name has the major alone."""
    version = numbers(file.name.partition(".so.")[2])
    return version if len(version) > 1 else ()
