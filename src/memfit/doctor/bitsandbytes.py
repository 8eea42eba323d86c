"""bitsandbytes: whether it brings a build for the CUDA that torch has.

Source: bitsandbytes/cextension.py of 0.45 and 0.50. Older versions want exactly torch's CUDA; newer
ones take the nearest build of the same major version. Which rule holds is read from that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, TorchBuild, Version, read_text
from .packages import Package

_OVERRIDE = "BNB_CUDA_VERSION"


def check_bitsandbytes(machine: Machine) -> Iterator[Finding]:
    """Check the build that bitsandbytes would load."""
    package, torch = machine.packages.get("bitsandbytes"), machine.torch
    if package is None or torch is None:
        yield not_applicable("bitsandbytes", "bitsandbytes is not installed")
        return
    if torch.hip:
        yield not_applicable("bitsandbytes", "torch is built for ROCm, whose builds are not known")
        return
    folder = package.folder / "bitsandbytes"
    if not folder.is_dir():
        yield not_applicable("bitsandbytes", f"its files are not in {package.folder}")
        return
    yield _check(machine, package, torch, folder)


def _check(machine: Machine, package: Package, torch: TorchBuild, folder: Path) -> Finding:
    takes_near = "_find_cuda_libs" in read_text(folder / "cextension.py")
    # The CUDA versions it has builds for: ``cuda128`` is 12.8.
    names = (path.name.partition("cuda")[2] for path in folder.glob("libbitsandbytes_cuda*"))
    codes = (name.partition(".")[0].partition("_")[0] for name in names)
    builds: set[Version] = {
        (int(code[:2]), int(code[2:])) for code in codes if code.isdigit() and len(code) > 2
    }
    override = machine.variables.get(_OVERRIDE)
    if torch.cuda and override is not None and (override or takes_near):
        return _check_override(machine, torch, folder, override)
    if not torch.cuda:
        if list(folder.glob("libbitsandbytes_cpu.*")):
            return fine("bitsandbytes", f"{package.version} with its build for the CPU")
        found, needed = "no libbitsandbytes_cpu", "its build for the CPU: torch has no CUDA"
    else:
        wanted = torch.cuda_version[:2]
        taken = _taken(wanted, builds) if takes_near else (wanted if wanted in builds else None)
        if taken == wanted:
            return fine("bitsandbytes", f"{package.version} with its build for CUDA {torch.cuda}")
        if taken:
            return Finding(
                name="bitsandbytes",
                status=Status.NOTE,
                found=f"{package.version} takes its build for CUDA {_shown(taken)}, "
                f"the nearest to torch's {torch.cuda}",
            )
        has = ", ".join(map(_shown, sorted(builds)))
        found = f"builds for CUDA {has}" if has else "no build for CUDA, only for the CPU"
        needed = f"a build for CUDA {torch.cuda}, torch's"
    return Finding(
        name="bitsandbytes",
        status=_status(machine, torch),
        found=f"{package.version} in {folder} has {found}",
        needed=needed,
        remedy="Install the newest bitsandbytes, or a torch for a CUDA that it has a build for.",
        command="pip install --upgrade --force-reinstall --no-deps bitsandbytes",
    )


def _status(machine: Machine, torch: TorchBuild) -> Status:
    """Return a problem, but where torch's CUDA is not used for want of a card."""
    return Status.PROBLEM if machine.driver_version or not torch.cuda else Status.NOTE


def _check_override(machine: Machine, torch: TorchBuild, folder: Path, override: str) -> Finding:
    """Check the build that the variable names; it is loaded whatever torch has."""
    name = f"libbitsandbytes_cuda{override}.so"
    told = f"{_OVERRIDE}={override}"
    is_there = override.isdigit() and any(folder.glob(f"libbitsandbytes_cuda{override}*.so"))
    if is_there and override == "".join(map(str, torch.cuda_version[:2])):
        return fine("bitsandbytes", f"{told}, which is torch's CUDA")
    if not override.isdigit():
        found = f"{told!r}, which is no number"
    elif is_there:
        found = f"{told} loads {name} whatever torch has"
    else:
        found = f"{told}, and there is no {name} in {folder}"
    same_major = is_there and override[:2] == str(torch.cuda_version[0])
    return Finding(
        name="bitsandbytes",
        status=Status.WARNING if same_major else _status(machine, torch),
        found=found,
        needed=f"the build for torch's CUDA {torch.cuda}, which is found without the variable",
        remedy=f"Take {_OVERRIDE} out of the environment.",
        command=f"unset {_OVERRIDE}",
    )


def _taken(wanted: Version, builds: set[Version]) -> Version | None:
    """Return the build a newer bitsandbytes takes: the next lower, else the next higher."""
    same = sorted(build for build in builds if build[0] == wanted[0])
    lower = [build for build in same if build <= wanted]
    return lower[-1] if lower else (same[0] if same else None)


def _shown(version: Version) -> str:
    return ".".join(map(str, version))
