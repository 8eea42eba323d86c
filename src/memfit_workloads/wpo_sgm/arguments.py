"""The flags of ``memfit train wpo-sgm``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit_workloads import flags
from memfit_workloads.flags import not_negative, positive, whole
from memfit_workloads.watching import add_watching_flags

from .settings import CENTRE_CHOICES, DATASET_NAMES, FIRST, POLICIES, SCHEDULERS, STRATEGIES
from .sizes import EPS, PRECISIONS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    _add_data(parser)
    _add_model(parser)
    _add_training(parser)
    _add_memory(parser)
    _add_outputs(parser)


def _add(group: Any, name: str, **how: Any) -> None:
    """Declare a flag as the document writes it, and with hyphens."""
    group.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, **how)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        default="cifar10",
        metavar="NAME",
        help=f"{', '.join(DATASET_NAMES)}, or a file (.npy, .pt) with one sample per row; "
        "default cifar10",
    )
    _add(group, "data_dir", type=Path, metavar="DIR", help="where CIFAR-10 lies; default ./data")
    _add(
        group,
        "train_samples_size",
        type=whole(1),
        help="samples to train on; default 500, or as many as there are centres",
    )
    _add(group, "validation_samples_size", type=whole(1), default=200, help="default 200")
    _add(group, "test_samples_size", type=whole(2), default=200, help="default 200")
    group.add_argument(
        "--whiten",
        action="store_true",
        help="train in coordinates in which the training samples have unit covariance; figures "
        "and pictures stay those of the data",
    )
    _add(
        group,
        "data_noise",
        type=not_negative,
        default=0.0,
        metavar="V",
        help="variance of the noise added to the samples of every step; smooths edges of the "
        "data's density, which score matching cannot follow; default 0",
    )
    group.add_argument(
        "--centers",
        choices=CENTRE_CHOICES,
        default=FIRST,
        help="first: the first training samples, the default; kmeans: the means of clusters",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    _add(
        group,
        "train_kernel_size",
        type=whole(1),
        default=50,
        metavar="K",
        help="number of centres; default 50",
    )
    group.add_argument("--depth", type=whole(1), default=5, help="hidden layers; default 5")
    group.add_argument("--hiddenunits", type=whole(1), default=64, help="default 64")
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=EPS,
        help="of a kernel: eps, L L^T + stability I, the default; softplus, "
        "L L^T with a positive diagonal, far cheaper in many dimensions; low_rank, another model",
    )
    group.add_argument("--stability", type=not_negative, default=0.01, help="default 0.01")
    group.add_argument("--rank", type=whole(1), default=8, help="of low_rank; default 8")
    group.add_argument(
        "--noise", type=not_negative, default=0.0, metavar="V", help="variance added to the mixture"
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--niters", type=whole(1), default=1000, help="steps; default 1000")
    _add(group, "batch_size", type=whole(1), default=8, help="default 8")
    group.add_argument("--lr", type=positive, default=1e-4, help="AdamW; default 0.0001")
    _add(group, "weight_decay", type=not_negative, default=1e-4, help="default 0.0001")
    _add(
        group,
        "grad_clip",
        type=not_negative,
        default=1.0,
        help="largest norm of all gradients together; 0 clips nothing; default 1",
    )
    _add(
        group,
        "scheduler_type",
        choices=SCHEDULERS,
        default="one_cycle",
        help="of the learning rate; default one_cycle",
    )
    _add(
        group,
        "eval_every",
        type=whole(1),
        default=100,
        help="steps between validations; default 100",
    )
    group.add_argument("--seed", type=whole(0), default=42, help="default 42")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="auto",
        help="auto: the fastest plan that fits, the default; single_gpu: everything at once; "
        "chunked: --chunk_size centres at a time; gradient_accumulation: the centres in "
        "--accumulation_steps parts; model_parallel: the centres split over ranks. All train the "
        "same objective",
    )
    _add(group, "chunk_size", type=whole(1), metavar="C", help="default: found from the budget")
    _add(group, "accumulation_steps", type=whole(1), default=4, help="default 4")
    _add(
        group,
        "num_ranks",
        type=whole(1),
        help="processes that model_parallel starts; default one per GPU, or two without GPUs. Not "
        "needed under torchrun",
    )
    _add(
        group,
        "auto_policy",
        choices=POLICIES,
        default="planner",
        help="how auto chooses: planner, the default; thresholds, the document's shares of a "
        "GPU's memory",
    )
    flags.add_memory_flags(group)
    add_watching_flags(parser.add_argument_group("watching"))


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument(
        "--save",
        type=Path,
        default=Path("runs/wpo-sgm"),
        metavar="DIR",
        help="the run lies in strategy_NAME/centers_K in there; default runs/wpo-sgm",
    )
    group.add_argument("--overwrite", action="store_true", help="replace the run that lies there")
    _add(group, "checkpoint_every", type=whole(1), default=500, help="in steps; default 500")
    group.add_argument(
        "--resume", action="store_true", help="continue exactly from latest_checkpoint.pth"
    )
    _add(
        group,
        "num_generated",
        type=whole(4),
        default=1000,
        help="samples to draw at the end; default 1000",
    )
