"""What compiles extensions here: a C++ compiler, ninja, Python's headers, and nvcc for CUDA.

Who compiles decides how bad a gap is: DeepSpeed's operators are built when first used and fail
without; torch.compile, Triton and torchao's optimizers compile too; without these it is a note.
Source: torch/utils/cpp_extension.py of torch 2.13; CMakeLists.txt of PyTorch for GCC 9.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from .deepspeed import accepts_toolkit, builds_at_first_use
from .finding import Finding, Status, fine, not_applicable
from .machine import Machine, Version, numbers, read_text

_COMPILE_AT_RUN_TIME = ("torchao", "triton")
# The first compiler that knows the option -std=c++NN as it is written, or that PyTorch asks for.
_OLDEST_GCC = {17: (9, 3), 20: (10,)}
_OLDEST_CLANG = {17: (9,), 20: (10,)}
_INSTALL_COMPILER = "apt-get install g++"


def check_compilers(machine: Machine) -> Iterator[Finding]:
    """Check all that building an extension takes."""
    if machine.torch is None:
        yield not_applicable("c++ compiler", "torch is not installed")
        return
    yield _check_compiler(machine)
    yield _check_ninja(machine)
    yield _check_headers(machine)
    yield _check_nvcc(machine)


def _status(machine: Machine, compiles: tuple[str, ...] = ()) -> Status:
    """Return how bad it is when something cannot be compiled here."""
    if builds_at_first_use(machine):
        return Status.PROBLEM
    return Status.WARNING if any(map(machine.packages.get, compiles)) else Status.NOTE


def _who(machine: Machine, compiles: tuple[str, ...] = ()) -> str:
    """Name the packages that compile."""
    names = [name for name in compiles if machine.packages.get(name)]
    deepspeed = ["DeepSpeed's operators"] if builds_at_first_use(machine) else []
    return ", ".join([*deepspeed, *names]) or "torch.compile and extensions"


def _check_compiler(machine: Machine) -> Finding:
    """Check that there is a C++ compiler, neither too old for torch nor too new for nvcc."""
    name, torch = "c++ compiler", machine.torch
    words = (machine.variables.get("CXX") or "").split()
    path = next(filter(None, map(machine.which, [*words[:1], "c++", "g++", "clang++"])), None)
    status = _status(machine, _COMPILE_AT_RUN_TIME)
    if path is None:
        return Finding(
            name=name,
            status=status,
            found="no c++, g++ or clang++ on the path, and none in CXX",
            needed=f"a C++ compiler, for {_who(machine, _COMPILE_AT_RUN_TIME)}",
            remedy="Install one, or name one in CXX.",
            command=_INSTALL_COMPILER,
        )
    is_clang, version = _compiler_version(machine.output_of([path, "--version"]) or "")
    if not version:
        return fine(name, f"{path}, of a version that it does not tell")
    shown = f"{path} {'.'.join(map(str, version))}"
    table = _OLDEST_CLANG if is_clang else _OLDEST_GCC
    oldest = table.get((torch and torch.standard) or 0, ())
    newest = None if is_clang else _newest_gcc(machine)
    if version < oldest:
        needed = f"{'.'.join(map(str, oldest))} or newer: torch compiles with -std=c++"
        needed += str(torch and torch.standard)
    elif newest is not None and version[0] > newest:
        needed, status = f"GCC {newest} or older, as this nvcc says", _status(machine)
    else:
        return fine(name, shown)
    return Finding(
        name=name,
        status=status,
        found=shown,
        needed=needed,
        remedy="Install a compiler that fits and name it in CXX and CC.",
        command=f"export CC=gcc-{newest or oldest[0]} CXX=g++-{newest or oldest[0]}",
    )


def _compiler_version(said: str) -> tuple[bool, Version]:
    """Read whether it is clang, and its version; empty where it does not tell."""
    first = said.partition("\n")[0]
    is_clang = "clang" in first
    pattern = r"version (\d+(?:\.\d+)+)" if is_clang else r"\)\s+(\d+(?:\.\d+)+)"
    found = re.search(pattern, first) or re.search(r"(\d+(?:\.\d+)+)", first)
    return is_clang, numbers(found[1]) if found else ()


def _newest_gcc(machine: Machine) -> int | None:
    """Read from the toolkit which GCC its nvcc takes at most."""
    home = _cuda_home(machine)
    is_told = "unsupported-compiler" in machine.variables.get("NVCC_APPEND_FLAGS", "")
    if home is None or is_told or machine.torch is None or not machine.torch.cuda:
        return None
    found = re.search(r"__GNUC__\s*>\s*(\d+)", read_text(home / "include/crt/host_config.h"))
    return int(found[1]) if found else None


def _check_ninja(machine: Machine) -> Finding:
    """Check that the program ninja is on the path; torch starts it by its name."""
    if machine.which("ninja"):
        return fine("ninja", "on the path")
    package = machine.packages.get("ninja")
    found = "no program ninja on the path"
    if package:
        found += f", though the package {package.title} is installed in {package.folder}"
    return Finding(
        name="ninja",
        status=_status(machine),
        found=found,
        needed="ninja, with which torch builds extensions",
        remedy="Put the environment's folder of programs on the path: activate it."
        if package
        else "Install ninja.",
        command="export PATH=\"$(python -c 'import sysconfig; "
        'print(sysconfig.get_path("scripts"))\'):$PATH"'
        if package
        else "pip install ninja",
    )


def _check_headers(machine: Machine) -> Finding:
    """Check that Python's headers are there; Triton's launchers include them."""
    header = machine.python_headers / "Python.h"
    if header.is_file():
        return fine("python headers", str(header))
    return Finding(
        name="python headers",
        status=_status(machine, ("triton",)),
        found=f"{header} does not exist",
        needed=f"Python.h, for {_who(machine, ('triton',))}",
        remedy="Install the headers of this Python.",
        command="apt-get install python3-dev",
    )


def _cuda_home(machine: Machine) -> Path | None:
    """Return where torch looks for the toolkit."""
    chosen = machine.variables.get("CUDA_HOME") or machine.variables.get("CUDA_PATH")
    if chosen:
        return Path(chosen)
    path = machine.which("nvcc")
    if path:
        return Path(path).parents[1]
    usual = machine.at("/usr/local/cuda")
    return usual if usual.exists() else None


def _check_nvcc(machine: Machine) -> Finding:
    """Check that nvcc is there, whole, and of torch's CUDA."""
    torch = machine.torch
    if torch is None or not torch.cuda:
        return not_applicable("nvcc", "torch is not built for CUDA")
    home = _cuda_home(machine)
    names = ("CUDA_HOME", "CUDA_PATH")
    variable = next((name for name in names if machine.variables.get(name)), "")
    from_where = f"{variable}={home}" if variable else str(home)
    major = torch.cuda_version[0]
    needed = f"the toolkit of CUDA {major}, for torch's {torch.cuda}, to build {_who(machine)}"
    version = ""
    if home is None:
        found = "no nvcc on the path, no /usr/local/cuda, and CUDA_HOME is not set"
    elif not (home / "bin" / "nvcc").is_file():
        found = f"{from_where}, where there is no bin/nvcc"
    elif not _has_headers(home):
        found = f"{from_where}, where there is no cuda_runtime.h: its nvcc stands in for another"
    else:
        said = machine.output_of([str(home / "bin" / "nvcc"), "--version"]) or ""
        told = re.search(r"release (\d+\.\d+)", said)
        if told is None:
            return fine("nvcc", f"{from_where}, of a version that it does not tell")
        version = told[1]
        found = f"CUDA {version} in {from_where}"
        if numbers(version)[0] == major and accepts_toolkit(machine, version, torch.cuda):
            return fine("nvcc", found)
    if version and numbers(version)[0] == major:
        needed = f"CUDA {torch.cuda}, or another that DeepSpeed takes for it"
    return Finding(
        name="nvcc",
        status=_status(machine),
        found=found,
        needed=needed,
        remedy="Install that toolkit beside the other, and set CUDA_HOME to it.",
        command=f"export CUDA_HOME=/usr/local/cuda-{torch.cuda}",
    )


def _has_headers(home: Path) -> bool:
    """Return whether the headers of the runtime lie where torch adds them."""
    places = (home / "include", *home.glob("targets/*/include"))
    return any((place / "cuda_runtime.h").is_file() for place in places)
