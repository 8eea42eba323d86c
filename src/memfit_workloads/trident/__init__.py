"""TRIDENT-Net: two nested outcomes from video, infrared, kinematics and a class, fused."""

from __future__ import annotations

import argparse

from memfit_workloads.workload import Workload

from .arguments import add_arguments
from .config_file import with_config
from .placement import with_placement
from .settings import TridentSettings, settings_from
from .table_settings import TableSettings, table_settings


def _settings_from(args: argparse.Namespace, command: str) -> TridentSettings | TableSettings:
    """Let the file of ``--config`` fill in what the flags leave open."""
    args = with_config(args, add_arguments)
    if (table := table_settings(args, add_arguments)) is not None:
        return table
    return settings_from(with_placement(args), command)


WORKLOAD = Workload(
    name="trident",
    summary="TRIDENT-Net: fuse video, infrared, kinematics and a class into two nested outcomes",
    add_arguments=add_arguments,
    settings_from=_settings_from,
    package=__name__,
)
