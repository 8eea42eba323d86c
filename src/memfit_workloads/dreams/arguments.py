"""The flags of ``memfit train dreams``, by the document's names. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit_workloads import flags
from memfit_workloads.flags import fraction, not_negative, positive, whole

from .settings import (
    MODELS,
    NAMES,
    PRECISIONS,
    REGIMES,
    TRAIN_REGIMES,
    DreamsSettings,
    settings_from,
)
from .sizes import FUSED, PAIRWISE, PER_KEY, PLAIN

_STANDARD: dict[str, Any] = {
    "batch_size": 1,
    "accumulate_grad_batches": 2,
    "empty_cache_every": 1,
    "gc_every": 25,
    "delete_batches": True,
    "memory_fraction": 0.95,
    "allocator_settings": "max_split_size_mb:128",
}
PRESETS: dict[str, dict[str, Any]] = {
    "standard": _STANDARD,
    "extreme": {
        **_STANDARD,
        "gc_every": 10,
        "limit_val_batches": 0.5,
        "val_check_interval": 0.5,
        "save_top_k": 1,
        "every_n_train_steps": 2000,
        "num_workers_data": 1,
        "max_peaks_n": 80,
        "num_devices": 1,
    },
}
"""What the document describes; the extreme one adds what it keeps for "if still needed"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is to be done, and the flags."""
    parser.add_argument(
        "regime",
        nargs="?",
        choices=REGIMES,
        help="pretrain and finetune train; embed writes embeddings and similarities; convert "
        "writes HDF5",
    )
    parser.add_argument(
        "--train_regime", choices=TRAIN_REGIMES, help="the document's way to say what is done"
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help="pre-train, fine-tune and embed on data that ships, inside half of the unplanned peak",
    )
    parser.add_argument(
        "--remedies",
        action="store_true",
        help="print the table of the document's remedies: its claim, predicted and measured",
    )
    _add_data(parser)
    _add_model(parser)
    _add_computation(parser)
    _add_training(parser)
    _add_finetuning(parser)
    _add_trainer(parser)
    _add_memory(parser)
    _add_outputs(parser)


def settings_of(args: argparse.Namespace, command: str) -> DreamsSettings:
    """Turn parsed flags into settings, with a preset where nothing else was asked for.

    Raises:
        UsageError: if flags contradict each other, or do not say what to do.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_from(_apply_preset(args, parser.parse_args([])), command)


def _add(group: Any, name: str, **how: Any) -> None:
    """Declare a flag as the document writes it, and with hyphens."""
    group.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, **how)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    _add(
        group,
        "dataset_pth",
        action="append",
        default=[],
        metavar="PATH",
        help=f"a .hdf5, .mgf, .mzML or .mzML.gz file, or {', '.join(NAMES)}; convert takes several",
    )
    _add(
        group,
        "dformat",
        choices=("A", "B", "none"),
        default="A",
        help="which spectra are taken, and the finest m/z: A up to m/z 1000, the default; B up to "
        "1500; none takes all",
    )
    _add(group, "max_charge", type=whole(1), default=1, help="of the format; default 1")
    _add(
        group,
        "max_peaks_n",
        type=whole(2),
        help="the highest peaks that are kept; default 60 in pre-training, 100 in fine-tuning",
    )
    _add(group, "val_frac", type=fraction, default=0.2, help="held out; default 0.2")
    _add(
        group,
        "split_by",
        choices=("scan", "group"),
        default="group",
        help="hold out whole molecules (fine-tuning) or ions (pre-training), the default, or scans",
    )
    _add(group, "in_mem", action="store_true", help="read an HDF5 file at once, not row by row")
    _add(
        group,
        "on_bad_record",
        choices=("refuse", "skip"),
        default="refuse",
        help="a record that cannot be used stops the run, the default, or is reported and left out",
    )
    _add(group, "num_workers_data", type=whole(0), default=0, help="default 0")
    _add(group, "pin_memory", action="store_true", help="pin batches for the copy to a GPU")
    _add(
        group,
        "trim_padding",
        action="store_true",
        help="cut padding that no spectrum of a batch has",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model: --model, and what differs from it")
    group.add_argument(
        "--model",
        choices=MODELS,
        default="small",
        help="small: about 0.3 million weights, for CPUs, the default; document: 116 million",
    )
    _add(group, "d_fourier", type=whole(1), help="980 in the document")
    _add(group, "d_peak", type=whole(1), help="44 in the document")
    _add(group, "fourier_width", type=whole(1), help="512 in the document")
    _add(group, "n_layers", type=whole(1), help="7 in the document")
    _add(group, "n_heads", type=whole(1), help="8 in the document")
    _add(
        group, "mz_bin", type=positive, help="class width of masked m/z in Da; 0.05 in the document"
    )
    _add(group, "dropout", type=fraction, help="default 0.1")
    group.add_argument(
        "--attention",
        choices=(FUSED, PLAIN),
        help="fused: torch's scaled dot product, the default; plain: every logit exists",
    )
    _add(
        group,
        "pre_trained_pth",
        type=Path,
        metavar="FILE",
        help="start from this backbone: final_model.pt of an earlier run; its sizes are taken",
    )
    _add(group, "head_depth", type=whole(1), default=1, help="linear layers; default 1")
    _add(
        group,
        "mz_accuracy",
        type=positive,
        help="finest period of the Fourier features in Da; default the format's, 0.01 in small",
    )


def _add_computation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the same is computed")
    group.add_argument(
        "--bias",
        choices=(PER_KEY, PAIRWISE),
        help="of attention: per_key, exact, the default; pairwise: from the document's tensor of "
        "all differences",
    )
    _add(
        group,
        "fourier_chunk",
        type=whole(0),
        metavar="N",
        help="frequencies at a time; 0: all features at once; default 256",
    )
    _add(
        group,
        "as_documented",
        action="store_true",
        help="compute as the document does, to compare: pairwise bias, all features and logits at "
        "once, batches of 2",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    _add(
        group,
        "train_objective",
        metavar="NAME",
        help="mask_mz_hot (pre-training); has_F, has_Cl, has_N, elements, a property such as qed, "
        "mol_props, fp_morgan_4096, contrastive_spec_embs (fine-tuning); default has_F",
    )
    _add(group, "batch_size", type=whole(1), help="default 16; 1 works")
    _add(
        group,
        "accumulate_grad_batches",
        type=whole(1),
        default=1,
        metavar="N",
        help="batches per update; default 1",
    )
    _add(group, "max_epochs", type=whole(1), default=20, help="default 20")
    group.add_argument("--lr", type=positive, default=1e-3, help="highest; default 0.001")
    _add(
        group,
        "warmup_steps",
        type=whole(0),
        default=0,
        help="of the Noam schedule; 0 keeps the rate, the default",
    )
    _add(group, "weight_decay", type=not_negative, default=0.0, help="default 0")
    _add(
        group,
        "gradient_clip_val",
        type=not_negative,
        default=1.0,
        help="0 clips nothing; default 1",
    )
    group.add_argument("--seed", type=whole(0), default=42, help="default 42")


def _add_finetuning(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fine-tuning")
    _add(group, "focal_gamma", type=not_negative, default=0.0, help="of has_*; default 0")
    _add(
        group,
        "unfreeze_backbone_at_epoch",
        type=whole(0),
        default=0,
        metavar="E",
        help="train the head alone before; default 0",
    )
    _add(
        group,
        "frozen_layers",
        type=whole(0),
        default=0,
        metavar="N",
        help="the first N blocks and what lies below never learn; default 0",
    )
    _add(
        group,
        "probe",
        action="append",
        type=positive,
        default=[],
        metavar="C",
        help="begin has_* with a logistic regression on the backbone's embeddings, its penalty "
        "1/C; of several C the one that is best on folds inside the training part",
    )
    group.add_argument("--folds", type=whole(2), help="cross-validate fine-tuning, by molecule")
    group.add_argument(
        "--seeds", type=whole(1), default=1, help="seeds of cross-validation; default 1"
    )


def _add_trainer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Lightning's Trainer")
    _add(
        group,
        "train_precision",
        choices=PRECISIONS,
        default="32",
        help="64, 32 (default), bf16, or 16 on a GPU",
    )
    _add(group, "num_devices", type=whole(1), default=1, help="default 1; more are refused")
    _add(
        group,
        "val_check_interval",
        type=positive,
        default=1.0,
        help="a fraction of an epoch; default 1",
    )
    _add(
        group,
        "limit_val_batches",
        type=positive,
        default=1.0,
        help="a fraction up to 1, or a number of batches; default all",
    )
    _add(group, "save_top_k", type=whole(0), default=1, help="checkpoints kept; default 1")
    _add(
        group,
        "every_n_train_steps",
        type=whole(1),
        metavar="N",
        help="steps between checkpoints; default after each validation",
    )
    _add(
        group, "wandb_project", metavar="NAME", help="log to Weights & Biases; needs memfit[wandb]"
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    flags.add_memory_flags(group)
    _add(
        group,
        "layer_by_layer",
        action="store_true",
        help="hold the activations of one block at a time: the plan has activation-checkpointing",
    )
    group.add_argument(
        "--preset", choices=tuple(PRESETS), help="the document's ready-made settings"
    )
    _add(
        group,
        "empty_cache_every",
        type=whole(1),
        metavar="N",
        help="empty the allocator's cache every N steps, as the document does; lowers no peak",
    )
    _add(group, "gc_every", type=whole(1), metavar="N", help="collect garbage every N steps")
    _add(
        group,
        "delete_batches",
        action="store_true",
        help="drop the names of batch and outputs after each step, as the document does",
    )
    _add(
        group,
        "memory_fraction",
        type=fraction,
        metavar="F",
        help="of a GPU's memory that this process may take",
    )
    _add(
        group,
        "allocator_settings",
        metavar="TEXT",
        help="PYTORCH_ALLOC_CONF, such as max_split_size_mb:128; before the GPU's first use",
    )
    _add(
        group,
        "log_memory_every",
        type=whole(1),
        metavar="N",
        help="log_memory_usage() each N steps",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument("-o", "--output-dir", type=Path, default=Path("runs/dreams"), metavar="DIR")
    group.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    _add(
        group,
        "resume_from_checkpoint",
        type=Path,
        metavar="FILE",
        help="continue from a checkpoint of this run, at the epoch after it",
    )


def _apply_preset(args: argparse.Namespace, defaults: argparse.Namespace) -> argparse.Namespace:
    """Fill in a preset where nothing else was asked for; what was typed stays.

    Args:
        args: the parsed flags.
        defaults: the same without any flag typed.

    Returns:
        New flags.
    """
    if args.preset is None:
        return args
    filled = {
        name: value
        for name, value in PRESETS[args.preset].items()
        if getattr(args, name) == getattr(defaults, name)
    }
    return argparse.Namespace(**{**vars(args), **filled})
