"""ConvE as a memfit job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from memfit.job import Job
from memfit.losses import one_to_many_bce

from .batches import QueryBatch, QueryBatches
from .data import Graph
from .model import ConvE, build_model
from .queries import Queries
from .settings import K_VS_ALL, TrainingSettings
from .sizes import ConvESizes


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


def training_batches(settings: TrainingSettings, queries: Queries) -> QueryBatches:
    """Choose how the rows are put into batches."""
    return QueryBatches.of(queries, settings.batch_size, settings.random_seed)


def build_job(settings: TrainingSettings, sizes: ConvESizes, batches: QueryBatches) -> Job:
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
        batch=batches.largest,
        loss=loss,
        optimizer=optimizer,
        batch_size=min(settings.batch_size, len(batches.queries)),
        name="conve",
    )
