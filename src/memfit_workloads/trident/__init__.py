"""TRIDENT-Net: two nested outcomes from video, infrared, kinematics and a class, fused."""

from __future__ import annotations

from memfit_workloads.workload import Workload

from .arguments import add_arguments
from .settings import settings_from

WORKLOAD = Workload(
    name="trident",
    summary="TRIDENT-Net: fuse video, infrared, kinematics and a class into two nested outcomes",
    add_arguments=add_arguments,
    settings_from=settings_from,
    package=__name__,
)
