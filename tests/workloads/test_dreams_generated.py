"""DreaMS' generated spectra, the objective that learns from them, and the probe of a backbone."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from tests.workloads.training import train_workload

from memfit.errors import DataError, UsageError
from memfit_workloads.dreams.data_module import in_batches, rows_of
from memfit_workloads.dreams.elements import atom_counts
from memfit_workloads.dreams.finetuning import DreamsFinetuning
from memfit_workloads.dreams.made_spectra import (
    ELEMENTS,
    anion_mz,
    generated_spectra,
    is_generated,
    make_molecule,
    molecule_of,
)
from memfit_workloads.dreams.ms_data import MSData
from memfit_workloads.dreams.objectives import objective_named
from memfit_workloads.dreams.probing import begin_at_probe, inner_loss
from memfit_workloads.dreams.runs import at_its_largest
from memfit_workloads.dreams.schedule import Schedule
from memfit_workloads.dreams.settings import DATASETS, SMALL
from memfit_workloads.dreams.sizes import DreamsSizes
from memfit_workloads.dreams.spectra import fault_of

FEW = Path("generated:40:3")


def small_module(name: str = "has_F", head_depth: int = 1) -> DreamsFinetuning:
    values = {**SMALL.to_json(), "d_fourier": 12, "d_peak": 4, "n_heads": 2, "mz_accuracy": 0.1}
    torch.manual_seed(0)
    sizes = DreamsSizes.from_json(values)
    return DreamsFinetuning(
        sizes, objective_named(name, 16), Schedule(lr=0.1), head_depth=head_depth
    )


def test_the_units_of_a_made_molecule_add_up_to_its_formula():
    draw = np.random.default_rng(0)
    for _ in range(100):
        molecule = make_molecule(draw)
        counts = atom_counts(molecule.smiles)
        assert set(counts) <= set(ELEMENTS)
        assert molecule.units.sum(0).tolist() == [counts.get(each, 0) for each in ELEMENTS]


def test_made_molecules_are_ones_that_rdkit_understands():
    chemistry = pytest.importorskip("rdkit.Chem")
    draw = np.random.default_rng(1)

    smiles = [make_molecule(draw).smiles for _ in range(50)]

    assert [each for each in smiles if chemistry.MolFromSmiles(each) is None] == []


def test_fragments_have_the_masses_of_ions_that_are_known():
    # [M-H]- of phenol, and the anions of difluorobenzene and of difluorobenzamide; by hand.
    assert anion_mz(molecule_of(["O", "c1ccccc1"]).units.sum(0) - [0, 1, *[0] * 7]) == (
        pytest.approx(93.0346, abs=1e-4)
    )
    assert anion_mz(np.array([6, 3, 0, 0, 0, 0, 2, 0, 0])) == pytest.approx(113.0208, abs=1e-4)
    assert anion_mz(np.array([7, 4, 1, 1, 0, 0, 2, 0, 0])) == pytest.approx(156.0266, abs=1e-4)


def test_generated_spectra_repeat_and_more_of_them_begin_alike():
    first, again = (list(generated_spectra(Path(name))) for name in ("generated:3:5",) * 2)
    more = list(generated_spectra(Path("generated:5:5")))

    assert [each.smiles for each in first] == [each.smiles for each in again]
    assert [each.smiles for each in more[:3]] == [each.smiles for each in first]
    np.testing.assert_array_equal(first[2].mzs, more[2].mzs)
    assert first[0].smiles != next(generated_spectra(Path("generated:1:6"))).smiles
    assert [fault_of(each) for each in more] == [""] * 5


def test_generated_spectra_keep_below_their_precursor_and_within_ppm():
    for spectrum in generated_spectra(FEW):
        assert spectrum.mzs.max() < spectrum.precursor_mz + 1
        assert 100 < spectrum.precursor_mz < 1000


def test_a_name_of_generated_spectra_is_known_and_none_is_refused():
    assert is_generated(Path("generated"))
    assert is_generated(Path("generated:7:1"))
    assert not is_generated(Path("generated.mgf"))
    with pytest.raises(DataError, match="a number above 0"):
        list(generated_spectra(Path("generated:0")))


def test_elements_say_how_many_atoms_there_are_at_least():
    labels = objective_named("elements", 16).labels("FC(F)(F)CCl")

    assert len(labels) == objective_named("elements", 16).num_outputs
    assert labels[:8] == [1, 1, 1, 0, 0, 1, 0, 0]  # F at least 1, 2, 3, 4, 6; Cl at least 1, 2, 3


def test_a_probe_is_the_logistic_regression_of_its_embeddings():
    data = MSData(DATASETS["pesticides"])
    spectra = rows_of(data, range(30), 10)
    labels = torch.tensor([[float("F" in data.column("smiles")[row])] for row in range(30)])
    module = small_module()

    strength = begin_at_probe(module, spectra, labels, data.column("smiles")[:30], [0.1])

    features = in_batches(module.eval().backbone.embed, spectra, 8).double().numpy()
    features = (features - features.mean(0)) / features.std(0)
    model = LogisticRegression(C=0.1, max_iter=5000).fit(features, labels[:, 0])
    found = in_batches(module.predict, spectra, 8)[:, 0]
    assert strength == 0.1
    np.testing.assert_allclose(found, model.predict_proba(features)[:, 1], atol=1e-3)


def test_the_strength_of_a_probe_is_the_best_inside_the_training_part():
    draw = np.random.default_rng(0)
    labels = np.arange(40) % 2.0
    molecules = [str(row // 2) for row in range(40)]
    useless = draw.normal(size=(40, 60))
    clear = useless.copy()
    clear[:, 0] = 20 * labels + draw.normal(size=40)

    # Of what means nothing little may be learned; of what is clear, much.
    assert inner_loss(useless, labels, molecules, 1e-4) < inner_loss(useless, labels, molecules, 10)
    assert inner_loss(clear, labels, molecules, 1e-4) > inner_loss(clear, labels, molecules, 1)
    assert inner_loss(clear, labels, ["one"] * 40, 1.0) == float("inf")


@pytest.mark.parametrize(
    ("objective", "head_depth", "labels", "reason"),
    [
        ("has_F", 2, [[0.0], [1.0]], "1 outputs and 2 layers"),
        ("qed", 1, [[0.0], [1.0]], "not qed"),
        ("has_F", 1, [[1.0], [1.0]], "labelled alike"),
    ],
)
def test_what_a_probe_cannot_fit_is_refused(objective, head_depth, labels, reason):
    spectra = rows_of(MSData(DATASETS["pesticides"]), range(2), 10)
    module = small_module(objective, head_depth)

    with pytest.raises(UsageError, match=reason):
        begin_at_probe(module, spectra, torch.tensor(labels), ["a", "b"], [1.0])


@pytest.mark.slow
def test_folds_tell_the_strength_of_their_probe(tmp_path):
    words = ("finetune", "--dataset_pth", FEW, "--dformat", "none", "--no-gpu", "--max_epochs", 1)
    words += ("--d_fourier", 12, "--d_peak", 4, "--n_heads", 2, "--mz_accuracy", "0.1")
    words += ("--folds", 2, "--probe", 0.1, "--probe", 0.01, "--max_peaks_n", 8)

    result = train_workload("dreams", (*words, "-o", tmp_path / "run"))

    assert all(fold["probe"] in {0.1, 0.01} for fold in result["folds"])
    assert "probe_mean" not in result["metrics"]


@pytest.mark.parametrize(("freed_at", "learns"), [(0, True), (1, True), (2, False)])
def test_a_backbone_that_this_run_never_frees_is_planned_frozen(freed_at, learns):
    settings = SimpleNamespace(unfreeze_backbone_at_epoch=freed_at, max_epochs=2)

    def build() -> DreamsFinetuning:
        module = small_module()
        module.backbone.requires_grad_(False)
        return module

    module = at_its_largest(settings, build)()

    assert all(each.requires_grad == learns for each in module.backbone.parameters())
