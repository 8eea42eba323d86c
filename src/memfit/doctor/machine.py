"""The machine that is examined: files, programs, variables and packages, each replaceable.

A check asks only this. So a test examines a machine that does not exist, and says what it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from memfit.devices.detect import Host

from .packages import Packages, read_packages

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """How much a file system holds."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a process of its own has seen when it imported torch."""

    host: Host
    nccl_version: Version | None = None
    """The NCCL that torch has loaded; None without one, or where torch does not tell."""
    import_problems: Mapping[str, str] = field(default_factory=dict)
    """Extension modules that do not load, each with what was said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What the files of torch say of how it was built."""

    version: str
    cuda: str | None
    hip: str | None
    folder: Path
    standard: int | None
    """The C++ standard that it builds extensions with, such as 20."""

    @property
    def cuda_version(self) -> Version:
        """The CUDA it was built for, as numbers; empty without one."""
        return numbers(self.cuda or "")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of a machine without importing anything heavy."""

    variables: Mapping[str, str]
    search_paths: Sequence[Path]
    """Where Python looks for packages."""
    root: Path = Path("/")
    home: Path
    python_tag: str
    """Python as torch names its folders of built extensions, such as ``py311``."""
    python_headers: Path
    """Where ``Python.h`` lies if it is installed."""
    now_seconds: float
    system: str
    """``linux``, ``darwin`` or ``win32``."""
    which: Callable[[str], str | None]
    output_of: Callable[[Sequence[str]], str | None]
    """Run a program and return what it prints; None when it fails or takes too long."""
    space_of: Callable[[Path], Space | None]
    is_writable: Callable[[Path], bool]
    probe: Probe

    def at(self, path: str) -> Path:
        """Return the place of an absolute path."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str:
        """Read a file of an absolute path; empty where it cannot be read."""
        return read_text(self.at(path))

    @cached_property
    def packages(self) -> Packages:
        """What is installed."""
        return read_packages(self.search_paths)

    @cached_property
    def torch(self) -> TorchBuild | None:
        """The torch that an import would find."""
        return next((found for path in self.search_paths if (found := torch_in(path))), None)

    @cached_property
    def driver_version(self) -> str | None:
        """The version of the NVIDIA driver, where a card can be reached from here."""
        reachable = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
        if not any(self.at(each).exists() for each in reachable):
            return None  # a container sees the host's driver, and has no card
        found = re.search(r"Kernel Module\D*?(\d+(?:\.\d+)+)", self.text(_DRIVER_FILE))
        if found:
            return found[1]
        program = self.which("nvidia-smi")
        said = program and self.output_of([program, *_ASK_DRIVER])
        return said.split()[0] if said and numbers(said.split()[0]) else None


_DRIVER_FILE = "/proc/driver/nvidia/version"
_ASK_DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader")


def read_text(file: Path) -> str:
    """Read a file; empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def numbers(version: str) -> Version:
    """Read the numbers a version begins with: ``2.13.0+cu128`` gives (2, 13, 0)."""
    found = re.match(r"\s*v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def torch_in(folder: Path) -> TorchBuild | None:
    """Read the torch in a folder of the search path; None without one."""
    text = read_text(folder / "torch" / "version.py")
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    if version is None:
        return None
    builder = read_text(folder / "torch" / "utils" / "cpp_extension.py")
    standards = re.findall(r"-std=c\+\+(\d\d)\b", builder)
    return TorchBuild(
        version=version[1],
        cuda=_assigned(text, "cuda"),
        hip=_assigned(text, "hip"),
        folder=folder / "torch",
        standard=max(map(int, standards), default=None),
    )


def _assigned(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}\s*(?::[^=\n]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None
