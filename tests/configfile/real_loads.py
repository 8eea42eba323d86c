"""What the frameworks themselves see in configuration files."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

Seen = dict[str, Any]
"""Values by their keys, whose parts are parted by slashes."""
NOT_IN_DEV = "it is not among the packages of the checks: pip install"


def flat(value: Any, prefix: str = "") -> Seen:
    """List everything below a value."""
    if isinstance(value, Mapping):
        pairs = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, list | tuple):
        pairs = [(str(number), part) for number, part in enumerate(value)]
    else:
        return {prefix: value}
    found: Seen = {}
    for name, part in pairs:
        found |= flat(part, f"{prefix}/{name}" if prefix else name)
    return found


def seen_by_hydra(folder: Path, *overrides: str, name: str = "config") -> Seen:
    """Put a Hydra tree together."""
    hydra = pytest.importorskip("hydra", reason=f"{NOT_IN_DEV} hydra-core")
    omegaconf = pytest.importorskip("omegaconf")
    with hydra.initialize_config_dir(str(folder.resolve()), version_base="1.3"):
        config = hydra.compose(name, overrides=list(overrides))
    return flat(omegaconf.OmegaConf.to_container(config, resolve=True))


def seen_by_omegaconf(file: Path) -> Seen:
    """Load one file and resolve what it refers to."""
    omegaconf = pytest.importorskip("omegaconf", reason=f"{NOT_IN_DEV} hydra-core")
    omegaconf.OmegaConf.register_new_resolver("now", lambda form: form, replace=True)
    return flat(omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(file), resolve=True))


def seen_by_lightning_cli(*files: Path, parser_mode: str = "yaml") -> Seen:
    """Build trainer, module and data as ``python train.py fit --config FILE`` does."""
    pytest.importorskip("jsonargparse", reason=f"{NOT_IN_DEV} 'jsonargparse[signatures]'")
    pytest.importorskip("docstring_parser")
    pytest.importorskip("omegaconf")
    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    class Built(LightningCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            """Build everything, and train nothing."""

    words = [word for file in files for word in ("--config", str(file))]
    built = Built(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        save_config_callback=None,
        parser_kwargs={"parser_mode": parser_mode},
        args=["fit", *words],
    )
    trainer = {
        "precision": built.trainer.precision,
        "accumulate_grad_batches": built.trainer.accumulate_grad_batches,
        "num_devices": built.trainer.num_devices,
        "callbacks": [type(each).__name__ for each in built.trainer.callbacks],
    }
    objects = {"trainer": trainer, "model": dict(built.model.hparams)}
    objects["data"] = dict(built.datamodule.hparams)
    return flat({"config": built.config.as_dict(), "objects": objects})


def seen_by_transformers(file: Path, group: str = "") -> Seen:
    """Read TrainingArguments as ``HfArgumentParser`` does, without a GPU."""
    from transformers import HfArgumentParser, TrainingArguments

    values = raw(file)
    for name in filter(None, group.split("/")):
        values = values[int(name)] if isinstance(values, list) else values[name]
    unseen = {"deepspeed", "fsdp", "fsdp_config", "tf32"}  # what needs a GPU, or other files
    values = {key: value for key, value in values.items() if key not in unseen}
    values |= {"use_cpu": True, "output_dir": "out"}
    (arguments,) = HfArgumentParser(TrainingArguments).parse_dict(values, allow_extra_keys=True)
    return flat({**arguments.to_dict(), "train_batch_size": arguments.train_batch_size})


def seen_by_accelerate(file: Path) -> Seen:
    """Read a file of ``accelerate config``, and what ``accelerate launch`` makes of it."""
    launch = pytest.importorskip("accelerate.commands.launch")
    loaded = pytest.importorskip("accelerate.commands.config.config_args")
    config = loaded.load_config_from_file(str(file))
    words = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    launched, _, _ = launch._validate_launch_command(words)
    return flat({"config": config.to_dict(), "launched": vars(launched)})


def seen_by_deepspeed(file: Path, num_devices: int, arguments: Path | None = None) -> Seen:
    """Read a file as DeepSpeed does; transformers fills in ``auto`` first where it is used."""
    reason = f"{NOT_IN_DEV} deepspeed"
    deepspeed = pytest.importorskip("deepspeed.runtime.config", reason=reason, exc_type=ImportError)
    config = raw(file) if arguments is None else _filled_in(file, num_devices, arguments)

    class Ranks:
        def get_data_parallel_world_size(self) -> int:
            return num_devices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed.dist, "get_rank", lambda: 0)
        read = deepspeed.DeepSpeedConfig(config, mpu=Ranks())
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers = {name: getattr(read, name) for name in names}
    switches = {"bf16": read.bfloat16_config.enabled, "fp16": read.float16_config.enabled}
    others = {key: config[key] for key in config.keys() - {*names, "bf16", "fp16"}}
    return flat({**numbers, **switches, "others": others})


def _filled_in(file: Path, num_devices: int, arguments: Path) -> Any:
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations import HfTrainerDeepSpeedConfig

    values = {key: value for key, value in raw(arguments).items() if key != "deepspeed"}
    (read,) = HfArgumentParser(TrainingArguments).parse_dict(values, allow_extra_keys=True)

    class OnSeveral:
        world_size = num_devices

        def __getattr__(self, name: str) -> Any:
            return getattr(read, name)

    filled = HfTrainerDeepSpeedConfig(str(file))
    filled.trainer_config_process(OnSeveral())
    assert filled.mismatches == []
    # What depends on the model is filled in later.
    return json.loads(json.dumps(filled.config).replace('"auto"', "1"))


def raw(file: Path) -> Any:
    """Read a file with the parser of its language."""
    text = file.read_text("utf-8-sig")
    if file.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
