"""From a file to batches: which spectra belong, how they are split, and the loaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from memfit.errors import DataError

from .batches import EpochOrder, SpectrumRows
from .ms_data import PRECURSOR_MZ, MSData
from .spectra import BadRecords, DataFormat

_PRECURSOR_WIDTH_MZ = 0.5
"""Precursors closer than this, of one charge, count as one ion, fragmented again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The rows of a file to train on, and why others are not."""

    rows: list[int]
    objections: dict[str, int]
    """How many spectra each limit of the format leaves out."""


def select(ms_data: MSData, data_format: DataFormat | None, bad_records: BadRecords) -> Selected:
    """Choose the rows that can be used and belong to a format; None takes all that can be used.

    Raises:
        DataError: if none is left, or one cannot be used and such records are refused.
    """
    rows, objections = [], Counter[str]()
    for row, spectrum in ms_data.usable(bad_records):
        objection = data_format.objection(spectrum) if data_format else ""
        if objection:
            objections[objection] += 1
        else:
            rows.append(row)
    if not rows:
        reason = f"no spectrum of {len(ms_data)} is left: {dict(objections)}, "
        reason += f"{len(bad_records.found)} bad records. --dformat none takes all."
        raise DataError(str(ms_data.path), reason)
    return Selected(rows=rows, objections=dict(objections))


def molecule_keys(ms_data: MSData, rows: Sequence[int]) -> list[str]:
    """Name the molecule of each row: its SMILES without stereochemistry; spectra of one share it.

    Raises:
        DataError: if the file has no SMILES.
    """
    smiles = ms_data.column("smiles")
    marks = str.maketrans("", "", "@/\\")
    return [smiles[row].translate(marks) for row in rows]


def precursor_keys(ms_data: MSData, rows: Sequence[int]) -> list[str]:
    """Name the ion of each row: spectra whose precursors are neighbours in m/z share it."""
    mzs = np.asarray(ms_data.column(PRECURSOR_MZ))[list(rows)]
    charges = np.asarray(ms_data.column("charge"))[list(rows)]
    order = np.lexsort((mzs, charges))
    starts = np.r_[
        True, (np.diff(mzs[order]) > _PRECURSOR_WIDTH_MZ) | (np.diff(charges[order]) != 0)
    ]
    keys = np.empty(len(order), dtype=np.int64)
    keys[order] = np.cumsum(starts)
    return [str(key) for key in keys]


def split_by_group(
    groups: Sequence[str], val_fraction: float, random_seed: int
) -> tuple[list[int], list[int]]:
    """Split positions into training and validation, whole groups on one side.

    Returns:
        Positions to train on and to validate on; the latter at least one group.
    """
    names = sorted(set(groups))
    np.random.default_rng(random_seed).shuffle(names)
    wanted, num_held = val_fraction * len(groups), 0
    held_out: set[str] = set()
    counts = Counter(groups)
    for name in names[:-1] if len(names) > 1 else ():
        if held_out and num_held + counts[name] / 2 > wanted:
            break
        held_out.add(name)
        num_held += counts[name]
    train = [i for i, group in enumerate(groups) if group not in held_out]
    return train, [i for i, group in enumerate(groups) if group in held_out]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How batches are loaded."""

    batch_size: int
    num_workers: int = 0
    pin_memory: bool = False
    random_seed: int = 0


class DreamsData(LightningDataModule):
    """Loaders over a training and a validation set."""

    def __init__(self, train: Dataset, val: Dataset | None, settings: LoaderSettings) -> None:
        super().__init__()
        self.train_set, self.val_set, self._settings = train, val, settings
        self.order = EpochOrder(_length(train), settings.random_seed)

    def train_dataloader(self) -> DataLoader:
        """Return batches in a new order in every epoch."""
        return self._loader(self.train_set, self.order)

    def val_dataloader(self) -> Any:
        """Return the validation set in its order; an empty list without one."""
        return [] if self.val_set is None else self._loader(self.val_set, None)

    def largest_batch(self, num_samples: int) -> dict[str, Tensor]:
        """Return a batch as large as any of training: rows are padded to one length."""
        samples = [self.train_set[i % _length(self.train_set)] for i in range(num_samples)]
        return default_collate(samples)

    @property
    def num_train(self) -> int:
        """Return the samples of an epoch."""
        return _length(self.train_set)

    def _loader(self, dataset: Dataset, sampler: EpochOrder | None) -> DataLoader:
        settings = self._settings
        return DataLoader(
            dataset,
            batch_size=settings.batch_size,
            sampler=sampler,
            num_workers=settings.num_workers,
            pin_memory=settings.pin_memory,
            persistent_workers=settings.num_workers > 0,
        )


def _length(dataset: Any) -> int:
    return len(dataset)


def rows_of(ms_data: MSData, rows: Sequence[int], max_peaks_n: int) -> SpectrumRows:
    """Return rows of a file as the model's input."""
    return SpectrumRows(ms_data=ms_data, rows=list(rows), max_peaks_n=max_peaks_n)


@torch.no_grad()
def in_batches(function: Any, spectra: SpectrumRows, batch_size: int) -> Tensor:
    """Apply a function to all spectra, a few at a time, and return the rows on the CPU."""
    parts = []
    for start in range(0, len(spectra), batch_size):
        own = range(start, min(start + batch_size, len(spectra)))
        batch = torch.stack([spectra.padded(spectra.tokens(i)) for i in own])
        parts.append(function(batch).cpu())
    return torch.cat(parts)
