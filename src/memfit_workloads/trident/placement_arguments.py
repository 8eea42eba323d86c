"""The flags that say where weights, states and activations may lie. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from memfit_workloads import flags

DEVICE_MAPS = AUTO, BALANCED, CUSTOM = ("auto", "balanced", "custom")
ZERO_STAGES = range(4)


def add_placement_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; what is not given is None."""
    group = parser.add_argument_group("placement: what may lie on the device, the host and disk")
    group.add_argument(
        "--max-gpu-mem",
        type=flags.size,
        metavar="SIZE",
        help="the device's budget, as --budget is; a peak above it ends with exit code 3",
    )
    group.add_argument(
        "--cpu-mem",
        type=flags.size,
        metavar="SIZE",
        help="what the plan may take of the host beside a GPU; default: any amount",
    )
    group.add_argument(
        "--offload-folder",
        type=Path,
        metavar="DIR",
        help="let the plan move activations and states to disk here, as far as there is room",
    )
    group.add_argument(
        "--device-map",
        choices=DEVICE_MAPS,
        help="auto: the planner may use host and disk within these bounds; balanced: as auto, on "
        "one device; custom: small branches are computed on the host",
    )
    group.add_argument(
        "--zero-stage",
        type=int,
        choices=ZERO_STAGES,
        help="1 to 3, on one process: the optimizer's states are offloaded, which is what ZeRO "
        "leaves of itself where there are no ranks to divide by",
    )
    group.add_argument(
        "--deepspeed-config",
        type=Path,
        metavar="FILE",
        help="JSON of DeepSpeed: precision, stage, offload and micro-batch are taken from it",
    )
    group.add_argument(
        "--qlora",
        action="store_true",
        help="4-bit weights and adapters in the transformer blocks; all else is trained as it is",
    )
