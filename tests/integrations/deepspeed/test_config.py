"""Configurations of DeepSpeed are complete, exact in their batch, and contradict nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import ConfigFileError, MissingExtraError, UsageError
from memfit.integrations.deepspeed import (
    ZeroChoice,
    adapted,
    choice_of,
    config_of,
    starting,
    write_config,
)

SIZES: dict[str, Any] = {"batch_size": 12, "num_ranks": 4}


def test_a_choice_becomes_a_whole_configuration(tmp_path: Path) -> None:
    choice = ZeroChoice(
        stage=3,
        micro_batch_size=3,
        offload_optimizer="cpu",
        offload_parameters="nvme",
        nvme_folder="/fast",
        precision="bf16",
        reduce_bucket_elements=1000,
    )
    config = config_of(choice, **SIZES, clip_grad_norm=0.5)
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (48, 4)
    assert config["train_micro_batch_size_per_gpu"] * 4 * 4 == config["train_batch_size"]
    assert config["managed_gradient_accumulation"] is False
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    section = config["zero_optimization"]
    assert section["reduce_bucket_size"] == 1000
    assert section["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert section["offload_param"] == {"device": "nvme", "nvme_path": "/fast"}

    path = tmp_path / "ds.json"
    write_config(config, path)
    again = adapted(path, **SIZES, clip_grad_norm=0.5)
    assert again.config == config
    assert again.changes == ()
    assert again.choice == choice == choice_of(config, 12)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"stage": 4}, "stage is 4"),
        ({"stage": 2, "offload_parameters": "cpu"}, "only stage 3 has shards of parameters"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage 1, 2 or 3"),
        ({"stage": 2, "offload_optimizer": "nvme", "nvme_folder": "/n"}, "writes nothing to disk"),
        ({"stage": 3, "offload_optimizer": "nvme"}, "nvme needs nvme_folder"),
        ({"micro_batch_size": 0}, "has to be at least 1"),
        ({"allgather_bucket_elements": 7}, "has to be even"),
        ({"stage": 0, "precision": "bf16"}, "stage is 0 and precision bf16"),
    ],
)
def test_choices_that_contradict_themselves_are_refused(
    options: dict[str, Any], fragment: str
) -> None:
    with pytest.raises(UsageError, match=fragment):
        ZeroChoice(**options)


def test_a_micro_batch_that_does_not_divide_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match=r"Sizes that do: 4, 6, 3\."):
        config_of(ZeroChoice(micro_batch_size=5), **SIZES)


def test_what_is_left_to_others_is_filled_in_and_the_rest_is_kept() -> None:
    given = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
        "tensorboard": {"enabled": True},
    }
    found = adapted(given, **SIZES, clip_grad_norm=1.0)
    assert found.config["train_batch_size"] == 48
    assert found.config["gradient_accumulation_steps"] == 3
    assert found.config["gradient_clipping"] == 1.0
    assert found.config["bf16"] == {"enabled": False}
    assert found.config["tensorboard"] == {"enabled": True}
    assert found.config["zero_optimization"]["overlap_comm"] is False
    assert found.config["zero_optimization"]["reduce_bucket_size"] == 500_000_000
    assert "train_batch_size: auto -> 48" in found.changes
    assert given["train_batch_size"] == "auto"


def test_a_file_s_own_clipping_is_taken_where_the_job_has_none() -> None:
    given = {"train_micro_batch_size_per_gpu": 12, "gradient_clipping": 0.7}
    assert adapted(given, **SIZES).config["gradient_clipping"] == 0.7


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        ({"train_batch_size": 47}, "train_batch_size is 47, and the job's is 12 on each of 4"),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            "is 8, and a rank has a batch of 12",
        ),
        ({"gradient_accumulation_steps": 5}, "which does not divide 12"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, and the job clips to 0.5"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both enabled"),
        ({"communication_data_type": "fp16"}, "rounded on their way"),
        ({"gradient_allreduce_op": "sum"}, "weighed for an average"),
        ({"optimizer": {"type": "Adam"}}, "the optimizer is the job's own"),
        ({"tensor_parallel": {"autotp_size": 2}}, "count its samples several times"),
        ({"compile": {"deepcompile": True}}, "deepcompile does not go"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm is true"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "rounds what ranks"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "only stage 3"),
        ({"zero_optimization": True}, "zero_optimization is True"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload is an older name"),
        (
            {
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
                "zero_optimization": {"stage": 1},
            },
            "Take stage 2",
        ),
    ],
)
def test_contradictions_are_refused_by_name(given: dict[str, Any], fragment: str) -> None:
    with pytest.raises(UsageError, match=fragment):
        adapted(given, **SIZES, clip_grad_norm=0.5)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_files_that_hold_no_configuration_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigFileError, match=r"ds\.json"):
        adapted(path, **SIZES)


def test_without_deepspeed_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'memfit\[deepspeed\]'"):
        starting._deepspeed()


@pytest.mark.slow
def test_deepspeed_itself_reads_what_is_written() -> None:
    config_module = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is missing")
    for stage in range(4):
        config = config_of(ZeroChoice(stage=stage, micro_batch_size=3), **{**SIZES, "num_ranks": 1})
        read = config_module.DeepSpeedConfig(json.loads(json.dumps(config)))
        assert (read.train_batch_size, read.gradient_accumulation_steps) == (12, 4)
        assert read.zero_optimization_stage == stage
        assert read.managed_gradient_accumulation is False
