"""Video files: cut off, damaged, turned, cut without encoding; read ahead by threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.workloads.test_trident_manifest import write
from tests.workloads.test_trident_recorded import labelled, opened

from memfit.errors import DataError, MissingExtraError
from memfit_workloads.trident.clips import Clip, collate
from memfit_workloads.trident.frame_files import count_frames, open_frames
from memfit_workloads.trident.generated import GeneratedClips
from memfit_workloads.trident.reading import ClipReader, WaitingWatch
from memfit_workloads.trident.sizes import DEMO
from memfit_workloads.trident.video_files import write_lossless

av = pytest.importorskip("av")
NUM_FRAMES = 24


@pytest.fixture(scope="module")
def encoded(tmp_path_factory) -> Path:
    """Encode a light that moves to the right, as H.264 with the index before the frames."""
    path = tmp_path_factory.mktemp("video") / "light.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=24, options={"g": "6", "bf": "2"})
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.full((64, 96, 3), 16, np.uint8)
            pixels[20:40, 3 * number : 3 * number + 16] = (250, 20 + 9 * number, 20)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def frames_of(path: Path) -> list[np.ndarray]:
    """Read all frames."""
    file = open_frames(path, 3)
    return list(file.read(range(file.num_frames)))


def test_a_video_gives_the_frames_that_are_asked_for(encoded):
    every = frames_of(encoded)
    assert count_frames(encoded, 3) == len(every) == NUM_FRAMES
    for number, frame in enumerate(every):
        assert frame.shape == (64, 96, 3)
        assert frame[30, 3 * number + 8, 0] > 200
        assert frame[30, (3 * number + 60) % 96, 0] < 60
    chosen = list(open_frames(encoded, 3).read([2, 9, 23]))
    assert all(
        np.array_equal(a, every[number]) for a, number in zip(chosen, (2, 9, 23), strict=True)
    )
    (grey,) = open_frames(encoded, 1).read([5])
    assert grey.shape == (64, 96, 1)


def test_a_video_that_is_turned_in_its_header_comes_upright(encoded, tmp_path):
    content = bytearray(encoded.read_bytes())
    matrix = content.index(b"tkhd") + 4 + 40
    unit = (1 << 16).to_bytes(4, "big")
    # a = d = 0, b = 1, c = -1: to be shown turned to the right by a quarter
    turned = bytes(4) + unit + bytes(4) + (-(1 << 16)).to_bytes(4, "big", signed=True) + bytes(4)
    content[matrix : matrix + 20] = turned
    path = tmp_path / "portrait.mp4"
    path.write_bytes(content)
    every = frames_of(encoded)
    for upright, lying in zip(frames_of(path), every, strict=True):
        assert np.array_equal(upright, np.rot90(lying, -1))


def test_a_video_that_was_cut_without_encoding_has_the_frames_that_are_shown(encoded, tmp_path):
    path = tmp_path / "cut.mp4"
    with av.open(str(encoded)) as source, av.open(str(path), "w") as target:
        stream = source.streams.video[0]
        copy = target.add_stream_from_template(stream)
        begin = None
        for packet in source.demux(stream):
            if packet.dts is None:
                continue
            begin = packet.dts if begin is None else begin
            shift = begin + 4 * packet.duration  # the first frames lie before the start
            packet.dts, packet.pts, packet.stream = packet.dts - shift, packet.pts - shift, copy
            target.mux(packet)
    every, kept = frames_of(encoded), frames_of(path)
    assert len(kept) < NUM_FRAMES
    assert np.array_equal(kept[-1], every[-1])


def damaged(path: Path, encoded: Path, kind: str) -> Path:
    """Write a file with something wrong in it."""
    content = bytearray(encoded.read_bytes())
    middle = content.index(b"mdat") + (len(content) - content.index(b"mdat")) // 2
    if kind == "cut off":
        del content[middle:]
    elif kind == "bytes changed":
        for place in range(middle, middle + 300):
            content[place] ^= 0x5A
    elif kind == "no index":
        del content[200:]
    elif kind == "a text":
        content = bytearray(b"not a video\n" * 40)
    elif kind == "empty":
        content = bytearray()
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["cut off", "bytes changed", "no index", "a text", "empty"])
def test_a_damaged_video_is_never_read_as_if_it_were_whole(encoded, tmp_path, kind, capfd):
    path = damaged(tmp_path / "broken.mp4", encoded, kind)
    with pytest.raises(DataError, match=r"broken\.mp4: .*Encode it anew") as caught:
        frames_of(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_matroska_file_that_is_cut_off_is_refused(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    path = tmp_path / "clip.mkv"
    write_lossless(path, frames)
    whole = path.read_bytes()
    assert len(frames_of(path)) == 60
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"its header tells of 2\.5 s, and 1\.\d s are there"):
        open_frames(path, 3)


def test_a_sound_file_has_no_frames(tmp_path):
    import wave

    path = tmp_path / "sound.wav"
    with wave.open(str(path), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(8000))
    with pytest.raises(DataError, match="there is no video in it"):
        count_frames(path, 3)


def test_a_video_without_pyav_says_what_to_install(encoded, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"package av, .* pip install 'memfit\[trident\]'"):
        count_frames(encoded, 3)


def test_the_record_of_a_damaged_video_is_named_from_inside_a_thread(encoded, tmp_path):
    (tmp_path / "good.mp4").write_bytes(encoded.read_bytes())
    damaged(tmp_path / "bad.mp4", encoded, "bytes changed")
    lines = []
    for number, name in enumerate(("good.mp4", "bad.mp4")):
        told = {**labelled(number, 1), "video": {"path": name}}
        del told["targets"]
        lines.append(told)
    clips = opened(write(tmp_path / "clips.jsonl", *lines)).clips["train"]
    with ThreadPoolExecutor(2) as pool:
        reader = ClipReader(clips, pool)
        reader.batch([0], [1])
        with pytest.raises(DataError, match=r"clips\.jsonl, line 2: video\.path: .*bad\.mp4"):
            reader.batch([1])


def test_read_ahead_gives_the_same_batches_in_the_same_order():
    clips = GeneratedClips(sizes=DEMO, num_clips=10, seed=3)
    orders = ([4, 1, 7], [0, 9, 2], [5], [4, 1])
    with ThreadPoolExecutor(3) as pool:
        reader = ClipReader(clips, pool)
        for rows, following in zip(orders, (*orders[1:], ()), strict=True):
            for name, part in reader.batch(rows, following).items():
                assert torch.equal(part, collate(clips, rows)[name]), name
        # What was announced and not asked for, as where an epoch ends, does no harm.
        reader.batch([1], [8])
        assert torch.equal(reader.batch([2, 3])["rgb"], collate(clips, [2, 3])["rgb"])
        whole = torch.cat([batch["rgb"] for batch in reader.batches(4)])
    assert torch.equal(whole, collate(clips, range(10))["rgb"])


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedClips(GeneratedClips):
    """Generated clips that say when the last of them is read, and by whom."""

    is_read: threading.Event
    threads: set[str]

    def clip(self, number: int) -> Clip:
        self.threads.add(threading.current_thread().name.partition("_")[0])
        if number == len(self) - 1:
            self.is_read.set()
        return GeneratedClips.clip(self, number)


def test_clips_are_read_while_a_step_is_under_way():
    clips = WatchedClips(sizes=DEMO, num_clips=4, seed=0, is_read=threading.Event(), threads=set())
    with ThreadPoolExecutor(2, "reader") as pool:
        reader = ClipReader(clips, pool)
        reader.batch([0, 1], [2, 3])
        assert clips.is_read.wait(10)
        assert reader.waited_seconds > 0
    assert clips.threads == {"reader"}


def test_waiting_for_clips_is_said_once_with_what_to_do():
    reader = ClipReader(GeneratedClips(sizes=DEMO, num_clips=1, seed=0))
    watch = WaitingWatch(reader, num_workers=0)
    assert watch.epoch_done(1.0) is None
    reader.waited_seconds = 0.5
    assert watch.epoch_done(1.0) == (
        "Steps waited for clips in 50% of the epoch, with --num-workers 0; --num-workers 2 reads "
        "clips while steps are computed."
    )
    reader.waited_seconds = 1.5
    assert watch.epoch_done(1.0) is None
