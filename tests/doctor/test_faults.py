"""What each check finds, one fault at a time, on a machine that is else in order."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.zoo.made_up_machine import NOW_SECONDS, MadeUpMachine, healthy

from memfit.devices.detect import CudaDevice
from memfit.doctor.finding import Status
from memfit.doctor.machine import Space
from memfit.errors import UsageError
from memfit.units import GIB, MIB


@pytest.fixture
def made(tmp_path) -> MadeUpMachine:
    return healthy(tmp_path)


def only(made: MadeUpMachine, name: str, status: Status = Status.PROBLEM):
    """Return the one fault there is."""
    faults = made.faults()
    assert set(faults) == {name}
    assert faults[name].status is status
    assert faults[name].needed
    assert faults[name].remedy
    return faults[name]


def replace_version(made: MadeUpMachine, folder: str, version: str) -> None:
    file = made.site / folder / "METADATA"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1], f"Version: {version}", *lines[3:], ""]))


# --- extensions and caches ------------------------------------------------------------------------


def test_a_lock_of_another_python_or_a_young_one_is_a_warning(made):
    other = made.add_extension("py38_cu116/cpu_adam", lock=True)
    young = made.add_extension("py311_cu128/fused_adam", lock=True)
    os.utime(other, (NOW_SECONDS - 9000, NOW_SECONDS - 9000))
    os.utime(young, (NOW_SECONDS - 60, NOW_SECONDS - 60))
    faults = made.faults()
    assert {each.status for each in faults.values()} == {Status.WARNING}
    assert set(faults) == {"build lock cpu_adam", "build lock fused_adam"}
    assert "py38_cu116" in made.notes()["other builds"].found


def test_a_lock_in_the_folder_that_is_chosen(made):
    lock = made.write("/scratch/ext/fused_adam/lock")
    os.utime(lock, (NOW_SECONDS - 9000, NOW_SECONDS - 9000))
    made.variables["TORCH_EXTENSIONS_DIR"] = str(made.root / "scratch/ext")
    only(made, "build lock fused_adam")


def test_a_lock_is_seen_through_the_cache_home(made):
    lock = made.write("/cache/torch_extensions/py311_cu128/fused_adam/lock")
    os.utime(lock, (NOW_SECONDS - 9000, NOW_SECONDS - 9000))
    made.variables["XDG_CACHE_HOME"] = str(made.root / "cache")
    only(made, "build lock fused_adam")


def test_a_build_older_than_torch(made):
    library = made.add_extension()
    os.utime(library, (1000, 1000))
    found = only(made, "old builds", Status.WARNING)
    assert found.command == f"rm -r {library.parent}"


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("TORCH_EXTENSIONS_DIR", "extension cache"),
        ("TRITON_CACHE_DIR", "triton cache"),
        ("TORCHINDUCTOR_CACHE_DIR", "torch.compile cache"),
    ],
)
def test_a_cache_that_cannot_be_written_or_is_full(variable, name, made):
    (made.root / "full").mkdir()
    made.variables[variable] = str(made.root / "full")
    made.spaces["/full"] = Space(free_bytes=5 * MIB, total_bytes=GIB)
    assert "5.0 MiB free" in only(made, name, Status.WARNING).found
    made.read_only.add("/full")
    assert "cannot be written" in only(made, name, Status.WARNING).found


def test_little_disk_space_is_a_warning(made, monkeypatch):
    monkeypatch.chdir(made.home)
    made.spaces["/home/someone"] = Space(free_bytes=MIB, total_bytes=GIB)
    assert {"disk", "triton cache"} == made.faults().keys()


# --- torch ----------------------------------------------------------------------------------------


def test_two_torches_on_the_search_path(made):
    other = made.folder / "user-site"
    other.mkdir()
    made.install_torch("2.6.0+cu124", "12.4", site=other)
    made.search_paths.append(other)
    found = only(made, "torch copies", Status.WARNING)
    assert found.found.index("2.13.0") < found.found.index("2.6.0")


def test_metadata_of_a_torch_that_is_not_there(made):
    old = made.install("torch", "2.6.0")
    new = made.site / "torch-2.13.0.dist-info"
    found = {**made.faults()}
    assert found.keys() >= {"torch files"} or found.keys() >= {"torch copies"}
    assert old.name in str(found) or new.name in str(found)


def test_files_of_one_torch_under_the_metadata_of_another(made):
    replace_version(made, "torch-2.13.0.dist-info", "2.14.0")
    found = made.faults()["torch files"]
    assert found.status is Status.PROBLEM
    assert "2.14.0" in found.found


def test_the_driver_is_asked_where_no_file_tells(made):
    (made.root / "proc/driver/nvidia/version").unlink()
    made.add_program("nvidia-smi", "515.48.07\n515.48.07\n")
    assert "515.48.07" in only(made, "driver").found
    made.add_program("nvidia-smi", "NVIDIA-SMI has failed because it could not communicate\n")
    assert made.faults() == {}


# --- compilers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "is_fault"),
    [
        ("g++ (Ubuntu 9.4.0-1ubuntu1~20.04.2) 9.4.0\nCopyright", True),
        ("g++ (GCC) 11.4.1 20230605 (Red Hat 11.4.1-2)\n", False),
        ("c++ (GCC) 14.2.0\n", False),
        ("c++ (GCC) 15.1.0\n", True),
        ("Ubuntu clang version 9.0.1-12\n", True),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)\n", False),
        ("", False),
        ("what?", False),
    ],
)
def test_a_compiler_too_old_for_torch_or_too_new_for_nvcc(said, is_fault, made):
    made.add_program("c++", said)
    assert made.faults().keys() == ({"c++ compiler"} if is_fault else set())


def test_the_compiler_that_a_variable_names_comes_first(made):
    made.add_program("g++-9", "g++-9 (Debian 9.4.0) 9.4.0\n")
    made.variables["CXX"] = "g++-9 -m64"
    assert "9.4.0" in only(made, "c++ compiler").found


def test_a_compiler_that_nvcc_was_told_to_take(made):
    made.add_toolkit("12.8", newest_gcc=11)
    made.variables["NVCC_APPEND_FLAGS"] = "-allow-unsupported-compiler"
    assert made.faults() == {}


def test_no_compiler_matters_as_much_as_who_needs_it(made):
    del made.programs["c++"]
    assert "DeepSpeed" in only(made, "c++ compiler").needed
    for file in (made.site / "deepspeed-0.19.8.dist-info").iterdir():
        file.unlink()
    (made.site / "deepspeed-0.19.8.dist-info").rmdir()
    assert "torchao, triton" in only(made, "c++ compiler", Status.WARNING).needed


def test_headers_of_python(made):
    (made.root / "usr/include/python3.11/Python.h").unlink()
    assert "Python.h" in only(made, "python headers").needed


def test_an_nvcc_that_stands_in_for_another(made):
    (made.root / "usr/local/cuda/include/cuda_runtime.h").unlink()
    assert "stands in" in only(made, "nvcc").found


def test_a_toolkit_of_a_minor_version_that_deepspeed_refuses(made):
    made.add_toolkit("12.1")
    assert "12.8" in only(made, "nvcc").needed
    made.variables["DS_SKIP_CUDA_CHECK"] = "1"
    assert made.faults() == {}


def test_operators_that_were_built_for_another_torch(made):
    made.write(
        made.site / "deepspeed/git_version_info_installed.py",
        "installed_ops={'cpu_adam': True, 'fused_adam': True}\n"
        "torch_info={'version': '2.6', 'cuda_version': '12.4', 'hip_version': '0.0'}\n",
    )
    found = only(made, "deepspeed")
    assert "torch 2.6 with CUDA 12.4" in found.found
    assert "torch 2.13 with CUDA 12.8" in found.needed


# --- packages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "status", "expected"),
    [
        ("126", Status.WARNING, "loads libbitsandbytes_cuda126.so"),
        ("130", Status.PROBLEM, "loads libbitsandbytes_cuda130.so"),
        ("12.8", Status.PROBLEM, "no number"),
        ("", Status.PROBLEM, "no number"),
    ],
)
def test_the_build_of_bitsandbytes_that_a_variable_names(value, status, expected, made):
    made.variables["BNB_CUDA_VERSION"] = value
    assert expected in only(made, "bitsandbytes", status).found


def test_an_empty_variable_is_off_for_an_older_bitsandbytes(made):
    made.variables["BNB_CUDA_VERSION"] = ""
    made.write(made.site / "bitsandbytes/cextension.py", "")
    assert made.faults() == {}


def test_bitsandbytes_for_the_cpu_alone_beside_a_torch_for_cuda(made):
    for file in (made.site / "bitsandbytes").glob("*cuda*.so"):
        file.unlink()
    assert "only for the CPU" in only(made, "bitsandbytes").found


def test_bitsandbytes_without_a_build_for_the_cpu(tmp_path):
    made = MadeUpMachine(tmp_path)
    made.install_torch("2.13.0+cpu", None)
    made.install_bitsandbytes("0.41.0", "cuda118")
    assert "libbitsandbytes_cpu" in only(made, "bitsandbytes").found


def test_minimums_that_transformers_compares(made):
    made.write(
        made.site / "transformers/utils/import_utils.py",
        'ACCELERATE_MIN_VERSION = "1.1.0"\nBITSANDBYTES_MIN_VERSION = "0.51.0"\n',
    )
    found = only(made, "bitsandbytes")
    assert found.needed == "transformers 5.23.0 needs bitsandbytes>=0.51.0"


def test_a_version_that_two_packages_exclude_is_named_once(made):
    replace_version(made, "transformers-5.23.0.dist-info", "3.5.0")
    made.install("trl", "1.16.0", "transformers>=4.56.2", "accelerate>=1.4.0")
    made.install("sentence-transformers", "6.0", "transformers>=9")  # of no training known here
    (made.site / "peft-0.21.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: peft\nVersion: 0.21.2\nRequires-Dist: transformers>=4.40\n"
    )
    found = only(made, "transformers")
    assert found.needed.count("needs transformers") == 2
    assert found.command == "pip install 'transformers>=4.40,>=4.56.2'"


def test_torchvision_for_another_torch(made):
    (made.site / "torchvision-0.28.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.21.0\nRequires-Dist: torch==2.6.0\n"
    )
    found = only(made, "torch")
    assert "torchvision 0.21.0 needs torch==2.6.0" in found.needed
    assert found.remedy.startswith("Install the torchvision that goes with torch 2.13.0")


def test_what_is_missing_is_named_with_who_needs_it(made):
    made.install("trl", "1.16.0", "datasets>=3.0.0", "wandb; extra == 'dev'")
    assert "trl 1.16.0 needs datasets>=3.0.0" in only(made, "datasets").needed


def test_a_missing_library_of_cuda_is_a_warning(made):
    made.install("xformers", "0.1.0", "nvidia-cudnn-cu12==9.19")
    only(made, "nvidia-cudnn-cu12", Status.WARNING)


def test_torchvision_for_the_cpu_beside_a_torch_for_cuda(made):
    made.write(made.site / "torchvision/version.py", "__version__ = '0.28.0+cpu'\n")
    only(made, "torchvision", Status.WARNING)


def test_a_torchao_that_wants_a_newer_torch(made):
    made.install_torch("2.10.0+cu128", "12.8")
    (made.site / "torch-2.13.0.dist-info/METADATA").unlink()
    (made.site / "torch-2.13.0.dist-info").rmdir()
    made.write(
        made.site / "torchvision-0.28.0.dist-info/METADATA", "Name: torchvision\nVersion: 1\n"
    )
    assert "2.11.0 or newer" in made.faults()["torchao"].needed


def test_the_name_of_a_wheel_of_flash_attention(made):
    folder = made.install("flash-attn", "2.8.0", "torch")
    url = "https://example.org/2.8.0/flash_attn-2.8.0%2Bcu12torch2.6cxx11abiFALSE-cp311.whl"
    made.write(folder / "direct_url.json", json.dumps({"url": url}))
    assert "built for torch 2.6" in only(made, "flash-attn").found


# --- NCCL, libraries and variables ----------------------------------------------------------------


def test_no_nccl(made):
    (made.site / "nvidia_nccl_cu12-2.29.3.dist-info/METADATA").unlink()
    (made.site / "nvidia_nccl_cu12-2.29.3.dist-info").rmdir()
    assert only(made, "nccl").command == "pip install nvidia-nccl-cu12==2.29.3"


def test_another_nccl_is_loaded_than_is_installed(made):
    made.probe["nccl_version"] = (2, 21, 5)
    assert "2.21.5" in only(made, "nccl", Status.WARNING).found


def test_an_older_nccl_before_torchs(made):
    library = made.write("/opt/nccl/lib/libnccl.so.2.18.3")
    (library.parent / "libnccl.so.2").symlink_to(library.name)
    made.variables["LD_LIBRARY_PATH"] = str(library.parent)
    assert "2.18.3" in only(made, "LD_LIBRARY_PATH", Status.WARNING).found


def test_a_library_that_is_preloaded(made):
    made.variables["LD_PRELOAD"] = f"/gone/libfoo.so {made.write('/opt/libnccl.so.2.18.3')}"
    assert "libnccl.so.2.18.3" in only(made, "LD_PRELOAD", Status.WARNING).found
    assert "/gone/libfoo.so" in made.notes()["LD_PRELOAD files"].found


@pytest.mark.parametrize(
    ("name", "value", "status"),
    [
        ("NCCL_BUFFSIZE", "16777216", Status.NOTE),
        ("NCCL_MIN_NCHANNELS", "32", Status.NOTE),
        ("NCCL_P2P_DISABLE", "1", Status.NOTE),
        ("NCCL_SHM_DISABLE", "1", Status.NOTE),
        ("NCCL_IB_DISABLE", "1", Status.NOTE),
        ("NCCL_DEBUG", "TRACE", Status.NOTE),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", Status.WARNING),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", Status.NOTE),
        ("CUDA_LAUNCH_BLOCKING", "1", Status.WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "0", Status.WARNING),
        ("CUDA_VISIBLE_DEVICES", "-1", Status.WARNING),
    ],
)
def test_variables_that_matter(name, value, status, made):
    made.variables[name] = value
    (found,) = (each for each in made.findings() if each.name == name)
    assert found.status is status
    assert f"{name}={value}" in found.found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_BUFFSIZE", "1048576"),
        ("NCCL_BUFFSIZE", "x"),
        ("NCCL_P2P_DISABLE", "0"),
        ("NCCL_DEBUG", "INFO"),
        ("CUDA_VISIBLE_DEVICES", "0,1"),
    ],
)
def test_values_that_do_not_matter(name, value, made):
    made.variables[name] = value
    assert name not in {each.name for each in made.findings()}


@pytest.mark.parametrize(
    ("texts", "status"),
    [
        ({"PYTORCH_ALLOC_CONF": "backend:other"}, Status.PROBLEM),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments=True"}, Status.PROBLEM),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:5"}, Status.PROBLEM),
        (
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128",
            },
            Status.WARNING,
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"},
            Status.WARNING,
        ),
    ],
)
def test_settings_of_the_allocator_that_fail_or_contradict(texts, status, made):
    made.variables.update(texts)
    found = made.faults()["allocator settings"]
    assert found.status is status
    assert found.needed
    assert found.remedy


@pytest.mark.parametrize(
    ("hides", "hidden"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
        ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    ],
)
@pytest.mark.parametrize("text", ["max_split_size_mb:128", ""])
def test_settings_of_the_allocator_that_another_variable_hides(hides, hidden, text, made):
    made.variables.update({hidden: "expandable_segments:True", hides: text})
    found = only(made, "allocator settings", Status.WARNING)
    assert found.found.startswith(f"{hides}={text} counts")
    assert found.command == f"unset {hidden}"
    made.variables[hides] = " expandable_segments:True"
    assert made.faults() == {}


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True,max_split_size_mb:128",
        "garbage_collection_threshold:0.8",
        "backend:cudaMallocAsync,expandable_segments:True",
    ],
)
def test_settings_of_the_allocator_that_do_nothing_are_noted(text, made):
    made.variables["PYTORCH_ALLOC_CONF"] = text
    assert made.faults() == {}
    assert text in made.notes()["allocator settings"].found


# --- memfit's own needs ---------------------------------------------------------------------------


def test_cards_have_their_name_in_the_catalogue(made):
    cards = (
        CudaDevice(name="NVIDIA H200", memory_bytes=int(139.8 * GIB)),
        CudaDevice(name="Unheard Of 9000", memory_bytes=GIB),
    )
    made.probe["host"] = made.probe["host"].__class__(
        python_version="3.11.0",
        torch_version="2.13.0",
        torch_problem=None,
        num_cpus=2,
        memory_bytes=None,
        cuda_devices=cards,
    )
    found = {each.name: each for each in made.findings()}
    assert "h200" in found["cuda:0"].found
    assert made.faults().keys() == {"cuda:1", "memory"}


def test_missing_extras_are_told_from_missing_requirements(made):
    made.install(
        "memfit",
        "0.1.0",
        "numpy>=1.26",
        "no-such-package-a>=1",
        'no-such-package-b; extra == "plots"',
        'accelerate; extra == "shown"',
        'no-such-package-c; sys_platform == "plan9"',
        'memfit[plots]; extra == "all"',
        'no-such-package-d; extra == "dev"',
    )
    found = {each.name: each for each in made.findings() if "extra" in each.name}
    assert set(found) == {"extra plots", "extra shown"}
    assert only(made, "packages").found == "missing: no-such-package-a"
    assert found["extra plots"].status is Status.NOTE
    assert found["extra plots"].command == "pip install 'memfit[plots]'"
    assert found["extra shown"].status is Status.OK


def test_a_broken_catalogue_is_a_problem(made, monkeypatch):
    def refuse() -> None:
        raise UsageError("broken")

    monkeypatch.setattr("memfit.doctor.installation.all_devices", refuse)
    only(made, "catalogue")


# --- files that are broken ------------------------------------------------------------------------


def test_metadata_that_cannot_be_read_is_a_finding(made):
    (made.site / "accelerate-1.15.0.dist-info/METADATA").write_bytes(b"\xff\xfe\x00Name")
    (made.site / "other-1.0.dist-info").mkdir()
    faults = made.faults()
    assert faults["metadata of accelerate"].status is Status.WARNING
    assert made.notes()["metadata of other"].found.endswith("tells no name or version")


READ_FILES = (
    "site-packages/torch/version.py",
    "site-packages/torch/utils/cpp_extension.py",
    "site-packages/torch-2.13.0.dist-info/METADATA",
    "site-packages/flash_attn-2.8.0.dist-info/direct_url.json",
    "site-packages/flash_attn-2.8.0.dist-info/METADATA",
    "site-packages/transformers/utils/import_utils.py",
    "site-packages/torchvision/version.py",
    "site-packages/bitsandbytes/cextension.py",
    "site-packages/deepspeed/git_version_info_installed.py",
    "site-packages/deepspeed/ops/op_builder/builder.py",
    "root/proc/driver/nvidia/version",
    "root/proc/mounts",
    "root/usr/local/cuda/include/crt/host_config.h",
)
PIECES = st.sampled_from(
    ["Name: torch", "Version: ", "Requires-Dist: nvidia-nccl-cu12==", "2.29.3", "\n", "installed_ops=",
     "{", "}", "'cpu_adam': True", "torch_info={'version': ", "Kernel Module  ", "__version__ = '",
     "cuda = '12", "'", "{\"url\": 3}", "[]", "cuda_minor_mismatch_ok = {12: 3}", "__GNUC__ > ", "99",
     "tmpfs / tmpfs ro,noexec 0 0", "ACCELERATE_MIN_VERSION = \"9\"", "\\040", "-std=c++99"]
)  # fmt: skip
TEXTS = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=8).map("".join))


@pytest.mark.slow
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(file=st.sampled_from(READ_FILES), text=TEXTS, value=TEXTS)
def test_no_text_in_a_file_or_variable_ends_the_examination(file, text, value, made):
    made.install("flash-attn", "2.8.0", "torch")
    path = made.folder / file
    before = path.read_bytes() if path.exists() else b""
    made.write(path, text)
    names = ("PYTORCH_ALLOC_CONF", "BNB_CUDA_VERSION", "LD_LIBRARY_PATH", "CXX", "LD_PRELOAD")
    made.variables.update(dict.fromkeys(names, value.replace("\0", "")))
    assert not [each for each in made.findings() if "could not be checked" in each.found]
    path.write_bytes(before)


def test_a_check_that_fails_keeps_no_other_from_being_made(made, monkeypatch):
    def refuse(machine):
        raise PermissionError("no")

    monkeypatch.setattr("memfit.doctor.checks.CHECKS", (refuse,))
    assert only(made, "refuse", Status.WARNING).found == "could not be checked: PermissionError: no"
