"""Spectra made from made molecules: exact masses of what is left when bonds break.

Negative mode, one charge. A fragment is a run of neighbouring units, with some hydrogens more or
less and neutral losses; its m/z is exact but for an error of some ppm. Which fragment is high is
drawn at random: masses are physics here, intensities are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from memfit.errors import DataError

from .elements import atom_counts
from .spectra import Spectrum

GENERATED = "generated"
_DEFAULT_NUM, _DEFAULT_SEED = 2000, 0
_NAME = re.compile(rf"{GENERATED}(?::(?P<num>\d+))?(?::(?P<seed>\d+))?")
ELECTRON_DA = 0.00054858
ELEMENTS = ("C", "H", "N", "O", "S", "P", "F", "Cl", "Br")
_MONOISOTOPIC_DA = np.array([
    12.0, 1.00782503207, 14.0030740048, 15.99491461956, 31.972071, 30.97376163, 18.99840322,
    34.96885268, 78.9183371,
])  # fmt: skip
"""Of `ELEMENTS`. Source: NIST, Atomic Weights and Isotopic Compositions, version 3.0."""
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
_AROMATIC_RINGS = (
    "cccccc", "cccccc", "cccccc", "cccccc", "ccccnc", "cccccn", "cncccn", "cncncn", "cnncs",
    "cnnco", "ccccs", "cccco", "cnccs", "cncco", "nnccc", "ncncc", "ncncn",
)  # fmt: skip
_ALIPHATIC_RINGS = ("CCCCCC", "CCCCC", "CCC", "NCCCCC", "NCCNCC", "NCCOCC", "CCOCC", "CCCCO")
_SUBSTITUENTS = {
    "F": 0.19, "Cl": 0.28, "C(F)(F)F": 0.11, "Br": 0.03, "C": 0.14, "OC": 0.08, "CC": 0.03,
    "C(C)C": 0.02, "[N+](=O)[O-]": 0.04, "C#N": 0.05, "O": 0.03, "N": 0.02, "OC(F)(F)F": 0.03,
    "OC(F)F": 0.02, "SC": 0.01, "S(=O)(=O)C": 0.01, "C(=O)OC": 0.01,
}  # fmt: skip
_LINKS = (
    "C(=O)N", "NC(=O)", "C(=O)N", "NC(=O)", "NC(=O)N", "OC(=O)N", "NC(=O)O", "C(=O)O", "OC(=O)",
    "S(=O)(=O)N", "NS(=O)(=O)", "O", "O", "S", "N", "N", "C", "C", "CC", "C(C)", "C(=O)", "OC",
    "CO", "C(=O)NC(=O)N", "NC(=O)NC(=O)", "C=N", "C=NN", "NN=C", "S(=O)", "S(=O)(=O)", "C(O)",
    "C(C#N)", "CCC", "OCC", "C(C)(C)", "C(=O)NC", "CNC(=O)", "N(C)", "C=C", "C(=NOC)", "OCCO",
)  # fmt: skip
_BACKBONE = (
    "C", "CC", "C(C)", "C(O)", "C(OC)", "C=C", "C(=O)", "C(=O)O", "C(C)=C", "OC", "C(CC)", "C(N)",
    "C1CCC(CO1)", "C1C(O)C(OC)C(C(C)O1)",
)  # fmt: skip
_FIRST_ENDS = (
    "C", "CC", "CC(C)", "CC(C)(C)", "N", "O", "OC(=O)", "N#C", "CO", "FC(F)(F)", "CN(C)", "CON(C)",
    "COP(=S)(OC)O", "CCOP(=O)(OCC)O", "C=CC", "CCCC", "COC(=O)", "CS(=O)(=O)", "FC(F)", "ClC",
    "NS(=O)(=O)", "COC", "CNC(=O)", "CC(=O)",
)  # fmt: skip
_LAST_ENDS = (
    "C", "CC", "C(C)C", "C(C)(C)C", "N", "O", "C(=O)O", "C#N", "OC", "C(F)(F)F", "N(C)C", "N(C)OC",
    "OP(=S)(OC)OC", "OP(=O)(OCC)OCC", "CC=C", "CCCC", "C(=O)OC", "S(=O)(=O)C", "C(F)F", "CCl",
    "S(=O)(=O)N", "COC", "C(=O)NC", "C(=O)C",
)  # fmt: skip
_RING_SHARE, _AROMATIC_SHARE, _NATURAL_SHARE = 0.55, 0.85, 0.1


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


def _molecule_in_range(draw: np.random.Generator) -> _MadeMolecule:
    while True:
        molecule = make_molecule(draw)
        if _LEAST_MZ < molecule.units.sum(0) @ _MONOISOTOPIC_DA < _LARGEST_MZ - 50:
            return molecule


def _spectrum(molecule: _MadeMolecule, draw: np.random.Generator, row: int) -> Spectrum:
    whole = molecule.units.sum(0)
    adduct = _ADDUCT_COUNTS[int(draw.choice(len(_ADDUCT_COUNTS), p=list(_ADDUCTS.values())))]
    precursor_mz = anion_mz(whole + adduct - _counts("H") * (not adduct[ELEMENTS.index("Cl")]))
    mzs, intensities = _fragments(molecule, draw)
    mzs = np.append(mzs, precursor_mz)
    intensities = np.append(intensities, intensities.max() * draw.choice([0.02, 0.3, 1.5]))
    mzs *= 1 + 1e-6 * (_SPECTRUM_PPM * draw.normal() + _PEAK_PPM * draw.normal(size=len(mzs)))
    is_seen = (mzs > draw.choice(_LOWEST_MZS)) & (mzs < precursor_mz + 1)
    # Peaks that mean nothing, below a hundredth or a tenth of the highest.
    size = int(draw.choice([0, 5, 20]))
    ceiling = intensities.max() * draw.choice([0.003, 0.01, 0.08])
    noise_mzs, noise = (draw.uniform(50, precursor_mz, size), ceiling * draw.uniform(0.3, 1, size))
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
    return float(counts @ _MONOISOTOPIC_DA) + ELECTRON_DA


def _fragments(molecule: _MadeMolecule, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeMolecule:
    """A molecule as a chain of units.

    A unit is written so that its first atom bonds to the unit before it and its last atom to the
    one after it; the SMILES of a molecule is then the text of its units in a row.
    """

    smiles: str
    units: np.ndarray
    """(units, elements): atoms of each unit without what bonds it to its neighbours."""


def make_molecule(draw: np.random.Generator) -> _MadeMolecule:
    """Draw a molecule: rings with substituents, links and ends, or a long oxygenated chain."""
    if draw.random() < _NATURAL_SHARE:
        middle = [_one_of(draw, _BACKBONE) for _ in range(int(draw.integers(6, 28)))]
    else:
        middle = _rings_and_links(draw)
    return molecule_of([_one_of(draw, _FIRST_ENDS), *middle, _one_of(draw, _LAST_ENDS)])


def molecule_of(units: Sequence[str]) -> _MadeMolecule:
    """Return the molecule of a chain of units."""
    last = len(units) - 1
    rows = [_atoms(unit, place > 0, place < last) for place, unit in enumerate(units)]
    return _MadeMolecule(smiles="".join(units), units=np.array(rows))


def _rings_and_links(draw: np.random.Generator) -> list[str]:
    """Draw one to four rings with links between them; a share of the links is missing."""
    units: list[str] = []
    for number in range(int(draw.choice([1, 2, 3, 4], p=[0.25, 0.45, 0.22, 0.08]))):
        if number or draw.random() < _RING_SHARE:
            units += [_one_of(draw, _LINKS) for _ in range(int(draw.integers(1, 3)))]
        units.append(_ring(draw))
    return units


def _ring(draw: np.random.Generator) -> str:
    """Draw a ring that is bound at two places, with substituents on some of its carbons."""
    is_aromatic = draw.random() < _AROMATIC_SHARE
    atoms = _one_of(draw, _AROMATIC_RINGS if is_aromatic else _ALIPHATIC_RINGS)
    carbons = [place for place in range(1, len(atoms)) if atoms[place] in "cC"]
    out = int(draw.choice(carbons))
    chance = draw.choice([0.05, 0.2, 0.4]) if is_aromatic else 0.05
    texts, shares = list(_SUBSTITUENTS), np.array(list(_SUBSTITUENTS.values()))
    written = [atoms[0] + "1"]
    for place in range(1, len(atoms)):
        text = atoms[place] + ("1" if place == len(atoms) - 1 else "")
        if place != out and place in carbons and draw.random() < chance:
            text += f"({texts[int(draw.choice(len(texts), p=shares / shares.sum()))]})"
        written.append(text)
    rest = "".join(written[out + 1 :])
    return "".join(written[: out + 1]) + (f"({rest})" if rest else "")


@lru_cache(maxsize=4096)
def _atoms(unit: str, has_before: bool, has_after: bool) -> tuple[int, ...]:
    """Count the atoms of a unit that is bound to one before it and to one after it."""
    # With hydrogens in their places, so that sulphur knows how many bonds it has.
    counts = atom_counts("[H]" * has_before + unit + "[H]" * has_after)
    num_caps = has_before + has_after
    return tuple(counts.get(each, 0) - num_caps * (each == "H") for each in ELEMENTS)


def _one_of(draw: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(draw.integers(len(choices)))]
