"""The flags of ``memfit train naics``. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from memfit_workloads import flags

PRESETS = ("cpu", "document")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is trained, and the flags."""
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        metavar="NN",
        help="a stage of the curriculum, 01 to 05; repeated, one after the other in one run",
    )
    parser.add_argument("--chain", type=Path, metavar="FILE", help="a file that lists stages")
    parser.add_argument(
        "--demo",
        action="store_true",
        help="stages 01 and 05 in a few steps, inside half of the unplanned peak",
    )
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--config-path",
        type=Path,
        metavar="FILE",
        help="config.yaml; the folders curriculum and text_curriculum lie beside it; default: the "
        "one that comes with memfit",
    )
    group.add_argument(
        "--preset",
        choices=PRESETS,
        help="cpu lays conf/cpu.yaml over the configuration, short texts and few steps: the "
        "default without --config-path",
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="given",
        help="a setting of config.yaml, such as data_loader.batch_size=64; may be repeated",
    )
    _add_memory_and_outputs(parser)


def _add_memory_and_outputs(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group("memory")
    flags.add_memory_flags(memory)
    memory.add_argument(
        "--any-strategy",
        action="store_true",
        help="let the planner do without cached gradients",
    )
    outputs = parser.add_argument_group("outputs")
    outputs.add_argument("-o", "--output-dir", type=Path, default=Path("runs/naics"), metavar="DIR")
    outputs.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --output-dir, at the update that its last checkpoint was "
        "written after",
    )
    outputs.add_argument("--overwrite", action="store_true", help="replace the run in --output-dir")
    outputs.add_argument(
        "--no-baselines", action="store_true", help="leave out the table of what needs no training"
    )
