"""Spectra in HDF5, one data set per column: written whole, read row by row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from memfit.errors import DataError, MissingExtraError
from memfit.files import replace_atomically

from .made_spectra import generated_spectra, is_generated
from .mgf import read_mgf
from .mzml import read_mzml
from .spectra import BadRecords, Spectrum, checked, fault_of

SPECTRUM, PRECURSOR_MZ = "spectrum", "precursor_mz"
NEEDED = (SPECTRUM, PRECURSOR_MZ)
_NUMBERS = {PRECURSOR_MZ: np.float64, "charge": np.int64, "RT": np.float64}
_TEXTS = ("smiles", "adduct", "name", "record")
COLUMNS = (SPECTRUM, *_NUMBERS, *_TEXTS)
HDF5_SUFFIXES = (".hdf5", ".h5")
_READERS = {".mgf": read_mgf, ".mzml": read_mzml, ".mzml.gz": read_mzml}


def read_spectra(path: Path, bad_records: BadRecords) -> Iterator[Spectrum]:
    """Yield the spectra of a file that can be used, and report the others.

    Args:
        path: a .mgf, .mzML or .mzML.gz file, or the name of generated spectra.
        bad_records: is told of what cannot be used.

    Raises:
        DataError: if there is no such file, or it is of another kind.
    """
    if is_generated(path):
        yield from checked(generated_spectra(path), path, bad_records)
        return
    if not path.is_file():
        raise DataError(str(path), "there is no such file. Give a .mgf, .mzML or .hdf5 file.")
    name = path.name.lower()
    reader = next((read for suffix, read in _READERS.items() if name.endswith(suffix)), None)
    if reader is None:
        kinds = ", ".join((*_READERS, *HDF5_SUFFIXES))
        raise DataError(str(path), f"its kind is not known by its name; known are {kinds}.")
    yield from checked(reader(path, bad_records), path, bad_records)


def columns_of(spectra: Sequence[Spectrum]) -> dict[str, Any]:
    """Put spectra into columns of equal length; peaks are padded with zeros to the longest.

    Returns:
        ``spectrum`` (N, 2, P) float64, and the columns of `COLUMNS` with N entries each.
    """
    longest = max((len(each.mzs) for each in spectra), default=0)
    padded = np.zeros((len(spectra), 2, longest))
    for row, each in zip(padded, spectra, strict=True):
        row[0, : len(each.mzs)] = each.mzs
        row[1, : len(each.mzs)] = each.intensities
    return {
        SPECTRUM: padded,
        PRECURSOR_MZ: np.array([each.precursor_mz for each in spectra]),
        "charge": np.array([each.charge for each in spectra], dtype=np.int64),
        "RT": np.array([each.retention_seconds for each in spectra]),
        **{name: [getattr(each, name) for each in spectra] for name in _TEXTS},
    }


def write_hdf5(path: Path, spectra: Sequence[Spectrum], **extra: Any) -> None:
    """Write spectra as HDF5: the whole file, or none.

    Args:
        path: where to; a file that lies there is replaced at the end.
        spectra: the rows.
        extra: further columns, such as ``fold``, with one entry per row.

    Raises:
        DataError: if there is nothing to write.
        MissingExtraError: without h5py.
    """
    h5py = _h5py()
    if not spectra:
        raise DataError(str(path), "no spectrum is left to write; nothing was written.")
    columns = {**columns_of(spectra), **extra}

    def write(part: Path) -> None:
        with h5py.File(part, "w") as file:
            for name, values in columns.items():
                if name == SPECTRUM:
                    chunk = (1, *values.shape[1:])  # so that one row is read alone
                    file.create_dataset(name, data=values, chunks=chunk, compression="gzip")
                elif isinstance(values, list):
                    file.create_dataset(name, data=values, dtype=h5py.string_dtype())
                else:
                    file.create_dataset(name, data=values)

    replace_atomically(path, write)


def convert(sources: Iterable[Path], target: Path, bad_records: BadRecords) -> int:
    """Write .mgf and .mzML files as one HDF5 file; nothing is written if one is refused.

    Returns:
        The number of spectra.
    """
    spectra = [each for source in sources for each in read_spectra(source, bad_records)]
    write_hdf5(target, spectra)
    return len(spectra)


class MSData:
    """The spectra of a file.

    Peaks of an HDF5 file are read when they are asked for (``in_mem=False``), or at once. Text
    formats have no rows to find, so they are read at once; `convert` makes HDF5 of them.

    Raises:
        DataError: if the file is missing, broken, or lacks a column.
        MissingExtraError: for HDF5 without h5py.
    """

    def __init__(
        self, path: Path | str, in_mem: bool = False, bad_records: BadRecords | None = None
    ) -> None:
        self.path = Path(path)
        self.in_mem = in_mem
        self._file: Any = None
        self._columns: dict[str, Any] = {}
        if self.path.suffix.lower() in HDF5_SUFFIXES:
            self._open_hdf5()
        else:
            self.in_mem = True
            spectra = list(read_spectra(self.path, bad_records or BadRecords()))
            self._columns = columns_of(spectra)
            self.names = frozenset(COLUMNS)
        self._num_rows = len(self.column(PRECURSOR_MZ))

    def _open_hdf5(self) -> None:
        if not self.path.is_file():
            raise DataError(str(self.path), "there is no such file.")
        file = self._handle()
        self.names = frozenset(file)
        missing = [name for name in NEEDED if name not in self.names]
        lengths = {name: len(file[name]) for name in self.names if getattr(file[name], "shape", ())}
        if missing:
            needed = f"needed are {', '.join(NEEDED)}"
            reason = f"it has no column {', '.join(missing)}; {needed}."
        elif len(set(lengths.values())) != 1:
            reason = f"its columns differ in length: {lengths}."
        elif len(file[SPECTRUM].shape) != 3 or file[SPECTRUM].shape[1] != 2:
            reason = f"column spectrum has shape {file[SPECTRUM].shape}, needed is (N, 2, P)."
        else:
            if self.in_mem:
                self._columns[SPECTRUM] = file[SPECTRUM][:]
            return
        self.close()
        raise DataError(str(self.path), reason)

    def _handle(self) -> Any:
        """Return the open file; each process opens its own."""
        if self._file is None:
            try:
                self._file = _h5py().File(self.path, "r")
            except OSError as error:
                reason = f"it cannot be read as HDF5 ({error}). It may be cut off."
                raise DataError(str(self.path), reason) from None
        return self._file

    def __len__(self) -> int:
        """Return the number of spectra."""
        return self._num_rows

    def column(self, name: str) -> Any:
        """Return a column but the peaks, as an array or a list of texts; it is kept in memory.

        Raises:
            DataError: if there is no such column.
        """
        if name not in self.names:
            there = ", ".join(sorted(self.names))
            raise DataError(str(self.path), f"it has no column {name}; it has {there}.")
        if name not in self._columns:
            values = self._handle()[name][:]
            is_text = values.dtype.kind in "OS"
            self._columns[name] = [_text(each) for each in values] if is_text else values
        return self._columns[name]

    def peaks(self, row: int) -> np.ndarray:
        """Return the peaks of one spectrum, (2, P) float64: m/z and intensity, zero-padded."""
        held = self._columns.get(SPECTRUM)
        peaks = self._handle()[SPECTRUM][row] if held is None else held[row]
        return np.asarray(peaks, dtype=np.float64)

    def spectrum(self, row: int) -> Spectrum:
        """Return one spectrum without its padding."""
        mzs, intensities = self.peaks(row)
        is_peak = mzs != 0
        texts = {name: self.column(name)[row] for name in _TEXTS if name in self.names}
        texts.setdefault("record", "")
        texts["record"] = f"row {row} {texts['record']}".rstrip()
        return Spectrum(
            mzs=mzs[is_peak],
            intensities=intensities[is_peak],
            precursor_mz=float(self.column(PRECURSOR_MZ)[row]),
            charge=abs(int(self.column("charge")[row])) if "charge" in self.names else 0,
            retention_seconds=float(self.column("RT")[row]) if "RT" in self.names else np.nan,
            **texts,
        )

    def usable(self, bad_records: BadRecords) -> Iterator[tuple[int, Spectrum]]:
        """Yield the rows that can be used, and report the others."""
        for row in range(len(self)):
            spectrum = self.spectrum(row)
            if fault := fault_of(spectrum):
                bad_records.report(self.path, spectrum.record, fault)
            else:
                yield row, spectrum

    def close(self) -> None:
        """Close the file; it is opened again where peaks are asked for."""
        if self._file is not None:
            with contextlib.suppress(ValueError):
                self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """Enter a context at whose end the file is closed."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the file."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the open file out: a worker of a data loader opens its own."""
        return {**self.__dict__, "_file": None}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("HDF5", "h5py", "dreams") from None
    return h5py
