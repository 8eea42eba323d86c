"""What the flags of ``memfit train conve`` mean, as data. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UsageError
from memfit_workloads.memory_settings import EpochSettings, MemorySettings, read_flags
from memfit_workloads.watching import WatchSettings

from .sizes import check_image, even_image

DATASETS = ("kinships", "nations", "umls")
K_VS_ALL, SINGLE = "k-vs-all", "single"
_DATASET_FOLDER = Path(__file__).parent / "datasets"
_DEFAULT_IMAGE = (10, 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFiles:
    """Where a knowledge graph is read from."""

    train: Path
    valid: Path | None = None
    test: Path | None = None
    """None reads no such triples."""
    entity_to_id: Path | None = None
    relation_to_id: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """The model's sizes and dropouts, without the numbers that come from the data."""

    embedding_dim: int
    embedding_height: int
    embedding_width: int
    output_channels: int
    kernel_height: int
    kernel_width: int
    input_dropout: float
    feature_map_dropout: float
    output_dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings(EpochSettings):
    """Everything that one training run is told."""

    files: GraphFiles
    image: ImageSettings
    memory_cleanup: bool
    """Recorded only: memfit never empties the allocator's cache, which would save nothing."""
    output_dir: Path
    checkpoint_dir: Path
    skip_bad_lines: bool
    training_target: str
    learning_rate: float
    learning_rate_decay: float
    label_smoothing: float
    num_workers: int

    @property
    def use_mixed_precision(self) -> bool:
        """Return whether autocast was asked for."""
        return any(name in self.memory_settings.require for name in ("bf16", "fp16"))

    @property
    def use_gradient_checkpointing(self) -> bool:
        """Return whether recomputation was asked for."""
        return "activation-checkpointing" in self.memory_settings.require


def settings_from(args: argparse.Namespace, command: str) -> TrainingSettings:
    """Turn parsed flags into settings.

    Raises:
        UsageError: if flags contradict each other.
    """
    require = []
    if args.use_mixed_precision:
        require.append("bf16")
    if args.use_gradient_checkpointing:
        require.append("activation-checkpointing")
    return read_flags(
        TrainingSettings,
        args,
        files=_graph_files(args),
        image=_image_settings(args),
        memory_settings=MemorySettings.from_flags(args, require),
        watching=WatchSettings.from_flags(args),
        memory_cleanup=not args.disable_memory_cleanup,
        checkpoint_dir=args.checkpoint_dir or args.output_dir / "checkpoints",
        resume=args.resume_from_checkpoint,
        command=command,
    )


def _graph_files(args: argparse.Namespace) -> GraphFiles:
    own = [getattr(args, name) for name in ("train", "valid", "test")]
    maps = [args.entity_to_id, args.relation_to_id]
    if args.dataset and any(path is not None for path in own + maps):
        msg = (
            "--dataset brings its own files; give either --dataset or --train, --valid and --test."
        )
        raise UsageError(msg)
    if args.dataset:
        return dataset_files(args.dataset)
    if any(path is None for path in own):
        msg = (
            "No graph to train on. Give --train, --valid and --test with one file each, or "
            f"--dataset with one of {', '.join(DATASETS)}."
        )
        raise UsageError(msg)
    return GraphFiles(
        train=own[0], valid=own[1], test=own[2], entity_to_id=maps[0], relation_to_id=maps[1]
    )


def dataset_files(name: str) -> GraphFiles:
    """Return the files of a graph that comes with memfit."""
    folder = _DATASET_FOLDER / name
    return GraphFiles(
        train=folder / "train.txt", valid=folder / "valid.txt", test=folder / "test.txt"
    )


def _image_settings(args: argparse.Namespace) -> ImageSettings:
    height, width = _image(args.embedding_dim, args.embedding_height, args.embedding_width)
    embedding_dim = args.embedding_dim or height * width
    check_image(embedding_dim, height, width)
    return read_flags(
        ImageSettings,
        args,
        embedding_dim=embedding_dim,
        embedding_height=height,
        embedding_width=width,
    )


def _image(embedding_dim: int | None, height: int | None, width: int | None) -> tuple[int, int]:
    """Fill in the image's sides that were not given."""
    if embedding_dim is not None and height is None and width is None:
        return even_image(embedding_dim)
    if embedding_dim is not None and height is None and width is not None:
        return max(embedding_dim // width, 1), width
    if embedding_dim is not None and width is None and height is not None:
        return height, max(embedding_dim // height, 1)
    return height or _DEFAULT_IMAGE[0], width or _DEFAULT_IMAGE[1]
