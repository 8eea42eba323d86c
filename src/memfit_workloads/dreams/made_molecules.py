"""Molecules put together of units that are common in drugs and crop protection, as chains.

A unit is written so that its first atom bonds to the unit before it and its last atom to the one
after it; the SMILES of a molecule is then the text of its units in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .elements import atom_counts

ELEMENTS = ("C", "H", "N", "O", "S", "P", "F", "Cl", "Br")
MONOISOTOPIC_DA = np.array([
    12.0, 1.00782503207, 14.0030740048, 15.99491461956, 31.972071, 30.97376163, 18.99840322,
    34.96885268, 78.9183371,
])  # fmt: skip
"""Of `ELEMENTS`. Source: NIST, Atomic Weights and Isotopic Compositions, version 3.0."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeMolecule:
    """A molecule as a chain of units."""

    smiles: str
    units: np.ndarray
    """(units, elements): atoms of each unit without what bonds it to its neighbours."""


def make_molecule(draw: np.random.Generator) -> MadeMolecule:
    """Draw a molecule: rings with substituents, links and ends, or a long oxygenated chain."""
    if draw.random() < _NATURAL_SHARE:
        middle = [_one_of(draw, _BACKBONE) for _ in range(int(draw.integers(6, 28)))]
    else:
        middle = _rings_and_links(draw)
    return molecule_of([_one_of(draw, _FIRST_ENDS), *middle, _one_of(draw, _LAST_ENDS)])


def molecule_of(units: Sequence[str]) -> MadeMolecule:
    """Return the molecule of a chain of units."""
    last = len(units) - 1
    rows = [_atoms(unit, place > 0, place < last) for place, unit in enumerate(units)]
    return MadeMolecule(smiles="".join(units), units=np.array(rows))


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
