"""What the flags of ``memfit train wpo-sgm`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError
from memfit_workloads.memory_settings import MemorySettings, SystemSettings, read_flags
from memfit_workloads.watching import WatchSettings

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

_USUAL_SAMPLES = 500
"""Trained on where nothing is said; the centres are the first of them, so never fewer."""


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
class TrainingSettings(SystemSettings):
    """Everything that one training run is told."""

    data: DataSettings
    model: ModelSettings
    strategy: StrategySettings
    num_steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    clip_grad_norm: float | None
    scheduler: str
    eval_every: int
    seed: int
    save: Path
    checkpoint_every: int
    resume: bool
    num_generated: int

    @property
    def folder(self) -> Path:
        """Return where the run lies."""
        return self.save / f"strategy_{self.strategy.name}" / f"centers_{self.model.num_centres}"


def settings_from(args: argparse.Namespace, command: str) -> TrainingSettings:
    """Turn parsed flags into settings.

    Raises:
        UsageError: if flags contradict each other.
    """
    num_train = args.train_samples_size or max(_USUAL_SAMPLES, args.train_kernel_size)
    if num_train < args.train_kernel_size:
        msg = (
            f"--train_kernel_size {args.train_kernel_size} needs as many training samples, since "
            f"the centres are the first of them; there are {num_train}. Raise "
            "--train_samples_size or lower --train_kernel_size."
        )
        raise UsageError(msg)
    return read_flags(
        TrainingSettings,
        args,
        data=read_flags(
            DataSettings,
            args,
            name=args.data,
            folder=args.data_dir,
            num_train=num_train,
            num_validation=args.validation_samples_size,
            num_test=args.test_samples_size,
            noise=args.data_noise,
            centre_choice=args.centers,
        ),
        model=read_flags(
            ModelSettings,
            args,
            num_centres=args.train_kernel_size,
            hidden_units=args.hiddenunits,
        ),
        strategy=_strategy_settings(args),
        memory_settings=MemorySettings.from_flags(args),
        watching=WatchSettings.from_flags(args),
        num_steps=args.niters,
        learning_rate=args.lr,
        clip_grad_norm=args.grad_clip or None,
        scheduler=args.scheduler_type,
        command=command,
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
    return read_flags(StrategySettings, args, name=args.strategy)
