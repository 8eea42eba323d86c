"""Spectra as they are read, what is wrong with a record, and the formats' filters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import numpy as np

from memfit.errors import DataError

Array = np.ndarray
_MOST_CHARGE = 1000


class OnBadRecord(StrEnum):
    """What is done about a record that cannot be used."""

    REFUSE = "refuse"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """One tandem mass spectrum; peaks in the order of their m/z."""

    mzs: Array
    """(num_peaks,) float64."""
    intensities: Array
    """(num_peaks,) float64, none negative."""
    precursor_mz: float
    charge: int = 1
    """Without its sign; 0 where the file does not know it."""
    smiles: str = ""
    adduct: str = ""
    retention_seconds: float = float("nan")
    name: str = ""
    """The file of the instrument's run; retention times compare within one."""
    record: str = ""
    """Where in its file it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRecord:
    """A record that cannot be used."""

    path: str
    record: str
    reason: str

    def __str__(self) -> str:
        """Name file, record and reason."""
        return f"{self.path}, {self.record}: {self.reason}"


@dataclass(slots=True)
class BadRecords:
    """Collect what cannot be used, or refuse the first."""

    on_bad: OnBadRecord = OnBadRecord.REFUSE
    found: list[BadRecord] = field(default_factory=list)

    def report(self, path: Path | str, record: str, reason: str) -> None:
        """Note a record that cannot be used.

        Raises:
            DataError: unless such records are to be skipped.
        """
        bad = BadRecord(path=str(path), record=record, reason=reason)
        if self.on_bad is OnBadRecord.REFUSE:
            raise DataError(str(path), f"{record}: {reason}. --on_bad_record skip passes over it.")
        self.found.append(bad)


def fault_of(spectrum: Spectrum) -> str:
    """Say why a spectrum cannot be used; empty if it can."""
    if len(spectrum.mzs) != len(spectrum.intensities):
        return f"{len(spectrum.mzs)} m/z values, {len(spectrum.intensities)} intensities"
    if len(spectrum.mzs) == 0:
        return "it has no peaks"
    if not np.isfinite(spectrum.mzs).all() or not np.isfinite(spectrum.intensities).all():
        return "an m/z or an intensity is no finite number (NaN or infinity)"
    if (spectrum.mzs <= 0).any():
        return "an m/z is not above 0"
    if (spectrum.intensities < 0).any() or not spectrum.intensities.any():
        return "an intensity is negative, or all are 0"
    if not np.isfinite(spectrum.precursor_mz) or spectrum.precursor_mz <= 0:
        return f"the precursor's m/z is {spectrum.precursor_mz}, needed is a number above 0"
    if abs(spectrum.charge) > _MOST_CHARGE:
        return f"the charge is beyond {_MOST_CHARGE}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFormat:
    """Which spectra are trained on.

    Source: formats A and B of Bushuiev et al., Nature Biotechnology 2025,
    doi 10.1038/s41587-025-02663-3.
    """

    name: str
    max_mz: float
    mz_accuracy: float
    """Of the instrument; the finest period of the Fourier features, in Da."""
    max_charge: int = 1
    min_peaks: int = 3
    max_peaks: int = 128
    min_amplitude: float = 20.0
    """Highest by lowest intensity above 0."""
    high_peak_fraction: float = 0.1
    min_high_peaks: int = 3

    def objection(self, spectrum: Spectrum) -> str:
        """Say by which of its limits a spectrum does not belong; empty if it does."""
        checks = (
            (0 <= spectrum.charge <= self.max_charge, f"charge above {self.max_charge}"),
            (spectrum.precursor_mz <= self.max_mz, f"precursor m/z above {self.max_mz:g}"),
            (float(spectrum.mzs.max()) <= self.max_mz, f"m/z above {self.max_mz:g}"),
            (len(spectrum.mzs) >= self.min_peaks, f"fewer than {self.min_peaks} peaks"),
            (len(spectrum.mzs) <= self.max_peaks, f"more than {self.max_peaks} peaks"),
            (_amplitude(spectrum) >= self.min_amplitude, f"amplitude below {self.min_amplitude:g}"),
            (
                self._num_high(spectrum) >= self.min_high_peaks,
                f"fewer than {self.min_high_peaks} high peaks",
            ),
        )
        return next((reason for is_kept, reason in checks if not is_kept), "")

    def _num_high(self, spectrum: Spectrum) -> int:
        highest = spectrum.intensities.max()
        return int((spectrum.intensities > self.high_peak_fraction * highest).sum())


FORMATS = {
    "A": DataFormat(name="A", max_mz=1000.0, mz_accuracy=1e-4),
    "B": DataFormat(name="B", max_mz=1500.0, mz_accuracy=1e-3),
}


def _amplitude(spectrum: Spectrum) -> float:
    above = spectrum.intensities[spectrum.intensities > 0]
    return float(above.max() / above.min())


def prepared(mzs: Array, intensities: Array, precursor_mz: float, max_peaks_n: int) -> Array:
    """Make the model's input of a spectrum.

    The ``max_peaks_n`` highest peaks are kept in the order of their m/z, intensities are divided by
    the highest, and the precursor comes first, as a peak of intensity 1.1.

    Returns:
        (n + 1, 2) float64 with n = the number of kept peaks, unpadded: m/z and intensity.
    """
    is_peak = (mzs > 0) & (intensities > 0)
    mzs, intensities = mzs[is_peak], intensities[is_peak]
    # Stable, so that of equal peaks those of lower m/z are kept, everywhere.
    highest = np.sort(np.argsort(-intensities, kind="stable")[:max_peaks_n])
    kept = np.stack([mzs[highest], intensities[highest] / intensities.max()], axis=1)
    return np.concatenate([[[precursor_mz, PRECURSOR_INTENSITY]], kept])


PRECURSOR_INTENSITY = 1.1
"""Marks the precursor's token; above that of every peak. Source: as `DataFormat`."""


def checked(spectra: Iterator[Spectrum], path: Path, bad_records: BadRecords) -> Iterator[Spectrum]:
    """Pass on the spectra that can be used, peaks sorted by m/z, and report the others."""
    for spectrum in spectra:
        if fault := fault_of(spectrum):
            bad_records.report(path, spectrum.record, fault)
        else:
            yield _sorted(spectrum)


def _sorted(spectrum: Spectrum) -> Spectrum:
    from dataclasses import replace

    order = np.argsort(spectrum.mzs, kind="stable")
    return replace(spectrum, mzs=spectrum.mzs[order], intensities=spectrum.intensities[order])
