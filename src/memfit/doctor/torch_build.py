"""torch itself: built for the card and driver of this machine, whole, and there once.

Source of the drivers: CUDA Toolkit 13.0 release notes, table "CUDA Toolkit and Minimum Required
Driver Version for CUDA Minor Version Compatibility", Linux; and "Minor Version Compatibility" of
NVIDIA's CUDA Compatibility guide, read 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, TorchBuild, numbers, torch_in

_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def check_torch_build(machine: Machine) -> Iterator[Finding]:
    """Check the build of torch, its driver and its copies."""
    torch = machine.torch
    if torch is None:
        yield not_applicable("torch build", "torch is not installed")
        return
    yield _check_kind(machine, torch)
    yield _check_driver(machine, torch)
    yield from _check_copies(machine, torch)


def _check_kind(machine: Machine, torch: TorchBuild) -> Finding:
    """Check that a machine with a card has a torch that can use it."""
    kind = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU"
    driver = machine.driver_version
    if torch.cuda or torch.hip or driver is None:
        return fine("torch build", f"{torch.version}, for {kind}")
    return Finding(
        name="torch build",
        status=Status.PROBLEM,
        found=f"{torch.version}, for the CPU, beside an NVIDIA driver {driver}",
        needed="a build for CUDA, or the card is not used",
        remedy="Install the build for a CUDA that this driver runs, and torchvision with it; "
        "https://pytorch.org/get-started/locally/ names the index.",
        command="pip install --force-reinstall torch --index-url "
        "https://download.pytorch.org/whl/cuNNN",
    )


def _check_driver(machine: Machine, torch: TorchBuild) -> Finding:
    """Check that the driver runs what torch was built for."""
    driver = machine.driver_version
    if not torch.cuda or driver is None or machine.system != "linux":
        reason = "no NVIDIA card can be reached here" if torch.cuda else "torch is not for CUDA"
        return not_applicable("driver", reason)
    oldest = oldest_driver(torch)
    if oldest is None or _is_at(driver, oldest):
        return fine("driver", f"{driver}, for torch's CUDA {torch.cuda}")
    compatible = _compatibility_library(machine, oldest)
    if compatible:
        return Finding(
            name="driver",
            status=Status.NOTE,
            found=f"{driver}, with the compatibility library {compatible} before it",
        )
    return Finding(
        name="driver",
        status=Status.PROBLEM,
        found=f"{driver}, older than the CUDA {torch.cuda} that torch was built for",
        needed=f"{oldest} or newer for CUDA {torch.cuda_version[0]}",
        remedy="Update the driver, or install a torch for an older CUDA.",
        command="nvidia-smi --query-gpu=driver_version --format=csv",
    )


def oldest_driver(torch: TorchBuild) -> str | None:
    """Return the oldest driver that runs a torch for CUDA; None where that is not known."""
    return _OLDEST_DRIVER.get(torch.cuda_version[0]) if torch.cuda_version else None


def _is_at(driver: str, oldest: str) -> bool:
    return numbers(driver) >= numbers(oldest)


def _compatibility_library(machine: Machine, oldest: str) -> Path | None:
    """Find a newer libcuda on LD_LIBRARY_PATH, as cuda-compat installs it."""
    for folder in filter(None, machine.variables.get("LD_LIBRARY_PATH", "").split(":")):
        for library in Path(folder).glob("libcuda.so.*.*"):
            if _is_at(library.name.removeprefix("libcuda.so."), oldest):
                return library
    return None


def _check_copies(machine: Machine, torch: TorchBuild) -> Iterator[Finding]:
    """Find a torch that is half of one version, and copies that are not the one imported."""
    package = machine.packages.get("torch")
    said = numbers(package.version) if package else ()
    if package and package.folder == torch.folder.parent and said != numbers(torch.version):
        yield Finding(
            name="torch files",
            status=Status.PROBLEM,
            found=f"files of {torch.version} under metadata of {package.version} in {torch.folder}",
            needed="files and metadata of one version; an installation has been cut off",
            remedy="Delete what is left of torch and install it again.",
            command=f"pip uninstall -y torch && rm -rf {torch.folder} && pip install torch",
        )
    builds = [build for path in dict.fromkeys(machine.search_paths) if (build := torch_in(path))]
    places = {build.folder.resolve(): build for build in builds}
    left = [each for each in machine.packages.shadowed if each.name == "torch"]
    if len(places) > 1:
        shown = ", then ".join(f"{each.version} in {each.folder}" for each in builds)
        yield Finding(
            name="torch copies",
            status=Status.WARNING,
            found=f"more than one torch: {shown}; the first is imported",
            needed="one torch, or packages built for one load the other",
            remedy="Uninstall the others, or leave user packages out with PYTHONNOUSERSITE=1.",
            command="python -m pip uninstall torch",
        )
    elif left:
        shown = ", ".join(f"{each.version} in {each.metadata_folder}" for each in left)
        yield Finding(
            name="torch copies",
            status=Status.WARNING,
            found=f"metadata of a further torch: {shown}",
            needed="metadata of one torch, or pip and packages see the wrong version",
            remedy="Delete the metadata of the version that is not installed.",
            command=f"rm -r {left[0].metadata_folder}",
        )
