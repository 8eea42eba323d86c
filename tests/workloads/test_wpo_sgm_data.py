"""Data of WPO-SGM: toy sets, pictures, CIFAR-10 from a folder, files, and what is wrong with them."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from memfit.errors import DataError, UsageError
from memfit_workloads.wpo_sgm.cifar import read_cifar10
from memfit_workloads.wpo_sgm.data import DATASETS, DataSizes, load_samples
from memfit_workloads.wpo_sgm.settings import DATASET_NAMES
from memfit_workloads.wpo_sgm.toy_sets import TOY_SETS, draw_toy_set

SIZES = DataSizes(num_train=30, num_validation=10, num_test=5)


@pytest.mark.parametrize("name", TOY_SETS)
def test_toy_sets_depend_on_the_seed_alone_and_lie_within_bounds(name):
    drawn = draw_toy_set(name, 500, seed=3)
    assert drawn.shape == (500, 6 if name == "swissroll_6D_xy1" else 2)
    assert drawn.dtype == np.float32
    assert np.array_equal(drawn, draw_toy_set(name, 500, seed=3))
    assert not np.array_equal(drawn, draw_toy_set(name, 500, seed=4))
    assert np.abs(drawn).max() < 20
    assert drawn[:, :2].std(axis=0).min() > 0.3


def test_eight_gaussians_are_where_they_are_said_to_be():
    drawn = draw_toy_set("8gaussians", 20_000, seed=0)
    angles = np.arctan2(drawn[:, 1], drawn[:, 0]) / (np.pi / 4)
    nearest = np.round(angles) % 8
    for number in range(8):
        own = drawn[nearest == number]
        centre = 4 / 1.414 * np.array([np.cos(number * np.pi / 4), np.sin(number * np.pi / 4)])
        assert np.abs(own.mean(axis=0) - centre).max() < 0.03
        assert own.std() < 2.1


def test_parts_do_not_overlap_and_the_help_lists_every_set():
    samples = load_samples("moons", SIZES, seed=0)
    parts = [samples.train, samples.validation, samples.test]
    assert [len(part) for part in parts] == [30, 10, 5]
    assert len(torch.cat(parts).unique(dim=0)) == 45
    assert set(DATASET_NAMES) == set(DATASETS)


@pytest.mark.parametrize(("name", "num_dimensions"), [("digits", 64), ("patches8", 192)])
def test_pictures_are_standardised_and_can_be_shown_again(name, num_dimensions):
    pytest.importorskip("sklearn" if name == "digits" else "skimage")
    samples = load_samples(name, DataSizes(num_train=300, num_validation=50, num_test=50), seed=0)
    assert samples.num_dimensions == num_dimensions
    assert abs(float(samples.train.mean())) < 1e-4
    assert float(samples.train.std()) == pytest.approx(1.0, abs=1e-4)
    pixels = samples.shift + samples.scale * samples.test
    low, high = samples.pixel_range
    assert low <= float(pixels.min()) <= float(pixels.max()) <= high
    assert samples.picture_shape is not None
    assert len(samples.train.unique(dim=0)) == 300


def cifar_pixels(num_pictures: int = 4, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_pictures, 3072), dtype=np.uint8)


def names() -> list[str]:
    return [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@pytest.fixture
def python_folder(tmp_path: Path) -> Path:
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    for seed, name in enumerate(names()):
        content = {b"data": cifar_pixels(seed=seed), b"labels": [0] * 4, b"batch_label": b"x"}
        (inner / name).write_bytes(pickle.dumps(content, protocol=2))
    return tmp_path


def test_both_formats_of_cifar_give_the_same_pictures(python_folder, tmp_path):
    binary = tmp_path / "binary"
    binary.mkdir()
    for seed, name in enumerate(names()):
        rows = np.concatenate([np.full((4, 1), 7, np.uint8), cifar_pixels(seed=seed)], axis=1)
        rows.tofile(binary / f"{name}.bin")
    for ours, theirs in zip(read_cifar10(python_folder), read_cifar10(binary), strict=True):
        assert np.array_equal(ours, theirs)
    train, test = read_cifar10(binary)
    assert train.shape == (20, 3072)
    assert test.shape == (4, 3072)
    first = cifar_pixels()[0, 0] / 255
    assert float(train[0, 0]) == pytest.approx((first - 0.4914) / 0.2023, rel=1e-5)


class Harmful:
    """What a prepared file may hold."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harmed",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    python_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = python_folder / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps({b"data": Harmful()}, protocol=2))
    with pytest.raises(DataError, match=r"posix\.mkdir|nt\.mkdir"):
        read_cifar10(python_folder)
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "cannot be read"),
        (pickle.dumps({b"data": np.zeros((4, 10), np.uint8)}, protocol=2), r"\(4, 10\)"),
        (pickle.dumps({b"data": np.zeros((4, 3072), np.float32)}, protocol=2), r"\(4, 3072\)"),
        (pickle.dumps([1], protocol=2), "NoneType"),
    ],
)
def test_batches_that_hold_something_else_are_named(python_folder, content, what):
    (python_folder / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=what) as caught:
        read_cifar10(python_folder)
    assert "data_batch_3" in str(caught.value)


def test_a_damaged_index_of_the_memo_takes_no_memory(python_folder):
    """Python's own unpickler in C sets aside sixteen bytes for each index below it."""
    path = next(python_folder.rglob("data_batch_1"))
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x0f.")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="data"):
        read_cifar10(python_folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_missing_and_cut_off_files_of_cifar_are_named(python_folder, tmp_path):
    (python_folder / "cifar-10-batches-py" / "test_batch").unlink()
    with pytest.raises(DataError, match="no test_batch"):
        read_cifar10(python_folder)
    for name in names():
        (tmp_path / f"{name}.bin").write_bytes(b"\0" * 3073)
    (tmp_path / "data_batch_1.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(DataError, match=r"3,000 bytes; needed is a multiple of 3,073"):
        read_cifar10(tmp_path)


def test_cifar_needs_a_folder_with_enough_pictures(python_folder):
    with pytest.raises(UsageError, match="--data_dir"):
        load_samples("cifar10", SIZES, seed=0)
    few = DataSizes(num_train=12, num_validation=6, num_test=4)
    samples = load_samples("cifar10", few, seed=0, folder=python_folder)
    assert samples.train.shape == (12, 3072)
    with pytest.raises(DataError, match="20 samples; needed are 30"):
        load_samples("cifar10", SIZES, seed=0, folder=python_folder)
    with pytest.raises(DataError, match="4 test pictures"):
        load_samples(
            "cifar10",
            DataSizes(num_train=2, num_validation=2, num_test=9),
            seed=0,
            folder=python_folder,
        )


@pytest.mark.parametrize("suffix", [".npy", ".pt"])
def test_files_of_ones_own_are_read(tmp_path, suffix):
    rows = np.random.default_rng(0).normal(size=(45, 3))
    path = tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(path, rows)
    else:
        torch.save(torch.from_numpy(rows), path)
    samples = load_samples(str(path), SIZES, seed=0)
    assert samples.train.shape == (30, 3)
    assert samples.train.dtype == torch.float32


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        (np.zeros(5), r"shape \(5,\)"),
        (np.zeros((5, 2, 2)), r"shape \(5, 2, 2\)"),
        (np.array([["a", "b"]]), "numbers"),
        (np.array([[1.0, 2.0], [np.nan, 1.0], [np.inf, 1.0]]), "2 of 3 rows.* row 1"),
        (np.zeros((44, 2)), "44 samples; needed are 30 to train on"),
    ],
)
def test_files_that_cannot_be_used_say_why(tmp_path, rows, what):
    path = tmp_path / "rows.npy"
    np.save(path, rows)
    with pytest.raises(DataError, match=what):
        load_samples(str(path), SIZES, seed=0)


def test_what_is_no_array_and_what_is_not_there_is_said(tmp_path):
    (tmp_path / "rows.npy").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        load_samples(str(tmp_path / "rows.npy"), SIZES, seed=0)
    with pytest.raises(DataError, match="no such file"):
        load_samples(str(tmp_path / "none.npy"), SIZES, seed=0)
    with pytest.raises(UsageError, match="No data set named 'nope'"):
        load_samples("nope", SIZES, seed=0)
