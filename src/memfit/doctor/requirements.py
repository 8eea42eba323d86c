"""What packages of a training declare that they need, against what is installed.

Only what a package always needs is compared; its extras are asked for by nobody here. Added are the
minimums that transformers itself compares when it uses an optional package.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from .finding import Finding, Status, fine
from .machine import Machine, read_text
from .packages import Package, canonical

_OF_A_TRAINING = (
    "torch", "torchvision", "torchaudio", "torchao", "torchmetrics", "triton", "xformers",
    "flash-attn", "bitsandbytes", "deepspeed", "accelerate", "transformers", "tokenizers",
    "safetensors", "huggingface-hub", "peft", "trl", "datasets", "lightning", "pytorch-lightning",
    "lightning-utilities", "liger-kernel", "unsloth", "axolotl", "llamafactory", "vllm",
)  # fmt: skip
_BUILT_AGAINST = frozenset({"torch", "triton"})
_MINIMUMS_FILE = "transformers/utils/import_utils.py"
_OPTIONAL_OF_TRANSFORMERS = {
    "ACCELERATE_MIN_VERSION": "accelerate",
    "BITSANDBYTES_MIN_VERSION": "bitsandbytes",
    "TORCHAO_MIN_VERSION": "torchao",
}


def check_requirements(machine: Machine) -> Iterator[Finding]:
    """Name each package once whose version others exclude, with the line that mends it."""
    asked: dict[str, list[tuple[Package, Requirement]]] = {}
    askers = list(filter(None, map(machine.packages.get, _OF_A_TRAINING)))
    for package in askers:
        for requirement in [*_unmet(machine, package), *_below_minimum(machine, package)]:
            asked.setdefault(canonical(requirement.name), []).append((package, requirement))
    yield from map(_unreadable, machine.packages.unreadable)
    for name, by_whom in asked.items():
        yield _finding(machine, name, by_whom)
    if not asked:
        count = len(askers)
        yield fine("requirements", f"{count} packages of a training have what they declare")


def _unmet(machine: Machine, package: Package) -> Iterator[Requirement]:
    """Yield what a package always needs on this system and has not got."""
    for line in package.requires:
        try:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
        except (InvalidRequirement, ValueError):
            continue  # pip cannot read it either
        if canonical(requirement.name).startswith("nvidia-nccl-"):
            continue  # the check of NCCL looks at it
        found = machine.packages.get(requirement.name)
        if found is None or not _is_met(requirement, found.version):
            yield requirement


def _below_minimum(machine: Machine, package: Package) -> Iterator[Requirement]:
    """Yield the optional packages that transformers would refuse to use."""
    if package.name != "transformers":
        return
    text = read_text(package.folder / _MINIMUMS_FILE)
    for key, name in _OPTIONAL_OF_TRANSFORMERS.items():
        least = re.search(rf"^{key}\s*=\s*\"([\d.]+)\"", text, re.MULTILINE)
        found = machine.packages.get(name)
        if least and found:
            requirement = Requirement(f"{name}>={least[1]}")
            if not _is_met(requirement, found.version):
                yield requirement


def _is_met(requirement: Requirement, version: str) -> bool:
    """Compare as pip does; a build of one's own, such as 2.9.0a0+git, counts as its release."""
    try:
        found = Version(version)
    except InvalidVersion:
        return True  # it cannot be compared
    accepts = requirement.specifier.contains
    if accepts(found, prereleases=True):
        return True
    return found.is_prerelease and accepts(found.base_version, prereleases=True)


def _finding(machine: Machine, name: str, by_whom: list[tuple[Package, Requirement]]) -> Finding:
    package = machine.packages.get(name)
    ranges = sorted({str(requirement.specifier) for _, requirement in by_whom} - {""})
    needed = "; ".join(
        f"{asker.title} needs {requirement.name}{_ordered(requirement)}"
        for asker, requirement in by_whom
    )
    both = ",".join(dict.fromkeys(_ordered(requirement) for _, requirement in by_whom))
    is_built = name in _BUILT_AGAINST
    own = ", ".join(dict.fromkeys(asker.name for asker, _ in by_whom))
    return Finding(
        name=name,
        status=Status.PROBLEM if _fails(package, name) else Status.WARNING,
        found=f"{package.title} is installed" if package else f"{name} is not installed",
        needed=needed,
        remedy=f"Install the {own} that goes with {package.title}, or the line below."
        if is_built and package
        else "Install a version that all of them accept."
        if len(ranges) > 1
        else "Install a version in that range.",
        command=f"pip install '{name}{both.strip(',')}'",
    )


def _fails(package: Package | None, name: str) -> bool:
    """Return whether a package that is missing or of another version is refused or breaks.

    CUDA's libraries may be the system's, or of another patch, and work.
    """
    return not name.startswith("nvidia-") and (package is None or name in _OF_A_TRAINING)


def _ordered(requirement: Requirement) -> str:
    """Write a range; packaging keeps no order."""
    return ",".join(sorted(map(str, requirement.specifier)))


def _unreadable(folder: Path) -> Finding:
    """Name metadata that cannot be read; of other packages than a training's it is a note."""
    name = canonical(folder.name.rpartition(".")[0].partition("-")[0])
    return Finding(
        name=f"metadata of {name}",
        status=Status.WARNING if name in _OF_A_TRAINING else Status.NOTE,
        found=f"{folder} tells no name or version",
        needed="readable metadata; an installation has been cut off",
        remedy="Delete this folder and install the package again.",
        command=f"rm -r {folder} && pip install --force-reinstall --no-deps {name}",
    )
