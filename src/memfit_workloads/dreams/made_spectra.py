"""Spectra made from made molecules: exact masses of what is left when bonds break.

Negative mode, one charge. A fragment is a run of neighbouring units, with some hydrogens more or
less and neutral losses; its m/z is exact but for an error of some ppm. Which fragment is high is
drawn at random: masses are physics here, intensities are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from memfit.errors import DataError

from .made_molecules import ELEMENTS, MONOISOTOPIC_DA, MadeMolecule, make_molecule
from .spectra import Spectrum

GENERATED = "generated"
_DEFAULT_NUM, _DEFAULT_SEED = 2000, 0
_NAME = re.compile(rf"{GENERATED}(?::(?P<num>\d+))?(?::(?P<seed>\d+))?")
ELECTRON_DA = 0.00054858
_HYDROGEN = ELEMENTS.index("H")
_LOSSES = {
    "HF": 0.22, "HCl": 0.1, "HBr": 0.06, "CO": 0.1, "CO2": 0.12, "H2O": 0.08, "HCN": 0.06,
    "NH3": 0.04, "CH3": 0.05, "SO2": 0.06, "CF2": 0.05, "CF2O": 0.03, "CHF3": 0.02, "CH4O": 0.04,
    "C2H4": 0.03, "Cl": 0.03, "NO2": 0.03, "HNCO": 0.03,
}  # fmt: skip
_ADDUCTS = {"": 0.7, "Cl": 0.15, "CH2O2": 0.15}
_SHIFTS, _SHIFT_SHARES = (0, -1, -2, 2), (0.62, 0.15, 0.15, 0.08)
_LOWEST_MZS = (50.0, 70.0, 80.0)
_SPECTRUM_PPM, _PEAK_PPM = 4.0, 4.0
_LARGEST_MZ, _LEAST_MZ = 1000.0, 150.0


def _counts(formula: str) -> np.ndarray:
    """Count the atoms of a formula such as CF2O, (elements,)."""
    out = np.zeros(len(ELEMENTS), dtype=np.int64)
    for symbol, number in re.findall(r"([A-Z][a-z]?)(\d*)", formula):
        out[ELEMENTS.index(symbol)] += int(number or 1)
    return out


_LOSS_COUNTS = np.array([_counts(each) for each in _LOSSES])
_LOSS_SHARES = np.array(list(_LOSSES.values()))
_ADDUCT_COUNTS = [_counts(each) for each in _ADDUCTS]


def is_generated(path: Path) -> bool:
    """Return whether a path is the name of generated spectra, such as ``generated:2000:7``."""
    return _NAME.fullmatch(str(path)) is not None


def generated_spectra(path: Path) -> Iterator[Spectrum]:
    """Yield the spectra that a name stands for: ``generated:NUMBER:SEED``; one per molecule.

    Raises:
        DataError: if the name asks for none.
    """
    found = _NAME.fullmatch(str(path))
    num = int((found and found["num"]) or _DEFAULT_NUM)
    seed = int((found and found["seed"]) or _DEFAULT_SEED)
    if found is None or num == 0:
        raise DataError(str(path), f"needed is {GENERATED}:NUMBER:SEED with a number above 0.")
    for row in range(num):
        # Of its own, so that more spectra begin with the same ones.
        draw = np.random.default_rng((seed, row))
        yield _spectrum(_molecule_in_range(draw), draw, row)


def _molecule_in_range(draw: np.random.Generator) -> MadeMolecule:
    while True:
        molecule = make_molecule(draw)
        if _LEAST_MZ < molecule.units.sum(0) @ MONOISOTOPIC_DA < _LARGEST_MZ - 50:
            return molecule


def _spectrum(molecule: MadeMolecule, draw: np.random.Generator, row: int) -> Spectrum:
    whole = molecule.units.sum(0)
    adduct = _ADDUCT_COUNTS[int(draw.choice(len(_ADDUCT_COUNTS), p=list(_ADDUCTS.values())))]
    precursor_mz = anion_mz(whole + adduct - _counts("H") * (not adduct[ELEMENTS.index("Cl")]))
    mzs, intensities = _fragments(molecule, draw)
    mzs = np.append(mzs, precursor_mz)
    intensities = np.append(intensities, intensities.max() * draw.choice([0.02, 0.3, 1.5]))
    mzs *= 1 + 1e-6 * (_SPECTRUM_PPM * draw.normal() + _PEAK_PPM * draw.normal(size=len(mzs)))
    is_seen = (mzs > draw.choice(_LOWEST_MZS)) & (mzs < precursor_mz + 1)
    noise_mzs, noise = _noise(draw, precursor_mz, intensities.max())
    return Spectrum(
        mzs=np.concatenate([mzs[is_seen], noise_mzs]),
        intensities=np.concatenate([intensities[is_seen], noise]),
        precursor_mz=round(precursor_mz * (1 + 3e-6 * draw.normal()), 3),
        charge=1,
        smiles=molecule.smiles,
        name=GENERATED,
        record=f"spectrum {row}",
    )


def anion_mz(counts: np.ndarray) -> float:
    """Return the m/z of an ion of one negative charge; the counts are its atoms."""
    return float(counts @ MONOISOTOPIC_DA) + ELECTRON_DA


def _fragments(molecule: MadeMolecule, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw fragments: m/z, each once, and intensities, log-normal."""
    num_units = len(molecule.units)
    sums = np.concatenate([np.zeros((1, len(ELEMENTS)), int), molecule.units.cumsum(0)])
    mzs: dict[float, float] = {}
    for _ in range(int(draw.integers(6, 45))):
        first, last = sorted(draw.choice(num_units + 1, size=2, replace=False).tolist())
        if draw.random() < 0.35:  # one bond breaks more often than two
            first, last = (0, last) if draw.random() < 0.5 else (first, num_units)
        num_cuts = (first > 0) + (last < num_units)
        atoms = sums[last] - sums[first]
        # One bond breaks: a radical, which is an anion with one electron more.
        atoms[_HYDROGEN] += num_cuts - 1
        if num_cuts:
            atoms[_HYDROGEN] += draw.choice(_SHIFTS, p=_SHIFT_SHARES)
        for _ in range(int(draw.choice([0, 1, 2, 3], p=[0.4, 0.35, 0.17, 0.08]))):
            atoms = _less_a_loss(atoms, draw)
        if atoms[_HYDROGEN] >= 0:
            mzs.setdefault(round(anion_mz(atoms), 6), float(np.exp(1.8 * draw.normal())))
    if not mzs:
        whole = molecule.units.sum(0) - _counts("H")
        mzs[anion_mz(whole)] = 1.0
    return np.array(list(mzs)), np.array(list(mzs.values()))


def _less_a_loss(atoms: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Take a neutral loss away that the fragment has the atoms for, if there is one."""
    left = atoms - _LOSS_COUNTS
    shares = _LOSS_SHARES * ((left >= 0).all(1) & (left[:, 0] > 0))
    if not shares.any():
        return atoms
    return left[int(draw.choice(len(shares), p=shares / shares.sum()))]


def _noise(
    draw: np.random.Generator, precursor_mz: float, highest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Draw peaks that mean nothing, below a hundredth or a tenth of the highest."""
    size = int(draw.choice([0, 5, 20]))
    ceiling = highest * draw.choice([0.003, 0.01, 0.08])
    return draw.uniform(50, precursor_mz, size), ceiling * draw.uniform(0.3, 1, size)
