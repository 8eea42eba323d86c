"""The flags of ``memfit train conve``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from memfit_workloads import flags
from memfit_workloads.flags import fraction, positive, whole
from memfit_workloads.watching import add_watching_flags

from .settings import DATASETS, K_VS_ALL, SINGLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    _add_data(parser)
    _add_model(parser)
    _add_training(parser)
    _add_memory(parser)
    _add_outputs(parser)


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data: --dataset, or --train, --valid and --test")
    group.add_argument("--dataset", choices=DATASETS, help="a graph that comes with memfit")
    for name in ("train", "valid", "test"):
        group.add_argument(
            f"--{name}", type=Path, metavar="FILE", help="triples: head TAB relation TAB tail"
        )
    for name in ("entity", "relation"):
        group.add_argument(
            f"--{name}-to-id",
            type=Path,
            metavar="FILE",
            help=f"{name} ids: name TAB id; built from the triples when not given",
        )
    group.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="count and report lines that cannot be used, instead of stopping at the first",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--embedding-dim", type=whole(1), help="height x width; default 200, or what they give"
    )
    group.add_argument("--embedding-height", type=whole(1), help="default 10")
    group.add_argument("--embedding-width", type=whole(1), help="default 20")
    group.add_argument("--output-channels", type=whole(1), default=32, help="default 32")
    group.add_argument("--kernel-height", type=whole(1), default=3, help="default 3")
    group.add_argument("--kernel-width", type=whole(1), default=3, help="default 3")
    group.add_argument("--input-dropout", type=fraction, default=0.2, help="default 0.2")
    group.add_argument("--feature-map-dropout", type=fraction, default=0.2, help="default 0.2")
    group.add_argument("--output-dropout", type=fraction, default=0.3, help="default 0.3")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--training-target",
        choices=(K_VS_ALL, SINGLE),
        default=K_VS_ALL,
        help="k-vs-all: one row per (head, relation) with all its tails, the default; "
        "single: one row per triple, whose tail alone counts as true",
    )
    group.add_argument("--num-epochs", "--epochs", type=whole(1), default=100, help="default 100")
    group.add_argument(
        "--max-steps",
        type=whole(1),
        metavar="N",
        help="end after so many steps, within an epoch too, and evaluate; default: all epochs",
    )
    group.add_argument("--batch-size", type=whole(3), default=256, help="rows; default 256")
    group.add_argument("--learning-rate", type=positive, default=0.001, help="default 0.001")
    group.add_argument(
        "--learning-rate-decay", type=positive, default=1.0, help="factor per epoch; default 1"
    )
    group.add_argument(
        "--label-smoothing", type=fraction, default=0.1, help="y' = (1 - e) y + e / N; default 0.1"
    )
    group.add_argument(
        "--eval-every", type=whole(1), default=5, help="epochs between validations; default 5"
    )
    group.add_argument(
        "--early-stopping-patience",
        type=whole(1),
        metavar="N",
        help="stop after N validations in a row without a better MRR",
    )
    group.add_argument("--random-seed", "--seed", type=whole(0), default=42, help="default 42")
    group.add_argument(
        "--num-workers",
        type=whole(0),
        default=4,
        help="accepted and recorded; batches are cut from tensors in this process",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    flags.add_memory_flags(group)
    add_watching_flags(parser.add_argument_group("watching"))
    group.add_argument(
        "--use-mixed-precision",
        action="store_true",
        help="autocast in forward and loss: bfloat16, or float16 with a gradient scaler where the "
        "device has no bfloat16 (T4, V100)",
    )
    group.add_argument(
        "--use-gradient-checkpointing",
        action="store_true",
        help="recompute the encoder's activations in backward",
    )
    group.add_argument(
        "--disable-memory-cleanup",
        action="store_true",
        help="accepted and recorded; memfit never empties the allocator's cache, which would make "
        "training slower and save nothing at the peak",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument("-o", "--output-dir", type=Path, default=Path("runs/conve"), metavar="DIR")
    group.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    group.add_argument(
        "--checkpoint-dir", type=Path, metavar="DIR", help="default: checkpoints in --output-dir"
    )
    group.add_argument(
        "--checkpoint-frequency", type=whole(1), default=2, help="in epochs; default 2"
    )
    group.add_argument(
        "--checkpoint-steps",
        type=whole(1),
        metavar="N",
        help="write a checkpoint within an epoch as well, after every N steps",
    )
    group.add_argument(
        "--resume-from-checkpoint",
        metavar="PATH",
        help="continue exactly from this checkpoint; auto takes the newest that can be read",
    )
