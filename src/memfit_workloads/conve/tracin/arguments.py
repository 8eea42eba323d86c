"""The flags of ``memfit tracin``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from memfit_workloads.conve.settings import DATASETS, K_VS_ALL, SINGLE
from memfit_workloads.flags import fraction, positive, size, whole

MODES = ("test", "self", "single")
TRAINING, TARGET, ROW = "training", "target", "row"
TAIL, BOTH = "tail", "both"
WITHOUT_EFFECT = {
    "enable_multi_gpu": "one device is used: a scan holds one model, and its chunks bound memory",
    "use_torch_compile": "a scan reads the autograd graph of the plain model, and most of its time "
    "goes into matrix products that are compiled already",
    "use_optimized_tracin": "gradients are always compared by their factors, exactly",
    "use_gradient_checkpointing": "activations of a chunk alone are held; --budget or --batch-size "
    "makes the chunk smaller",
    "disable_vectorized_gradients": "gradients are not made, one by one or together; their "
    "factors give the same scores",
    "disable_test_gradient_caching": "the factors of a chunk of test triples alone are held, and "
    "their bytes are in the predicted peak",
    "disable_memory_cleanup": "the allocator's cache is never emptied, which would save nothing at "
    "the peak",
}
"""The document's flags that nothing depends on here, each with the reason."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    _add_model(parser)
    _add_data(parser)
    _add_question(parser)
    _add_definition(parser)
    _add_layers(parser)
    _add_memory(parser)
    _add_outputs(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model-path",
        type=Path,
        nargs="+",
        required=True,
        metavar="PATH",
        help="a checkpoint, several, or a folder with checkpoint_epoch_N.pt or of a run",
    )
    group.add_argument(
        "--checkpoints",
        default="all",
        metavar="WHICH",
        help="of a folder: all, the default; some, five spread from first to last; or epochs, as "
        "in 10,20,30",
    )
    group.add_argument(
        "--learning-rate",
        type=positive,
        metavar="ETA",
        help="what scores are multiplied with; default: the rate that each checkpoint has noted, "
        "or 0.001",
    )
    group.add_argument(
        "--embedding-dim", type=whole(1), help="checked against the checkpoint, which has it"
    )
    group.add_argument(
        "--output-channels", type=whole(1), help="checked against the checkpoint, which has it"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "data: taken from the run folder of the model, if it lies in one, where not given"
    )
    group.add_argument("--dataset", choices=DATASETS, help="a graph that comes with memfit")
    for name in ("train", "valid", "test"):
        group.add_argument(
            f"--{name}", type=Path, metavar="FILE", help="triples: head TAB relation TAB tail"
        )
    for name in ("entity", "relation"):
        group.add_argument(
            f"--{name}-to-id", type=Path, metavar="FILE", help=f"{name} ids: name TAB id"
        )
    group.add_argument(
        "--node-name-dict",
        type=Path,
        metavar="FILE",
        help="labels of entities to read: name TAB label",
    )
    group.add_argument(
        "--edge-map",
        type=Path,
        metavar="FILE",
        help='labels of relations to read, as JSON: {"label, or JSON with a predicate": "name"}',
    )


def _add_question(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("question")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="test",
        help="test: what the training triples did to test triples, the default; single: to one, "
        "with a score for every training triple; self: each training triple to itself",
    )
    group.add_argument(
        "--test-indices",
        nargs="+",
        metavar="N",
        help="lines of the test set, from 0, as in 0 3 7-9; default: all, and in mode single 0",
    )
    group.add_argument("--max-test-triples", type=whole(1), metavar="N", help="at most so many")
    group.add_argument(
        "--train-indices",
        nargs="+",
        metavar="N",
        help="lines of the training set, from 0, that are compared; default: all. What counts as "
        "true of a query comes from the whole set in any case",
    )
    group.add_argument("--max-train-triples", type=whole(1), metavar="N", help="at most so many")
    group.add_argument(
        "--top-k",
        type=whole(1),
        metavar="K",
        help="how many of the most helpful and the most harmful are given; default 10, in mode "
        "single and self all",
    )


def _add_definition(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what the loss of a triple is")
    group.add_argument(
        "--loss",
        choices=(TRAINING, TARGET),
        help="training: the loss as it was trained, the default; target: binary cross-entropy of "
        "the tail's score alone, the default in mode self, as it tells wrong triples from others",
    )
    group.add_argument(
        "--triple-loss",
        choices=(ROW, TARGET),
        help="of the training loss: row, the loss of (head, relation) against all tails, the "
        "default; target, the part of it that is the triple's own score",
    )
    group.add_argument(
        "--sides",
        choices=(TAIL, BOTH),
        help="tail: the triple as it is read, the default; both: and its inverse, which the "
        "training had as well, the default in mode self",
    )
    group.add_argument(
        "--training-target",
        choices=(K_VS_ALL, SINGLE),
        help="as in memfit train conve; default: that of the run, or k-vs-all",
    )
    group.add_argument("--label-smoothing", type=fraction, help="default: that of the run, or 0.1")


def _add_layers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("parameters")
    group.add_argument(
        "--use-last-layers-only", action="store_true", help="compare the last layers alone"
    )
    group.add_argument(
        "--num-last-layers", type=whole(1), metavar="N", help="how many these are; default 2"
    )
    group.add_argument(
        "--last-layer-names",
        nargs="+",
        metavar="NAME",
        help="these parameters or modules instead, such as entity_embedding or encoder.1",
    )
    group.add_argument(
        "--unproved",
        nargs="+",
        default=[],
        metavar="NAME",
        help="leave these out of the proof, whose gradient is too large to be made even once, such "
        "as entity_embedding.weight of a large graph; they are read by the same formulas",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and time")
    group.add_argument(
        "--device",
        help="cpu or cuda; default: CUDA where there is any. With --dry-run any that `memfit "
        "devices` lists",
    )
    group.add_argument(
        "--budget", type=size, metavar="SIZE", help="such as 512MiB; it chooses the chunks"
    )
    group.add_argument(
        "--batch-size", type=whole(1), metavar="N", help="triples read at a time; default 128"
    )
    group.add_argument(
        "--use-mixed-precision",
        action="store_true",
        help="encode under bfloat16 autocast: approximate",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="say what it takes in memory and time, and end"
    )
    for name, reason in WITHOUT_EFFECT.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, action="store_true", help=f"accepted, not needed: {reason}")


def _add_outputs(parser: Any) -> None:
    group = parser.add_argument_group("outputs")
    group.add_argument("--output", type=Path, metavar="FILE", help="results as JSON")
    group.add_argument("--csv-output", type=Path, metavar="FILE", help="results as CSV")
    group.add_argument(
        "--output-per-triple",
        action="store_true",
        help="a file for each test triple besides, STEM_test_N, of each of these",
    )
    group.add_argument(
        "--page", type=Path, metavar="FILE", help="results as a page to read; needs memfit[html]"
    )
    group.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where progress is kept; the same command goes on from there. Default: beside the "
        "first output, until it is written",
    )
