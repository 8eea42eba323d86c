"""Machines in order, of kinds that differ from the usual one, have no fault."""

from __future__ import annotations

import os

import pytest
from tests.zoo.made_up_machine import NOW_SECONDS, MadeUpMachine, healthy

from memfit.doctor.finding import Status


@pytest.fixture
def bare(tmp_path) -> MadeUpMachine:
    """A machine with a torch for the CPU and nothing else."""
    made = MadeUpMachine(tmp_path)
    made.install_torch("2.13.0+cpu", None, "numpy")
    made.install("numpy", "2.4.6")
    return made


@pytest.fixture
def made(tmp_path) -> MadeUpMachine:
    return healthy(tmp_path)


def statuses(made: MadeUpMachine) -> dict[str, Status]:
    return {each.name: each.status for each in made.findings()}


def test_a_laptop_without_card_or_compiler(bare):
    assert bare.faults() == {}
    assert {"c++ compiler", "ninja", "python headers"} <= bare.notes().keys()
    assert statuses(bare)["nvcc"] is Status.NOT_APPLICABLE


def test_a_container_without_a_card_on_a_host_with_one(bare):
    bare.write("/proc/driver/nvidia/version", "NVRM version: x  Kernel Module  580.82.07  Tue\n")
    assert bare.faults() == {}


def test_no_torch_at_all(tmp_path):
    assert MadeUpMachine(tmp_path).faults() == {}  # the probe says it, if it is so


def test_a_torch_whose_libraries_are_the_systems(bare):
    bare.install_torch("2.13.0", "12.8", "numpy")
    bare.add_card("580.82.07")
    old = bare.write("/usr/local/cuda-12.1/lib64/libcudart.so.12")
    bare.variables["LD_LIBRARY_PATH"] = str(old.parent)
    assert bare.faults() == {}
    assert statuses(bare)["nccl"] is Status.NOT_APPLICABLE
    assert statuses(bare)["LD_LIBRARY_PATH"] is Status.NOT_APPLICABLE


def test_a_container_of_nvidia_with_a_torch_of_its_own(bare):
    bare.install("torch", "2.13.0a0+7c8ec84dab.nv26.03")
    bare.write(
        bare.site / "torch/version.py",
        "__version__ = '2.13.0a0+7c8ec84dab.nv26.03'\ncuda = '13.0'\n",
    )
    (bare.site / "torch-2.13.0.dist-info/METADATA").unlink()
    (bare.site / "torch-2.13.0.dist-info").rmdir()
    bare.install("accelerate", "1.15.0", "torch>=2.13.0", "numpy<3.0.0,>=1.17")
    bare.install("flash-attn", "2.8.0", "torch", "numpy")
    assert bare.faults() == {}


def test_a_torch_for_rocm(bare):
    bare.write(
        bare.site / "torch/version.py",
        "__version__ = '2.13.0+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n",
    )
    bare.install_bitsandbytes("0.50.2", "rocm70")
    assert bare.faults() == {}
    assert statuses(bare)["bitsandbytes"] is Status.NOT_APPLICABLE


def test_the_toolkit_of_the_same_and_of_another_major_version_on_the_path(made):
    same = made.write("/usr/local/cuda-12.9/lib64/libcudart.so.12.9.79")
    (same.parent / "libcudart.so.12").symlink_to(same)
    other = made.write("/usr/local/cuda-11.8/lib64/libcudart.so.11.0")
    own = made.site / "nvidia" / "nccl" / "lib"
    folders = [same.parent, other.parent, own, made.root / "gone"]
    made.variables["LD_LIBRARY_PATH"] = ":".join([*map(str, folders), "", "relative"])
    made.variables["LD_PRELOAD"] = str(made.write("/usr/lib/libjemalloc.so.2"))
    assert made.faults() == {}
    assert statuses(made)["LD_LIBRARY_PATH"] is Status.OK


def test_a_library_of_unknown_version_is_a_note(made):
    library = made.write("/opt/lib/libcudart.so.12")
    made.variables["LD_LIBRARY_PATH"] = str(library.parent)
    assert made.faults() == {}
    assert str(library) in made.notes()["LD_LIBRARY_PATH"].found


def test_a_newer_nccl_than_torch_declares(made):
    metadata = made.site / "nvidia_nccl_cu12-2.29.3.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.30.1\n")
    made.probe["nccl_version"] = (2, 30, 1)
    assert made.faults() == {}
    assert "2.30.1" in made.notes()["nccl"].found


def test_the_nearest_build_of_bitsandbytes(made):
    (made.site / "bitsandbytes/libbitsandbytes_cuda128.so").unlink()
    made.write(made.site / "bitsandbytes/libbitsandbytes_cuda124.so")
    assert made.faults() == {}
    assert "CUDA 12.6" in made.notes()["bitsandbytes"].found


def test_a_login_node_without_a_card(made):
    for file in (made.site / "bitsandbytes").glob("*cuda*.so"):
        file.unlink()
    (made.root / "dev/nvidia0").unlink()
    assert made.faults() == {}
    assert "bitsandbytes" in made.notes()


@pytest.mark.parametrize("version", ["525.60.13", "525.105.17", "1000.5"])
def test_a_driver_that_is_new_enough(version, made):
    made.add_card(version)
    assert made.faults() == {}


def test_an_old_driver_with_the_compatibility_library(made):
    made.add_card("470.129.06")
    library = made.write("/usr/local/cuda/compat/libcuda.so.580.65.06")
    made.variables["LD_LIBRARY_PATH"] = str(library.parent)
    assert made.faults() == {}
    assert str(library) in made.notes()["driver"].found


def test_deepspeed_with_all_its_operators_needs_no_compiler(made):
    made.write(
        made.site / "deepspeed/git_version_info_installed.py",
        "version='0.19.8'\ninstalled_ops={'cpu_adam': True, 'fused_adam': True, 'nvme': False}\n"
        "torch_info={'version': '2.13', 'bf16_support': True, 'cuda_version': '12.8'}\n",
    )
    for name in ("nvcc", "ninja"):
        del made.programs[name]
    made.variables["CUDA_HOME"] = "/nowhere"
    assert made.faults() == {}


def test_a_toolkit_of_a_minor_version_that_deepspeed_takes(made):
    made.write(
        made.site / "torch/version.py", "__version__ = '2.13.0+cu126'\ncuda = '12.6'\nhip = None\n"
    )
    made.add_toolkit("12.4")
    assert made.faults() == {}


def test_search_paths_that_are_one_folder(made):
    link = made.folder / "lib64"
    link.symlink_to(made.site)
    made.search_paths += [made.site, link, made.folder / "python311.zip"]
    assert made.faults() == {}


def test_a_build_that_goes_on_now(made):
    lock = made.add_extension("py311_cu128/fused_adam", lock=True)
    os.utime(lock, (NOW_SECONDS - 3600, NOW_SECONDS - 3600))
    link = made.root / "proc/4242/fd/3"
    link.parent.mkdir(parents=True)
    link.symlink_to(lock)
    assert made.faults() == {}
    assert "process 4242" in made.notes()["build lock fused_adam"].found


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker0,lo", "ib0,eth0", "^=eth1", ""])
def test_interfaces_that_nccl_finds(value, made):
    for name in ("eth0", "lo", "docker0"):
        made.write(f"/sys/class/net/{name}/mtu")
    made.variables["NCCL_SOCKET_IFNAME"] = value
    assert made.faults() == {}


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "expandable_segments: True, garbage_collection_threshold: 0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "backend:cudaMallocAsync",
        "backend:native,max_split_size_mb:128,",
        "",
    ],
)
def test_settings_that_the_allocator_takes(text, made):
    made.variables["PYTORCH_ALLOC_CONF"] = text
    assert made.faults() == {}


def test_variables_that_nothing_here_reads(bare):
    bare.write("/sys/class/net/eth0/mtu")
    names = {"NCCL_SOCKET_IFNAME": "ib0", "CUDA_LAUNCH_BLOCKING": "1", "CUDA_VISIBLE_DEVICES": ""}
    bare.variables.update(names)
    assert bare.faults() == {}


def test_what_pip_was_about_to_delete(made):
    folder = made.install("torch", "2.6.0")
    folder.rename(folder.with_name("~orch-2.6.0.dist-info"))
    assert made.faults() == {}
