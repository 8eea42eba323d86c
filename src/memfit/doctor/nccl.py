"""The NCCL that torch was linked with, against the one that is installed and loaded.

An older NCCL lacks functions that torch calls (``undefined symbol: ncclCommRegister``); the
packages for CUDA 12 and 13 own the same file, so that the one installed last wins.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, numbers
from .packages import Package

_NAME = "nvidia-nccl-cu"


def check_nccl(machine: Machine) -> Iterator[Finding]:
    """Check the package of NCCL, and the library that torch has loaded."""
    if machine.torch is None or not machine.torch.cuda:
        yield not_applicable("nccl", "torch is not built for CUDA")
        return
    required = required_nccl(machine)
    installed = [
        package for name, package in machine.packages.by_name.items() if name.startswith(_NAME)
    ]
    if required is None:
        yield _of_its_own(installed)
        return
    name, version = required
    package = machine.packages.get(name)
    loaded = machine.probe.nccl_version
    others = [each.name for each in installed if each.name != name]
    right = f"pip install {name}=={version}"
    if others:
        yield _wrong(
            f"{', '.join(each.title for each in installed)}: all own nvidia/nccl/lib/libnccl.so.2",
            f"{name} {version} alone",
            f"pip uninstall -y {' '.join(others)} && pip install --force-reinstall --no-deps "
            f"{name}=={version}",
        )
    elif package is None:
        yield _wrong(f"{name} is not installed", f"{name} {version}, as torch declares", right)
    elif numbers(package.version) < numbers(version):
        yield _wrong(f"{package.title}", f"{version} or newer, as torch declares", right)
    elif loaded and loaded[:3] != numbers(package.version)[:3]:
        shown = ".".join(map(str, loaded))
        yield Finding(
            name="nccl",
            status=Status.WARNING,
            found=f"torch has loaded NCCL {shown}, and {package.title} is installed",
            needed="the NCCL that is installed with torch",
            remedy="Take the folder of the other libnccl out of LD_LIBRARY_PATH and LD_PRELOAD.",
            command="NCCL_DEBUG=VERSION python -c 'import torch; print(torch.cuda.nccl.version())'",
        )
    elif numbers(package.version) > numbers(version):
        found = f"{package.title}, newer than torch's {version}; that works as a rule"
        yield Finding(name="nccl", status=Status.NOTE, found=found)
    else:
        yield fine("nccl", package.title)


def required_nccl(machine: Machine) -> tuple[str, str] | None:
    """Return the package and version that torch declares; None where it brings its own."""
    torch = machine.packages.get("torch")
    for line in torch.requires if torch else ():
        try:
            requirement = Requirement(line)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        except (InvalidRequirement, ValueError):
            continue
        exact = [each.version for each in requirement.specifier if each.operator == "=="]
        if requirement.name.startswith(_NAME) and applies and exact:
            return requirement.name, exact[0]
    return None


def _of_its_own(installed: list[Package]) -> Finding:
    if not installed:
        return not_applicable("nccl", "torch brings its own, or takes the system's")
    names = ", ".join(each.title for each in installed)
    return Finding(
        name="nccl",
        status=Status.NOTE,
        found=f"{names}, though this torch declares none: it brings its own or takes the system's",
    )


def _wrong(found: str, needed: str, command: str) -> Finding:
    return Finding(
        name="nccl",
        status=Status.PROBLEM,
        found=found,
        needed=needed,
        remedy="Install the NCCL that torch declares, and no other.",
        command=command,
    )
