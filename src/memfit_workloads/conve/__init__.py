"""ConvE: link prediction in a knowledge graph, with an exact one-to-many loss in bounded memory."""

from __future__ import annotations

from memfit_workloads.workload import Workload

from .arguments import add_arguments
from .settings import settings_from

WORKLOAD = Workload(
    name="conve",
    summary="ConvE: predict missing links of a knowledge graph",
    add_arguments=add_arguments,
    settings_from=settings_from,
    package=__name__,
)
