"""Manifests as people write them, most of them wrong: one line says what, where and what instead."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memfit.errors import DataError
from memfit_workloads.trident.manifest import read_manifest

NUM_CLASSES = 8
Change = Callable[[dict[str, Any]], object]


def record(number: int = 0) -> dict[str, Any]:
    """Return a record that has everything."""
    return {
        "video": {"path": f"rgb_{number}.npy", "ir_path": f"ir_{number}.npy", "fps": 24},
        "motion": {"kinematics": [[10.0, 0, 1, -1, 0, 0, 10.05, 0.0, 0.1]] * 3},
        "object": {"class_id": 3, "conf": 0.9},
        "labels": {"event": 1, "severe": False},
        "targets": {"mask_path": f"mask_{number}.npy", "boxes_path": f"boxes_{number}.npy"},
        "prompt": "a square moves to the left",
    }


def write(path: Path, *lines: object) -> Path:
    """Write lines; what is no text yet as JSON."""
    told = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in told))
    return path


def changed(change: Change) -> dict[str, Any]:
    """Return a good record with one thing changed."""
    content = record(1)
    change(content)
    return content


def put(group: str, key: str, value: Any) -> Change:
    """Set a value of a record."""
    return lambda content: content[group].__setitem__(key, value)


def rows(value: Any) -> Change:
    """Set one number of the kinematics."""

    def change(content: dict[str, Any]) -> None:
        content["motion"]["kinematics"] = [[0.0] * 9, [0.0] * 4 + [value] + [0.0] * 4, [0.0] * 9]

    return change


def test_a_good_manifest_is_read_whole(tmp_path):
    bare = record(1)
    bare["video"].pop("ir_path")
    for group, key in (("video", "fps"), ("object", "conf")):
        bare[group].pop(key)
    del bare["prompt"], bare["targets"]
    path = write(tmp_path / "clips.jsonl", "\ufeff" + json.dumps(record()), "", bare)

    first, second = read_manifest(path, tmp_path / "clips", NUM_CLASSES)

    assert first.files["video.path"] == tmp_path / "clips" / "rgb_0.npy"
    assert first.kinematics.shape == (3, 9)
    assert first.kinematics.dtype == np.float32
    assert (first.class_id, first.class_conf) == (3, 0.9)
    assert (first.event, first.severe) == (1.0, 0.0)
    assert first.prompt == "a square moves to the left"
    assert (second.line, second.class_conf, second.prompt) == (3, 1.0, None)
    assert list(second.files) == ["video.path"]


HOSTILE: dict[str, tuple[Change, str]] = {
    "no path": (lambda c: c["video"].pop("path"), r"video\.path is missing; needed is the path"),
    "no video": (lambda c: c.pop("video"), r"video is missing; needed is an object"),
    "flat keys": (
        lambda c: (c.pop("video"), c.__setitem__("video.path", "a.npy")),
        r'found the key "video\.path"; keys are nested: \{"video": \{"path": ',
    ),
    "path is a number": (put("video", "path", 7), r"video\.path is 7; needed is the path"),
    "path is empty": (put("video", "path", " "), r'video\.path is " "; needed is the path'),
    "path holds NUL": (put("video", "path", "a\0.npy"), r"video\.path is .*; needed is the path"),
    "misspelled key": (
        put("video", "ir-path", "a.npy"),
        r'video has the key "ir-path"; known are fps, ir_path, path',
    ),
    "misspelled group": (
        lambda c: c.__setitem__("target", c.pop("targets")),
        r'found the key "target"; did you mean "targets"',
    ),
    "video is a path": (lambda c: c.update(video="a.mp4"), r'video is "a\.mp4"; needed is an obj'),
    "fps 0": (put("video", "fps", 0), r"video\.fps is 0; needed is a number above 0"),
    "fps a text": (put("video", "fps", "24"), r'video\.fps is "24"; needed is a number above 0'),
    "no kinematics": (lambda c: c["motion"].clear(), r"motion\.kinematics is missing; needed are 3"),
    "9 x 3": (put("motion", "kinematics", [[0.0] * 3] * 9), r"kinematics is 9 lists; needed are 3"),
    "ragged": (
        put("motion", "kinematics", [[0.0] * 9, [0.0] * 8, [0.0] * 9]),
        r"kinematics, moment 2, has 8 numbers; needed are 9",
    ),
    "NaN": (rows(float("nan")), r"kinematics, moment 2, vy is NaN; needed is a finite number"),
    "infinite in float32": (rows(1e39), r"moment 2, vy is 1e\+39; needed is a finite number"),
    "many digits": (rows(10**400), r"moment 2, vy is 1000\S*\.\.\.; needed is a finite number"),
    "a text": (rows("0"), r'moment 2, vy is "0"; needed is a finite number'),
    "true": (rows(True), r"moment 2, vy is true; needed is a finite number"),
    "degrees": (
        put("motion", "kinematics", [[0.0] * 7 + [45.0, 0.0]] * 3),
        r"moment 1, bearing is 45\.0; needed are radians",
    ),
    "negative range": (
        put("motion", "kinematics", [[0.0] * 6 + [-1.0, 0.0, 0.0]] * 3),
        r"moment 1, range is -1\.0; needed is a distance",
    ),
    "class too high": (put("object", "class_id", 8), r"class_id is 8; needed is a .* 0 to 7"),
    "class negative": (put("object", "class_id", -1), r"class_id is -1; needed is .* 0 to 7"),
    "class 2.5": (put("object", "class_id", 2.5), r"class_id is 2\.5; needed is a whole number"),
    "class true": (put("object", "class_id", True), r"class_id is true; needed is a whole number"),
    "conf 90": (put("object", "conf", 90), r"object\.conf is 90; needed is a number from 0 to 1"),
    "no label": (lambda c: c["labels"].pop("severe"), r"labels\.severe is missing; needed is 0 or"),
    "label 2": (put("labels", "event", 2), r"labels\.event is 2; needed is 0 or 1"),
    "label yes": (put("labels", "event", "yes"), r'labels\.event is "yes"; needed is 0 or 1'),
    "severe alone": (
        lambda c: c["labels"].update(event=0, severe=1),
        r"labels\.severe is 1 and labels\.event 0; a severe event is an event",
    ),
    "prompt a list": (lambda c: c.update(prompt=[]), r"prompt is \[\]; needed is a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_record_is_named_with_what_was_found_and_needed(tmp_path, name):
    change, message = HOSTILE[name]
    path = write(tmp_path / "clips.jsonl", record(), changed(change))

    with pytest.raises(DataError, match=rf"clips\.jsonl, line 2: .*{message}") as caught:
        read_manifest(path, tmp_path, NUM_CLASSES)

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"video": ', r"line 2: it is no JSON \("),
        ("[1, 2]", r"line 2: found a list; needed is one JSON object"),
        ("null", r"line 2: found null; needed is one JSON object"),
        ('{"video": {}, "video": {}}', r'line 2: .* the key "video" twice'),
        ("[" * 100_000, r"line 2: it is no JSON \(.*nested too deeply"),
        ("1" * 5_000, r"line 2: it is no JSON \("),
        ("", r"found 1 record"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line, message):
    path = write(tmp_path / "clips.jsonl", record(), line)
    if not line:
        assert len(read_manifest(path, tmp_path, NUM_CLASSES)) == 1
        return
    with pytest.raises(DataError, match=message) as caught:
        read_manifest(path, tmp_path, NUM_CLASSES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"no record in it; needed is one JSON object per line"),
        (b"\n \n", r"no record in it"),
        (b'{"a": "\xff"}\n', r"line 1: it is no UTF-8"),
        ("{}".encode("utf-16"), r"line 1: it is no UTF-8"),
        (b"\x1f\x8b\x08\x00", r"line 1: it is no UTF-8"),
        (b'[\n{"video": {}}\n]', r"line 1: it is no JSON \(.*one record per line"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(tmp_path, content, message):
    path = tmp_path / "clips.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_manifest(path, tmp_path, NUM_CLASSES)


def test_a_manifest_that_is_not_there_or_no_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl: it cannot be read \(No such file"):
        read_manifest(tmp_path / "gone.jsonl", tmp_path, NUM_CLASSES)
    with pytest.raises(DataError, match=r"it is a folder; needed is a file"):
        read_manifest(tmp_path, tmp_path, NUM_CLASSES)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"it is no regular file"):
        read_manifest(tmp_path / "pipe", tmp_path, NUM_CLASSES)


def test_further_wrong_records_are_counted(tmp_path):
    wrong = changed(put("labels", "event", 2))
    path = write(tmp_path / "clips.jsonl", wrong, record(), wrong, "{")
    with pytest.raises(
        DataError, match=r"line 1: labels.* \(2 more lines are wrong, the next is 3"
    ):
        read_manifest(path, tmp_path, NUM_CLASSES)


def test_keys_of_others_are_kept_out(tmp_path):
    told = {**record(), "site": "north", "id": 7}
    (found,) = read_manifest(write(tmp_path / "clips.jsonl", told), tmp_path, NUM_CLASSES)
    assert found.unused == ("id", "site")
