"""NAICS: hyperbolic embeddings of industry codes from four texts, under Lightning."""

from __future__ import annotations

from memfit_workloads.naics.settings import add_arguments
from memfit_workloads.workload import Workload

from .settings import settings_of

WORKLOAD = Workload(
    name="naics",
    summary="NAICS: contrastive embeddings of industry codes, MiniLM with LoRA and experts",
    add_arguments=add_arguments,
    settings_from=settings_of,
    package=__name__,
)
