"""Embeddings of spectra, how alike they make them, and a picture.

Shapes: S spectra, D the width of an embedding.
"""

from __future__ import annotations

import csv
import io
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memfit.errors import MissingExtraError, UsageError
from memfit.files import replace_atomically, write_atomically

from .backbone import DreamsBackbone
from .checkpoints import load_backbone, read_model
from .data_module import in_batches, molecule_keys, rows_of
from .elements import SmilesError, has_element
from .folds import auroc
from .inputs import Spectra, read_inputs
from .objectives import CONTRASTIVE_OBJECTIVE, fingerprint
from .runs import begin_folder, run_files, with_pre_trained_sizes
from .settings import DreamsSettings
from .spectra import Array

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console


_MAX_PAIRS = 5000
_NUM_NEIGHBOURS = 5


def embed(settings: DreamsSettings, console: Console) -> dict[str, Any]:
    """Embed all spectra of a file, and compare similarities.

    Raises:
        UsageError: without a trained model.
    """
    if settings.pre_trained_pth is None:
        msg = "embed needs a trained model: --pre_trained_pth FILE, the final_model.pt of a run."
        raise UsageError(msg)
    settings = with_pre_trained_sizes(settings)
    spectra = read_inputs(settings, console)
    begin_folder(settings, spectra.to_json(), None)
    embeddings = embed_rows(settings, spectra)
    metrics, lines = compare(settings, spectra, embeddings)
    write_embeddings(settings.output_dir, spectra, embeddings)
    note = draw(settings.output_dir / "embedding.png", spectra, embeddings)
    result = {
        "workload": "dreams",
        "regime": settings.regime,
        "metrics": {"num_spectra": len(embeddings), **metrics},
        "notes": [note] if note else [],
        "run_folder": str(settings.output_dir),
    }
    run_files(settings).write_json("results.json", result)
    where = f"run folder: {settings.output_dir} (embeddings.npz, similarity.csv, embedding.png)"
    console.print("\n".join([*lines, *result["notes"], where]), markup=False, soft_wrap=True)
    return result


def embed_rows(settings: DreamsSettings, spectra: Spectra) -> np.ndarray:
    """Return the embeddings of a run's spectra, (S, D) float32."""
    assert settings.pre_trained_pth is not None
    _, content = read_model(settings.pre_trained_pth)
    backbone = DreamsBackbone(settings.sizes).eval()
    load_backbone(backbone, settings.pre_trained_pth)
    head = None
    if content["objective"] == CONTRASTIVE_OBJECTIVE:
        from .finetuning import make_head

        head = make_head(settings.sizes, settings.sizes.d_model, content["head_depth"]).eval()
        own = {name.removeprefix("head."): value for name, value in content["head"].items()}
        head.load_state_dict(own)

    def function(batch: torch.Tensor) -> torch.Tensor:
        embedding = backbone.embed(batch)
        return embedding if head is None else head(embedding)

    rows = rows_of(spectra.ms_data, spectra.rows, settings.max_peaks_n)
    return in_batches(function, rows, settings.batch_size).numpy()


def compare(
    settings: DreamsSettings, spectra: Spectra, embeddings: np.ndarray
) -> tuple[dict[str, float], list[str]]:
    """Compare pairs by embedding and by modified cosine, against what is known of molecules.

    ``same_molecule_auroc``: whether pairs of one molecule come before others. With RDKit also the
    correlation with the Tanimoto similarity of Morgan fingerprints.
    """
    if "smiles" not in spectra.ms_data.names or not any(_smiles(spectra)):
        return {}, ["no SMILES: similarities are written, and held against nothing"]
    pairs = _some_pairs(len(embeddings), settings.seed)
    cosines = cosine_matrix(embeddings)
    rows = rows_of(spectra.ms_data, spectra.rows, settings.max_peaks_n)
    tokens = [rows.tokens(i) for i in range(len(rows))]
    values = {
        "embedding": np.array([cosines[i, j] for i, j in pairs]),
        "modified_cosine": np.array([modified_cosine(tokens[i], tokens[j]) for i, j in pairs]),
    }
    keys = molecule_keys(spectra.ms_data, spectra.rows)
    same = [float(keys[i] == keys[j]) for i, j in pairs]
    metrics = {f"{name}_same_molecule_auroc": auroc(same, v.tolist()) for name, v in values.items()}
    truths = _tanimoto_of(spectra, pairs)
    if truths is not None:
        for name, found in values.items():
            figures = correlations(found, truths)
            metrics |= {f"{name}_tanimoto_{key}": value for key, value in figures.items()}
    metrics = {name: round(value, 4) for name, value in metrics.items() if np.isfinite(value)}
    return metrics, [f"{name}: {value}" for name, value in metrics.items()]


def _smiles(spectra: Spectra) -> list[str]:
    column = spectra.ms_data.column("smiles")
    return [column[row] for row in spectra.rows]


def _some_pairs(num: int, random_seed: int) -> list[tuple[int, int]]:
    pairs = list(itertools.combinations(range(num), 2))
    if len(pairs) <= _MAX_PAIRS:
        return pairs
    chosen = np.random.default_rng(random_seed).choice(len(pairs), _MAX_PAIRS, replace=False)
    return [pairs[i] for i in sorted(chosen)]


def _tanimoto_of(spectra: Spectra, pairs: list[tuple[int, int]]) -> np.ndarray | None:
    """Return the Tanimoto similarity of pairs; None without RDKit, or with unknown molecules."""
    try:
        bits = {each: fingerprint(each, "fp_morgan_4096") for each in set(_smiles(spectra))}
    except (MissingExtraError, SmilesError):
        return None
    smiles = _smiles(spectra)
    return np.array([_tanimoto(bits[smiles[i]], bits[smiles[j]]) for i, j in pairs])


def write_embeddings(folder: Path, spectra: Spectra, embeddings: np.ndarray) -> None:
    """Write embeddings.npz, and each spectrum's nearest neighbours as similarity.csv."""
    records = [spectra.ms_data.spectrum(row).record for row in spectra.rows]
    mzs = np.asarray(spectra.ms_data.column("precursor_mz"))[spectra.rows]
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=embeddings, rows=spectra.rows, precursor_mz=mzs)
    write_atomically(folder / "embeddings.npz", buffer.getvalue())
    cosines = cosine_matrix(embeddings)
    np.fill_diagonal(cosines, -np.inf)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("record", "neighbour", "cosine"))
    for i, row in enumerate(cosines):
        for j in np.argsort(-row, kind="stable")[: min(_NUM_NEIGHBOURS, len(row) - 1)]:
            writer.writerow((records[i], records[int(j)], f"{row[j]:.4f}"))
    write_atomically(folder / "similarity.csv", text.getvalue())


def draw(path: Path, spectra: Spectra, embeddings: np.ndarray) -> str:
    """Draw the first two principal components; return why not, where it cannot be done."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "No embedding.png: it needs matplotlib. Run: pip install 'memfit[plots]'"
    centred = embeddings - embeddings.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    places = centred @ axes[:2].T
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plot = figure.add_subplot()
    values, label = _colours(spectra)
    points = plot.scatter(places[:, 0], places[:, 1], c=values, cmap="viridis", s=18)
    figure.colorbar(points, label=label)
    plot.set_xlabel("first principal component")
    plot.set_ylabel("second principal component")
    plot.set_title(f"{len(embeddings)} spectra by their embeddings")
    replace_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120))
    return ""


def _colours(spectra: Spectra) -> tuple[list[float], str]:
    try:
        return [float(has_element(each, "F")) for each in _smiles(spectra)], "contains fluorine"
    except (SmilesError, KeyError):
        mzs = np.asarray(spectra.ms_data.column("precursor_mz"))
        return mzs[spectra.rows].tolist(), "precursor m/z"


def cosine_matrix(embeddings: Array) -> Array:
    """Return the cosine of every two embeddings, (S, S); 0 for an embedding of zeros.

    Shapes: S spectra, P pairs.
    """
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit = embeddings / np.where(norms == 0, 1, norms)
    return unit @ unit.T


def modified_cosine(one: Array, other: Array, tolerance_mz: float = 0.02) -> float:
    """Return the cosine of matched peaks, where a peak may be shifted by the precursors' distance.

    Matches are taken greedily from the highest product on.
    Source: Watrous et al. 2012, doi 10.1073/pnas.1203689109.

    Args:
        one: (n, 2) tokens as `spectra.prepared` makes them, the precursor first.
        other: the same of the other spectrum.
        tolerance_mz: how far matched peaks may lie apart.

    Returns:
        From 0 to 1.
    """
    shift = one[0, 0] - other[0, 0]
    distances = one[1:, None, 0] - other[None, 1:, 0]
    is_match = (np.abs(distances) <= tolerance_mz) | (np.abs(distances - shift) <= tolerance_mz)
    left, right = np.sqrt(one[1:, 1]), np.sqrt(other[1:, 1])
    products = np.where(is_match, left[:, None] * right[None], 0.0)
    total = 0.0
    while products.size and products.max() > 0:
        row, column = np.unravel_index(products.argmax(), products.shape)
        total += products[row, column]
        products[row], products[:, column] = 0.0, 0.0
    scale = np.linalg.norm(left) * np.linalg.norm(right)
    return float(total / scale) if scale else 0.0


def _tanimoto(one: Array, other: Array) -> float:
    """Return the shared bits of two fingerprints by the bits of either; 0 without any."""
    either = np.logical_or(one, other).sum()
    return float(np.logical_and(one, other).sum() / either) if either else 0.0


def correlations(values_P: Array, truths_P: Array) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of two lists."""
    ranks = [_ranks(each) for each in (values_P, truths_P)]
    return {
        "pearson": float(np.corrcoef(values_P, truths_P)[0, 1]),
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
    }


def _ranks(values: Array) -> Array:
    """Return ranks; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]
