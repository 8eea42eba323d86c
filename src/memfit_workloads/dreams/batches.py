"""What one sample of pre-training and of fine-tuning is, and the order they are drawn in.

Shapes: N tokens (the precursor and ``max_peaks_n`` peaks), K masked peaks at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from .ms_data import PRECURSOR_MZ, MSData
from .spectra import prepared

MASKED_MZ = -1.0
_MASK_FRACTION = 0.3
_LEAST_MASKED = 2
_SHIFT_PROBABILITY, _LARGEST_SHIFT_MZ = 0.2, 50.0
"""Source of the four: Bushuiev et al. 2025."""


@dataclass(slots=True)
class SpectrumRows:
    """Rows of a file as the model's input, read when they are asked for."""

    ms_data: MSData
    rows: Sequence[int]
    max_peaks_n: int

    def __len__(self) -> int:
        """Return the number of spectra."""
        return len(self.rows)

    def tokens(self, index: int) -> np.ndarray:
        """Return one spectrum, (num_tokens, 2), unpadded."""
        row = self.rows[index]
        mzs, intensities = self.ms_data.peaks(row)
        precursor_mz = float(self.ms_data.column(PRECURSOR_MZ)[row])
        return prepared(mzs, intensities, precursor_mz, self.max_peaks_n)

    def padded(self, tokens: np.ndarray) -> Tensor:
        """Return tokens filled up with zeros, (max_peaks_n + 1, 2) float64."""
        out = torch.zeros(self.max_peaks_n + 1, 2, dtype=torch.float64)
        out[: len(tokens)] = torch.from_numpy(tokens)
        return out


def num_masked_at_most(max_peaks_n: int) -> int:
    """Return K."""
    return max(_LEAST_MASKED, math.floor(_MASK_FRACTION * max_peaks_n))


def mask(tokens: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Choose the peaks to mask, by intensity; never the precursor nor the base peak.

    Returns:
        Positions among the tokens, ascending; fewer than two where there are no more peaks.
    """
    intensities = tokens[:, 1]
    eligible = np.flatnonzero(intensities < 1)
    wanted = max(_LEAST_MASKED, math.floor(_MASK_FRACTION * (len(tokens) - 1)))
    if len(eligible) == 0:
        return eligible
    shares = intensities[eligible] / intensities[eligible].sum()
    size = min(wanted, len(eligible))
    return np.sort(generator.choice(eligible, size=size, replace=False, p=shares))


class PretrainingDataset(Dataset):
    """Pairs of spectra of one run, with masked peaks; an index is ``epoch * len + row``.

    What is drawn depends on the seed and the index alone, not on the number of workers.
    """

    def __init__(
        self,
        spectra: SpectrumRows,
        *,
        max_mz: float,
        mz_bin: float,
        random_seed: int,
        is_training: bool = True,
    ) -> None:
        self.spectra = spectra
        self._max_mz, self._mz_bin = max_mz, mz_bin
        self._seed, self._is_training = random_seed, is_training
        self._seconds = _retention_seconds(spectra)
        self._partners = _partners(spectra, self._seconds)

    def __len__(self) -> int:
        """Return the number of pairs in an epoch: one for each spectrum."""
        return len(self.spectra)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a pair.

        Returns:
            ``spectra`` (2, N, 2), ``positions``, ``targets`` and ``weights`` (2, K): masked tokens,
            their classes, and 1 / their number, 0 beyond it; ``earlier`` and ``is_pair`` ().
        """
        row, partner, draw = self._drawn(index)
        seconds = self._seconds
        parts = [self._one(each, draw) for each in (row, partner)]
        return {
            **{name: torch.stack([part[name] for part in parts]) for name in parts[0]},
            "earlier": torch.tensor(float(seconds[row] < seconds[partner])),
            "is_pair": torch.tensor(float(row != partner)),
        }

    def pair(self, index: int) -> tuple[int, int]:
        """Return the two spectra of a pair; one twice where it has no partner."""
        row, partner, _ = self._drawn(index)
        return row, partner

    def _drawn(self, index: int) -> tuple[int, int, np.random.Generator]:
        epoch, row = divmod(int(index), len(self))
        draw = np.random.default_rng((self._seed, epoch if self._is_training else 0, row))
        others = self._partners[row]
        if not len(others):
            return row, row, draw
        # Any but itself: the rows of one run are in one array.
        chosen = int(others[int(draw.integers(len(others) - 1))])
        return row, chosen if chosen != row else int(others[-1]), draw

    def _one(self, row: int, draw: np.random.Generator) -> dict[str, Tensor]:
        tokens = self.spectra.tokens(row)
        if self._is_training and draw.random() < _SHIFT_PROBABILITY:
            shift = draw.random() * _LARGEST_SHIFT_MZ
            if tokens[:, 0].max() + shift < self._max_mz:  # classes end there
                tokens[:, 0] += shift
        chosen = mask(tokens, draw)
        num_at_most = num_masked_at_most(self.spectra.max_peaks_n)
        positions = torch.zeros(num_at_most, dtype=torch.long)
        targets = torch.zeros(num_at_most, dtype=torch.long)
        weights = torch.zeros(num_at_most)
        if len(chosen):
            positions[: len(chosen)] = torch.from_numpy(chosen)
            targets[: len(chosen)] = mz_classes(tokens[chosen, 0], self._mz_bin, self._max_mz)
            weights[: len(chosen)] = 1 / len(chosen)
        tokens[chosen, 0] = MASKED_MZ
        return {
            "spectra": self.spectra.padded(tokens),
            "positions": positions,
            "targets": targets,
            "weights": weights,
        }


def mz_classes(mzs: np.ndarray, mz_bin: float, max_mz: float) -> Tensor:
    """Return the class of each m/z; the last one also takes what lies above."""
    last = round(max_mz / mz_bin) - 1
    return torch.from_numpy(np.minimum(np.floor(mzs / mz_bin).astype(np.int64), last))


def _retention_seconds(spectra: SpectrumRows) -> np.ndarray:
    ms_data, rows = spectra.ms_data, list(spectra.rows)
    if "RT" not in ms_data.names:
        return np.full(len(rows), np.nan)
    return np.asarray(ms_data.column("RT"), dtype=np.float64)[rows]


def _partners(spectra: SpectrumRows, seconds: np.ndarray) -> list[np.ndarray]:
    """Return, for each spectrum, the spectra of its run with a retention time; none if alone."""
    ms_data, rows = spectra.ms_data, list(spectra.rows)
    names = np.asarray(ms_data.column("name") if "name" in ms_data.names else [""] * len(ms_data))
    names = names[rows] if len(names) else names
    known = np.isfinite(seconds)
    members = {name: np.flatnonzero((names == name) & known) for name in set(names.tolist())}
    nobody = np.array([], dtype=np.int64)
    return [
        members[name] if known[i] and len(members[name]) > 1 else nobody
        for i, name in enumerate(names.tolist())
    ]


class FinetuningDataset(Dataset):
    """Spectra with what is to be predicted of each."""

    def __init__(self, spectra: SpectrumRows, targets: Tensor) -> None:
        self.spectra, self.targets = spectra, targets

    def __len__(self) -> int:
        """Return the number of spectra."""
        return len(self.spectra)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``spectra`` (1, N, 2) and ``target`` (T,)."""
        row = int(index) % len(self)
        tokens = self.spectra.padded(self.spectra.tokens(row))
        return {"spectra": tokens[None], "target": self.targets[row]}


class ContrastiveDataset(Dataset):
    """Anchor, a spectrum of the same molecule, and one of another, the nearest in precursor m/z."""

    def __init__(
        self, spectra: SpectrumRows, molecules: Sequence[str], *, random_seed: int
    ) -> None:
        self.spectra, self._seed = spectra, random_seed
        names = np.asarray(molecules)
        rows = list(spectra.rows)
        self._mzs = np.asarray(spectra.ms_data.column(PRECURSOR_MZ), dtype=np.float64)[rows]
        self._same = [
            np.setdiff1d(np.flatnonzero(names == each), [i]) for i, each in enumerate(names)
        ]
        self._other = [np.flatnonzero(names != each) for each in names]
        self.anchors = [i for i in range(len(names)) if len(self._same[i]) and len(self._other[i])]
        """Spectra whose molecule has another one."""

    def __len__(self) -> int:
        """Return the number of anchors."""
        return len(self.anchors)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``spectra`` (3, N, 2) and an empty ``target``."""
        epoch, place = divmod(int(index), len(self))
        anchor = self.anchors[place]
        draw = np.random.default_rng((self._seed, epoch, place))
        others = self._other[anchor]
        nearest = np.argsort(np.abs(self._mzs[others] - self._mzs[anchor]), kind="stable")
        negative = others[nearest[int(draw.integers(min(5, len(nearest))))]]
        rows = (anchor, int(draw.choice(self._same[anchor])), int(negative))
        tokens = [self.spectra.padded(self.spectra.tokens(row)) for row in rows]
        return {"spectra": torch.stack(tokens), "target": torch.zeros(0)}


class EpochOrder(Sampler[int]):
    """A new order in every epoch, from the seed; indices carry the epoch: ``epoch * len + row``."""

    def __init__(self, num_rows: int, random_seed: int) -> None:
        self.epoch = 0
        self._num_rows, self._seed = num_rows, random_seed

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._num_rows

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next; Lightning calls this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield the epoch's indices."""
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        order = torch.randperm(self._num_rows, generator=generator)
        yield from (order + self.epoch * self._num_rows).tolist()


def trimmed(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Cut padding that no spectrum of a batch needs; attention never sees it, so results stay."""
    spectra: Tensor = batch["spectra"]
    is_used = (spectra[..., 0] != 0).flatten(0, -2).any(0)
    longest = int(is_used.nonzero().max()) + 1 if is_used.any() else 1
    return {**batch, "spectra": spectra[..., :longest, :]}
