"""Counts the atoms of a molecule written as SMILES, hydrogens included; no RDKit needed.

What is not understood is refused, never guessed. Source: OpenSMILES specification 1.0
(opensmiles.org): organic subset, brackets, ring bonds, branches, normal valences.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

_VALENCES = {
    "B": (3,), "C": (4,), "N": (3, 5), "O": (2,), "P": (3, 5), "S": (2, 4, 6),
    "F": (1,), "Cl": (1,), "Br": (1,), "I": (1,),
}  # fmt: skip
_AROMATIC = {"b", "c", "n", "o", "p", "s", "se", "as"}
_ORDERS = {"-": 1, "=": 2, "#": 3, "$": 4, ":": 1, "/": 1, "\\": 1}
_TOKEN = re.compile(
    r"(?P<bracket>\[[^\]]*\])|(?P<atom>Cl|Br|[BCNOPSFI]|[bcnops])|(?P<bond>[-=#$:/\\])"
    r"|(?P<ring>%\d\d|\d)|(?P<open>\()|(?P<close>\))|(?P<dot>\.)"
)
_BRACKET = re.compile(
    r"\[(?P<isotope>\d+)?(?P<symbol>[A-Z][a-z]?|[a-z]{1,2})(?P<chiral>@{0,2}(?:[A-Z]{2}\d+)?)"
    r"(?P<hydrogens>H\d*)?(?P<charge>[+-]+\d*)?(?::\d+)?\]"
)
_ELEMENTS = frozenset({
    "H", "He", "Li", "Be", "B", "C", "N", "O", "F", "Ne", "Na", "Mg", "Al", "Si", "P", "S", "Cl",
    "Ar", "K", "Ca", "Sc", "Ti", "V", "Cr", "Mn", "Fe", "Co", "Ni", "Cu", "Zn", "Ga", "Ge", "As",
    "Se", "Br", "Kr", "Rb", "Sr", "Y", "Zr", "Nb", "Mo", "Tc", "Ru", "Rh", "Pd", "Ag", "Cd", "In",
    "Sn", "Sb", "Te", "I", "Xe", "Cs", "Ba", "La", "Ce", "Pr", "Nd", "Sm", "Eu", "Gd", "Tb", "Dy",
    "Ho", "Er", "Tm", "Yb", "Lu", "Hf", "Ta", "W", "Re", "Os", "Ir", "Pt", "Au", "Hg", "Tl", "Pb",
    "Bi", "U",
})  # fmt: skip


class SmilesError(ValueError):
    """Say which part of a SMILES is not understood."""


@dataclass(slots=True)
class _Atom:
    symbol: str
    is_aromatic: bool
    hydrogens: int | None
    """None: as many as the normal valence leaves."""
    bonds: int = 0
    """Sum of the orders; an aromatic bond counts one."""

    def num_hydrogens(self) -> int:
        """Return the hydrogens, written or implied."""
        if self.hydrogens is not None:
            return self.hydrogens
        valences = _VALENCES[self.symbol]
        if self.is_aromatic:
            # One valence goes into the ring's electrons; only carbon and boron keep hydrogens then.
            left = valences[0] - 1 - self.bonds
            return max(left, 0) if self.symbol in {"C", "B"} else 0
        return next((v - self.bonds for v in valences if v >= self.bonds), 0)


@dataclass(slots=True)
class _Reader:
    text: str
    atoms: list[_Atom] = field(default_factory=list)
    last: _Atom | None = None
    bond: str = ""
    branches: list[_Atom | None] = field(default_factory=list)
    rings: dict[str, tuple[_Atom, str]] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        """Refuse the text.

        Raises:
            SmilesError: always.
        """
        msg = f"SMILES {self.text[:80]!r}: {what}"
        raise SmilesError(msg)

    def read(self) -> list[_Atom]:
        """Read all atoms with their bonds."""
        position = 0
        while position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                self.fail(f"{self.text[position]!r} at {position} is not understood")
                break
            getattr(self, f"take_{match.lastgroup}")(match[0])
            position = match.end()
        if self.rings or self.branches or self.bond:
            self.fail("a ring, a branch or a bond is not closed")
        return self.atoms

    def take_bracket(self, token: str) -> None:
        """Take an atom in brackets."""
        match = _BRACKET.fullmatch(token)
        if match is None:
            self.fail(f"{token} is not understood")
            return
        symbol, hydrogens = match["symbol"], match["hydrogens"] or ""
        is_aromatic = symbol in _AROMATIC
        if symbol.capitalize() not in _ELEMENTS or (symbol[0].islower() and not is_aromatic):
            self.fail(f"{token} names no element")
        count = int(hydrogens[1:] or 1) if hydrogens else 0
        self._add(_Atom(symbol.capitalize(), is_aromatic, count))

    def take_atom(self, token: str) -> None:
        """Take an atom of the organic subset."""
        self._add(_Atom(token.capitalize(), token in _AROMATIC, None))

    def _add(self, atom: _Atom) -> None:
        self.atoms.append(atom)
        if self.last is not None:
            self._join(self.last, atom, self.bond)
        elif self.bond:
            self.fail("it begins with a bond")
        self.last, self.bond = atom, ""

    def _join(self, one: _Atom, other: _Atom, bond: str) -> None:
        order = _ORDERS.get(bond, 1)
        one.bonds += order
        other.bonds += order

    def take_bond(self, token: str) -> None:
        """Take a bond's sign."""
        if self.bond:
            self.fail("two bonds in a row")
        self.bond = token

    def take_ring(self, token: str) -> None:
        """Open or close a ring."""
        if self.last is None:
            self.fail("a ring bond comes before any atom")
            return
        if token in self.rings:
            atom, bond = self.rings.pop(token)
            self._join(atom, self.last, self.bond or bond)
        else:
            self.rings[token] = (self.last, self.bond)
        self.bond = ""

    def take_open(self, token: str) -> None:
        """Open a branch."""
        if self.last is None:
            self.fail(f"{token} comes before any atom")
        self.branches.append(self.last)

    def take_close(self, token: str) -> None:
        """Close a branch."""
        if not self.branches:
            self.fail(f"{token} closes nothing")
        self.last = self.branches.pop()

    def take_dot(self, token: str) -> None:
        """Begin another part."""
        if self.bond:
            self.fail(f"a bond before {token}")
        self.last = None


def atom_counts(smiles: str) -> dict[str, int]:
    """Count the atoms of a molecule by element, implied hydrogens included.

    Raises:
        SmilesError: if a part is not understood.
    """
    text = smiles.strip()
    if not text:
        msg = "the SMILES is empty"
        raise SmilesError(msg)
    counts: Counter[str] = Counter()
    for atom in _Reader(text).read():
        counts[atom.symbol] += 1
        counts["H"] += atom.num_hydrogens()
    return {symbol: number for symbol, number in counts.items() if number}


def formula(smiles: str) -> str:
    """Write the molecular formula in Hill's order, such as C11H8N2O.

    Raises:
        SmilesError: if a part is not understood.
    """
    counts = atom_counts(smiles)
    first = [symbol for symbol in ("C", "H") if symbol in counts and "C" in counts]
    order = first + sorted(set(counts) - set(first))
    return "".join(f"{each}{counts[each] if counts[each] > 1 else ''}" for each in order)


def has_element(smiles: str, symbol: str) -> bool:
    """Return whether a molecule has an atom of an element.

    Raises:
        SmilesError: if a part of the SMILES is not understood.
    """
    return symbol in atom_counts(smiles)
