"""Packages compiled for one torch that do not say so in their requirements.

Sources: torchao/__init__.py of 0.13 to 0.18 and "torchao release compatibility table" of
pytorch/ao, read 2026-11-23; ``_check_cuda_version`` in torchvision/extension.py; the names of
flash-attn's wheels.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, TorchBuild, numbers, read_text
from .packages import Package

# Up to 0.16 a torchao loads its kernels under exactly the torch it was built with.
_TORCH_OF_TORCHAO = {
    (0, 13, 0): "2.8.0",
    (0, 14, 0): "2.8.0",
    (0, 14, 1): "2.9.0",
    (0, 15, 0): "2.9.1",
    (0, 16, 0): "2.10.0",
}
_STABLE_TORCHAO = (0, 17)
_OLDEST_TORCH_OF_STABLE_TORCHAO = "2.11.0"
_MODULES_OF_FLASH = {"flash_attn_2_cuda": "flash-attn", "flash_attn_3._C": "flash-attn-3"}


def check_companions(machine: Machine) -> Iterator[Finding]:
    """Check torchao, torchvision, torchaudio and flash-attn against torch."""
    if machine.torch is None:
        return
    yield _check_torchao(machine, machine.torch)
    for name in ("torchvision", "torchaudio"):
        yield _check_same_build(machine, machine.torch, name)
    yield _check_flash(machine, machine.torch)


def _check_torchao(machine: Machine, torch: TorchBuild) -> Finding:
    package = machine.packages.get("torchao")
    if package is None:
        return not_applicable("torchao", "torchao is not installed")
    major, minor, patch = (*numbers(package.version), 0, 0, 0)[:3]
    version = (major, minor, patch)
    is_stable = version[:2] >= _STABLE_TORCHAO
    needed = _OLDEST_TORCH_OF_STABLE_TORCHAO if is_stable else _TORCH_OF_TORCHAO.get(version)
    if needed is None:
        reason = f"which torch {package.title} was built with is not known here"
        return not_applicable("torchao", reason)
    has = numbers(torch.version)
    if has >= numbers(needed) if is_stable else has == numbers(needed):
        return fine("torchao", f"{package.version}, built for this torch")
    return Finding(
        name="torchao",
        status=Status.WARNING,
        found=f"{package.version} with torch {torch.version}: its compiled kernels are left out",
        needed=f"torch {needed}{' or newer' if is_stable else ', exactly'}",
        remedy="Install the torchao for this torch; from 0.17 on one serves torch 2.11 and newer.",
        command="pip install --upgrade torchao",
    )


def _check_same_build(machine: Machine, torch: TorchBuild, name: str) -> Finding:
    """Compare the CUDA in a local version, such as ``+cu128``, with torch's."""
    package = machine.packages.get(name)
    if package is None:
        return not_applicable(name, f"{name} is not installed")
    text = read_text(package.folder / name / "version.py")
    told = re.search(r"^__version__\s*=\s*['\"][^'\"+]*\+(cpu|cu\d+)", text, re.MULTILINE)
    if told is None:
        return fine(name, package.version)
    ours = f"cu{''.join(map(str, torch.cuda_version[:2]))}" if torch.cuda else "cpu"
    is_same_major = told[1][:4] == ours[:4]
    if told[1] == ours or torch.hip or (is_same_major and "cpu" not in {told[1], ours}):
        return fine(name, f"{package.version}+{told[1]}")
    return Finding(
        name=name,
        status=Status.WARNING if "cpu" in {told[1], ours} else Status.PROBLEM,
        found=f"{package.version} is built for {told[1]}, torch {torch.version} for {ours}",
        needed=f"both from one index: {name} for {ours}",
        remedy=f"Install {name} from the index that torch is from.",
        command=f"pip install --force-reinstall --no-deps {name}=={package.version} "
        f"--index-url https://download.pytorch.org/whl/{ours}",
    )


def _check_flash(machine: Machine, torch: TorchBuild) -> Finding:
    """Check flash-attn by what loading it said, and by the name of its wheel."""
    name = "flash-attn"
    package = machine.packages.get(name) or machine.packages.get("flash-attn-3")
    if package is None:
        return not_applicable(name, "flash-attn is not installed")
    said = {
        _MODULES_OF_FLASH.get(module, module): text
        for module, text in machine.probe.import_problems.items()
    }
    wanted = _torch_in_wheel_name(package)
    has = ".".join(map(str, numbers(torch.version)[:2]))
    if package.name in said and "libcuda.so" not in said[package.name]:
        found = f"{package.version} does not load: {said[package.name][:300]}"
    elif wanted not in {None, has}:
        found = f"{package.version} is built for torch {wanted}"
    else:
        return fine(name, package.version)
    return Finding(
        name=name,
        status=Status.PROBLEM,
        found=found,
        needed=f"a build for torch {has} with CUDA {torch.cuda} and this Python",
        remedy="Install a wheel whose name has this torch, or build it here.",
        command=f"pip install --force-reinstall --no-deps --no-build-isolation {package.name}",
    )


def _torch_in_wheel_name(package: Package) -> str | None:
    """Read the torch in the name of a wheel that was installed from an address or a file."""
    text = read_text(package.metadata_folder / "direct_url.json")
    try:
        address = str(json.loads(text).get("url", "")) if text else ""
    except (ValueError, AttributeError):
        return None
    found = re.search(r"torch(\d+\.\d+)", address.rpartition("/")[2])
    return found[1] if found else None
