"""Makes of settings what Lightning trains: the module, how its weights move, and the steps."""

from __future__ import annotations

from .data_module import NaicsData, StepSettings
from .inputs import Inputs, embedder_sizes
from .module import LossSettings, NaicsContrastive, OptimizerSettings
from .sampling import Stage
from .settings import NaicsSettings


def module_of(settings: NaicsSettings) -> NaicsContrastive:
    """Return the module with its first weights, which torch's generator decides."""
    loss = settings.of("loss")
    return NaicsContrastive(
        embedder_sizes(settings),
        LossSettings(
            kind=loss["kind"],
            temperature=float(loss["temperature"]),
            contrastive_weight=float(loss["contrastive_weight"]),
            hierarchy_weight=float(loss["hierarchy_weight"]),
            balance_weight=float(settings.of("model.moe.load_balancing_coef")),
            rank_weight=float(loss["rank_weight"]),
            radius_weight=float(loss["radius_reg_weight"]),
            target_radius=float(loss["target_radius"]),
        ),
        optimizer_settings(settings, settings.stages[0]),
    )


def optimizer_settings(settings: NaicsSettings, stage: Stage) -> OptimizerSettings:
    """Return how weights move in a stage, which may have a learning rate of its own."""
    training = settings.of("training")
    max_steps = training["trainer"]["max_steps"]
    return OptimizerSettings(
        learning_rate=float(stage.learning_rate or training["learning_rate"]),
        head_rate_fraction=float(training["head_rate_fraction"]),
        weight_decay=float(training["weight_decay"]),
        warmup_steps=training["warmup_steps"],
        total_steps=max_steps if max_steps > 0 else None,
    )


def data_of(settings: NaicsSettings, inputs: Inputs, stage: Stage) -> NaicsData:
    """Return the steps of a stage."""
    loader = settings.of("data_loader")
    steps = StepSettings(
        batch_size=loader["batch_size"],
        padding=loader["tokenization"]["padding"],
        negatives=loader["negatives"],
        num_workers=loader["num_workers"],
        random_seed=settings.of("seed"),
    )
    return NaicsData(inputs.tree, inputs.table, inputs.train, stage, steps)
