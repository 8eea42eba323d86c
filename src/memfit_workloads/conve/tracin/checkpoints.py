"""Finds the checkpoints to trace through, and sees that they are of one model and this graph."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memfit.errors import DataError, UsageError
from memfit.journal.plain_text import parsed_json, read_plain
from memfit_workloads.checkpoint_files import read_checkpoint
from memfit_workloads.conve.data import Graph
from memfit_workloads.conve.sizes import ConvESizes

from .settings import TracinSettings

_EPOCH = re.compile(r"checkpoint_epoch_(\d+)\.pt")
_SOME = 5
_USUAL_RATE = 0.001
_REMEDY = "Give a checkpoint that `memfit train conve` wrote, or a folder of them."


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint without its weights."""

    path: Path
    sizes: ConvESizes
    epoch: int | None
    learning_rate: float
    dtype: torch.dtype
    """Of its weights."""


def find_checkpoints(settings: TracinSettings) -> list[FoundCheckpoint]:
    """Read what the chosen checkpoints say of themselves; weights stay in their files.

    Raises:
        DataError: if there is none, one cannot be used, or they are of several models.
        UsageError: if `--checkpoints` asks for what is not there.
    """
    paths: list[Path] = []
    for path in settings.model_path:
        paths += _in_folder(path, settings.checkpoints) if path.is_dir() else [path]
    found = [_read(path, settings) for path in paths]
    first = found[0]
    for other in found[1:]:
        if other.sizes != first.sizes:
            reason = (
                f"it is of another model than {first.path}: {_difference(other.sizes, first.sizes)}"
                ". Give the checkpoints of one training."
            )
            raise DataError(str(other.path), reason)
    return found


def check_graph(checkpoint: FoundCheckpoint, graph: Graph, source: Path) -> None:
    """Refuse a graph of another size than the one that a model was trained on.

    Raises:
        DataError: if the numbers of entities or relations differ.
    """
    there = (checkpoint.sizes.num_entities, checkpoint.sizes.num_relations)
    here = (graph.num_entities, graph.num_relations)
    if there != here:
        reason = (
            f"it was trained on {there[0]} entities and {there[1]} relations, and the graph of "
            f"{source} has {here[0]} and {here[1]}. Give --train, --test, --entity-to-id and "
            "--relation-to-id of that training."
        )
        raise DataError(str(checkpoint.path), reason)


def run_folder_of(paths: Sequence[Path]) -> Path | None:
    """Return the run folder that a model lies in, if it lies in one."""
    first = paths[0]
    folders = (first, first.parent) if first.is_dir() else (first.parent, first.parent.parent)
    return next((each for each in folders if (each / "config.json").is_file()), None)


def read_config(folder: Path) -> dict[str, Any]:
    """Read how the model of a run folder was trained.

    Raises:
        DataError: if the file is malformed.
    """
    path = folder / "config.json"
    try:
        content = parsed_json(read_plain(path))
        return {"data": dict(content["data"]), "training": dict(content["training"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (
            f"it does not say how a model was trained ({type(error).__name__}: {error}). Give "
            "--train and --test, or a model outside of this folder."
        )
        raise DataError(str(path), reason) from None


def _in_folder(folder: Path, which: str) -> list[Path]:
    """Return the chosen checkpoints of a folder, in the order of training."""
    by_epoch: dict[int, Path] = {}
    for place in (folder, folder / "checkpoints"):
        for path in place.glob("checkpoint_epoch_*.pt"):
            named = _EPOCH.fullmatch(path.name)
            if named:
                by_epoch.setdefault(int(named[1]), path)
    if not by_epoch:
        raise DataError(str(folder), f"there is no checkpoint_epoch_N.pt in it. {_REMEDY}")
    epochs = sorted(by_epoch)
    if which == "some":
        last = len(epochs) - 1
        places = {round(last * step / (_SOME - 1)) for step in range(_SOME)}
        epochs = [epochs[place] for place in sorted(places)]
    elif which != "all":
        epochs = _asked_for(which, epochs, folder)
    return [by_epoch[epoch] for epoch in epochs]


def _asked_for(which: str, epochs: Sequence[int], folder: Path) -> list[int]:
    words = which.replace(",", " ").split()
    there = ", ".join(map(str, epochs))
    if not words or not all(word.isdecimal() for word in words):
        msg = f"--checkpoints is all, some, or epochs such as 10,20; not {which!r}."
        raise UsageError(msg)
    for word in words:
        if int(word) not in epochs:
            msg = f"--checkpoints: {folder} has no checkpoint of epoch {word}; it has {there}."
            raise UsageError(msg)
    return sorted({int(word) for word in words})


def _read(path: Path, settings: TracinSettings) -> FoundCheckpoint:
    """Read what one checkpoint says, and compare it with the flags."""
    needed = ("model_state_dict", "model_config")
    content = read_checkpoint(path, "ConvE", needed, remedy=_REMEDY, is_mapped=True)
    try:
        sizes = ConvESizes.from_json(content["model_config"])
    except (TypeError, UsageError) as error:
        reason = f"its model_config is unusable ({error}). Needed are all sizes and dropouts."
        raise DataError(str(path), reason) from None
    for name in ("embedding_dim", "output_channels"):
        wanted, there = getattr(settings, name), getattr(sizes, name)
        if wanted is not None and wanted != there:
            flag = f"--{name.replace('_', '-')}"
            reason = f"its model has {name} {there}, and {flag} says {wanted}. Leave {flag} out."
            raise DataError(str(path), reason)
    metrics = content.get("metrics")
    noted = metrics.get("learning_rate") if isinstance(metrics, dict) else None
    return FoundCheckpoint(
        path=path,
        sizes=sizes,
        epoch=content.get("epoch"),
        learning_rate=settings.learning_rate or noted or _USUAL_RATE,
        dtype=_dtype_of(content["model_state_dict"]),
    )


def _dtype_of(state: Any) -> torch.dtype:
    bias = state.get("entity_bias") if isinstance(state, dict) else None
    return bias.dtype if isinstance(bias, torch.Tensor) else torch.float32


def _difference(other: ConvESizes, first: ConvESizes) -> str:
    mine, theirs = other.to_json(), first.to_json()
    return ", ".join(
        f"{name} {mine[name]} and not {theirs[name]}" for name in mine if mine[name] != theirs[name]
    )
