"""Files that hold the frames of a clip: arrays of numpy, and video.

Shape suffixes: N frames of a file, H height, W width, C channels.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError

ARRAY_SUFFIXES = (".npy", ".npz")
_LAYOUTS = {
    3: "(frames, height, width, 3) of uint8, as videos are decoded",
    1: "(frames, height, width) of uint8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameFile:
    """A file whose frames are read when they are asked for."""

    path: Path
    num_frames: int
    read: Callable[[Sequence[int]], Iterator[NDArray[np.uint8]]]
    """Takes rising numbers of frames; yields each as (H, W, C)."""


def open_frames(path: Path, num_channels: int) -> FrameFile:
    """Open a clip, and count its frames.

    Raises:
        DataError: if the file cannot be read, or holds something else.
        MissingExtraError: for a video without PyAV.
    """
    check_regular(path)
    if path.suffix.lower() in ARRAY_SUFFIXES:
        array = _frames_of(path, open_array(path), num_channels)
        return FrameFile(
            path=path,
            num_frames=len(array),
            read=lambda numbers: (np.array(array[number]) for number in numbers),
        )
    from .video_files import count_packets, decoded

    return FrameFile(
        path=path,
        num_frames=count_packets(path),
        read=lambda numbers: decoded(path, num_channels, numbers),
    )


def count_frames(path: Path, num_channels: int) -> int:
    """Count the frames of a clip by what stands at its head, without reading it whole.

    Raises:
        DataError: if the file cannot be read, or holds something else.
        MissingExtraError: for a video without PyAV.
    """
    check_regular(path)
    if path.suffix.lower() in ARRAY_SUFFIXES:
        return len(_frames_of(path, open_array(path, head_only=True), num_channels))
    from .video_files import frames_in_header

    return frames_in_header(path)


def spread(path: Path, num_there: int, num_wanted: int) -> list[int]:
    """Choose frames evenly, the first and the last among them.

    Raises:
        DataError: if there are too few.
    """
    if num_there < num_wanted:
        reason = (
            f"it has {num_there} frames; needed are {num_wanted}. Give a longer clip, or lower "
            "--num-frames."
        )
        raise DataError(str(path), reason)
    steps = num_wanted - 1
    return [(2 * place * (num_there - 1) + steps) // (2 * steps) for place in range(num_wanted)]


def check_regular(path: Path) -> None:
    """Refuse what is no file: a pipe would be waited for without end.

    Raises:
        DataError: if the file is missing or something else.
    """
    try:
        path.stat()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        reason = f"it cannot be read ({getattr(error, 'strerror', None) or error}). Check the path."
        raise DataError(str(path), reason) from None
    if not is_file:
        found = "a folder" if is_folder else "no regular file"
        raise DataError(str(path), f"it is {found}; needed is a file with frames.")


def open_array(path: Path, *, head_only: bool = False) -> NDArray[Any]:
    """Open an array, mapped into memory where the file is .npy.

    With ``head_only``, an array of .npz has the right shape and type and no content.

    Raises:
        DataError: if there is none, or more than one.
    """
    try:
        if path.suffix.lower() == ".npy":
            found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            return found
        return _archived(path, head_only=head_only)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - the readers raise whatever damage leads to
        cause = str(error).partition("\n")[0] or type(error).__name__
        reason = f"it cannot be read as an array ({cause}). Write it anew with numpy.save."
        raise DataError(str(path), reason) from None


def _archived(path: Path, *, head_only: bool) -> NDArray[Any]:
    """Read the one array of a .npz file."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if len(names) != 1:
            reason = (
                f"it holds {len(names)} arrays ({', '.join(sorted(names)[:4])}); needed is one. "
                "Save each to a file of its own."
            )
            raise DataError(str(path), reason)
        with archive.open(names[0]) as member:
            if not head_only:
                array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
                return array
            version = np.lib.format.read_magic(member)
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[version]
            shape, _, dtype = read(member)
    return np.broadcast_to(np.zeros((), dtype), shape)


def _frames_of(path: Path, array: NDArray[Any], num_channels: int) -> NDArray[Any]:
    """Look at an array as frames: (N, H, W, C).

    Raises:
        DataError: if it has another shape or type.
    """
    if array.ndim == 3 and num_channels == 1:
        array = array[..., None]
    is_right = array.ndim == 4 and array.shape[-1] == num_channels and 0 not in array.shape
    if not is_right or array.dtype != np.uint8:
        reason = (
            f"it is an array of shape {tuple(array.shape)} and type {array.dtype}; needed is "
            f"{_LAYOUTS[num_channels]}."
        )
        raise DataError(str(path), reason)
    return array
