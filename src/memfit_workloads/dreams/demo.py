"""``memfit train dreams --demo``: pre-train, fine-tune and embed on the data that ship."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit_workloads.memory_settings import MemorySettings
from memfit_workloads.run_files import RunFiles

from .checkpoints import FINAL
from .ms_data import HDF5_SUFFIXES, convert
from .settings import DATASETS, EMBED, FINETUNE, PRETRAIN, DreamsSettings
from .spectra import BadRecords

if TYPE_CHECKING:
    from rich.console import Console

_HALF = 0.5
_STAGES = (PRETRAIN, FINETUNE, EMBED)


def demo(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Run the three stages, each training inside half of what it takes as it is.

    Returns:
        What ``--json`` ends with: the peaks are those of the stage that takes most; ``stages`` has
        all.
    """
    root = settings.output_dir
    files = RunFiles(
        root=root, checkpoints=root / "checkpoints", own=("results.json",), final=("results.json",)
    )
    files.begin(overwrite=settings.overwrite)
    memory = settings.memory_settings
    if memory.budget_bytes is None and memory.budget_fraction is None and memory.plan_file is None:
        memory = replace(memory, budget_fraction=_HALF)
    spectra = root / f"bsa{HDF5_SUFFIXES[0]}"
    console.print(f"{convert([DATASETS['bsa']], spectra, BadRecords())} scans -> {spectra}")
    stages = {
        name: _stage(replace(settings, memory_settings=memory), name, console) for name in _STAGES
    }
    trained = [stages[name] for name in (PRETRAIN, FINETUNE)]
    largest = max(trained, key=lambda each: each["measured_peak_bytes"] or 0)
    peaks = ("plain_peak_bytes", "budget_bytes", "predicted_peak_bytes", "measured_peak_bytes")
    result = {
        "workload": "dreams",
        "regime": "demo",
        "metrics": {
            f"{name}_{key}": value
            for name, stage in stages.items()
            for key, value in stage["metrics"].items()
        },
        **{name: largest[name] for name in (*peaks, "strategies", "numerics")},
        "stages": stages,
        "run_folder": str(root),
    }
    files.write_json("results.json", result)
    return result


def _stage(settings: DreamsSettings, name: str, console: Console) -> dict[str, Any]:
    from .embedding import embed
    from .runs import finetune, pretrain

    console.rule(name)
    root = settings.output_dir
    own = replace(
        settings,
        regime=name,
        output_dir=root / name,
        overwrite=True,
        memory_settings=_without_plan(settings.memory_settings, name),
        **_OWN[name],
    )
    if name == PRETRAIN:
        return pretrain(replace(own, paths=(root / "bsa.hdf5",)), console)
    own = replace(own, paths=(DATASETS["pesticides"],), pre_trained_pth=root / PRETRAIN / FINAL)
    return finetune(own, console) if name == FINETUNE else embed(own, console)


def _without_plan(given: MemorySettings, name: str) -> MemorySettings:
    """Leave a saved plan to the first stage; it is made for that model."""
    return given if name == PRETRAIN else replace(given, plan_file=None)


_OWN: dict[str, dict[str, Any]] = {
    PRETRAIN: {
        "train_objective": "mask_mz_hot",
        "dformat": "none",
        "max_peaks_n": 32,
        "split_by": "scan",
        "batch_size": 32,
        "max_epochs": 6,
        "lr": 2e-3,
        "warmup_steps": 50,
    },
    FINETUNE: {
        "train_objective": "has_F",
        "dformat": "none",
        "max_peaks_n": 60,
        "batch_size": 32,
        "max_epochs": 15,
        "lr": 1e-3,
    },
    EMBED: {"dformat": "none", "max_peaks_n": 60, "batch_size": 32},
}
