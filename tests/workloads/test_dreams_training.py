"""DreaMS as a whole: runs, files, peaks, frozen parts, folds, embeddings, refusals."""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.workloads.training import train_workload

from memfit.errors import DataError, MemfitError, UsageError
from memfit.observe.allocator_blocks import living_blocks
from memfit.units import MIB
from memfit_workloads.dreams import MSData, callbacks, log_memory_usage, training
from memfit_workloads.dreams.arguments import PRESETS, add_arguments
from memfit_workloads.dreams.batches import ContrastiveDataset, EpochOrder
from memfit_workloads.dreams.checkpoints import read_model
from memfit_workloads.dreams.data_module import rows_of
from memfit_workloads.dreams.embedding import correlations, cosine_matrix, modified_cosine
from memfit_workloads.dreams.finetuning import DreamsFinetuning
from memfit_workloads.dreams.objectives import objective_named
from memfit_workloads.dreams.remedies import markdown, remedy_settings
from memfit_workloads.dreams.remedy_list import REMEDIES
from memfit_workloads.dreams.schedule import Schedule
from memfit_workloads.dreams.settings import SMALL
from memfit_workloads.flags import command_of

pytest.importorskip("lightning")
TINY = (
    *("--d_fourier", "12", "--d_peak", "4", "--n_layers", "2", "--n_heads", "2", "--no-gpu"),
    *("--mz_accuracy", "0.1", "--mz_bin", "5", "--max_peaks_n", "20", "--dformat", "none"),
)
sizes = replace(SMALL, d_fourier=12, d_peak=4, n_heads=2, mz_accuracy=0.1)


@pytest.fixture
def few(tmp_path) -> Path:
    """Write ten spectra of five molecules, with retention times."""
    path = tmp_path / "few.mgf"
    draw = np.random.default_rng(0)
    smiles = ["CCF", "CCCl", "CCN", "FCCN", "CC"]
    records = []
    for number in range(10):
        peaks = "\n".join(
            f"{mz:.4f} {height:.1f}"
            for mz, height in zip(draw.uniform(50, 300, 25), draw.uniform(1, 100, 25), strict=True)
        )
        records.append(
            f"BEGIN IONS\nPEPMASS={300 + number}\nCHARGE=1\nRTINSECONDS={number}\n"
            f"SMILES={smiles[number % 5]}\n{peaks}\nEND IONS\n"
        )
    path.write_text("".join(records))
    return path


def run(regime: str, *words: object) -> dict:
    return train_workload("dreams", (regime, *TINY, *words))


@pytest.mark.slow
def test_pretraining_then_finetuning_then_embedding(tmp_path, few):
    pre, fine, out = (tmp_path / name for name in ("pre", "fine", "out"))
    shared = ("--dataset_pth", few, "--batch_size", 4, "--max_epochs", 2)

    first = run("pretrain", *shared, "-o", pre)
    second = run("finetune", *shared, "-o", fine, "--pre_trained_pth", pre / "final_model.pt")
    third = run(
        "embed", "--dataset_pth", few, "-o", out, "--pre_trained_pth", fine / "final_model.pt"
    )

    assert {"val_mask_top1", "frequency_top1", "logistic_order_accuracy"} <= set(first["metrics"])
    for result in (first, second):
        assert json.loads(json.dumps(result, allow_nan=False)) == result
        assert result["measured_peak_bytes"] == pytest.approx(
            result["predicted_peak_bytes"], rel=0.05
        )
    names = {path.name for path in fine.iterdir()}
    assert names >= {"config.json", "plan.yaml", "final_model.pt", "results.json", "checkpoints"}
    embeddings = np.load(out / "embeddings.npz")["embeddings"]
    assert embeddings.shape == (10, 16)
    assert "embedding_same_molecule_auroc" in third["metrics"]
    assert len((out / "similarity.csv").read_text().splitlines()) == 51
    with pytest.raises(UsageError, match="already holds a run"):
        run("finetune", *shared, "-o", fine)


@pytest.mark.slow
def test_batches_of_one_accumulate_to_batches_of_two(tmp_path, few):
    words = ("--dataset_pth", few, "--batch_size", 1, "--accumulate_grad_batches", 2)

    result = run("finetune", *words, "--max_epochs", 1, "-o", tmp_path / "run")

    assert result["num_steps"] == result["num_train"] // 2
    assert result["measured_peak_bytes"] == pytest.approx(result["predicted_peak_bytes"], rel=0.05)


@pytest.mark.slow
def test_folds_are_reported_beside_logistic_regression(tmp_path, few):
    words = ("--dataset_pth", few, "--folds", 2, "--max_epochs", 1, "--train_objective", "has_N")

    result = run("finetune", *words, "-o", tmp_path / "run")

    assert len(result["folds"]) == 2
    assert sum(fold["num_test"] for fold in result["folds"]) == 10
    assert {"auroc_mean", "logistic_auroc_mean", "majority_accuracy_std"} <= set(result["metrics"])


def test_what_is_frozen_does_not_move_and_is_freed_at_its_epoch():
    module = DreamsFinetuning(
        sizes, objective_named("has_F", 16), Schedule(lr=0.1), unfreeze_at_epoch=2,
        num_frozen_layers=1,
    )  # fmt: skip

    assert not any(each.requires_grad for each in module.backbone.parameters())
    assert all(each.requires_grad for each in module.head.parameters())
    module.unfreeze_all()
    assert not any(each.requires_grad for each in module.backbone.blocks[0].parameters())
    assert all(each.requires_grad for each in module.backbone.blocks[1].parameters())


def test_every_objective_keeps_the_batch_axis_at_a_batch_of_one():
    spectra = torch.zeros(1, 1, 6, 2, dtype=torch.float64)
    spectra[..., :4, 0] = torch.tensor([100.0, 50, 60, 70])
    for name, labels in (("has_F", torch.ones(1, 1)), ("fp_morgan_2048", torch.ones(1, 2048))):
        module = DreamsFinetuning(sizes, objective_named(name, 16), Schedule(lr=0.1), head_depth=2)
        assert module.sample_losses({"spectra": spectra, "target": labels}).shape == (1,)
    triplet = {"spectra": spectra.expand(1, 3, 6, 2), "target": torch.zeros(1, 0)}
    module = DreamsFinetuning(sizes, objective_named("contrastive_spec_embs", 16), Schedule(lr=0.1))
    assert module.sample_losses(triplet).shape == (1,)


@pytest.mark.slow
def test_properties_are_scaled_by_the_training_labels_and_given_back():
    pytest.importorskip("rdkit")
    objective = objective_named("mol_props", 16)
    labels = torch.tensor([objective.labels(each) for each in ("CCF", "c1ccccc1O", "CC(=O)NCCCl")])
    module = DreamsFinetuning(sizes, objective, Schedule(lr=0.1), train_labels=labels)

    scaled = module.scale(labels)

    assert scaled.min() == 0
    assert scaled.max() == 1
    torch.testing.assert_close(module.scale.undo(scaled), labels)
    with pytest.raises(ValueError, match="does not understand"):
        objective.labels("C(")


def test_triplets_hold_the_molecule_and_another(few):
    data = MSData(few)
    molecules = data.column("smiles")
    triplets = ContrastiveDataset(rows_of(data, range(10), 20), molecules, random_seed=0)

    assert len(triplets) == 10
    for index in range(10):
        mzs = [float(each[0, 0]) for each in triplets[index]["spectra"]]
        anchor, positive, negative = (molecules[round(mz) - 300] for mz in mzs)
        assert anchor == positive != negative
        assert mzs[0] != mzs[1]


def test_an_epoch_has_every_row_once_in_its_own_order():
    order = EpochOrder(5, random_seed=1)
    first = list(order)
    order.set_epoch(1)
    second = [index - 5 for index in order]

    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second


@pytest.mark.slow
def test_unknown_molecules_are_refused_or_left_out(tmp_path, few):
    few.write_text(few.read_text().replace("SMILES=CCN", "SMILES=C?N", 1))
    words = ("--dataset_pth", few, "--max_epochs", 1, "-o", tmp_path / "run")

    with pytest.raises(DataError, match="row 2: SMILES 'C\\?N'"):
        run("finetune", *words)
    assert not (tmp_path / "run").exists()
    run("finetune", *words, "--on_bad_record", "skip", "--batch_size", 4)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert len(config["data_and_plan"]["bad_records"]) == 1


@pytest.mark.slow
def test_a_loss_that_is_no_number_leaves_no_final_model(tmp_path, few):
    words = ("--dataset_pth", few, "--max_epochs", 3, "--lr", "1e30", "--gradient_clip_val", 0)

    with pytest.raises(MemfitError, match="No final model is written"):
        run("finetune", *words, "-o", tmp_path / "run")
    assert not (tmp_path / "run" / "final_model.pt").exists()


def test_a_pretrained_file_brings_its_sizes_or_is_refused(tmp_path, few):
    (tmp_path / "not.pt").write_bytes(b"no checkpoint")
    with pytest.raises(DataError, match="cannot be read as a checkpoint"):
        run("finetune", "--dataset_pth", few, "--pre_trained_pth", tmp_path / "not.pt")
    torch.save({"sizes": {}, "backbone": {}, "head": {}, "objective": ""}, tmp_path / "old.pt")
    with pytest.raises(DataError, match="not those of DreaMS"):
        read_model(tmp_path / "old.pt")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "Say what to do"),
        (("pretrain",), "No spectra to read"),
        (("pretrain", "--dataset_pth", "bsa", "--train_objective", "has_F"), "is none of pretrain"),
        (("embed", "--dataset_pth", "bsa"), "needs a trained model"),
        (("pretrain", "--train_regime", "fine-tuning", "--dataset_pth", "bsa"), "contradicts"),
        (("pretrain", "--dataset_pth", "bsa", "--n_heads", "7"), "no multiple of --n_heads 7"),
        (("pretrain", "--dataset_pth", "a", "--dataset_pth", "b"), "Only convert"),
        (("--demo", "pretrain"), "leave pretrain out"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, reason):
    with pytest.raises(UsageError, match=reason):
        train_workload("dreams", words)


def test_the_command_line_that_repeats_a_run_says_what_is_done():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["pretrain", "--dataset_pth", "bsa", "--lr", "0.5", "--in_mem"]

    command = command_of(parser.parse_args(words), "dreams", add_arguments)

    again = parser.parse_args(command.split()[3:])
    assert command.startswith("memfit train dreams pretrain ")
    assert again == parser.parse_args(words)


def test_the_converter_is_a_command(tmp_path, few):
    target = tmp_path / "all.hdf5"

    result = run("convert", "--dataset_pth", few, "--dataset_pth", "pesticides", "-o", target)

    assert result["metrics"] == {"num_spectra": 86}
    assert len(MSData(target)) == 86


def test_presets_fill_in_what_was_not_typed():
    named = {remedy.name: remedy for remedy in REMEDIES}
    for name in PRESETS:
        settings = remedy_settings(named[f"{name} preset"], "cpu")
        assert (settings.batch_size, settings.accumulate_grad_batches) == (1, 2)
        assert settings.remedies.empty_cache_every == 1
    assert settings.max_peaks_n == 80
    plain = remedy_settings(REMEDIES[0], "document")
    assert (plain.batch_size, plain.max_peaks_n, plain.sizes.d_model) == (2, 100, 1024)
    assert plain.sizes.bias_form == "pairwise"


def test_the_readme_has_a_row_for_every_remedy():
    readme = (Path(__file__).parents[2] / "src/memfit_workloads/dreams/README.md").read_text()
    for remedy in REMEDIES:
        assert f"| {remedy.name} | `{remedy.flag}` | {remedy.claim} |" in readme
    assert markdown([]).splitlines()[0] in readme


def test_memory_is_logged_where_there_is_no_gpu(capsys):
    line = log_memory_usage()

    assert line in capsys.readouterr().err
    assert "Memory" in line or "memory" in line


def test_similarities_are_what_they_say():
    one = np.array([[200.0, 1.1], [50, 1.0], [80, 0.5]])
    shifted = one + np.array([[10, 0], [0, 0], [10, 0]])

    assert modified_cosine(one, one) == pytest.approx(1)
    assert modified_cosine(one, shifted) == pytest.approx(1)  # one peak moved with the precursor
    assert modified_cosine(one, one + np.array([[0, 0], [5, 0], [5, 0]])) == 0
    assert cosine_matrix(np.array([[1.0, 0], [0, 2], [0, 0]])).tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 0],
    ]
    figures = correlations(np.array([1.0, 2, 3, 10]), np.array([2.0, 4, 6, 7]))
    assert figures["spearman"] == pytest.approx(1)
    assert figures["pearson"] < 1


@pytest.mark.slow
def test_sixty_epochs_with_validation_hold_no_more_than_three(tmp_path, few, monkeypatch):
    pytest.importorskip("rdkit")
    held: dict[int, int] = {}

    class Watch(callbacks.StopOnNoNumber):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch in {3, 20, 40, 59}:
                held[trainer.current_epoch] = sum(living_blocks().values())

    monkeypatch.setattr(training, "StopOnNoNumber", Watch)
    words = ("--dataset_pth", few, "--batch_size", 4, "--max_epochs", 60, "--save_top_k", 0)
    # Kept from pass to pass, predictions and targets of 4096 bits would add up to 7 MiB.
    run("finetune", *words, "--train_objective", "fp_morgan_4096", "-o", tmp_path / "run")

    assert len(held) == 4
    assert max(held.values()) - held[3] <= MIB


def test_allocator_settings_are_given_where_torch_reads_them_first(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    remedies = SimpleNamespace(allocator_settings="expandable_segments:True", memory_fraction=None)
    training._set_up_process(SimpleNamespace(remedies=remedies, seed=0))
    found = {name: text for name, text in os.environ.items() if name.endswith("ALLOC_CONF")}
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
