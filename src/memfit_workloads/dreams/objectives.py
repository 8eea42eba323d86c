"""What a spectrum's embedding is fine-tuned to: labels, losses and scores of each objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memfit.errors import DataError, MissingExtraError, UsageError

from .elements import SmilesError, atom_counts, has_element
from .spectra import BadRecords

BINARY, REGRESSION, FINGERPRINT, CONTRASTIVE = "binary", "regression", "fingerprint", "contrastive"
ELEMENTS = {"has_F": "F", "has_Cl": "Cl", "has_N": "N"}
ELEMENT_COUNTS = "elements"
_AT_LEAST = {
    "F": (1, 2, 3, 4, 6), "Cl": (1, 2, 3), "Br": (1,), "S": (1, 2), "P": (1,),
    "N": (1, 2, 3, 4, 5, 6), "O": (1, 2, 3, 4, 5, 6, 8, 10), "C": (8, 12, 16, 20, 24, 30, 40),
    "H": (6, 10, 14, 18, 22, 28, 36, 50),
}  # fmt: skip
"""What ``elements`` predicts: whether there are at least so many atoms of each."""
PROPERTIES = (
    "logp", "hba", "hbd", "tpsa", "rotatable_bonds", "aromatic_rings", "aliphatic_rings", "fsp3",
    "qed", "sa", "bertz",
)  # fmt: skip
MOL_PROPS = "mol_props"
_FINGERPRINT_BITS = {
    "fp_morgan_2048": 2048, "fp_morgan_4096": 4096, "fp_rdkit_2048": 2048, "fp_rdkit_4096": 4096,
}  # fmt: skip
CONTRASTIVE_OBJECTIVE = "contrastive_spec_embs"
MASK_MZ = "mask_mz_hot"
FINETUNING = (
    *ELEMENTS,
    ELEMENT_COUNTS,
    *PROPERTIES,
    MOL_PROPS,
    *_FINGERPRINT_BITS,
    CONTRASTIVE_OBJECTIVE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One thing to predict."""

    name: str
    kind: str
    num_outputs: int
    labels: Callable[[str], Any]
    """Of a SMILES; raises ValueError for one that is not understood."""


def objective_named(name: str, d_model: int) -> Objective:
    """Return an objective by the document's name.

    Raises:
        UsageError: if there is none of that name.
    """
    if name in ELEMENTS:
        symbol = ELEMENTS[name]
        return Objective(
            name=name, kind=BINARY, num_outputs=1, labels=lambda s: [float(has_element(s, symbol))]
        )
    if name == ELEMENT_COUNTS:
        width = sum(map(len, _AT_LEAST.values()))
        return Objective(name=name, kind=BINARY, num_outputs=width, labels=_at_least)
    if name in PROPERTIES:
        return Objective(
            name=name, kind=REGRESSION, num_outputs=1, labels=lambda s: [_properties(s)[name]]
        )
    if name == MOL_PROPS:
        return Objective(
            name=name,
            kind=REGRESSION,
            num_outputs=len(PROPERTIES),
            labels=lambda s: [_properties(s)[each] for each in PROPERTIES],
        )
    if name in _FINGERPRINT_BITS:
        bits = _FINGERPRINT_BITS[name]
        return Objective(
            name=name, kind=FINGERPRINT, num_outputs=bits, labels=lambda s: fingerprint(s, name)
        )
    if name == CONTRASTIVE_OBJECTIVE:
        return Objective(name=name, kind=CONTRASTIVE, num_outputs=d_model, labels=lambda _: [])
    msg = f"There is no objective {name!r}. There are: {', '.join(FINETUNING)}."
    raise UsageError(msg)


def _at_least(smiles: str) -> list[float]:
    counts = atom_counts(smiles)
    return [
        float(counts.get(symbol, 0) >= number)
        for symbol, numbers in _AT_LEAST.items()
        for number in numbers
    ]


def labelled(
    objective: Objective, path: Any, rows: Sequence[int], smiles: Sequence[str], bad: BadRecords
) -> tuple[list[int], np.ndarray]:
    """Return the rows whose molecule is understood, and their labels (rows, outputs) float32.

    Args:
        objective: what is predicted.
        path: the file, for messages.
        rows: of the file.
        smiles: one per row of the file.
        bad: is told of unknown molecules.

    Raises:
        DataError: if a molecule is unknown and such records are refused, or none is left.
    """
    kept, labels = [], []
    for row in rows:
        try:
            labels.append(_labels_of(objective, smiles[row]))
        except ValueError as error:
            bad.report(path, f"row {row}", str(error))
            continue
        kept.append(row)
    if not kept:
        raise DataError(str(path), f"no spectrum has a molecule that {objective.name} is known of.")
    return kept, np.asarray(labels, dtype=np.float32)


def _labels_of(objective: Objective, smiles: str) -> Any:
    if not smiles.strip():
        msg = "it has no SMILES, so its label is unknown"
        raise SmilesError(msg)
    return objective.labels(smiles)


def _rdkit_molecule(smiles: str) -> Any:
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise MissingExtraError("A property or a fingerprint", "rdkit", "chemistry") from None
    rdBase.DisableLog("rdApp.error")  # the fault is told with file and record instead
    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        msg = f"RDKit does not understand SMILES {smiles[:80]!r}"
        raise SmilesError(msg)
    return molecule


def _properties(smiles: str) -> dict[str, float]:
    """Compute the eleven properties of a molecule.

    Source: RDKit's descriptors; the synthetic accessibility of its contribution SA_Score.
    """
    molecule = _rdkit_molecule(smiles)
    from rdkit.Chem import QED, GraphDescriptors, rdMolDescriptors

    return {
        "logp": rdMolDescriptors.CalcCrippenDescriptors(molecule)[0],
        "hba": rdMolDescriptors.CalcNumHBA(molecule),
        "hbd": rdMolDescriptors.CalcNumHBD(molecule),
        "tpsa": rdMolDescriptors.CalcTPSA(molecule),
        "rotatable_bonds": rdMolDescriptors.CalcNumRotatableBonds(molecule),
        "aromatic_rings": rdMolDescriptors.CalcNumAromaticRings(molecule),
        "aliphatic_rings": rdMolDescriptors.CalcNumAliphaticRings(molecule),
        "fsp3": rdMolDescriptors.CalcFractionCSP3(molecule),
        "qed": QED.qed(molecule),
        "sa": _synthetic_accessibility(molecule),
        "bertz": GraphDescriptors.BertzCT(molecule),
    }


def _synthetic_accessibility(molecule: Any) -> float:
    import importlib
    import sys
    from pathlib import Path

    from rdkit.Chem import RDConfig

    folder = str(Path(RDConfig.RDContribDir) / "SA_Score")
    if folder not in sys.path:
        sys.path.append(folder)
    return float(importlib.import_module("sascorer").calculateScore(molecule))


def fingerprint(smiles: str, name: str) -> np.ndarray:
    """Return the bits of a fingerprint by the document's name, such as ``fp_morgan_4096``.

    Source: RDKit; Morgan with radius 2.

    Raises:
        ValueError: if the molecule is not understood.
        MissingExtraError: without RDKit.
    """
    molecule = _rdkit_molecule(smiles)
    from rdkit.Chem import rdFingerprintGenerator

    bits = _FINGERPRINT_BITS[name]
    if name.startswith("fp_morgan"):
        generator = rdFingerprintGenerator.GetMorganGenerator(radius=2, fpSize=bits)
    else:
        generator = rdFingerprintGenerator.GetRDKitFPGenerator(fpSize=bits)
    return generator.GetFingerprintAsNumPy(molecule).astype(np.float32)
