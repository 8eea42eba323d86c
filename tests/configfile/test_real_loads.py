"""Applied files are loaded by the frameworks that they are for: nothing else has become another.

The trees and files of ``real`` are written in the manner of public repositories.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.configfile import real_loads
from tests.configfile.corpus_cases import CASES, CORPUS, Case
from tests.configfile.real_loads import Seen

from memfit.configfile.applying import Applied, apply_plan
from memfit.configfile.changes import Wishes
from memfit.errors import ConfigFileError

REAL = Path(__file__).parent / "real"
BF16, FULL = "bf16-mixed", "32-true"
# What frameworks say of each other is not the matter here.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{each}")
    for each in ("DeprecationWarning", "FutureWarning", "UserWarning")
]


def file_of(case: Case) -> str:
    return case.file


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A folder of ``real``, what is given of it, and what must become another."""

    folder: str
    files: tuple[str, ...]
    seen: Callable[[], Seen]
    """Loads the files of the working folder."""
    changes: Seen
    product: tuple[str, ...] = ()
    """Keys whose product is the effective batch on one device."""
    devices: int | None = None


def hydra(folder: str, changes: Seen, *overrides: str, name: str = "config", **keys: Any) -> Loaded:
    keys.setdefault("product", ("data/batch_size", "trainer/accumulate_grad_batches"))
    return Loaded(
        folder=f"hydra_{folder}",
        files=(f"{name}.yaml",),
        seen=lambda: real_loads.seen_by_hydra(Path(), *overrides, name=name),
        changes=changes,
        **keys,
    )


def numbers(micro: int, steps: int, **more: Any) -> Seen:
    changes = {"data/batch_size": micro, "trainer/accumulate_grad_batches": steps}
    return changes | {key.replace("__", "/"): value for key, value in more.items()}


def cli(folder: str, steps: int, *files: str, more: Seen | None = None, mode: str = "yaml") -> Any:
    data, trainer = "data/init_args/batch_size", "trainer/accumulate_grad_batches"
    configured = {data: 4, trainer: steps, "trainer/precision": BF16, **(more or {})}
    changes = {f"config/fit/{key}": value for key, value in configured.items()}
    changes |= {"objects/data/batch_size": 4, "objects/trainer/precision": BF16}
    changes |= {"objects/trainer/accumulate_grad_batches": steps}
    if more:
        changes |= {"objects/model/batch_size": 4}
    return Loaded(
        folder=f"cli_{folder}",
        files=files,
        seen=lambda: real_loads.seen_by_lightning_cli(*map(Path, files), parser_mode=mode),
        changes=changes,
        product=("objects/data/batch_size", "objects/trainer/accumulate_grad_batches"),
    )


MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"
# transformers has two names for one switch, and shows both.
CHECKPOINTED = {"gradient_checkpointing": True, "activation_checkpointing": True}


def arguments(folder: str, file: str, steps: int, changes: Seen) -> Loaded:
    return Loaded(
        folder=f"arguments_{folder}",
        files=(file,),
        seen=lambda: real_loads.seen_by_transformers(Path(file)),
        changes={MICRO: 4, "train_batch_size": 4, STEPS: steps, **changes},
        product=("train_batch_size", STEPS),
    )


def deepspeed(folder: str, devices: int, steps: int, changes: Seen, **keys: Any) -> Loaded:
    file, args = Path(keys.pop("file", "ds.json")), keys.pop("arguments", None)
    return Loaded(
        folder=f"deepspeed_{folder}",
        files=(file.name, args) if args else (file.name,),
        seen=lambda: real_loads.seen_by_deepspeed(file, devices, Path(args) if args else None),
        changes={"train_micro_batch_size_per_gpu": 4, STEPS: steps, **changes},
        product=("train_batch_size",),
        devices=devices,
    )


def accelerate(folder: str, file: str, companion: str, changes: Seen) -> Loaded:
    return Loaded(
        folder=f"accelerate_{folder}",
        files=(file, companion),
        seen=lambda: real_loads.seen_by_accelerate(Path(file)),
        changes={f"{part}/{key}": value for key, value in changes.items() for part in PARTS}
        if "deepspeed_config/" not in "".join(changes)
        else changes,
    )


PARTS = ("config", "launched")
LOADS = [
    hydra("template", numbers(4, 32, trainer__precision=BF16), name="train"),
    hydra("template", numbers(4, 32, trainer__precision=BF16), "experiment=example", name="train"),
    hydra("self_last", numbers(4, 32, trainer__precision=BF16)),
    hydra("self_first", numbers(4, 16, trainer__precision=BF16)),
    hydra("no_self", numbers(4, 32, trainer__precision=BF16)),
    hydra("experiment_chosen", numbers(4, 30, trainer__precision=BF16)),
    hydra("anchors", numbers(4, 10, trainer__precision=BF16)),
    hydra("one_source", numbers(4, 32, trainer__precision=BF16, batch_size=4)),
    hydra(
        "interpolated",
        numbers(4, 24, trainer__precision=BF16, model__batch_size=4, eval__batch_size=4),
    ),
    hydra(
        "packages",
        {"data/batch_size": 4, "training/trainer/accumulate_grad_batches": 12},
        product=("data/batch_size", "training/trainer/accumulate_grad_batches"),
    ),
    cli("printed", 16, "config.yaml"),
    cli("two_files", 5, "trainer.yaml", "data.yaml"),
    cli("interpolated", 4, "config.yaml", mode="omegaconf", more={"model/init_args/batch_size": 4}),
    arguments("handbook", "config_full.yaml", 4, {}),
    arguments("json", "args.json", 8, {"fp16": False, "bf16": True, **CHECKPOINTED}),
    arguments("no_accumulation", "args.yaml", 8, {"bf16": True, **CHECKPOINTED}),
    arguments("finds_its_batch", "args.yaml", 8, {"bf16": True, **CHECKPOINTED}),
    deepspeed(
        "auto",
        4,
        4,
        {"bf16": True, "fp16": False},
        file="ds_config_zero3.json",
        arguments="args.yaml",
    ),
    deepspeed("half_auto", 4, 4, {"bf16": True}, arguments="args.yaml"),
    deepspeed("total", 4, 4, {"bf16": True, "fp16": False}),
    deepspeed("three", 4, 4, {"bf16": True}),
    deepspeed("micro_only", 4, 4, {"bf16": True}),
    accelerate("fsdp", "fsdp.yaml", "args.yaml", {"mixed_precision": "bf16"}),
    accelerate(
        "deepspeed",
        "default_config.yaml",
        "args.yaml",
        {
            "config/deepspeed_config/gradient_accumulation_steps": 4,
            "launched/gradient_accumulation_steps": 4,
            "config/mixed_precision": "bf16",
            "launched/mixed_precision": "bf16",
        },
    ),
    accelerate("file", "default_config.yaml", "ds.json", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LOADS, ids=lambda case: case.folder)
def test_a_framework_sees_what_is_meant_and_the_same_effective_batch(case, folder):
    shutil.copytree(REAL / case.folder, folder, dirs_exist_ok=True)
    before = case.seen()

    applied = apply_real(case.files, write=True, num_devices=case.devices)

    after = case.seen()
    assert difference(before, after) == case.changes
    product = math.prod(after[key] for key in case.product)
    assert product == math.prod(before[key] for key in case.product)
    if case.product:
        whole = product if case.devices else product * applied.changes.after.num_devices
        assert whole == applied.changes.after.effective_size


REFUSED = {
    "hydra_anchored_batch": ("config.yaml", "shared by several keys through the anchor &data"),
    "hydra_computed": ("config.yaml", "it is computed"),
    "hydra_copied_node": ("config.yaml", "no micro-batch was found"),
    "hydra_lists": ("config.yaml", "GradientAccumulationScheduler"),
    "hydra_scaled_rate": ("config.yaml", "model.optimizer.lr (config.yaml:6)"),
    "hydra_shared_package": ("config.yaml", "no micro-batch was found"),
    "hydra_twice_used": ("config.yaml", "put in twice, as data and as val_data"),
    "cli_subcommand": ("config.yaml", "no kind of configuration"),
    "deepspeed_auto": ("ds_config_zero3.json", "no micro-batch was found"),
    "deepspeed_half_auto": ("args.yaml", "deepspeed names ds.json"),
    "accelerate_file": ("default_config.yaml", "deepspeed_config_file names ds.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_framework_would_see_otherwise_is_refused(name, folder):
    file, words = REFUSED[name]
    shutil.copytree(REAL / name, folder, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with pytest.raises(ConfigFileError) as caught:
        apply_real([file], write=True)

    assert words in str(caught.value)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_every_folder_is_loaded_or_refused():
    assert {path.name for path in REAL.iterdir()} == {each.folder for each in LOADS} | {*REFUSED}


def test_a_learning_rate_written_out_is_kept_when_the_batch_is_cut(folder):
    shutil.copytree(REAL / "hydra_scaled_rate", folder, dirs_exist_ok=True)
    config = folder / "config.yaml"
    computed = "${eval:'${base_lr} * ${data.batch_size} / 256'}"
    assert computed in config.read_text()
    config.write_text(config.read_text().replace(computed, "0.1"))
    before = real_loads.seen_by_omegaconf(config)

    apply_real(["config.yaml"], write=True)

    after = real_loads.seen_by_omegaconf(config)
    assert difference(before, after) == numbers(4, 64, trainer__precision=BF16)


@pytest.mark.parametrize("case", [c for c in CASES if c.file.startswith("hydra/")], ids=file_of)
def test_the_corpus_of_trees_as_omegaconf_loads_it(case, folder, monkeypatch):
    monkeypatch.setenv("PROJECT_ROOT", "root")
    followed = {"hydra/interpolations.yaml": {"data/val_batch_size": 4}}.get(case.file, {})

    assert corpus_difference(case, real_loads.seen_by_omegaconf) == really_new(case) | followed


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.file.startswith("accelerate/")], ids=file_of
)
def test_the_corpus_of_accelerate_as_it_is_loaded(case, folder):
    found = corpus_difference(case, real_loads.seen_by_accelerate)

    assert {key: value for key, value in found.items() if key.startswith("config/")} == {
        f"config/{key}": value for key, value in really_new(case).items()
    }


ARGUMENTS = ("transformers/", "llamafactory/")


@pytest.mark.parametrize("case", [c for c in CASES if c.file.startswith(ARGUMENTS)], ids=file_of)
def test_the_corpus_of_arguments_as_transformers_reads_it(case, folder):
    if case.file.endswith("two_documents.yaml"):
        pytest.skip("transformers reads one document of a file")
    micro = next(key for key in case.changes if key.endswith(MICRO))
    group = micro.removesuffix(MICRO).strip("/")

    found = corpus_difference(case, lambda file: real_loads.seen_by_transformers(file, group))

    expected = {key.removeprefix(f"{group}/"): value for key, value in really_new(case).items()}
    if "gradient_checkpointing" in expected:
        expected |= CHECKPOINTED
    assert int(found.pop("train_batch_size", 4)) == 4
    assert found == expected


@pytest.mark.parametrize("case", [c for c in CASES if c.file.startswith("deepspeed/")], ids=file_of)
def test_the_corpus_of_deepspeed_as_it_reads_it(case, folder):
    if not case.changes:
        pytest.skip("all of it is auto, and another file decides")

    said = real_loads.raw(CORPUS / case.file)
    factors = [said.get(name) for name in ("train_micro_batch_size_per_gpu", STEPS)]
    total = said.get("train_batch_size")
    num_devices = total // math.prod(factors) if total and all(factors) else 1

    found = corpus_difference(case, lambda file: real_loads.seen_by_deepspeed(file, num_devices))

    names = {"bf16/enabled": "bf16", "fp16/enabled": "fp16"}
    assert found == {names.get(key, key): value for key, value in really_new(case).items()}


def apply_real(files: Any, *, write: bool, num_devices: int | None = None) -> Applied:
    wishes = Wishes(num_devices=num_devices)
    return apply_plan(Path("plan.yaml"), [Path(file) for file in files], wishes, write=write)


def corpus_difference(case: Case, load: Callable[[Path], Seen]) -> Seen:
    names = [Path(shutil.copy(CORPUS / each, ".")) for each in (case.file, case.companion) if each]
    before = load(names[0])
    apply_real(names, write=True)
    return difference(before, load(names[0]))


def really_new(case: Case) -> Seen:
    """Return what a file of the corpus did not say before."""
    before = real_loads.flat(real_loads.raw(CORPUS / case.file))
    missing = object()
    return {
        key: value
        for key, value in case.changes.items()
        if before.get(key, missing) != value or type(before.get(key)) is not type(value)
    }


def difference(before: Seen, after: Seen) -> Seen:
    assert not before.keys() - after.keys()
    missing = object()
    return {
        key: value
        for key, value in after.items()
        if before.get(key, missing) != value or type(before[key]) is not type(value)
    }
