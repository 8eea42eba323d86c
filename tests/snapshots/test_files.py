"""Snapshots are found in every form that tools leave them in, within limits."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest
import torch.cuda._memory_viz as viewer
from tests.snapshots.recorded_programs import steady_training

from memfit.errors import DataError
from memfit.snapshots.files import ReadLimits, load_content
from memfit.units import MIB

LIMITS = ReadLimits(max_file_bytes=4 * MIB)


def plainly(value: object) -> object:
    """Return a value as JSON would give it back."""
    return json.loads(json.dumps(value))


def forms(content: dict) -> dict[str, bytes]:
    return {
        "pickle": pickle.dumps(content),
        "gzip": gzip.compress(pickle.dumps(content)),
        "JSON": json.dumps(content).encode(),
        "compressed JSON": gzip.compress(json.dumps(content, indent=1).encode()),
        "page of the timeline": viewer.trace_plot(content).encode(),
        "page of the segments": viewer.segment_plot(content).encode(),
    }


@pytest.mark.parametrize("form", forms({}))
def test_every_form_of_a_snapshot_is_read(form, tmp_path: Path) -> None:
    content = steady_training(num_steps=1).snapshot()
    path = tmp_path / "snapshot"
    path.write_bytes(forms(content)[form])

    assert plainly(load_content(path, LIMITS)) == plainly(content)


def test_a_list_of_segments_is_a_snapshot_without_history(tmp_path: Path) -> None:
    """What ``torch.cuda.memory_snapshot()`` gives, and the viewer takes."""
    segments = steady_training(num_steps=1).snapshot()["segments"]
    path = tmp_path / "segments.json"
    path.write_text(json.dumps(segments))

    assert plainly(load_content(path, LIMITS)["segments"]) == plainly(segments)


REFUSED = {
    "nothing": (b"", "it is empty"),
    "text": (b"out of memory at line 3", "neither a pickle nor JSON"),
    "zeros": (b"\0" * 100, "neither a pickle nor JSON"),
    "a picture": (b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "neither a pickle nor JSON"),
    "an archive of torch.save": (b"PK\x03\x04" + b"\0" * 100, "torch.save"),
    "cut JSON": (b'{"segments": [', "as JSON"),
    "deep JSON": (b"[" * 100_000, "as JSON"),
    "JSON with a huge number": (b'{"segments": ' + b"9" * 10_000 + b"}", "as JSON"),
    "JSON of a number": (b"[1", "as JSON"),
    "cut gzip": (gzip.compress(pickle.dumps({"a": 1}))[:-6], "gzip data are damaged"),
    "broken gzip": (b"\x1f\x8b" + b"\xff" * 50, "gzip data are damaged"),
    "a page of nothing": (b"<html><body>hello</body></html>", "page without a snapshot"),
    "a page that is damaged": (b'<html>"base64": "abc"</html>', "damaged"),
    "a page with a bad pickle": (b'<html>"base64": "gARjb3MKc3lzdGVtCi4="</html>', "os.system"),
    "a cut pickle": (pickle.dumps({"segments": [1, 2, 3]})[:-4], "cut off"),
    "a pickled number": (pickle.dumps(7), "holds a int"),
    "a memory timeline of the profiler": (b"[[1, 2], [[0, 3], [0, 4]]]", "memory timeline"),
    "a gzip of nothing": (gzip.compress(b""), "it is empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_no_snapshot_is_refused_with_its_reason(name, tmp_path: Path) -> None:
    data, reason = REFUSED[name]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)

    with pytest.raises(DataError) as caught:
        load_content(path, LIMITS)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.slow
def test_a_file_that_unpacks_without_end_is_refused_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle.gz"
    path.write_bytes(gzip.compress(b"\x80\x04" + b"\0" * (64 * MIB), 9))
    assert path.stat().st_size < MIB

    with pytest.raises(DataError, match=r"more than 4\.0 MiB.*--max-file"):
        load_content(path, LIMITS)


def test_a_file_above_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    with path.open("wb") as file:
        file.truncate(5 * MIB)

    with pytest.raises(DataError, match="more than"):
        load_content(path, LIMITS)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(DataError, match="no regular file"):
        load_content(pipe, LIMITS)
    with pytest.raises(DataError, match="no such file"):
        load_content(tmp_path / "none.pickle", LIMITS)
