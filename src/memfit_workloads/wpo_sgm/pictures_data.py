"""Pictures that come with other packages: handwritten digits, and patches of photographs.

Pixels are whole numbers; a density needs real ones, so each gets a uniform number from 0 to 1 added
("dequantised": Uria et al. 2013, https://arxiv.org/abs/1306.0186, section 6.1). Then all are
standardised by one mean and one deviation, taken over the training part.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memfit.errors import MissingExtraError

PATCH_SIDES = (8, 16, 32)
_PHOTOGRAPHS = ("astronaut", "chelsea", "coffee", "rocket")
"""In the public domain or under CC0, by the list that scikit-image ships with its pictures."""
_EXTRA = "pictures"


def dequantised_digits(seed: int) -> NDArray[np.float32]:
    """Return the 1,797 digits of scikit-learn in random order, (1797, 64), pixels from 0 to 17.

    Raises:
        MissingExtraError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise MissingExtraError("--data digits", "scikit-learn", _EXTRA) from None
    rng = np.random.default_rng(seed)
    digits = rng.permutation(load_digits().data)
    return (digits + rng.random(digits.shape)).astype(np.float32)


def dequantised_patches(side: int, num_patches: int, seed: int) -> NDArray[np.float32]:
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
