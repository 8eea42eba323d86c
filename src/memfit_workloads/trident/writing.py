"""Writes generated clips as files, with manifests that ``--jsonl`` takes: all of them, or none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError, UsageError
from memfit.files import foreign_file
from memfit.units import format_bytes

from .clips import NUM_OBJECTS, Clip
from .parts import PARTS
from .settings import MKV, TridentSettings
from .sizes import PRESETS, TridentSizes
from .sources import Splits, open_clips

if TYPE_CHECKING:
    from rich.console import Console

_FRAMES_PER_SECOND = 24
_BYTES_PER_PIXEL = 5
"""Three of colour, one of infrared, one of the mask."""
_BYTES_PER_CLIP = 4 * 128 + 1024
"""Heads of four arrays, and a line of the manifest."""
_CLIPS = "clips"
_OWN = re.compile(
    rf"({'|'.join(PARTS)})\.jsonl"
    rf"|{_CLIPS}/({'|'.join(PARTS)})_\d+_(rgb|ir|mask|boxes)\.(npy|mkv)"
)
"""What is written here, as paths in the folder."""
_PROMPT = "a warm shape moves over the ground"


def write_clips(settings: TridentSettings, console: Console) -> dict[str, Any]:
    """Write the clips that the settings would train on, and say how to train on the files.

    They are written into a folder beside, which takes its name once it is whole.

    Raises:
        DataError: if the folder cannot be written, or has not the room.
        UsageError: if something is there that is not to be replaced.
        MissingExtraError: for video without PyAV.
    """
    data = settings.data
    folder = data.write_clips
    assert folder is not None, "asked for"
    if folder.exists() and not settings.overwrite:
        msg = (
            f"{folder} is there already. Give another --write-clips, or --overwrite to replace it."
        )
        raise UsageError(msg)
    foreign = folder if folder.is_file() else foreign_file(folder, _OWN)
    if foreign is not None:
        msg = (
            f"{folder} holds something else than written clips ({foreign.name}); it is not "
            "replaced. Give another."
        )
        raise UsageError(msg)
    if folder.parent.exists() and not folder.parent.is_dir():
        msg = f"--write-clips {folder}: {folder.parent} is no folder. Give another place."
        raise UsageError(msg)
    splits = open_clips(data, settings.sizes)
    num_clips = {part: len(getattr(splits, part)) for part in PARTS}
    _write_whole(folder, splits, settings, needed_bytes=_needed_bytes(splits, settings.sizes))
    manifests = {part: str(folder / f"{part}.jsonl") for part in PARTS}
    command = _command(manifests, settings.sizes)
    numbers = ", ".join(f"{number} {part}" for part, number in num_clips.items())
    console.print(
        f"{folder}: {numbers}. Train on them with:\n{command}", markup=False, soft_wrap=True
    )
    return {
        "workload": "trident",
        "metrics": {f"num_{part}": number for part, number in num_clips.items()},
        "clips_folder": str(folder),
        "manifests": manifests,
        "command": command,
    }


def _command(manifests: dict[str, str], sizes: TridentSizes) -> str:
    """Write the command line that trains on what was written."""
    words = ["memfit", "train", "trident"]
    for part, flag in zip(PARTS, ("--jsonl", "--valid-jsonl", "--test-jsonl"), strict=True):
        words += [flag, manifests[part]]
    given = {name: getattr(sizes, name) for name in ("num_frames", "height", "width")}
    for model, preset in PRESETS.items():
        if replace(preset, **given) == sizes:
            words += ["--model", model]
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _needed_bytes(splits: Splits, sizes: TridentSizes) -> int:
    """Return what the clips take as arrays; video takes less."""
    frame_bytes = _BYTES_PER_PIXEL * sizes.height * sizes.width + 4 * 5 * NUM_OBJECTS
    clip_bytes = sizes.num_frames * frame_bytes + _BYTES_PER_CLIP
    return sum(len(getattr(splits, part)) for part in PARTS) * clip_bytes


def _write_whole(
    folder: Path, splits: Splits, settings: TridentSettings, *, needed_bytes: int
) -> None:
    """Fill a folder beside, and move it into its place; leave nothing where that fails."""
    beside = earlier = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder.parent).free
        if settings.data.clip_format != MKV and free_bytes < needed_bytes:
            reason = (
                f"the clips take {format_bytes(needed_bytes)}, and {format_bytes(free_bytes)} are "
                "free there. Nothing has been written. Give another folder, or fewer or smaller "
                "clips."
            )
            raise DataError(str(folder), reason)
        beside = Path(
            tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part")
        )
        (beside / _CLIPS).mkdir()
        for part in PARTS:
            clips = getattr(splits, part)
            save = _save_video if (settings.data.clip_format == MKV) else _save_array
            lines = []
            for number in range(len(clips)):
                line = _write_clip(beside, f"{part}_{number:05d}", clips.clip(number), save)
                lines.append(json.dumps(line, allow_nan=False) + "\n")
            (beside / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        # For whom the umask lets in, as for the folder of the clips itself.
        beside.chmod(stat.S_IMODE((beside / _CLIPS).stat().st_mode))
        if folder.exists():
            folder.rename(earlier := Path(f"{beside}.earlier"))
        beside.rename(folder)
    except OSError as error:
        reason = (
            f"the clips cannot be written ({error.strerror or error}). Nothing has been kept. Give "
            "a folder with room that can be written to."
        )
        raise DataError(str(folder), reason) from None
    finally:
        for path in (beside, earlier):
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)


def _write_clip(
    folder: Path, name: str, clip: Clip, save: Callable[[Path, NDArray[Any]], Path]
) -> dict[str, Any]:
    """Write the files of a clip, and return its record."""
    begin = folder / _CLIPS / name
    rgb = save(Path(f"{begin}_rgb"), clip.rgb.permute(1, 2, 3, 0).numpy())
    infrared = save(Path(f"{begin}_ir"), clip.infrared.permute(1, 2, 3, 0).numpy())
    record: dict[str, Any] = {
        "video": {
            "path": rgb.relative_to(folder).as_posix(),
            "ir_path": infrared.relative_to(folder).as_posix(),
            "fps": _FRAMES_PER_SECOND,
        },
        "motion": {"kinematics": clip.kinematics.tolist()},
        "object": {"class_id": clip.class_id, "conf": clip.class_conf},
        "labels": {"event": int(clip.event), "severe": int(clip.severe)},
        "targets": {},
        "prompt": _PROMPT,
    }
    for key, target in (("mask_path", clip.mask), ("boxes_path", clip.boxes)):
        if target is not None:
            path = _save_array(Path(f"{begin}_{key.removesuffix('_path')}"), target.numpy())
            record["targets"][key] = path.relative_to(folder).as_posix()
    return record


def _save_array(path: Path, values: NDArray[Any]) -> Path:
    path = path.with_suffix(".npy")
    np.save(path, np.ascontiguousarray(values))
    return path


def _save_video(path: Path, values: NDArray[Any]) -> Path:
    from .video_files import write_lossless

    path = path.with_suffix(".mkv")
    write_lossless(path, np.ascontiguousarray(values))
    return path
