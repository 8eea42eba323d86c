"""The real machine: what a child process tells of torch, and what is asked of the system."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.made_up_machine import healthy
from tests.zoo.processes import environment, imports_after, run_python

from memfit.doctor import this_machine
from memfit.doctor.extensions import check_extensions
from memfit.doctor.finding import Status


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Put a program in the place of Python."""

    def choose(*lines: str) -> None:
        program = tmp_path / "python"
        program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return choose


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (("kill -SEGV $$",), "ended with -11"),
        (("echo 'libtorch_cuda.so: undefined symbol' >&2", "exit 1"), "undefined symbol"),
        (("echo '{\"host\": 3}'",), "ended with 0"),
        (("echo hello",), "ended with 0"),
        (("sleep 5",), "not imported within 0.5 seconds"),
    ],
)
def test_a_torch_that_crashes_hangs_or_babbles_is_one_that_cannot_be_imported(
    lines, expected, child
):
    child(*lines)
    found = this_machine.probe_torch(longest_seconds=0.5 if "sleep" in lines[0] else 60)
    assert found.host.torch_version is None
    assert expected in found.host.torch_problem
    assert found.host.memory_bytes


def test_what_the_child_tells_is_read(child):
    child(
        "echo noise",
        """echo '{"host": {"python_version": "3.11.7", "torch_version": "2.13.0", """
        """"torch_problem": null, "num_cpus": 2, "memory_bytes": 5, "cuda_devices": """
        """[{"name": "NVIDIA H200", "memory_bytes": 7}]}, "nccl_version": [2, 29, 3], """
        """"import_problems": {"flash_attn_2_cuda": "undefined symbol"}}'""",
    )
    found = this_machine.probe_torch()
    assert found.host.cuda_devices[0].name == "NVIDIA H200"
    assert found.nccl_version == (2, 29, 3)
    assert found.import_problems == {"flash_attn_2_cuda": "undefined symbol"}


@pytest.mark.slow
def test_torch_stays_out_of_the_examining_process():
    source = "from memfit.cli.main import main\nmain(['doctor', '--json'])"
    assert imports_after(source, "torch") == set()


def test_programs_that_fail_or_do_not_exist_say_nothing():
    assert this_machine._output_of([sys.executable, "-c", "print(3)"]) == "3\n"
    assert this_machine._output_of([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert this_machine._output_of(["/no/such/program"]) is None
    assert this_machine._space_of(Path("/no/such/folder")) is None


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system tells no open files")
def test_a_lock_is_held_as_long_as_its_builder_lives(tmp_path):
    """A builder is killed as a user kills it: its lock stays behind, and nobody holds it open."""
    made = healthy(tmp_path)
    lock = made.add_extension("py311_cu128/fused_adam", lock=True)
    lock.unlink()
    take = f"import os, time; os.open({str(lock)!r}, os.O_CREAT | os.O_EXCL); print(flush=True); "
    with subprocess.Popen(
        [sys.executable, "-c", take + "time.sleep(60)"], stdout=subprocess.PIPE
    ) as builder:
        assert builder.stdout is not None
        builder.stdout.readline()
        seen = made.machine()
        machine = replace(seen, root=Path("/"), now_seconds=lock.stat().st_mtime + 3600)
        (held,) = [each for each in check_extensions(machine) if "lock" in each.name]
        builder.kill()
    (stale,) = [each for each in check_extensions(machine) if "lock" in each.name]
    assert held.status is Status.NOTE
    assert f"process {builder.pid}" in held.found
    assert stale.status is Status.PROBLEM


@pytest.mark.slow
def test_torch_reads_the_older_name_of_its_settings_first():
    """What the check of the allocator takes for granted."""
    names = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_ALLOC_CONF": "no:sense"}
    source = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    done = run_python("-c", source, check=True, env=environment(**names))
    assert done.stdout == "max_split_size_mb:128\n"
