"""Which triples are traced: the graph, the test triples asked about, and how training took them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memfit.errors import DataError, UsageError
from memfit_workloads.conve.data import Graph, read_watched
from memfit_workloads.conve.settings import K_VS_ALL, GraphFiles, dataset_files

from .checkpoints import read_config, run_folder_of
from .settings import TracinSettings

if TYPE_CHECKING:
    from rich.console import Console

_USUAL_SMOOTHING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """A graph, and the test triples of it that are asked about."""

    graph: Graph
    files: GraphFiles
    train_rows: Tensor
    """(n,) int64: lines of the training set, from 0, in rising order."""
    test_rows: tuple[int, ...]
    """Lines of the test set, from 0; none in mode self."""
    training_target: str
    label_smoothing: float

    @property
    def train(self) -> Tensor:
        """Return the training triples (n, 3) that are compared."""
        return self.graph.train[self.train_rows]

    @property
    def test(self) -> Tensor:
        """Return the test triples (n, 3)."""
        return self.graph.test[torch.tensor(self.test_rows, dtype=torch.int64)]


def read_question(settings: TracinSettings, console: Console) -> Question:
    """Read the graph, from the flags or from the run folder that the model lies in.

    Raises:
        DataError: if a file is missing or malformed.
        UsageError: if no graph is named, or test triples that there are not.
    """
    folder = run_folder_of(settings.model_path)
    config: dict[str, Any] = {"data": {}, "training": {}}
    if folder is not None:
        config = read_config(folder)
    training = config["training"]
    files = _files(settings, folder, config["data"])
    skips = bool(training.get("skip_bad_lines"))
    graph = read_watched(files, console, skip_bad_lines=skips)
    smoothing = settings.label_smoothing
    if smoothing is None:
        smoothing = training.get("label_smoothing", _USUAL_SMOOTHING)
    return Question(
        graph=graph,
        files=files,
        train_rows=_train_rows(settings, len(graph.train), files.train),
        test_rows=_test_rows(settings, len(graph.test), files.test),
        training_target=settings.training_target or training.get("training_target", K_VS_ALL),
        label_smoothing=smoothing,
    )


def _files(settings: TracinSettings, folder: Path | None, noted: dict[str, Any]) -> GraphFiles:
    """Put the flags before what the run folder says; the ids behind its weights lie in it."""
    if settings.dataset:
        return dataset_files(settings.dataset)

    def file(name: str) -> Path | None:
        own: Path | None = getattr(settings, name)
        if own is not None or noted.get(name) is None:
            return own
        return Path(noted[name])

    def ids(name: str) -> Path | None:
        own: Path | None = getattr(settings, name)
        if own is not None or folder is None:
            return own
        path = folder / f"{name}.txt"
        return path if path.is_file() else file(name)

    train, test = file("train"), file("test") if settings.has_test else None
    if train is None or (test is None and settings.has_test):
        msg = (
            "No graph to trace in: the model lies in no run folder. Give --train and --test with "
            "one file each and the maps --entity-to-id and --relation-to-id, or --dataset."
        )
        raise UsageError(msg)
    entities, relations = ids("entity_to_id"), ids("relation_to_id")
    # Without maps, ids are given in the order of train, valid and test.
    is_open = entities is None or relations is None
    return GraphFiles(
        train=train,
        valid=file("valid") if is_open else None,
        test=file("test") if is_open else test,
        entity_to_id=entities,
        relation_to_id=relations,
    )


def _train_rows(settings: TracinSettings, count: int, path: Path) -> Tensor:
    """Return the lines of the training set that are compared.

    Raises:
        DataError: if one of them is not there.
    """
    if settings.train_indices is None:
        return torch.arange(min(count, settings.max_train_triples or count))
    rows = sorted(settings.train_indices)
    _check_rows(rows, count, path, "--train-indices")
    return torch.tensor(rows[: settings.max_train_triples], dtype=torch.int64)


def _test_rows(settings: TracinSettings, count: int, path: Path | None) -> tuple[int, ...]:
    """Return the lines of the test set that are asked about.

    Raises:
        DataError: if one of them is not there.
    """
    if not settings.has_test:
        return ()
    rows = settings.test_indices or tuple(range(count))
    _check_rows(rows, count, path, "--test-indices")
    return rows[: settings.max_test_triples]


def _check_rows(rows: Sequence[int], count: int, path: Path | None, flag: str) -> None:
    """Refuse lines that a file does not have.

    Raises:
        DataError: with the first of them.
    """
    unknown = next((row for row in rows if row >= count), None)
    if unknown is not None:
        reason = f"it has {count} triples, 0 to {count - 1}, and {flag} asks for {unknown}."
        raise DataError(str(path), reason)
