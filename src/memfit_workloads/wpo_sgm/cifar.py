"""CIFAR-10 from a local folder, in its published binary or Python format.

Source of both formats: https://www.cs.toronto.edu/~kriz/cifar.html. The Python format is a pickle,
which could run code when it is read; here only what an array is made of is let through.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError

_NUM_PIXELS = 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = ("test_batch",)
_FOLDERS = (".", "cifar-10-batches-py", "cifar-10-batches-bin")
_MEANS = (0.4914, 0.4822, 0.4465)
_DEVIATIONS = (0.2023, 0.1994, 0.2010)
_WHERE = (
    "Needed are data_batch_1 to data_batch_5 and test_batch, with or without .bin, as they come "
    "in cifar-10-python.tar.gz or cifar-10-binary.tar.gz."
)


def read_cifar10(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Read training and test pictures, standardised per channel, each (pictures, 3072).

    Channels come first, then rows.

    Raises:
        DataError: if a file is missing, cut off, or something else.
    """
    return _read_all(folder, _TRAIN), _read_all(folder, _TEST)


def _read_all(folder: Path, names: tuple[str, ...]) -> NDArray[np.float32]:
    pixels = np.concatenate([read_batch(_find(folder, name)) for name in names])
    pictures = pixels.reshape(-1, 3, 1024).astype(np.float32) / 255.0
    means = np.array(_MEANS, np.float32)[:, None]
    return ((pictures - means) / np.array(_DEVIATIONS, np.float32)[:, None]).reshape(
        len(pixels), -1
    )


def _find(folder: Path, name: str) -> Path:
    for inner in _FOLDERS:
        for path in (folder / inner / name, folder / inner / f"{name}.bin"):
            if path.is_file():
                return path
    raise DataError(str(folder), f"there is no {name} of CIFAR-10 there. {_WHERE}")


def read_batch(path: Path) -> NDArray[np.uint8]:
    """Read the pixels of one file, (pictures, 3072)."""
    return _read_binary(path) if path.suffix == ".bin" else _read_pickle(path)


def _read_binary(path: Path) -> NDArray[np.uint8]:
    """Read rows of one label byte and 3072 pixels.

    Raises:
        DataError: if the file does not hold whole rows.
    """
    content = np.fromfile(path, dtype=np.uint8)
    if not content.size or content.size % (1 + _NUM_PIXELS):
        reason = (
            f"it has {content.size:,} bytes; needed is a multiple of {1 + _NUM_PIXELS:,}, one "
            "label and 3,072 pixels per picture. It may be cut off; unpack it again."
        )
        raise DataError(str(path), reason)
    return content.reshape(-1, 1 + _NUM_PIXELS)[:, 1:]


def _read_pickle(path: Path) -> NDArray[np.uint8]:
    """Read the array under ``data``.

    Raises:
        DataError: if there is none of the right shape, or the file asks for anything but arrays.
    """
    try:
        file = io.BytesIO(path.read_bytes())
        content = _ArrayUnpickler(file, encoding="bytes").load()
    except Exception as error:  # noqa: BLE001 - unpickling raises whatever damage leads to
        cause = str(error).partition("\n")[0] or type(error).__name__
        reason = f"it cannot be read as a batch of CIFAR-10 ({cause}). {_WHERE}"
        raise DataError(str(path), reason) from None
    pixels = content.get(b"data") if isinstance(content, dict) else None
    if (
        not isinstance(pixels, np.ndarray)
        or pixels.dtype != np.uint8
        or pixels.ndim != 2
        or pixels.shape[1] != _NUM_PIXELS
    ):
        found = getattr(pixels, "shape", type(pixels).__name__)
        reason = f"its entry 'data' is {found}; needed are bytes of shape (pictures, 3072)."
        raise DataError(str(path), reason)
    return pixels


class _ArrayUnpickler(pickle._Unpickler):
    """Lets a pickle make numpy arrays of plain numbers, and nothing else.

    In Python, as the one in C sets aside sixteen bytes for every index of its memo below the
    largest one, which a damaged byte may make two billion.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return the three makers of arrays, under the names they have had.

        Raises:
            UnpicklingError: for everything else.
        """
        if module in {"numpy", "numpy.core.multiarray", "numpy._core.multiarray"}:
            if name in ("dtype", "ndarray"):
                return getattr(np, name)
            if name == "_reconstruct":
                return np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # what numpy's own pickles call
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes in old protocols
            return _encoded
        msg = f"it asks for {module}.{name}, which no array needs"
        raise pickle.UnpicklingError(msg)


def _encoded(text: str, encoding: str) -> bytes:
    """Return the bytes that an old protocol wrote as text.

    Raises:
        UnpicklingError: for any encoding but the one that is used for bytes.
    """
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding}, which no array needs")
    return text.encode("latin1")
