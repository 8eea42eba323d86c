"""What a mixture is trained on: samples parted into training, validation and test.

Shape suffixes: N samples, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memfit.errors import DataError, MissingExtraError, UsageError

from .cifar import read_cifar10
from .toy_sets import TOY_SETS, draw_toy_set

DIGITS, CIFAR10 = "digits", "cifar10"
_PATCH_SIDES = (8, 16, 32)
PATCHES = {f"patches{side}": side for side in _PATCH_SIDES}
DATASETS = (*TOY_SETS, DIGITS, *PATCHES, CIFAR10)
_FILES = (".npy", ".pt")
_Array = NDArray[np.float32]
_PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
"""In the public domain or under CC0, by the list that scikit-image ships with its pictures."""
_EXTRA = "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSizes:
    """How many samples of each part are wanted."""

    num_train: int
    num_validation: int
    num_test: int

    @property
    def total(self) -> int:
        """Add the parts up."""
        return self.num_train + self.num_validation + self.num_test


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Training, validation and test samples, each (N, D) float32."""

    name: str
    train: Tensor
    validation: Tensor
    test: Tensor
    picture_shape: tuple[int, int, int] | None = None
    """Channels, height and width, where samples are pictures."""
    shift: float = 0.0
    scale: float = 1.0
    """A pixel, as it was, is ``shift + scale * value``."""
    pixel_range: tuple[float, float] = (0.0, 1.0)
    """Of pixels as they were."""
    log_volume: float = 0.0
    """To be added to a log-density of these samples for that of the samples as loaded."""

    @property
    def num_dimensions(self) -> int:
        """Return D."""
        return self.train.shape[1]


def load_samples(name: str, sizes: DataSizes, *, seed: int, folder: Path | None = None) -> Samples:
    """Load or draw samples.

    Args:
        name: one of ``DATASETS``, or a file (.npy, .pt) of shape (N, D).
        sizes: of the three parts.
        seed: of what is drawn, and of the order.
        folder: where CIFAR-10 lies.

    Raises:
        DataError: if a file cannot be used or holds too few samples.
        UsageError: if there is no such data set.
    """
    if name in TOY_SETS:
        drawn = draw_toy_set(name, sizes.total, seed)
        return _parted(name, drawn, sizes)
    if name == DIGITS:
        # The 1,797 digits in random order. Pixels are whole numbers from 0 to 16; a density needs
        # real ones, so each gets a uniform number from 0 to 1 added ("dequantised": Uria et al.
        # 2013, https://arxiv.org/abs/1306.0186, section 6.1).
        try:
            from sklearn.datasets import load_digits
        except ModuleNotFoundError:
            raise MissingExtraError("--data digits", "scikit-learn", _EXTRA) from None
        rng = np.random.default_rng(seed)
        digits = rng.permutation(load_digits().data)
        parted = _parted(name, (digits + rng.random(digits.shape)).astype(np.float32), sizes)
        return _standardised(parted, (1, 8, 8), most=17.0)
    if name in PATCHES:
        side = PATCHES[name]
        patches = _dequantised_patches(side, sizes.total, seed)
        return _standardised(_parted(name, patches, sizes), (3, side, side), most=256.0)
    if name == CIFAR10:
        return _cifar10(sizes, seed, folder)
    path = Path(name)
    if path.suffix not in _FILES:
        msg = (
            f"No data set named {name!r}. There are: {', '.join(DATASETS)}; or give a file "
            f"({' or '.join(_FILES)}) with one sample per row."
        )
        raise UsageError(msg)
    return _parted(
        path.name, np.random.default_rng(seed).permutation(read_samples(path)), sizes, path
    )


def _parted(name: str, samples: _Array, sizes: DataSizes, path: Path | None = None) -> Samples:
    """Cut samples into parts.

    Raises:
        DataError: if there are too few.
    """
    if len(samples) < sizes.total:
        reason = (
            f"it has {len(samples):,} samples; needed are {sizes.num_train:,} to train on, "
            f"{sizes.num_validation:,} to validate and {sizes.num_test:,} to test. Lower "
            "--train_samples_size, --validation_samples_size or --test_samples_size."
        )
        raise DataError(str(path or name), reason)
    ends = np.cumsum((sizes.num_train, sizes.num_validation, sizes.num_test))
    parts = np.split(samples[: ends[-1]], ends[:-1])
    train, validation, test = (torch.from_numpy(np.ascontiguousarray(part)) for part in parts)
    return Samples(name=name, train=train, validation=validation, test=test)


def _standardised(samples: Samples, picture_shape: tuple[int, int, int], *, most: float) -> Samples:
    """Subtract one mean and divide by one deviation, those of the training part."""
    shift, scale = float(samples.train.mean()), float(samples.train.std())
    parts = (samples.train, samples.validation, samples.test)
    train, validation, test = ((part - shift) / scale for part in parts)
    return replace(
        samples,
        train=train,
        validation=validation,
        test=test,
        picture_shape=picture_shape,
        shift=shift,
        scale=scale,
        pixel_range=(0.0, most),
    )


def _cifar10(sizes: DataSizes, seed: int, folder: Path | None) -> Samples:
    """Part the training pictures, and take test pictures from the test batch.

    Raises:
        UsageError: if no folder is given.
        DataError: if there are too few pictures.
    """
    folder = folder or _usual_folder()
    if folder is None:
        msg = (
            "CIFAR-10, the default of --data, is not here: --data_dir names the folder where "
            "cifar-10-python.tar.gz or cifar-10-binary.tar.gz was unpacked (from "
            "https://www.cs.toronto.edu/~kriz/cifar.html); ./data is looked into without it. "
            "--data patches32 needs no download and has as many dimensions, 3,072."
        )
        raise UsageError(msg)
    rng = np.random.default_rng(seed)
    training, test = (rng.permutation(part) for part in read_cifar10(folder))
    needed = DataSizes(num_train=sizes.num_train, num_validation=sizes.num_validation, num_test=0)
    parted = _parted(CIFAR10, training, needed, folder)
    if len(test) < sizes.num_test:
        reason = f"it has {len(test):,} test pictures; lower --test_samples_size to that."
        raise DataError(str(folder), reason)
    return replace(
        parted,
        test=torch.from_numpy(test[: sizes.num_test]),
        picture_shape=(3, 32, 32),
        pixel_range=(-2.0, 2.0),  # about where standardised pixels lie
    )


def _usual_folder() -> Path | None:
    """Return ``./data`` if CIFAR-10 lies there, as other programs leave it."""
    usual = Path("data")
    return usual if any(usual.glob("cifar-10-batches-*")) else None


def read_samples(path: Path) -> _Array:
    """Read a file of samples.

    Raises:
        DataError: if it is missing, no array of numbers (N, D), or holds NaN or infinity.
    """
    try:
        if path.suffix == ".npy":
            found = np.load(path, allow_pickle=False)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
            found = found.numpy() if isinstance(found, Tensor) else found
    except FileNotFoundError:
        raise DataError(str(path), "there is no such file.") from None
    except Exception as error:  # noqa: BLE001 - the readers raise whatever damage leads to
        cause = str(error).partition("\n")[0]
        raise DataError(str(path), f"it cannot be read as an array ({cause}).") from None
    samples = np.asarray(found)
    if samples.ndim != 2 or samples.dtype.kind not in "fiu" or 0 in samples.shape:
        reason = f"it is {samples.dtype} of shape {samples.shape}; needed are numbers (N, D)."
        raise DataError(str(path), reason)
    bad = ~np.isfinite(samples).all(axis=1)
    if bad.any():
        reason = (
            f"{int(bad.sum()):,} of {len(samples):,} rows hold NaN or infinity, the first is row "
            f"{int(bad.argmax())} (counted from 0). Remove or repair them."
        )
        raise DataError(str(path), reason)
    return samples.astype(np.float32)


def _dequantised_patches(side: int, num_patches: int, seed: int) -> NDArray[np.float32]:
    """Cut square patches from photographs, (patches, 3 side side), pixels from 0 to 256.

    Channels come first, then rows.

    Raises:
        MissingExtraError: if scikit-image is not installed.
    """
    try:
        from skimage import data
    except ModuleNotFoundError:
        raise MissingExtraError("--data patches", "scikit-image", _EXTRA) from None
    rng = np.random.default_rng(seed)
    photographs = [getattr(data, name)()[..., :3] for name in _PHOTOGRAPHS]
    patches = np.empty((num_patches, 3, side, side), np.float32)
    for patch in patches:
        picture = photographs[rng.integers(len(photographs))]
        row = rng.integers(picture.shape[0] - side + 1)
        column = rng.integers(picture.shape[1] - side + 1)
        patch[:] = picture[row : row + side, column : column + side].transpose(2, 0, 1)
    return (patches + rng.random(patches.shape, np.float32)).reshape(num_patches, -1)
