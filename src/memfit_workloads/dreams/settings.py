"""What the flags of ``memfit train dreams`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit_workloads.memory_settings import MemorySettings, SystemSettings, read_flags

from .sizes import DOCUMENT, PAIRWISE, PLAIN, DreamsSizes

PRETRAIN, FINETUNE, EMBED, CONVERT = "pretrain", "finetune", "embed", "convert"
REGIMES = (PRETRAIN, FINETUNE, EMBED, CONVERT)
TRAIN_REGIMES = ("pre-training", "fine-tuning", "cv-fine-tuning")
PRECISIONS = ("64", "32", "bf16", "16")
_FOLDER = Path(__file__).parent / "datasets"
DATASETS = {
    "pesticides": _FOLDER / "matchms" / "pesticides.mgf",
    "bsa": _FOLDER / "pymzml" / "BSA1.mzML.gz",
    "peptides": _FOLDER / "casanovo" / "sample_preprocessed_spectra.mgf",
}
SMALL = DreamsSizes(
    d_fourier=48,
    d_peak=16,
    n_layers=2,
    n_heads=4,
    fourier_width=64,
    fourier_depth=3,
    mz_bin=1.0,
    mz_accuracy=1e-2,
)
NAMES = (*DATASETS, "generated:NUMBER")
MODELS = {"small": SMALL, "document": DOCUMENT}
_AS_DOCUMENTED = {
    "bias_form": PAIRWISE, "attention": PLAIN, "fourier_chunk": 0, "loss_rows": 0,
}  # fmt: skip
_DOCUMENTED_BATCH, _DEFAULT_BATCH = 2, 16
_SIZE_FLAGS = (
    "d_fourier", "d_peak", "fourier_width", "n_layers", "n_heads", "mz_bin", "mz_accuracy",
    "dropout", "attention", "fourier_chunk",
)  # fmt: skip
_MAX_MZ = {"A": 1000.0, "B": 1500.0, "none": 1500.0}
_MZ_ACCURACY = {"A": 1e-4, "B": 1e-3, "none": 1e-3}
_DEFAULT_PEAKS = {PRETRAIN: 60}
_FINETUNE_PEAKS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedies:
    """What the document does beside training; each is done as asked, and said to save nothing."""

    empty_cache_every: int | None = None
    gc_every: int | None = None
    delete_batches: bool = False
    memory_fraction: float | None = None
    allocator_settings: str | None = None
    log_memory_every: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamsSettings(SystemSettings):
    """Everything that one run is told."""

    regime: str
    sizes: DreamsSizes
    remedies: Remedies
    paths: tuple[Path, ...]
    demo: bool
    dformat: str
    max_charge: int
    max_peaks_n: int
    val_frac: float
    split_by: str
    in_mem: bool
    on_bad_record: str
    num_workers_data: int
    pin_memory: bool
    trim_padding: bool
    pre_trained_pth: Path | None
    head_depth: int
    train_objective: str
    batch_size: int
    accumulate_grad_batches: int
    max_epochs: int
    lr: float
    warmup_steps: int
    weight_decay: float
    gradient_clip_val: float
    focal_gamma: float
    unfreeze_backbone_at_epoch: int
    frozen_layers: int
    probe: list[float]
    folds: int | None
    seeds: int
    seed: int
    train_precision: str
    num_devices: int
    val_check_interval: float
    limit_val_batches: float
    save_top_k: int
    every_n_train_steps: int | None
    wandb_project: str | None
    output_dir: Path
    resume_from_checkpoint: Path | None

    @property
    def path(self) -> Path:
        """Return the one file that is read."""
        return self.paths[0]

    @property
    def val_batches(self) -> float | int:
        """Return the limit as Lightning takes it: a share up to 1, or a whole number."""
        limit = self.limit_val_batches
        return limit if limit <= 1 else int(limit)


def settings_from(args: argparse.Namespace, command: str) -> DreamsSettings:
    """Turn parsed flags into settings.

    Raises:
        UsageError: if flags contradict each other, or do not say what to do.
    """
    regime = _regime(args)
    required = ["activation-checkpointing"] if args.layer_by_layer else []
    memory_settings = MemorySettings.from_flags(args, required)
    return read_flags(
        DreamsSettings,
        args,
        regime=regime,
        sizes=_sizes(args),
        remedies=read_flags(Remedies, args),
        paths=_paths(args, regime),
        memory_settings=memory_settings,
        command=command,
        folds=_folds(args),
        batch_size=args.batch_size or (_DOCUMENTED_BATCH if args.as_documented else _DEFAULT_BATCH),
        max_peaks_n=args.max_peaks_n or _DEFAULT_PEAKS.get(regime, _FINETUNE_PEAKS),
        train_objective=_objective(args, regime),
    )


def _regime(args: argparse.Namespace) -> str:
    asked = args.regime
    if args.train_regime is not None:
        own = PRETRAIN if args.train_regime == "pre-training" else FINETUNE
        if asked not in (None, own):
            msg = f"{asked} contradicts --train_regime {args.train_regime}; leave one out."
            raise UsageError(msg)
        asked = own
    if args.demo or args.remedies:
        if asked is not None:
            msg = f"--demo and --remedies do all of their own; leave {asked} out."
            raise UsageError(msg)
        return "demo" if args.demo else "remedies"
    if asked is None:
        msg = f"Say what to do: one of {', '.join(REGIMES)}, or --demo, or --remedies."
        raise UsageError(msg)
    return asked


def _paths(args: argparse.Namespace, regime: str) -> tuple[Path, ...]:
    paths = tuple(DATASETS.get(name, Path(name)) for name in args.dataset_pth)
    if regime in REGIMES and not paths:
        msg = (
            f"No spectra to read. Give --dataset_pth FILE, or one of {', '.join(NAMES)}, which "
            "come with memfit."
        )
        raise UsageError(msg)
    if regime != CONVERT and len(paths) > 1:
        msg = "Only convert takes several --dataset_pth; make one HDF5 file of them first."
        raise UsageError(msg)
    return paths


def _folds(args: argparse.Namespace) -> int | None:
    if args.train_regime == "cv-fine-tuning":
        return args.folds or 5
    return args.folds


def _objective(args: argparse.Namespace, regime: str) -> str:
    from .objectives import FINETUNING, MASK_MZ

    own = (MASK_MZ,) if regime == PRETRAIN else FINETUNING
    objective = args.train_objective or ("has_F" if regime != PRETRAIN else MASK_MZ)
    if objective not in own:
        msg = f"--train_objective {objective} is none of {regime}. There are: {', '.join(own)}."
        raise UsageError(msg)
    return objective


def _sizes(args: argparse.Namespace) -> DreamsSizes:
    given = {name: getattr(args, name) for name in _SIZE_FLAGS if getattr(args, name) is not None}
    base = MODELS[args.model]
    accuracy = base.mz_accuracy if args.model == "small" else _MZ_ACCURACY[args.dformat]
    if args.bias is not None:
        given["bias_form"] = args.bias
    documented = _AS_DOCUMENTED if args.as_documented else {}
    given = {"mz_accuracy": accuracy, **documented, **given}
    return replace(base, max_mz=_MAX_MZ[args.dformat], **given)


def settings_json(settings: DreamsSettings) -> dict[str, Any]:
    """Return the settings as plain values, for config.json."""
    from memfit_workloads.memory_settings import plain_values

    told = plain_values(settings)
    told["paths"] = [str(path) for path in settings.paths]
    return told
