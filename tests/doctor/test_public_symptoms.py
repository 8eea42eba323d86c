"""Machines as people describe them when they ask for help, and what the doctor says of each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.zoo.made_up_machine import NOW_SECONDS, MadeUpMachine, healthy

from memfit.doctor.finding import Status
from memfit.doctor.machine import Space
from memfit.units import MIB


@pytest.fixture
def made(tmp_path) -> MadeUpMachine:
    return healthy(tmp_path)


def age(file: Path, seconds: float) -> None:
    os.utime(file, (NOW_SECONDS - seconds, NOW_SECONDS - seconds))


def only(made: MadeUpMachine, name: str, status: Status = Status.PROBLEM):
    """Return the one fault there is."""
    faults = made.faults()
    assert set(faults) == {name}
    assert faults[name].status is status
    assert faults[name].needed
    assert faults[name].remedy
    return faults[name]


def test_a_healthy_machine_has_no_fault(made):
    assert made.faults() == {}


def test_hangs_after_using_the_extensions_root(made):
    lock = made.add_extension("py311_cu128/fused_adam", lock=True)
    age(lock, 7200)
    found = only(made, "build lock fused_adam")
    assert str(lock) in found.found
    assert found.command == f"rm {lock}"


def test_undefined_symbol_nccl_comm_register(made):
    """An older NCCL than torch was linked with."""
    made.site.joinpath("nvidia_nccl_cu12-2.29.3.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.18.1\n"
    )
    made.probe.pop("nccl_version")
    found = only(made, "nccl")
    assert "2.18.1" in found.found
    assert "2.29.3" in found.needed
    assert found.command == "pip install nvidia-nccl-cu12==2.29.3"


def test_undefined_symbol_nccl_comm_resume(made):
    """Two packages own one file, and the last one installed wins."""
    made.install("nvidia-nccl-cu13", "2.29.7")
    found = only(made, "nccl")
    assert "nvidia-nccl-cu13" in found.found
    assert "pip uninstall -y nvidia-nccl-cu13" in found.command


def test_undefined_symbol_nv_jit_link_complete(made):
    """An old toolkit before torch's own libraries."""
    library = made.write("/usr/local/cuda-12.1/lib64/libnvJitLink.so.12.1.105")
    (library.parent / "libnvJitLink.so.12").symlink_to(library)
    made.variables["LD_LIBRARY_PATH"] = f"{library.parent}:"
    found = only(made, "LD_LIBRARY_PATH", Status.WARNING)
    assert "libnvJitLink.so.12" in found.found
    assert "12.1.105" in found.found


def test_configured_cuda_binary_not_found(made):
    made.variables["BNB_CUDA_VERSION"] = "124"
    found = only(made, "bitsandbytes")
    assert "libbitsandbytes_cuda124.so" in found.found
    assert found.command == "unset BNB_CUDA_VERSION"


def test_required_library_version_not_found(made):
    """An old bitsandbytes has no build for the CUDA of a new torch, and takes no other."""
    made.site.joinpath("bitsandbytes-0.50.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 0.45.0\n"
    )
    for file in (made.site / "bitsandbytes").glob("*cuda128.so"):
        file.unlink()
    made.write(made.site / "bitsandbytes/cextension.py", "def get_cuda_bnb_library_path(): ...")
    found = only(made, "bitsandbytes")
    assert "12.6, 13.0" in found.found
    assert "12.8" in found.needed


def test_installed_cuda_does_not_match_the_version_torch_was_compiled_with(made):
    made.add_toolkit("11.8", newest_gcc=14)
    found = only(made, "nvcc")
    assert "11.8" in found.found
    assert "12" in found.needed


def test_cuda_home_does_not_exist(made):
    del made.programs["nvcc"]
    made.variables["CUDA_HOME"] = str(made.root / "opt/cuda")
    found = only(made, "nvcc")
    assert "CUDA_HOME" in found.found


def test_ninja_is_required_to_load_extensions(made):
    """The package is there, and its environment is not activated."""
    del made.programs["ninja"]
    found = only(made, "ninja")
    assert "ninja 1.13.0" in found.found
    assert found.command.startswith("export PATH=")


def test_unsupported_gnu_version(made):
    made.add_toolkit("12.8", newest_gcc=11)
    found = only(made, "c++ compiler")
    assert "12.2.0" in found.found
    assert "11" in found.needed


def test_a_data_loader_worker_is_killed_by_a_bus_error(made):
    made.spaces["/dev/shm"] = Space(free_bytes=64 * MIB, total_bytes=64 * MIB)
    found = only(made, "shared memory", Status.WARNING)
    assert "64.0 MiB" in found.found
    assert "--shm-size" in found.remedy


def test_torch_was_not_compiled_with_cuda_enabled(made):
    made.install_torch("2.13.0+cpu", None)
    made.probe["nccl_version"] = None
    faults = made.faults()
    assert faults["torch build"].status is Status.PROBLEM
    assert "pip install --force-reinstall torch" in faults["torch build"].command


def test_the_driver_on_your_system_is_too_old(made):
    made.add_card("470.129.06")
    found = only(made, "driver")
    assert "470.129.06" in found.found
    assert "525.60.13" in found.needed


def test_flash_attention_has_an_undefined_symbol(made):
    made.install("flash-attn", "2.8.0.post2", "torch")
    message = "flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE"
    made.probe["import_problems"] = {"flash_attn_2_cuda": message}
    found = only(made, "flash-attn")
    assert "undefined symbol" in found.found
    assert "--no-build-isolation" in found.command


def test_detected_that_torch_and_torchvision_were_compiled_with_different_cuda(made):
    made.write(made.site / "torchvision/version.py", "__version__ = '0.28.0+cu118'\n")
    found = only(made, "torchvision")
    assert "cu118" in found.found


def test_skipping_import_of_cpp_extensions_of_torchao(made):
    made.site.joinpath("torchao-0.18.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchao\nVersion: 0.14.0\n"
    )
    found = only(made, "torchao", Status.WARNING)
    assert "2.8.0" in found.needed


def test_transformers_refuses_an_old_tokenizers(made):
    made.site.joinpath("tokenizers-0.23.1.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: tokenizers\nVersion: 0.19.1\n"
    )
    found = only(made, "tokenizers")
    assert "transformers 5.23.0 needs tokenizers<0.24,>=0.22" in found.needed
    assert found.command == "pip install 'tokenizers<0.24,>=0.22'"


def test_no_interface_of_the_name_in_nccl_socket_ifname(made):
    made.write("/sys/class/net/eth0/mtu")
    made.write("/sys/class/net/lo/mtu")
    made.variables["NCCL_SOCKET_IFNAME"] = "ib0,enp"
    found = only(made, "NCCL_SOCKET_IFNAME")
    assert "eth0" in found.found


def test_unrecognized_key_of_the_allocator(made):
    made.variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segment:True"
    found = only(made, "allocator settings")
    assert "expandable_segments" in found.remedy


def test_failed_to_map_segment_from_shared_object(made):
    made.write("/proc/mounts", f"tmpfs {made.home}/.cache tmpfs rw,noexec 0 0\n")
    found = only(made, "extension cache", Status.WARNING)
    assert "noexec" in found.found
