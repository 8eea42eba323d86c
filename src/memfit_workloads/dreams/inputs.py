"""What a run trains on, from its settings: spectra, splits, labels and data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from memfit.errors import DataError

from .batches import ContrastiveDataset, FinetuningDataset, PretrainingDataset
from .data_module import (
    DreamsData,
    LoaderSettings,
    molecule_keys,
    precursor_keys,
    rows_of,
    select,
    split_by_group,
)
from .ms_data import MSData
from .objectives import CONTRASTIVE, Objective, labelled, objective_named
from .settings import DreamsSettings
from .spectra import FORMATS, BadRecords, DataFormat, OnBadRecord

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectra:
    """The spectra of a run that belong to its format."""

    ms_data: MSData
    rows: list[int]
    objections: dict[str, int]
    bad: BadRecords

    def to_json(self) -> dict[str, object]:
        """Return what config.json says of the data."""
        return {
            "num_spectra": len(self.ms_data),
            "num_used": len(self.rows),
            "left_out_by_format": self.objections,
            "bad_records": [str(each) for each in self.bad.found],
        }


def read_inputs(settings: DreamsSettings, console: Console) -> Spectra:
    """Open the run's file and choose its spectra; what is left out is said."""
    bad = BadRecords(OnBadRecord(settings.on_bad_record))
    ms_data = MSData(settings.path, settings.in_mem, bad)
    selected = select(ms_data, data_format(settings), bad)
    spectra = Spectra(ms_data=ms_data, rows=selected.rows, objections=selected.objections, bad=bad)
    say_left_out(spectra, console)
    return spectra


def data_format(settings: DreamsSettings) -> DataFormat | None:
    """Return the format whose limits hold; None takes all spectra."""
    if settings.dformat == "none":
        return None
    return replace(FORMATS[settings.dformat], max_charge=settings.max_charge)


def say_left_out(spectra: Spectra, console: Console) -> None:
    """Print how many spectra are used, and why others are not."""
    lines = [f"{spectra.ms_data.path}: {len(spectra.rows)} of {len(spectra.ms_data)} spectra used"]
    lines += [f"  left out: {number}, {why}" for why, number in spectra.objections.items()]
    lines += [f"  skipped: {each}" for each in spectra.bad.found[:_SHOWN]]
    if (more := len(spectra.bad.found) - _SHOWN) > 0:
        lines.append(f"  skipped: {more} more, listed in config.json")
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def loader_settings(settings: DreamsSettings) -> LoaderSettings:
    """Return how batches are loaded."""
    return LoaderSettings(
        batch_size=settings.batch_size,
        num_workers=settings.num_workers_data,
        pin_memory=settings.pin_memory,
        random_seed=settings.seed,
    )


def pretraining_data(
    settings: DreamsSettings, spectra: Spectra
) -> tuple[DreamsData, list[int], list[int]]:
    """Return loaders over pairs, and the rows they train and validate on."""
    groups = _groups(settings, spectra, is_pretraining=True)
    train, val = split_by_group(groups, settings.val_frac, settings.seed)
    rows = [[spectra.rows[i] for i in part] for part in (train, val)]
    sets = [
        PretrainingDataset(
            rows_of(spectra.ms_data, part, settings.max_peaks_n),
            max_mz=settings.sizes.max_mz,
            mz_bin=settings.sizes.mz_bin,
            random_seed=settings.seed,
            is_training=is_training,
        )
        for part, is_training in zip(rows, (True, False), strict=True)
    ]
    data = DreamsData(sets[0], sets[1] if rows[1] else None, loader_settings(settings))
    return data, rows[0], rows[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Spectra with labels and the molecules they are of."""

    rows: list[int]
    labels: Tensor
    """(rows, outputs) float32."""
    molecules: list[str]
    objective: Objective


def read_labels(settings: DreamsSettings, spectra: Spectra) -> Labelled:
    """Compute the labels of an objective; an unknown molecule is refused or skipped.

    Raises:
        DataError: if the file has no SMILES, or none that is understood.
    """
    objective = objective_named(settings.train_objective, settings.sizes.d_model)
    smiles = spectra.ms_data.column("smiles")
    rows, labels = labelled(objective, spectra.ms_data.path, spectra.rows, smiles, spectra.bad)
    return Labelled(
        rows=rows,
        labels=torch.from_numpy(labels),
        molecules=molecule_keys(spectra.ms_data, rows),
        objective=objective,
    )


def finetuning_set(
    settings: DreamsSettings, spectra: Spectra, given: Labelled, part: Sequence[int]
) -> Dataset | None:
    """Return the samples of some positions; None where there are none."""
    if not part:
        return None
    rows = rows_of(spectra.ms_data, [given.rows[i] for i in part], settings.max_peaks_n)
    if given.objective.kind == CONTRASTIVE:
        molecules = [given.molecules[i] for i in part]
        pairs = ContrastiveDataset(rows, molecules, random_seed=settings.seed)
        return pairs if len(pairs) else None
    return FinetuningDataset(rows, given.labels[list(part)])


def finetuning_data(
    settings: DreamsSettings,
    spectra: Spectra,
    given: Labelled,
    train: Sequence[int],
    val: Sequence[int],
) -> DreamsData:
    """Return loaders over labelled spectra.

    Raises:
        DataError: if no sample is left to train on.
    """
    own = finetuning_set(settings, spectra, given, train)
    if own is None:
        reason = "no molecule has two spectra, which contrastive_spec_embs needs."
        raise DataError(str(spectra.ms_data.path), reason)
    held_out = finetuning_set(settings, spectra, given, val)
    return DreamsData(own, held_out, loader_settings(settings))


def split_labelled(
    settings: DreamsSettings, spectra: Spectra, given: Labelled
) -> tuple[list[int], list[int]]:
    """Split labelled spectra by molecule, by scan, or as the file's column ``fold`` says."""
    if "fold" in spectra.ms_data.names:
        folds = [str(spectra.ms_data.column("fold")[row]) for row in given.rows]
        return (
            [i for i, fold in enumerate(folds) if fold == "train"],
            [i for i, fold in enumerate(folds) if fold == "val"],
        )
    groups = given.molecules
    if settings.split_by == "scan":
        groups = [str(row) for row in given.rows]
    return split_by_group(groups, settings.val_frac, settings.seed)


def _groups(settings: DreamsSettings, spectra: Spectra, *, is_pretraining: bool) -> list[str]:
    if settings.split_by == "scan" or not is_pretraining or "charge" not in spectra.ms_data.names:
        return [str(row) for row in spectra.rows]
    return precursor_keys(spectra.ms_data, spectra.rows)
