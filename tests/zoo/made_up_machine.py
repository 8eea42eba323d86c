"""Machines that do not exist: packages, drivers, compilers and settings as files in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.zoo.machines import machine_with

from memfit.devices.detect import CudaDevice
from memfit.doctor.checks import all_findings
from memfit.doctor.finding import Finding
from memfit.doctor.machine import Machine, Probe, Space
from memfit.units import GIB

NOW_SECONDS = 1_800_000_000.0
GCC = "g++ (Debian 12.2.0-14) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc."
NVCC = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release {0}, V{0}.89"


class MadeUpMachine:
    """Build a machine piece by piece; nothing of the real one shows through."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        self.site = folder / "site-packages"
        self.home = self.root / "home" / "someone"
        for each in (self.root, self.site, self.home):
            each.mkdir(parents=True)
        self.search_paths = [self.site]
        self.variables: dict[str, str] = {}
        self.programs: dict[str, str] = {}
        self.outputs: dict[str, str] = {}
        self.spaces: dict[str, Space] = {}
        self.read_only: set[str] = set()
        self.probe: dict[str, Any] = {"host": machine_with()}

    def write(self, path: str | Path, text: str = "") -> Path:
        """Write a file below the root of this machine, or where an absolute path of it says."""
        file = path if isinstance(path, Path) else self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def install(self, name: str, version: str, *requires: str, site: Path | None = None) -> Path:
        """Install a package's metadata."""
        folder = (site or self.site) / f"{name.replace('-', '_')}-{version}.dist-info"
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires]
        self.write(folder / "METADATA", "\n".join(lines) + "\n")
        return folder

    def install_torch(
        self, version: str, cuda: str | None, *requires: str, site: Path | None = None
    ) -> None:
        """Install torch with what is read of its files."""
        place = site or self.site
        self.install("torch", version.partition("+")[0], *requires, site=place)
        built = f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
        self.write(place / "torch" / "version.py", f"__version__ = '{version}'\n{built}")
        self.write(place / "torch/utils/cpp_extension.py", "flags = ['-std=c++20']\n")

    def install_bitsandbytes(self, version: str, *libraries: str, falls_back: bool = True) -> None:
        """Install bitsandbytes with these builds, such as ``cuda128`` and ``cpu``."""
        self.install("bitsandbytes", version, "torch<3,>=2.4")
        for each in libraries:
            self.write(self.site / "bitsandbytes" / f"libbitsandbytes_{each}.so")
        text = (
            "def _find_cuda_libs(): ..." if falls_back else "def get_cuda_bnb_library_path(): ..."
        )
        self.write(self.site / "bitsandbytes" / "cextension.py", text)

    def add_card(self, driver: str) -> None:
        """Put a card and its driver in, which torch sees."""
        self.write(
            "/proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Jan  6 2026\n",
        )
        self.write("/dev/nvidia0")
        card = CudaDevice(name="NVIDIA H200", memory_bytes=139 * GIB)
        self.probe["host"] = machine_with(card)

    def add_program(self, name: str, output: str, path: str = "") -> None:
        """Put a program on the path, with what it says of its version."""
        place = path or f"/usr/bin/{name}"
        self.write(place)
        self.programs[name] = str(self.root / place.lstrip("/"))
        self.outputs[self.programs[name]] = output

    def add_toolkit(self, version: str, newest_gcc: int = 14) -> None:
        """Put a CUDA toolkit into its usual place."""
        self.add_program("nvcc", NVCC.format(version), "/usr/local/cuda/bin/nvcc")
        self.write("/usr/local/cuda/include/cuda_runtime.h")
        header = f"#if __GNUC__ > {newest_gcc}\n#error -- unsupported GNU version!\n"
        self.write("/usr/local/cuda/include/crt/host_config.h", header)

    def add_extension(self, place: str = "py311_cu128/cpu_adam", lock: bool = False) -> Path:
        """Put a built extension into the default cache, or the lock of a build."""
        folder = self.home / ".cache/torch_extensions" / place
        return self.write(folder / ("lock" if lock else f"{folder.name}.so"))

    def machine(self) -> Machine:
        """Return what checks get to see."""
        return Machine(
            variables=self.variables,
            search_paths=tuple(self.search_paths),
            root=self.root,
            home=self.home,
            python_tag="py311",
            python_headers=self.root / "usr/include/python3.11",
            now_seconds=NOW_SECONDS,
            system="linux",
            which=self.programs.get,
            output_of=self._output_of,
            space_of=lambda path: self.spaces.get(
                self._shown(path), Space(free_bytes=100 * GIB, total_bytes=200 * GIB)
            ),
            is_writable=lambda path: self._shown(path) not in self.read_only,
            probe=Probe(**self.probe),
        )

    def _output_of(self, words: Sequence[str]) -> str | None:
        return self.outputs.get(words[0])

    def _shown(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root)) if path.is_relative_to(self.root) else ""

    def findings(self) -> list[Finding]:
        """Examine this machine."""
        return list(all_findings(self.machine()))

    def faults(self) -> dict[str, Finding]:
        """Return what is wrong, by name, without what concerns memfit's own extras."""
        return {
            each.name: each
            for each in self.findings()
            if each.status.value in {"warning", "problem"}
        }

    def notes(self) -> dict[str, Finding]:
        """Return what is worth a note."""
        return {each.name: each for each in self.findings() if each.status.value == "note"}


def with_host(**changes: object) -> Any:
    """Return the host that a made-up machine has, changed."""
    return replace(machine_with(), **changes)


def healthy(folder: Path) -> MadeUpMachine:
    """Build a machine on which a training with DeepSpeed and bitsandbytes runs."""
    made = MadeUpMachine(folder)
    made.install_torch(
        "2.13.0+cu128", "12.8", "nvidia-nccl-cu12==2.29.3; sys_platform == 'linux'", "triton==3.5.1"
    )
    made.install("nvidia-nccl-cu12", "2.29.3")
    made.write(made.site / "nvidia/nccl/lib/libnccl.so.2")
    made.install("triton", "3.5.1")
    made.install("torchvision", "0.28.0", "torch==2.13.0", "numpy")
    made.write(made.site / "torchvision/version.py", "__version__ = '0.28.0+cu128'\n")
    made.install("numpy", "2.4.6")
    made.install("torchao", "0.18.0")
    made.install_bitsandbytes("0.50.2", "cpu", "cuda126", "cuda128", "cuda130")
    made.install("transformers", "5.23.0", "tokenizers<0.24,>=0.22", "numpy>=1.17")
    made.install("tokenizers", "0.23.1")
    made.install("accelerate", "1.15.0", "torch>=2.0.0")
    made.install("peft", "0.21.2", "transformers", "accelerate>=0.21.0", "torch>=1.13.0")
    made.install("deepspeed", "0.19.8", "torch", "ninja")
    made.write(
        made.site / "deepspeed/ops/op_builder/builder.py",
        'cuda_minor_mismatch_ok = {\n    11: ["11.8"],\n    12: ["12.4", "12.6"],\n}\n',
    )
    made.install("ninja", "1.13.0")
    made.add_card("580.82.07")
    made.write("/usr/include/python3.11/Python.h")
    made.add_program("c++", GCC)
    made.add_program("ninja", "1.13.0")
    made.add_toolkit("12.8")
    made.add_extension()
    made.probe["nccl_version"] = (2, 29, 3)
    return made
