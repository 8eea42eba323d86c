"""What the flags of ``memfit train wpo-sgm`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError
from memfit_workloads.memory_settings import MemorySettings

STRATEGIES = ("auto", "single_gpu", "model_parallel", "chunked", "gradient_accumulation")
FIRST, KMEANS = "first", "kmeans"
CENTRE_CHOICES = (FIRST, KMEANS)
POLICIES = ("planner", "thresholds")
SCHEDULERS = ("one_cycle", "reduce_on_plateau", "cosine_annealing", "step", "constant")
DATASET_NAMES = (
    *("swissroll", "8gaussians", "pinwheel", "circles", "moons", "2spirals", "checkerboard"),
    *("rings", "line", "cos", "swissroll_6D_xy1", "digits"),
    *("patches8", "patches16", "patches32", "cifar10"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What is trained on."""

    name: str
    folder: Path | None
    num_train: int
    num_validation: int
    num_test: int
    whiten: bool
    noise: float
    """The variance of what is added to the samples of every step."""
    centre_choice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The mixture's sizes, without the number of dimensions, which comes from the data."""

    num_centres: int
    depth: int
    hidden_units: int
    precision: str
    stability: float
    rank: int
    noise: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySettings:
    """How the centres are worked through."""

    name: str
    chunk_size: int | None
    accumulation_steps: int
    num_ranks: int | None
    auto_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Everything that one training run is told."""

    data: DataSettings
    model: ModelSettings
    strategy: StrategySettings
    memory_settings: MemorySettings
    num_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    clip_grad_norm: float | None
    scheduler: str
    eval_every: int
    seed: int
    save: Path
    overwrite: bool
    checkpoint_every: int
    resume: bool
    num_generated: int
    command: str

    @property
    def folder(self) -> Path:
        """Return where the run lies."""
        return self.save / f"strategy_{self.strategy.name}" / f"centers_{self.model.num_centres}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        told = asdict(self)
        told["save"] = str(self.save)
        told["data"]["folder"] = None if self.data.folder is None else str(self.data.folder)
        plan_file = self.memory_settings.plan_file
        told["memory_settings"]["plan_file"] = None if plan_file is None else str(plan_file)
        return told


def settings_from(args: argparse.Namespace, command: str) -> TrainingSettings:
    """Turn parsed flags into settings.

    Raises:
        UsageError: if flags contradict each other.
    """
    if args.train_samples_size < args.train_kernel_size:
        msg = (
            f"--train_kernel_size {args.train_kernel_size} needs as many training samples, since "
            f"the centres are the first of them; there are {args.train_samples_size}. Raise "
            "--train_samples_size or lower --train_kernel_size."
        )
        raise UsageError(msg)
    return TrainingSettings(
        data=_data_settings(args),
        model=_model_settings(args),
        strategy=_strategy_settings(args),
        memory_settings=MemorySettings.from_flags(args),
        num_steps=args.niters,
        batch_size=args.batch_size,
        learning_rate=args.lr,
        weight_decay=args.weight_decay,
        clip_grad_norm=args.grad_clip or None,
        scheduler=args.scheduler_type,
        eval_every=args.eval_every,
        seed=args.seed,
        save=args.save,
        overwrite=args.overwrite,
        checkpoint_every=args.checkpoint_every,
        resume=args.resume,
        num_generated=args.num_generated,
        command=command,
    )


def _data_settings(args: argparse.Namespace) -> DataSettings:
    return DataSettings(
        name=args.data,
        folder=args.data_dir,
        num_train=args.train_samples_size,
        num_validation=args.validation_samples_size,
        num_test=args.test_samples_size,
        whiten=args.whiten,
        noise=args.data_noise,
        centre_choice=args.centers,
    )


def _model_settings(args: argparse.Namespace) -> ModelSettings:
    return ModelSettings(
        num_centres=args.train_kernel_size,
        depth=args.depth,
        hidden_units=args.hiddenunits,
        precision=args.precision,
        stability=args.stability,
        rank=args.rank,
        noise=args.noise,
    )


def _strategy_settings(args: argparse.Namespace) -> StrategySettings:
    """Read how the centres are worked through.

    Raises:
        UsageError: if flags contradict each other.
    """
    if args.plan and args.strategy != "auto":
        msg = f"--plan says how to train; leave out --strategy {args.strategy} with it."
        raise UsageError(msg)
    if args.chunk_size and args.strategy not in ("chunked", "model_parallel"):
        msg = f"--chunk_size belongs to --strategy chunked or model_parallel, not {args.strategy}."
        raise UsageError(msg)
    return StrategySettings(
        name=args.strategy,
        chunk_size=args.chunk_size,
        accumulation_steps=args.accumulation_steps,
        num_ranks=args.num_ranks,
        auto_policy=args.auto_policy,
    )
