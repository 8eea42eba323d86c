"""ConvE as a memfit job, and the plan it is trained under."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memfit.job import Job
from memfit.losses import one_to_many_bce

from .data import Graph
from .model import ConvE, build_model
from .queries import Queries, QueryBatch
from .settings import K_VS_ALL, MemorySettings, TrainingSettings
from .sizes import ConvESizes

if TYPE_CHECKING:
    from memfit import Plan, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """The plan that a run carries out, and the figures it is held against."""

    job: Job
    plan: Plan
    plain: Prediction
    """What training would take as it is, without any strategy."""
    planned: Prediction
    budget_bytes: int | None
    run_device: str
    """``cpu`` or ``cuda``."""


def sizes_for(settings: TrainingSettings, graph: Graph) -> ConvESizes:
    """Put the sizes from the flags and from the data together."""
    return ConvESizes(
        num_entities=graph.num_entities,
        num_relations=graph.num_relations,
        **asdict(settings.image),
    )


def training_queries(settings: TrainingSettings, graph: Graph) -> Queries:
    """Make the rows to train on."""
    make = Queries.grouped if settings.training_target == K_VS_ALL else Queries.one_per_triple
    return make(graph.train, graph.num_relations)


def build_job(settings: TrainingSettings, sizes: ConvESizes, queries: Queries) -> Job:
    """Describe one training step of ConvE to memfit.

    The loss is memfit's own one-to-many loss, so that a plan can stream it over the entities.
    """

    def loss(model: nn.Module, batch: QueryBatch) -> Tensor:
        assert isinstance(model, ConvE), "the job's model() gives a ConvE"
        return one_to_many_bce(
            model.encode(batch.heads, batch.relations),
            model.entity_embedding.weight,
            model.entity_bias,
            batch.positives,
            label_smoothing=settings.label_smoothing,
        )

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=settings.learning_rate)

    return Job(
        model=lambda: build_model(sizes, settings.random_seed),
        batch=queries.largest_batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=min(settings.batch_size, len(queries)),
        name="conve",
    )


def plan_memory(job: Job, settings: MemorySettings) -> PlannedMemory:
    """Predict the job as it is, and find or read the plan that it is trained under.

    Raises:
        NoPlanFitsError: if no plan keeps the step inside the budget.
        PlanFileError: if ``--plan`` cannot be read.
    """
    import memfit

    run_device, device = _devices(settings.device)
    plain = memfit.predict(job, device=device)
    budget_bytes = settings.budget_bytes
    if settings.budget_fraction is not None:
        budget_bytes = int(settings.budget_fraction * plain.bounded_bytes())
    if settings.plan_file is not None:
        plan = memfit.Plan.load(settings.plan_file)
    else:
        plan = memfit.plan(
            job,
            device=device,
            budget=budget_bytes,
            allow=list(settings.allow),
            require=list(settings.require),
        )
    planned = plan.prediction
    if planned is None:
        planned = memfit.predict(job, device=device, plan=plan)
        plan = plan.with_prediction(planned)
    return PlannedMemory(
        job=job,
        plan=plan,
        plain=plain,
        planned=planned,
        budget_bytes=budget_bytes,
        run_device=run_device,
    )


def _devices(name: str | None) -> tuple[str, str]:
    """Give where to run (``cpu`` or ``cuda``) and the catalogue's name for it."""
    from memfit.devices.catalogue import current_device_name

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] == "cuda":
        return name, current_device_name()
    return ("cpu" if name == "cpu" else "cuda"), name
