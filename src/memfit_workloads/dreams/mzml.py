"""Reads .mzML and .mzML.gz with the standard library: MS2 scans with a precursor.

Source: PSI-MS controlled vocabulary; the accessions are named beside their use.
"""

from __future__ import annotations

import base64
import binascii
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast
from xml.etree import ElementTree

import numpy as np

from .spectra import BadRecords, Spectrum

_MS_LEVEL = "MS:1000511"
_SCAN_START = "MS:1000016"
_SELECTED_MZ = "MS:1000744"
_CHARGE_STATE = "MS:1000041"
_MZ_ARRAY, _INTENSITY_ARRAY = "MS:1000514", "MS:1000515"
_DTYPES = {"MS:1000521": "<f4", "MS:1000523": "<f8", "MS:1000519": "<i4", "MS:1000522": "<i8"}
_ZLIB, _NO_COMPRESSION = "MS:1000574", "MS:1000576"
_MINUTE = "UO:0000031"


def read_mzml(path: Path, bad_records: BadRecords) -> Iterator[Spectrum]:
    """Yield the MS2 scans of a .mzML file.

    A file that ends early or is no XML is reported as a whole after the scans that could be read;
    a scan that cannot be decoded is reported by its id.
    """
    num_scans, last_id = 0, "the beginning"
    with _opened(path) as stream:
        try:
            for _, element in ElementTree.iterparse(stream, events=("end",)):
                if _tag(element) != "spectrum":
                    continue
                num_scans += 1
                last_id = f"scan {element.get('id', num_scans)}"
                yield from _scan(element, path, last_id, bad_records)
                element.clear()  # a run has thousands of scans; only one is kept
        except (ElementTree.ParseError, EOFError, OSError, zlib.error) as error:
            reason = f"the file is broken or cut off after {last_id} ({error})"
            bad_records.report(path, f"after {num_scans} scans", reason)
    if num_scans == 0:
        bad_records.report(path, "the file", "there is no <spectrum> in it, so it is no .mzML")


def _opened(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb"))


def _scan(
    element: ElementTree.Element, path: Path, where: str, bad_records: BadRecords
) -> Iterator[Spectrum]:
    parameters = _parameters(element)
    if parameters.get(_MS_LEVEL, "1") != "2":
        return
    try:
        arrays = _arrays(element)
        spectrum = Spectrum(
            mzs=_needed(arrays, _MZ_ARRAY, "m/z array"),
            intensities=_needed(arrays, _INTENSITY_ARRAY, "intensity array"),
            precursor_mz=float(_needed(parameters, _SELECTED_MZ, "selected ion m/z")),
            charge=int(parameters.get(_CHARGE_STATE, 0)),
            retention_seconds=_retention_seconds(element),
            name=path.name,
            record=where,
        )
    except (ValueError, binascii.Error, zlib.error) as error:
        bad_records.report(path, where, str(error))
        return
    yield spectrum


def _needed(found: dict, key: str, what: str) -> Any:
    if key not in found:
        msg = f"it has no {what} ({key})"
        raise ValueError(msg)
    return found[key]


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _parameters(element: ElementTree.Element) -> dict[str, str]:
    """Return the values of all parameters of a scan but those of its arrays."""
    found: dict[str, str] = {}
    for child in element:
        if _tag(child) == "cvParam":
            found.setdefault(child.get("accession", ""), child.get("value", ""))
        elif _tag(child) != "binaryDataArrayList":
            found = {**_parameters(child), **found}
    return found


def _retention_seconds(element: ElementTree.Element) -> float:
    for child in element.iter():
        if _tag(child) == "cvParam" and child.get("accession") == _SCAN_START:
            factor = 60.0 if child.get("unitAccession") == _MINUTE else 1.0
            return float(child.get("value", "nan")) * factor
    return float("nan")


def _arrays(element: ElementTree.Element) -> dict[str, np.ndarray]:
    """Decode the arrays of a scan by what they hold."""
    found: dict[str, np.ndarray] = {}
    for child in element.iter():
        if _tag(child) == "binaryDataArray":
            names = _parameters(child)
            for kind in (_MZ_ARRAY, _INTENSITY_ARRAY):
                if kind in names:
                    found[kind] = _decoded(child, names)
    return found


def _decoded(array: ElementTree.Element, names: dict[str, str]) -> np.ndarray:
    text = next((each.text or "" for each in array if _tag(each) == "binary"), "")
    data = base64.b64decode(text, validate=False)
    if _ZLIB in names:
        data = zlib.decompress(data)
    elif _NO_COMPRESSION not in names:
        msg = "its arrays are compressed in a way that is not read here (zlib and none are)"
        raise ValueError(msg)
    dtype = next((_DTYPES[name] for name in names if name in _DTYPES), None)
    if dtype is None:
        msg = "its arrays do not say how many bits their numbers have"
        raise ValueError(msg)
    return np.frombuffer(data, dtype=dtype).astype(np.float64)
