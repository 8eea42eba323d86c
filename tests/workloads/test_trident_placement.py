"""The flags that say where things may lie: what they mean, contradict, and say of themselves."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import memfit
from memfit.errors import DataError, NoPlanFitsError, UsageError
from memfit.units import GIB
from memfit_workloads import load_workload
from memfit_workloads.trident import offload_folder, train
from memfit_workloads.trident.__main__ import words_from
from memfit_workloads.trident.deepspeed_file import check_beside_job, read_deepspeed_file
from memfit_workloads.trident.four_bit import four_bit_base, four_bit_figures, num_weights
from memfit_workloads.trident.host_branches import saved_bytes
from memfit_workloads.trident.job import StepSettings, build_job
from memfit_workloads.trident.memory_plan import _excluded
from memfit_workloads.trident.offload_folder import spilling_to
from memfit_workloads.trident.placement_lines import placement_lines
from memfit_workloads.trident.remedies import with_remedies
from memfit_workloads.trident.settings import TridentSettings
from memfit_workloads.trident.shipped_files import DEEPSPEED, FOLDER, TASKS
from memfit_workloads.trident.sizes import DEMO, DOCUMENT
from memfit_workloads.trident.train import fixed_strategies


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Stand in a folder of no files, as one rank."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def settings_of(*words: object) -> TridentSettings:
    workload = load_workload("trident")
    parser = argparse.ArgumentParser()
    workload.add_arguments(parser)
    args = parser.parse_args(["--synthetic", *map(str, words)])
    return workload.settings_from(args, "memfit train trident")


def written(content: object, name: str = "ds.json") -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def lines_of(*words: object, is_on_cpu: bool = True) -> str:
    return "\n".join(placement_lines(settings_of(*words), is_on_cpu=is_on_cpu))


def test_limits_become_the_budgets_of_the_planner():
    settings = settings_of(
        *("--max-gpu-mem", "39GiB", "--cpu-mem", "30GiB", "--offload-folder", "out")
    )
    assert settings.memory_settings.budget_bytes == 39 * GIB
    with spilling_to(settings.placement.offload_folder):
        memory = train.placed_memory(settings)
    assert memory.host_bytes == 30 * GIB
    assert memory.disk_bytes is not None


def test_without_the_flags_nothing_changes():
    settings = settings_of()
    memory = train.placed_memory(settings)
    assert memory == settings.memory_settings
    assert (memory.host_bytes, memory.disk_bytes, memory.require) == (None, None, ())
    assert fixed_strategies(settings) == ()
    assert lines_of() == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--max-gpu-mem", "1GiB", "--budget", "2GiB"), "--max-gpu-mem and --budget both"),
        (("--max-gpu-mem", "1GiB", "--budget-fraction", "0.5"), "--budget-fraction both"),
        (("--qlora", "--plan", "plan.yaml"), "leave out --qlora"),
        (("--qlora", "--resume-from-checkpoint", "auto"), "packed weights are rounded anew"),
        (("--batch-size", "auto", "--grad-accum-steps", "4"), "leave one of them out"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(words, says):
    with pytest.raises(UsageError, match=says):
        settings_of(*words)


@pytest.mark.parametrize("number", ["2", "8"])
def test_one_of_several_ranks_says_what_works(monkeypatch, number):
    monkeypatch.setenv("WORLD_SIZE", number)
    with pytest.raises(UsageError, match=rf"WORLD_SIZE is {number}.*--num_gpus 1"):
        settings_of()
    monkeypatch.setenv("WORLD_SIZE", "1")
    settings_of()


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ((), (16, None)),
        (("--batch-size", "auto"), (16, None)),
        (("--batch-size", "2", "--grad-accum-steps", "8"), (16, 2)),
        (("--grad-accum-steps", "4"), (16, 4)),
        (("--grad-accum-steps", "16"), (16, 1)),
        (("--grad-accum-steps", "32"), (32, 1)),
    ],
)
def test_more_steps_make_micro_batches_smaller_and_not_the_batch_larger(words, sizes):
    settings = settings_of(*words)
    assert (settings.batch_size, settings.micro_batch_size) == sizes


# --- The configuration of DeepSpeed.


@pytest.mark.slow
def test_the_document_s_configuration_works_and_says_what_one_process_has_no_use_for():
    settings = settings_of("--deepspeed-config", DEEPSPEED)
    assert settings.placement.deepspeed_config == FOLDER / DEEPSPEED
    assert "bf16" in settings.memory_settings.require
    assert (settings.placement.zero_stage, settings.placement.offloads_states) == (2, True)
    said = lines_of("--deepspeed-config", DEEPSPEED)
    assert "the one that ships is used" in said
    assert "overlap_comm, contiguous_gradients: between ranks" in said
    check_beside_job(read_deepspeed_file(FOLDER / DEEPSPEED), settings.batch_size, 1.0)


def test_a_file_of_one_s_own_comes_before_the_one_that_ships():
    written({"fp16": {"enabled": True}}, DEEPSPEED)
    written("num_clips: 7\n", TASKS)
    settings = settings_of("--deepspeed-config", DEEPSPEED, "--config", TASKS)
    assert "fp16" in settings.memory_settings.require
    assert settings.data.num_clips == 7
    assert settings.placement.remarks == ()


def test_only_the_names_that_ship_are_looked_for_there():
    with pytest.raises(DataError, match=r"ds_confg\.json"):
        settings_of("--deepspeed-config", "ds_confg.json")
    with pytest.raises(DataError, match=r"conf/tasks\.yml"):
        settings_of("--config", "conf/tasks.yml")


def test_a_shipped_file_replaces_no_run_in_a_folder_that_was_named():
    assert settings_of("--config", TASKS).overwrite
    assert not settings_of("--config", TASKS, "-o", "runs/mine").overwrite


@pytest.mark.parametrize(
    ("content", "words", "says"),
    [
        ({"bf16": {"enabled": True}}, ("--use-fp16",), "--use-fp16 contradicts bf16.enabled true"),
        ({"fp16": {"enabled": True}}, ("--no-fp16",), "--no-fp16 contradicts fp16.enabled"),
        (
            {"zero_optimization": {"stage": 3}},
            ("--zero-stage", 2),
            "--zero-stage 2 contradicts stage 3",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            ("--batch-size", 2),
            "--batch-size 2 contradicts train_micro_batch_size_per_gpu 4",
        ),
        (
            {"micro_batch_per_gpu": 2},
            (),
            "no key micro_batch_per_gpu; the one that DeepSpeed reads is train_micro_batch_size_per",
        ),
        ({"gradient_acumulation_steps": 2}, (), "is gradient_accumulation_steps"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, (), "are both true"),
        ({"zero_optimization": {"stage": 5}}, (), "stage is 5; needed is 0, 1, 2 or 3"),
        ({"zero_optimization": True}, (), "zero_optimization is True; needed is an object"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
            (),
            "device is 'gpu'; there are: none, cpu, nvme",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            (),
            "needs nvme_path",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, (), "is 0; needed is a whole number"),
    ],
)
def test_what_a_configuration_contradicts_is_named_with_both(content, words, says):
    with pytest.raises(UsageError, match=says):
        settings_of("--deepspeed-config", written(content), *words)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_what_is_no_configuration_is_named(content):
    with pytest.raises(DataError, match=r"ds\.json"):
        settings_of("--deepspeed-config", written(content))


def test_sizes_and_stage_come_from_the_configuration():
    path = written(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 3,
            "train_batch_size": 6,
            "zero_optimization": {"stage": 1},
        }
    )
    settings = settings_of("--deepspeed-config", path)
    assert (settings.batch_size, settings.micro_batch_size) == (6, 2)
    assert settings.placement.zero_stage == 1
    assert not settings.placement.offloads_states
    check_beside_job(read_deepspeed_file(path), 6, 1.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"train_batch_size": 32}, "train_batch_size is 32, and the job's is 16"),
        ({"gradient_clipping": 0.5}, "gradient_clipping is 0.5, and the job clips to 1"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm is true"),
    ],
)
def test_what_contradicts_the_job_is_refused(content, says):
    with pytest.raises(UsageError, match=says):
        check_beside_job(read_deepspeed_file(written(content)), 16, 1.0)


# --- What is said, and what the planner is told.


@pytest.mark.parametrize(
    ("words", "is_on_cpu", "says"),
    [
        (("--zero-stage", 0), True, ""),
        (("--zero-stage", 2), True, "the host is the device, so states stay: 2.1 MiB (140"),
        (("--zero-stage", 2), False, "optimizer-offload, exact, keeps 2.1 MiB (140"),
        (("--zero-stage", 1, "--offload-folder", "x"), True, "of states on disk"),
        (("--zero-stage", 2, "--optimizer", "adamw8bit"), True, "would have saved 549.0 KiB (35"),
        (("--zero-stage", 3), False, "weights stay on the device: 1.1 MiB"),
        (("--device-map", "auto"), False, "what waits to the host. It is not Accelerate's"),
        (("--device-map", "auto"), True, "nothing is moved, as the host is the device"),
        (("--device-map", "auto", "--offload-folder", "x"), True, "what waits to disk"),
        (("--device-map", "balanced"), False, "there is one, so it is auto"),
        (("--device-map", "custom"), True, "custom: nothing is moved, as the host is the device"),
        (("--device-map", "custom"), False, "(3.4 MiB at the document's size) of weights"),
        (("--cpu-mem", "30GiB"), True, "--cpu-mem 30.00 GiB: the host is the device here"),
        (("--cpu-mem", "30GiB"), False, ""),
        (("--qlora",), True, "36864 of 276946 weights are packed"),
    ],
)
def test_each_flag_says_in_a_line_what_it_does_here(words, is_on_cpu, says):
    said = lines_of(*words, is_on_cpu=is_on_cpu)
    assert says in said
    assert bool(said) == bool(says)
    assert len(said.splitlines()) <= 2


@pytest.mark.parametrize(
    ("words", "requires"),
    [
        (("--zero-stage", "2"), False),
        (("--zero-stage", "0", "--offload-folder", "out"), False),
        (("--zero-stage", "2", "--offload-folder", "out"), True),
        (("--zero-stage", "2", "--offload-folder", "out", "--optimizer", "adamw8bit"), False),
        (("--zero-stage", "2", "--device", "cuda"), True),
    ],
)
def test_states_are_offloaded_where_there_is_a_place_for_them(monkeypatch, words, requires):
    monkeypatch.setattr(train, "devices", lambda name: (name or "cpu",) * 2)
    Path("out").mkdir()
    assert ("optimizer-offload" in train.placed_memory(settings_of(*words)).require) == (requires)


@pytest.mark.slow
def test_four_bit_weights_lie_in_transformer_blocks_alone_and_save_little():
    strategy = four_bit_base(DOCUMENT)
    assert strategy.freezes == "packed"
    assert len(strategy.only) == 7
    assert all(".layers." in name for name in strategy.only)
    figures = four_bit_figures(DOCUMENT, 2.03)
    assert figures.num_weights == num_weights(DOCUMENT)
    assert 0 < figures.saved_bytes < 0.15e9
    assert figures.num_packed < 0.7 * figures.num_weights
    assert {"convolution-tiling", "linear-cross-entropy", "four-bit-base"} <= set(
        _excluded([four_bit_base(DEMO)])
    )


# --- Small branches on the host.


ON_A_CARD = ("--device-map", "custom", "--device", "a100-40gb")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--optimizer", "adamw8bit"), "--optimizer adamw8bit exclude each other"),
        (("--zero-stage", "2"), "optimizer states"),
        (("--qlora",), "--qlora exclude each other"),
        (("--use-fp16",), "float16"),
    ],
)
def test_what_does_not_go_with_branches_on_the_host_is_refused_on_a_card_alone(words, says):
    with pytest.raises(UsageError, match=says):
        fixed_strategies(settings_of(*ON_A_CARD, *words))
    here = fixed_strategies(settings_of("--device-map", "custom", "--device", "cpu", *words))
    assert "host-modules" not in {each.name for each in here}


@pytest.mark.slow
def test_branches_on_the_host_leave_the_device_with_their_gradients_and_states():
    settings = settings_of(*ON_A_CARD, "--height", 16, "--width", 16)
    job = build_job(settings.sizes, StepSettings(batch_size=1))
    (fixed,) = fixed_strategies(settings)
    found = memfit.predict(job, "a100-40gb", memfit.Plan(strategies=(fixed,)))
    model, names = job.model(), settings.placement.host_modules
    sizes = [each.nbytes for name in names for each in model.get_submodule(name).parameters()]
    # The caching allocator's blocks are multiples of 512 bytes.
    blocks = [-(-each.nbytes // 512) * 512 for each in model.parameters()]
    moved_bytes = sum(-(-each // 512) * 512 for each in sizes)
    assert found.by_category["parameters"] == sum(blocks) - moved_bytes
    assert found.by_category["optimizer state"] == 2 * (sum(blocks) - moved_bytes)
    assert saved_bytes(settings.sizes, names, 8.0) == 4 * sum(sizes)
    # Weights, gradients, states and step counts.
    assert found.host_bytes == 4 * (sum(sizes) + len(sizes))


# --- Disk and limit.


def test_what_is_spilled_lies_in_the_folder_while_the_run_lasts(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/tmp")
    before = tempfile.gettempdir()
    with spilling_to(Path("offload/deep")):
        assert tempfile.gettempdir() == str(Path("offload/deep").resolve())
        assert os.environ["TMPDIR"] == tempfile.gettempdir()
    assert tempfile.gettempdir() == before
    assert os.environ["TMPDIR"] == "/tmp"
    assert list(Path("offload/deep").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named():
    Path("file").write_text("")
    with pytest.raises(DataError, match="file/folder: nothing can be written there"), spilling_to(
        Path("file/folder")
    ):  # fmt: skip
        pass


def test_a_folder_on_a_full_disk_is_named(monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match=r"No space left on device"), spilling_to(Path("out")):
            pass
    monkeypatch.setattr(offload_folder, "room_bytes", lambda folder: 1000)
    with pytest.raises(DataError, match=r"at least 64\.0 MiB are needed"), spilling_to(Path("out")):
        pass


@pytest.mark.slow
def test_remedies_are_those_that_are_left_and_say_what_would_not_help():
    error = NoPlanFitsError(39 * GIB, 44 * GIB, {"saved activations": 40 * GIB}, ("bf16",))
    words = ("--model", "document", "--batch-size", 2, "--grad-accum-steps", 8)
    said = str(with_remedies(error, settings_of(*words)))
    assert "--batch-size 1 with --grad-accum-steps 16; --use-bf16; --offload-folder DIR" in said
    assert "--zero-stage 3 (140.2 MiB) and --qlora (" in said
    assert said.endswith("together could not.")
    asked = settings_of("--qlora", "--use-bf16", "--no-checkpointing", "--offload-folder", "x")
    said = str(with_remedies(error, asked))
    assert "off: no --no-checkpointing; no --qlora" in said
    near = NoPlanFitsError(GIB, GIB + 1000, {}, ())
    assert "together could not" not in str(with_remedies(near, settings_of(*words)))


def test_the_rank_that_a_launcher_adds_is_left_out():
    words = ["--local_rank=0", "--synthetic", "--local-rank", "3", "--zero-stage", "2"]
    assert words_from(words) == ["--synthetic", "--zero-stage", "2"]


def test_settings_can_be_written_as_json():
    from memfit_workloads.memory_settings import plain_values

    settings = replace(settings_of("--deepspeed-config", DEEPSPEED), command="x")
    assert json.loads(json.dumps(plain_values(settings)))["placement"]["zero_stage"] == 2
