"""Reads and writes video files with PyAV: FFmpeg's libraries, inside this process.

Shape suffixes: N frames of a file, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memfit.errors import DataError, MissingExtraError

_PIXELS = {3: "rgb24", 1: "gray"}
_LOSSLESS = {3: "bgr0", 1: "gray"}
"""Layouts of FFV1 that keep each byte of these."""
_REMEDY = "Encode it anew (`ffmpeg -i OLD -c:v libx264 NEW.mp4`), or leave the record out."
_FRAMES_PER_SECOND = 24
_LEAST_THERE = 0.9
"""Of the duration that a header tells of, where it tells no number of frames."""


def frames_in_header(path: Path) -> int:
    """Count the frames that a header tells of; where it tells nothing, those of the file.

    Raises:
        DataError: if the file is no video.
        MissingExtraError: without PyAV.
    """
    with _opened(path) as (_, stream):
        told = int(stream.frames)
    return told or count_packets(path)


def count_packets(path: Path) -> int:
    """Count the frames of a file by reading it through, without decoding.

    Raises:
        DataError: if the file is no video, or ends before its header says.
        MissingExtraError: without PyAV.
    """
    num_shown = num_there = 0
    end_seconds = 0.0
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise _cut_off(path, f"frame {num_there + 1} is damaged")
            if not packet.size:
                continue
            num_there += 1
            num_shown += not packet.is_discard  # left out by an edit list: cut without encoding
            end_seconds = max(end_seconds, _end_seconds(packet))
        told = int(stream.frames)
        told_seconds = (container.duration or 0) / 1e6 if len(container.streams) == 1 else 0.0
    if num_there < told:
        raise _cut_off(path, f"its header tells of {told} frames, and {num_there} are there")
    if not told and end_seconds < _LEAST_THERE * told_seconds:
        what = f"its header tells of {told_seconds:.1f} s, and {end_seconds:.1f} s are there"
        raise _cut_off(path, what)
    return num_shown


def decoded(path: Path, num_channels: int, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Decode the frames of these rising numbers, each (H, W, C).

    Raises:
        DataError: if one of them cannot be decoded.
        MissingExtraError: without PyAV.
    """
    wanted = iter(numbers)
    number = next(wanted, None)
    with _opened(path) as (container, stream):
        for place, frame in enumerate(container.decode(stream)):
            if frame.is_corrupt:
                raise _cut_off(path, f"frame {place + 1} is damaged")
            if place != number:
                continue
            pixels = frame.to_ndarray(format=_PIXELS[num_channels])
            upright = np.rot90(pixels, frame.rotation // 90)
            yield np.ascontiguousarray(upright).reshape(*upright.shape[:2], num_channels)
            number = next(wanted, None)
            if number is None:
                return
    if number is not None:
        raise _cut_off(path, f"frame {number + 1} cannot be decoded")


def write_lossless(path: Path, frames_NHWC: NDArray[np.uint8]) -> None:
    """Write frames so that each byte comes back: FFV1 in Matroska.

    Raises:
        MissingExtraError: without PyAV.
        OSError: if the file cannot be written.
    """
    av = _av()
    num_channels = frames_NHWC.shape[-1]
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("ffv1", rate=_FRAMES_PER_SECOND)
        stream.height, stream.width = frames_NHWC.shape[1:3]
        stream.pix_fmt = _LOSSLESS[num_channels]
        for pixels in frames_NHWC:
            picture = pixels if num_channels == 3 else pixels[..., 0]
            frame = av.VideoFrame.from_ndarray(picture, format=_PIXELS[num_channels])
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def _end_seconds(packet: Any) -> float:
    """Return when what a packet holds has been shown."""
    if packet.pts is None:
        return 0.0
    return float((packet.pts + (packet.duration or 0)) * packet.time_base)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a video for reading, and word what goes wrong until it is closed."""
    av = _av()
    try:
        # A path may hold a colon, which would name a protocol.
        with av.open(f"file:{path}", options={"protocol_whitelist": "file"}) as container:
            if not container.streams.video:
                raise DataError(str(path), f"there is no video in it. {_REMEDY}")
            stream = container.streams.video[0]
            stream.codec_context.options = {"err_detect": "explode"}
            stream.thread_count = 1  # clips are read side by side already
            yield container, stream
    except av.error.FFmpegError as error:
        what = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        reason = f"it cannot be read as a video ({what}). {_REMEDY}"
        raise DataError(str(path), reason) from None


def _cut_off(path: Path, what: str) -> DataError:
    return DataError(str(path), f"{what}: the file is cut off or damaged. {_REMEDY}")


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise MissingExtraError("Reading and writing video", "av", "trident") from None
    return av
