"""Clips from files: what comes back, how a manifest is parted, and files that cannot serve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.workloads.test_trident_manifest import record, write

from memfit.errors import DataError
from memfit_workloads.trident import settings as trident_settings
from memfit_workloads.trident.parts import PARTS, RecordedParts, open_parts
from memfit_workloads.trident.sizes import DEMO, TridentSizes

SIZES = TridentSizes(**{**DEMO.to_json(), "height": 16, "width": 16})
NUM_FRAMES, HEIGHT, WIDTH = 10, 20, 24


def save_clip(folder: Path, number: int) -> None:
    """Write the files of a record, each with a content of its own."""
    draw = np.random.default_rng(number)
    shape = (NUM_FRAMES, HEIGHT, WIDTH)
    np.save(folder / f"rgb_{number}.npy", draw.integers(0, 256, (*shape, 3), dtype=np.uint8))
    np.save(folder / f"ir_{number}.npy", draw.integers(0, 256, shape, dtype=np.uint8))
    np.save(folder / f"mask_{number}.npy", draw.integers(0, 2, shape, dtype=np.uint8))
    np.save(folder / f"boxes_{number}.npy", draw.random((NUM_FRAMES, 1, 5), dtype=np.float32))


def labelled(number: int, event: int, severe: int = 0) -> dict[str, Any]:
    """Return a record with these labels."""
    return {**record(number), "labels": {"event": event, "severe": severe}}


def opened(jsonl: Path, **others: Any) -> RecordedParts:
    """Open manifests as the flags would."""
    told = {"valid_jsonl": None, "test_jsonl": None, "video_root": None, "data_seed": 0, **others}
    known = trident_settings.DataSettings.__dataclass_fields__
    absent = {name: None for name in known if name not in {*told, "jsonl"}}
    return open_parts(trident_settings.DataSettings(jsonl=jsonl, **told, **absent), SIZES)


@pytest.fixture
def manifest(tmp_path) -> Path:
    """Write three clips and their manifest."""
    for number in range(3):
        save_clip(tmp_path, number)
    return write(tmp_path / "clips.jsonl", *(labelled(number, number % 2) for number in range(3)))


def test_frames_are_taken_evenly_and_resized_and_targets_go_with_them(manifest):
    clips = opened(manifest).clips["train"]
    clip = clips.clip(0)
    taken = [0, 1, 3, 4, 5, 6, 8, 9]
    rgb = np.load(manifest.parent / "rgb_0.npy")
    boxes = np.load(manifest.parent / "boxes_0.npy")
    picture = torch.from_numpy(rgb[taken]).permute(0, 3, 1, 2).float()
    expected = torch.nn.functional.interpolate(
        picture, (16, 16), mode="bilinear", antialias=True
    ).permute(1, 0, 2, 3)

    assert clip.rgb.dtype == torch.uint8
    assert clip.rgb.shape == (3, 8, 16, 16)
    assert (clip.rgb.float() - expected).abs().max() <= 1
    assert clip.infrared.shape == (1, 8, 16, 16)
    assert clip.mask.shape == (8, 16, 16)
    assert set(clip.mask.unique().tolist()) == {0, 1}
    assert torch.equal(clip.boxes[:, 0], torch.from_numpy(boxes[taken, 0]))
    assert not clip.boxes[:, 1].any()


def test_frames_of_the_right_size_come_back_byte_by_byte_from_arrays_and_from_video(tmp_path):
    from memfit_workloads.trident.video_files import write_lossless

    draw = np.random.default_rng(0)
    rgb = draw.integers(0, 256, (8, 16, 16, 3), dtype=np.uint8)
    infrared = draw.integers(0, 256, (8, 16, 16, 1), dtype=np.uint8)
    write_lossless(tmp_path / "rgb: 1.mkv", rgb)
    write_lossless(tmp_path / "ir.mkv", infrared)
    np.savez_compressed(tmp_path / "rgb.npz", rgb)
    np.savez_compressed(tmp_path / "ir.npz", infrared[..., 0])
    lines = []
    for number, names in enumerate((("rgb: 1.mkv", "ir.mkv"), ("rgb.npz", "ir.npz"))):
        told = {**labelled(number, 1), "video": dict(zip(("path", "ir_path"), names, strict=True))}
        del told["targets"]
        lines.append(told)

    clips = opened(write(tmp_path / "clips.jsonl", *lines)).clips["train"]

    for number in range(2):
        clip = clips.clip(number)
        assert np.array_equal(clip.rgb.permute(1, 2, 3, 0), rgb)
        assert np.array_equal(clip.infrared[0], infrared[..., 0])
        assert (clip.mask, clip.boxes) == (None, None)
    assert not clips.has_masks


def test_a_record_without_infrared_has_zeros_and_it_is_said(manifest):
    told = labelled(0, 1)
    del told["video"]["ir_path"]
    parts = opened(write(manifest, {**told, "site": 4}, labelled(1, 0)))

    assert not parts.clips["train"].clip(0).infrared.any()
    assert parts.notes[0].startswith("1 of 2 records have no video.ir_path")
    assert "2 records have a prompt" in parts.notes[1]
    assert parts.notes[2].endswith("keys that mean nothing here are passed over: site.")


def test_a_manifest_is_parted_by_a_seed_with_each_outcome_alike(tmp_path, monkeypatch):
    from memfit_workloads.trident import parts as module

    monkeypatch.setattr(module, "check_files", lambda *_: None)
    monkeypatch.setattr(module, "refuse_shared", lambda *_: None)
    outcomes = [(0, 0)] * 40 + [(1, 0)] * 20 + [(1, 1)] * 3
    lines = [labelled(number, *outcome) for number, outcome in enumerate(outcomes)]
    path = write(tmp_path / "clips.jsonl", *lines)
    first, again, other = opened(path), opened(path), opened(path, data_seed=1)

    rows = {part: [each.line for each in first.clips[part].records] for part in PARTS}
    assert sorted(line for part in PARTS for line in rows[part]) == list(range(1, 64))
    for part, numbers in (("train", (28, 14, 1)), ("valid", (6, 3, 1)), ("test", (6, 3, 1))):
        found = [(each.event, each.severe) for each in first.clips[part].records]
        assert tuple(found.count(outcome) for outcome in ((0, 0), (1, 0), (1, 1))) == numbers
    assert first.identity == again.identity != other.identity
    assert "43 train, 10 valid, 10 test" in first.notes[-1]

    lines[5]["motion"]["kinematics"][0][0] = 11.0
    assert opened(write(path, *lines)).identity != first.identity


def test_parts_of_their_own_are_taken_whole_and_share_no_file(manifest):
    folder = manifest.parent
    save_clip(folder, 3)
    valid = write(folder / "valid.jsonl", labelled(3, 1))
    parts = opened(manifest, valid_jsonl=valid)
    assert len(parts.clips["valid"]) == 1
    assert len(parts.clips["train"]) + len(parts.clips["test"]) == 3

    (folder / "rgb_3.npy").unlink()
    (folder / "rgb_3.npy").symlink_to(folder / "rgb_0.npy")
    with pytest.raises(DataError, match=r"valid\.jsonl, line 1: video\.path is .*rgb_3\.npy, which "
                       r"is video\.path of .*clips\.jsonl, line 1 too"):  # fmt: skip
        opened(manifest, valid_jsonl=valid)


def test_a_record_that_is_there_twice_is_refused(manifest):
    write(manifest, labelled(0, 1), labelled(1, 0), labelled(0, 1))
    with pytest.raises(DataError, match=r"line 3: video\.path is .*clips\.jsonl, line 1 too"):
        opened(manifest)
    told = labelled(0, 1)
    told["video"]["ir_path"] = "../" + manifest.parent.name + "/rgb_0.npy"
    np.save(manifest.parent / "rgb_0.npy", np.zeros((9, 4, 4), np.uint8))
    with pytest.raises(DataError, match=r"line 1: video\.path"):
        opened(write(manifest, told))


def save(path: Path, array: np.ndarray, **more: Any) -> None:
    np.save(path, array, **more)


BROKEN: dict[str, tuple[str, Any, str]] = {
    "missing": (
        "rgb",
        lambda p: p.unlink(),
        r"video\.path: .*rgb_1\.npy: it cannot be read \(No su",
    ),
    "folder": ("rgb", lambda p: (p.unlink(), p.mkdir()), r"it is a folder; needed is a file"),
    "pipe": ("ir", lambda p: (p.unlink(), os.mkfifo(p)), r"video\.ir_path: .*no regular file"),
    "loop": ("ir", lambda p: (p.unlink(), p.symlink_to(p)), r"it cannot be read \(Too many levels"),
    "empty": ("rgb", lambda p: p.write_bytes(b""), r"it cannot be read as an array \("),
    "cut off": (
        "rgb",
        lambda p: p.write_bytes(p.read_bytes()[:900]),
        r"it cannot be read as an ar",
    ),
    "objects": (
        "rgb",
        lambda p: save(p, np.array([{}] * 9), allow_pickle=True),
        r"cannot be read as an array \(.*\)\. Write it anew",
    ),
    "channels first": (
        "rgb",
        lambda p: save(p, np.zeros((3, 10, 4, 4), np.uint8)),
        r"shape \(3, 10, 4, 4\) and type uint8; needed is \(frames, height, width, 3\) of uint8",
    ),
    "float": ("rgb", lambda p: save(p, np.zeros((10, 4, 4, 3))), r"and type float64; needed is"),
    "infrared in colour": (
        "ir",
        lambda p: save(p, np.zeros((10, 4, 4, 3), np.uint8)),
        r"needed is \(frames, height, width\) of uint8",
    ),
    "no pixels": ("rgb", lambda p: save(p, np.zeros((10, 0, 4, 3), np.uint8)), r"shape \(10, 0, 4"),
    "few frames": (
        "ir",
        lambda p: save(p, np.zeros((7, 4, 4), np.uint8)),
        r"ir_1\.npy: it has 7 frames; needed are 8\. Give a longer clip, or lower --num-frames",
    ),
    "mask of another clip": (
        "mask",
        lambda p: save(p, np.zeros((9, 4, 4), np.uint8)),
        r"mask_1\.npy: it is of 9 frames; needed are 10, those of video\.path",
    ),
    "boxes in pixels": (
        "boxes",
        lambda p: save(p, np.full((10, 1, 5), 12.0, np.float32)),
        r"frame 1, object 1, value 1 is 12; needed are fractions of the frame",
    ),
    "NaN box": ("boxes", lambda p: save(p, np.full((10, 1, 5), np.nan)), r"value 1 is nan; needed"),
    "many boxes": (
        "boxes",
        lambda p: save(p, np.zeros((10, 3, 5), np.float32)),
        r"shape \(10, 3, 5\) .* needed is \(frames, 1 to 2, 5\) of float32",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_serve_is_named_with_its_record_at_the_start(manifest, name):
    kind, damage, message = BROKEN[name]
    damage(manifest.parent / f"{kind}_1.npy")
    with pytest.raises(DataError, match=rf"clips\.jsonl, line 2: .*{message}") as caught:
        opened(manifest)
    assert "\n" not in str(caught.value)


def test_a_mask_of_other_values_is_named_when_it_is_read(manifest):
    np.save(manifest.parent / "mask_2.npy", np.full((NUM_FRAMES, 4, 4), 3, np.uint8))
    clips = opened(manifest).clips["train"]
    with pytest.raises(DataError, match=r"clips\.jsonl, line 3: targets\.mask_path: .* values 3;"):
        clips.clip(2)


def test_a_file_that_changes_after_the_start_is_named_when_it_is_read(manifest):
    clips = opened(manifest).clips["train"]
    np.save(manifest.parent / "rgb_1.npy", np.zeros((4, 4, 4, 3), np.uint8))
    (manifest.parent / "ir_2.npy").unlink()
    for number, message in (
        (1, r"line 2: video\.path: .*4 frames"),
        (2, r"line 3: video\.ir_path:"),
    ):
        with pytest.raises(DataError, match=message):
            clips.clip(number)


def test_several_arrays_in_one_file_are_refused(manifest):
    path = manifest.parent / "both.npz"
    np.savez(path, rgb=np.zeros((9, 4, 4, 3), np.uint8), ir=np.zeros((9, 4, 4), np.uint8))
    told = labelled(0, 1)
    told["video"]["path"] = "both.npz"
    with pytest.raises(DataError, match=r"it holds 2 arrays \(ir\.npy, rgb\.npy\); needed is one"):
        opened(write(manifest, told))


def test_paths_begin_at_the_video_root(manifest, tmp_path):
    elsewhere = tmp_path / "lists" / "clips.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_text(manifest.read_text())
    assert len(opened(elsewhere, video_root=manifest.parent).clips["train"]) == 3
    with pytest.raises(DataError, match=r"lists/rgb_0\.npy: it cannot be read"):
        opened(elsewhere)
    absolute = labelled(0, 1)
    absolute["video"]["path"] = str(manifest.parent / "rgb_0.npy")
    del absolute["targets"], absolute["video"]["ir_path"]
    elsewhere.write_text(json.dumps(absolute))
    assert opened(elsewhere).clips["train"].clip(0).rgb.any()
