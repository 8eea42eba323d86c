"""Reads .mgf: a text format of a dozen lines, read here so that faults have their line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .spectra import BadRecords, Spectrum


@dataclass(slots=True)
class _Record:
    """One BEGIN IONS ... END IONS while it is read."""

    first_line: int
    number: int
    entries: dict[str, str] = field(default_factory=dict)
    peaks: list[tuple[float, float]] = field(default_factory=list)
    fault: str = ""

    def take(self, line: str, number: int) -> None:
        """Take one line in."""
        key, equals, value = line.partition("=")
        if equals and not key[:1].isdigit():
            self.entries[key.strip().upper()] = value.strip()
            return
        try:
            mz, intensity = (float(word) for word in line.split()[:2])
        except ValueError:
            self.fault = self.fault or f"line {number} is no peak: {line[:60]!r}"
            return
        self.peaks.append((mz, intensity))

    @property
    def where(self) -> str:
        """Name the record for a message."""
        title = self.entries.get("TITLE") or self.entries.get("NAME", "")
        return f"record {self.number} (line {self.first_line}) {title}".rstrip()

    def spectrum(self, path: Path) -> Spectrum:
        """Make a spectrum of the lines.

        Raises:
            ValueError: if an entry that is needed is missing or no number.
        """
        if self.fault:
            raise ValueError(self.fault)
        if "PEPMASS" not in self.entries:
            msg = "it has no PEPMASS, the precursor's m/z"
            raise ValueError(msg)
        peaks = np.array(self.peaks, dtype=np.float64).reshape(-1, 2)
        smiles = self.entries.get("SMILES", "")
        # ``2+``, ``1-``, ``-1`` or ``2+ and 3+`` (the first); 0 where nothing is said.
        found = re.search(r"\d+", self.entries.get("CHARGE", ""))
        return Spectrum(
            mzs=peaks[:, 0],
            intensities=peaks[:, 1],
            precursor_mz=_number(self.entries, "PEPMASS"),
            charge=int(found[0]) if found else 0,
            smiles="" if smiles.upper() in {"N/A", "NA", "NONE"} else smiles,
            adduct=self.entries.get("ADDUCT", ""),
            retention_seconds=_number(self.entries, "RTINSECONDS", default="nan"),
            name=self.entries.get("FILENAME") or path.name,
            record=self.where,
        )


def read_mgf(path: Path, bad_records: BadRecords) -> Iterator[Spectrum]:
    """Yield the spectra of a .mgf file; what cannot be read is reported with its line."""
    record: _Record | None = None
    num_records = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.strip()
            if line.upper() == "BEGIN IONS":
                if record is not None:
                    bad_records.report(path, record.where, f"it does not end before line {number}")
                num_records += 1
                record = _Record(first_line=number, number=num_records)
            elif line.upper() == "END IONS" and record is not None:
                yield from _finished(record, path, bad_records)
                record = None
            elif record is not None and line and line[0] not in "#;!/":
                record.take(line, number)
    if record is not None:
        bad_records.report(path, record.where, "the file ends before END IONS; it may be cut off")
    if num_records == 0:
        bad_records.report(path, "the file", "there is no BEGIN IONS in it, so it is no .mgf")


def _finished(record: _Record, path: Path, bad_records: BadRecords) -> Iterator[Spectrum]:
    try:
        spectrum = record.spectrum(path)
    except ValueError as error:
        bad_records.report(path, record.where, str(error))
        return
    yield spectrum


def _number(entries: dict[str, str], key: str, default: str = "") -> float:
    text = (entries.get(key) or default).split()
    try:
        return float(text[0].partition("-")[0] if key == "RTINSECONDS" else text[0])
    except (ValueError, IndexError):
        msg = f"{key}={entries.get(key)!r} is no number"
        raise ValueError(msg) from None
