"""Clips that a manifest lists: their files checked at the start, their frames read when needed.

Shape suffixes: T frames of a clip, H height, W width, C channels, K objects of a frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from memfit.errors import DataError

from .clips import NUM_OBJECTS, Clip
from .frame_files import check_regular, count_frames, open_array, open_frames, spread
from .manifest import Record, check_each
from .record_fields import BOXES, INFRARED, MASK, RGB
from .sizes import TridentSizes

_NUM_CHANNELS = {RGB: 3, INFRARED: 1, MASK: 1}
_NUM_BOX_VALUES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedClips:
    """The clips of some records, each read anew at every call."""

    sizes: TridentSizes
    records: Sequence[Record]

    @property
    def has_masks(self) -> bool:
        """Return whether some clip has a mask."""
        return any(MASK in record.files for record in self.records)

    @property
    def has_boxes(self) -> bool:
        """Return whether some clip has boxes."""
        return any(BOXES in record.files for record in self.records)

    def __len__(self) -> int:
        return len(self.records)

    def events(self) -> list[float]:
        """Return which clips are events."""
        return [record.event for record in self.records]

    def fingerprint(self) -> str:
        """Return what records, or files of another size or time, do not have."""
        found = hashlib.sha256(str(self.sizes).encode())
        for record in self.records:
            found.update(record.digest.encode())
            for key, path in sorted(record.files.items()):
                status = path.stat()
                said = (key, str(path), status.st_size, status.st_mtime_ns)
                found.update(repr(said).encode())
        return f"recorded: {found.hexdigest()}"

    def clip(self, number: int) -> Clip:
        """Read one clip.

        Raises:
            DataError: that names the record, if a file is damaged or has changed.
            MissingExtraError: for a video without PyAV.
        """
        record, sizes = self.records[number], self.sizes
        rgb, num_there = _frames(record, RGB, sizes)
        shape = (1, sizes.num_frames, sizes.height, sizes.width)
        infrared = mask = boxes = None
        if INFRARED in record.files:
            infrared, _ = _frames(record, INFRARED, sizes)
        if MASK in record.files:
            found, num_masks = _frames(record, MASK, sizes)
            _check_same_length(record, MASK, num_masks, num_there)
            mask = _mask(record, found[0])
        if BOXES in record.files:
            boxes = _boxes(record, num_there, sizes)
        return Clip(
            rgb=torch.from_numpy(rgb),
            infrared=torch.from_numpy(np.zeros(shape, np.uint8) if infrared is None else infrared),
            kinematics=torch.from_numpy(record.kinematics.copy()),
            class_id=record.class_id,
            class_conf=record.class_conf,
            event=record.event,
            severe=record.severe,
            mask=mask,
            boxes=boxes,
        )


def check_files(records: Iterable[Record], sizes: TridentSizes) -> None:
    """Check what the records' files say at their head, without reading frames.

    Raises:
        DataError: that names the first record whose files cannot serve, and counts the others.
        MissingExtraError: for a video without PyAV.
    """
    check_each((partial(_check_record, record, sizes), record.line) for record in records)


def refuse_shared(records: Iterable[Record]) -> None:
    """Refuse a file that two records name, under whatever path.

    Raises:
        DataError: that names both.
    """
    seen: dict[tuple[int, int], tuple[Record, str]] = {}
    for record in records:
        for key, path in record.files.items():
            status = path.stat()
            other, other_key = seen.setdefault((status.st_dev, status.st_ino), (record, key))
            if (other, other_key) == (record, key):
                continue
            where = (
                f"{other_key} of the same record"
                if other is record
                else f"{other_key} of {other.manifest}, line {other.line}"
            )
            msg = (
                f"{key} is {path}, which is {where} too. Each clip belongs to one record, so that "
                "none is trained on and tested on; leave one of them out."
            )
            raise record.fault(msg)


def _check_record(record: Record, sizes: TridentSizes) -> None:
    """Check the files of one record."""
    num_frames: dict[str, int] = {}
    for key, path in record.files.items():
        try:
            if key == BOXES:
                num_frames[key] = len(read_boxes(path))
                continue
            num_frames[key] = count_frames(path, _NUM_CHANNELS[key])
            spread(path, num_frames[key], sizes.num_frames)
        except DataError as error:
            raise record.fault(f"{key}: {error}") from None
    for key in (MASK, BOXES):
        if key in num_frames:
            _check_same_length(record, key, num_frames[key], num_frames[RGB])


def _check_same_length(record: Record, key: str, num_found: int, num_needed: int) -> None:
    if num_found != num_needed:
        msg = (
            f"{key}: {record.files[key]}: it is of {num_found} frames; needed are {num_needed}, "
            f"those of {RGB}."
        )
        raise record.fault(msg)


def _frames(record: Record, key: str, sizes: TridentSizes) -> tuple[NDArray[np.uint8], int]:
    """Read a file's frames as (C, T, H, W), and say how many it has."""
    num_channels = _NUM_CHANNELS[key]
    try:
        file = open_frames(record.files[key], num_channels)
        numbers = spread(file.path, file.num_frames, sizes.num_frames)
        shape = (num_channels, sizes.num_frames, sizes.height, sizes.width)
        found = np.empty(shape, dtype=np.uint8)
        for place, pixels in enumerate(file.read(numbers)):
            found[:, place] = resized(pixels, sizes.height, sizes.width, is_mask=key == MASK)
    except DataError as error:
        raise record.fault(f"{key}: {error}") from None
    return found, file.num_frames


def resized(
    pixels_HWC: NDArray[np.uint8], height: int, width: int, *, is_mask: bool = False
) -> NDArray[np.uint8]:
    """Resize a frame: (C, H, W). Masks keep their values, pictures are averaged where they shrink.

    Frames that have the size already come back byte by byte.
    """
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC.transpose(2, 0, 1)
    picture = torch.from_numpy(pixels_HWC.transpose(2, 0, 1).copy())[None]
    if is_mask:
        fitted = F.interpolate(picture, (height, width), mode="nearest-exact")
    else:
        fitted = F.interpolate(picture, (height, width), mode="bilinear", antialias=True)
    found: NDArray[np.uint8] = fitted[0].numpy()
    return found


def _mask(record: Record, values_THW: NDArray[np.uint8]) -> Tensor:
    """Make 0 and 1 of a mask."""
    there = set(np.unique(values_THW).tolist())
    if not (there <= {0, 1} or there <= {0, 255}):
        shown = ", ".join(map(str, sorted(there)[:6]))
        msg = (
            f"{MASK}: {record.files[MASK]}: it holds the values {shown}; needed are 0 and 1, or 0 "
            "and 255. A video that loses nothing, or an array, keeps them."
        )
        raise record.fault(msg)
    return torch.from_numpy((values_THW > 0).astype(np.uint8))


def _boxes(record: Record, num_there: int, sizes: TridentSizes) -> Tensor:
    """Read the boxes of the frames that are taken: (T, K, 5)."""
    path = record.files[BOXES]
    try:
        boxes = read_boxes(path)
        _check_same_length(record, BOXES, len(boxes), num_there)
        numbers = spread(path, num_there, sizes.num_frames)
    except DataError as error:
        raise record.fault(f"{BOXES}: {error}") from None
    found = np.zeros((sizes.num_frames, NUM_OBJECTS, _NUM_BOX_VALUES), dtype=np.float32)
    found[:, : boxes.shape[1]] = boxes[numbers]
    return torch.from_numpy(found)


def read_boxes(path: Path) -> NDArray[np.float32]:
    """Read boxes: (frames, K, 5).

    Raises:
        DataError: if the array has another shape, type or range.
    """
    check_regular(path)
    boxes = open_array(path)
    is_right = boxes.ndim == 3 and boxes.dtype.kind == "f" and len(boxes) > 0
    if not is_right or not 1 <= boxes.shape[1] <= NUM_OBJECTS or boxes.shape[2] != _NUM_BOX_VALUES:
        reason = (
            f"it is an array of shape {tuple(boxes.shape)} and type {boxes.dtype}; needed is "
            f"(frames, 1 to {NUM_OBJECTS}, {_NUM_BOX_VALUES}) of float32: centre x and y, width, "
            "height, intensity."
        )
        raise DataError(str(path), reason)
    wrong = np.argwhere(~((boxes >= 0) & (boxes <= 1)))
    if len(wrong):
        frame, place, value = wrong[0].tolist()
        reason = (
            f"frame {frame + 1}, object {place + 1}, value {value + 1} is "
            f"{float(boxes[frame, place, value]):g}; needed are fractions of the frame, 0 to 1."
        )
        raise DataError(str(path), reason)
    return np.asarray(boxes, dtype=np.float32)
