"""Every command of the document, typed with memfit's module name in place of its own."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import memfit_workloads.trident
from memfit.cli.main import main

FOLDER = Path(memfit_workloads.trident.__file__).parent
TARGETS = (
    *("deps", "verify-install", "test-cpu", "test-smoke", "train-deepspeed", "train-accelerate"),
    *("train-qlora", "monitor-memory", "check-gpu"),
)
VARIANT_A = (
    "--config tasks.yml --use-fp16 --checkpoint-every-layer --grad-accum-steps 4 "
    "--optimizer adamw8bit --zero-stage 2 --synthetic"
)
VARIANT_B = (
    "--config tasks.yml --use-fp16 --checkpoint-every-layer --grad-accum-steps 4 "
    "--optimizer paged_adamw8bit --device-map auto --max-gpu-mem 39GiB --cpu-mem 30GiB "
    "--zero-stage 0 --synthetic"
)
VARIANT_C = (
    "--config tasks.yml --use-bf16 --checkpoint-every-layer --grad-accum-steps 16 "
    "--optimizer paged_adamw8bit --qlora --device-map auto --max-gpu-mem 39GiB --synthetic"
)
ADVANCED = (
    "--config tasks.yml --synthetic --batch-size 2 --grad-accum-steps 8 --max-gpu-mem 39GiB "
    "--cpu-mem 70GiB --offload-folder ./offload --no-checkpointing --zero-stage 3"
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Stand in an empty folder, as one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (VARIANT_A, "states stay on the device in 8 bits"),
        (VARIANT_B, "--device-map auto: nothing is moved"),
        (VARIANT_C, "numerics different"),
        (ADVANCED, "of states on disk"),
    ],
    ids=["A", "B", "C", "advanced"],
)
def test_a_variant_trains_on_a_cpu_as_it_is_typed(words, says, capsys):
    pytest.importorskip("bitsandbytes")
    assert main(["train", "trident", *shlex.split(words), "--no-gpu"]) == 0
    said = capsys.readouterr().out
    assert says in said
    assert "peak: predicted" in said
    assert (Path("runs/tasks") / "final_model.pt").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Step 1 took"
)  # what single convolutions take is the processor's
def test_branches_on_the_host_train_on_a_cpu_where_nothing_is_moved(capsys):
    words = "--config tasks.yml --synthetic --no-gpu --device-map custom"
    assert main(["train", "trident", *shlex.split(words)]) == 0
    said = capsys.readouterr().out
    assert said.count("--device-map custom: nothing is moved, as the host is the device.") == 1
    assert "host-modules" not in said
    assert (Path("runs/tasks") / "final_model.pt").is_file()


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        ("--max-gpu-mem 39GB --budget 1GiB", 2, "leave one of them out"),
        ("--device-map custom --plan plan.yaml", 2, "--plan says which strategies"),
        ("--device-map custom --freeze-branches rgb", 2, "Leave one of them out"),
        ("--deepspeed-config none.json", 1, "cannot be read"),
        ("--deepspeed-config ds_config.json --use-fp16", 2, "--use-fp16 contradicts bf16"),
        ("--use-fp16 --use-bf16", 2, "leave one of them out"),
        ("--offload-folder /proc/none", 1, "nothing can be written there"),
    ],
)
def test_what_cannot_be_done_is_one_line(words, exit_code, says, capsys):
    words = f"--config tasks.yml --synthetic --no-gpu {words}"
    assert main(["train", "trident", *shlex.split(words)]) == exit_code
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert says in said.err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_limit_that_no_plan_keeps_ends_with_exit_code_3_and_what_would_help(capsys):
    words = "--config tasks.yml --synthetic --no-gpu --grad-accum-steps 4 --max-gpu-mem 2MiB"
    assert main(["train", "trident", *shlex.split(words)]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "--batch-size 1 with --grad-accum-steps 16" in line
    assert not Path("runs").exists()


@pytest.mark.slow
def test_the_module_is_the_command():
    words = [
        sys.executable,
        "-m",
        "memfit_workloads.trident",
        "--local_rank=0",
        "--zero-stage",
        "4",
    ]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "argument --zero-stage: invalid choice: 4" in found.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_of_the_document_can_be_made(target):
    made = _make("--dry-run", target)
    assert made.returncode == 0
    assert made.stdout.strip()
    assert str(FOLDER / "runs") not in made.stdout


@pytest.mark.parametrize(
    ("target", "says"), [("monitor-memory", "memfit report"), ("help", "deps")]
)
def test_targets_without_a_card_say_what_there_is(target, says):
    if shutil.which("nvidia-smi"):
        pytest.skip("this is for machines without a card")
    made = _make(target)
    assert made.returncode == 0
    assert says in made.stdout


def test_the_launcher_gets_a_word_that_it_knows():
    made = _make("--dry-run", "train-deepspeed", "LAUNCHER=/opt/deepspeed")
    (line,) = made.stdout.splitlines()
    assert line.startswith("/opt/deepspeed --num_gpus 1 --module memfit_workloads.trident ")
    without = _make("--dry-run", "train-deepspeed", "LAUNCHER=")
    assert "pip install 'memfit[deepspeed]'" in without.stdout


def _make(*words: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    line = ["make", "-s", "-f", str(FOLDER / "Makefile"), *words]
    return subprocess.run(line, capture_output=True, text=True, check=False)
