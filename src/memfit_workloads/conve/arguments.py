"""The flags of ``memfit train conve``. Imports no torch."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from memfit.units import parse_bytes

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
        "--embedding-dim", type=_whole(1), help="height x width; default 200, or what they give"
    )
    group.add_argument("--embedding-height", type=_whole(1), help="default 10")
    group.add_argument("--embedding-width", type=_whole(1), help="default 20")
    group.add_argument("--output-channels", type=_whole(1), default=32, help="default 32")
    group.add_argument("--kernel-height", type=_whole(1), default=3, help="default 3")
    group.add_argument("--kernel-width", type=_whole(1), default=3, help="default 3")
    group.add_argument("--input-dropout", type=_fraction, default=0.2, help="default 0.2")
    group.add_argument("--feature-map-dropout", type=_fraction, default=0.2, help="default 0.2")
    group.add_argument("--output-dropout", type=_fraction, default=0.3, help="default 0.3")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--training-target",
        choices=(K_VS_ALL, SINGLE),
        default=K_VS_ALL,
        help="k-vs-all: one row per (head, relation) with all its tails, the default; "
        "single: one row per triple, whose tail alone counts as true",
    )
    group.add_argument("--num-epochs", "--epochs", type=_whole(1), default=100, help="default 100")
    group.add_argument("--batch-size", type=_whole(3), default=256, help="rows; default 256")
    group.add_argument("--learning-rate", type=_positive, default=0.001, help="default 0.001")
    group.add_argument(
        "--learning-rate-decay", type=_positive, default=1.0, help="factor per epoch; default 1"
    )
    group.add_argument(
        "--label-smoothing", type=_fraction, default=0.1, help="y' = (1 - e) y + e / N; default 0.1"
    )
    group.add_argument(
        "--eval-every", type=_whole(1), default=5, help="epochs between validations; default 5"
    )
    group.add_argument(
        "--early-stopping-patience",
        type=_whole(1),
        metavar="N",
        help="stop after N validations in a row without a better MRR",
    )
    group.add_argument("--random-seed", "--seed", type=_whole(0), default=42, help="default 42")
    group.add_argument(
        "--num-workers",
        type=_whole(0),
        default=4,
        help="accepted and recorded; batches are cut from tensors in this process",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    group.add_argument("--device", help="cpu or cuda; default: CUDA where there is any")
    group.add_argument("--no-gpu", action="store_true", help="train on the CPU")
    budget = group.add_mutually_exclusive_group()
    budget.add_argument("--budget", type=_size, metavar="SIZE", help="such as 512MiB or 8GB")
    budget.add_argument(
        "--budget-fraction",
        type=_positive,
        metavar="F",
        help="budget as a fraction of the predicted peak without any strategy",
    )
    group.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="NAME",
        help="let the planner use a strategy that changes the numerics; may be repeated",
    )
    group.add_argument("--plan", type=Path, metavar="FILE", help="carry out this saved plan")
    group.add_argument(
        "--use-mixed-precision",
        action="store_true",
        help="bfloat16 autocast in forward and loss; needs no gradient scaler",
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
        "--checkpoint-frequency", type=_whole(1), default=2, help="in epochs; default 2"
    )
    group.add_argument(
        "--resume-from-checkpoint",
        metavar="PATH",
        help="continue exactly from this checkpoint; auto takes the newest that can be read",
    )


def command_of(args: argparse.Namespace) -> str:
    """Write the command line that repeats a run, with the flags that differ from their defaults."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    words = ["memfit", "train", "conve"]
    for action in parser._actions:
        value = getattr(args, action.dest)
        flag = max(action.option_strings, key=len)
        if value == action.default:
            continue
        if value is True:
            words.append(flag)
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [flag, str(each)]
    return shlex.join(words)


def _whole(lowest: int) -> Callable[[str], int]:
    """Make a reader of whole numbers from ``lowest`` up."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            msg = f"{text!r} is no whole number of at least {lowest}"
            raise argparse.ArgumentTypeError(msg)
        return value

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _positive(text: str) -> float:
    value = _number(text)
    if not 0.0 < value < float("inf"):
        msg = f"{text!r} is no number above 0"
        raise argparse.ArgumentTypeError(msg)
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0.0 <= value < 1.0:
        msg = f"{text!r} is no number from 0 to below 1"
        raise argparse.ArgumentTypeError(msg)
    return value


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
