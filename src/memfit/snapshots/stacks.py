"""Reads from a recorded stack which line asked for memory, and what the program was doing.

``frames[0]`` is the innermost call, as in ``torch.cuda._memory_viz``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from .records import Frame

_MOST_FRAMES = 200
_MOST_CHARACTERS = 200
_TORCH = re.compile(r"[/\\]torch[/\\]|^torch[/\\]|<frozen |<string>|<__array_function__")
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3")
_NO_PYTHON = re.compile(r"\.(?:c|cc|cpp|cu|cuh|h|hpp)$|^\?\?$|^$|^none$")


class Doing(StrEnum):
    """Say what a program was doing when it asked for memory, as far as its stack shows it."""

    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    MOVING = "moving or loading"
    FORWARD = "forward"
    OTHER = "other"
    NO_STACK = "no stack"


_SIGNS = (
    (Doing.OPTIMIZER, re.compile(r"[/\\]torch[/\\]optim[/\\]|[/\\]bitsandbytes[/\\]optim")),
    (
        Doing.BACKWARD,
        re.compile(
            r"torch::autograd::(?:Engine|generated)|[/\\]torch[/\\]autograd[/\\](?:__init__|graph)"
        ),
    ),
    (
        Doing.MOVING,
        re.compile(r"module\.py:(?:_apply|convert|to|cuda|load_state_dict|_load_from_state_dict)$"),
    ),
    (Doing.FORWARD, re.compile(r"module\.py:(?:_call_impl|_wrapped_call_impl)$|:forward$")),
)
"""Looked for in this order in ``filename:name`` of all frames: an optimizer's step is no forward,
and what backward computes anew is backward. A guess: backward runs in a thread of its own, whose
stack has no Python unless ``stacks="all"`` was recorded."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asked for memory."""

    line: str
    """``file.py:12 function``: the innermost line outside torch; empty without a stack."""
    called_from: str
    """The innermost line of the user's own files, where that is another one; else empty."""
    doing: Doing


def asking(frames: Sequence[Frame]) -> Asking:
    """Tell who asked for memory, from a stack whose innermost call comes first."""
    known = [frame for frame in frames[:_MOST_FRAMES] if isinstance(frame, dict)]
    if not known:
        return Asking("", "", Doing.NO_STACK)
    python = [frame for frame in known if not _NO_PYTHON.search(_file(frame))]
    outside = [frame for frame in python if not _TORCH.search(_file(frame))]
    own = [frame for frame in outside if not _INSTALLED.search(_file(frame))]
    chosen = (outside or python or known)[0]
    line = _shown(chosen)
    called_from = _shown(own[0]) if own and own[0] is not chosen else ""
    return Asking(line, called_from, _doing(known))


def _doing(frames: Sequence[Frame]) -> Doing:
    places = [f"{_file(frame)}:{_function(frame)}" for frame in frames]
    for doing, sign in _SIGNS:
        if any(sign.search(place) for place in places):
            return doing
    return Doing.OTHER


def _file(frame: Frame) -> str:
    name = frame.get("filename", "")
    return name[-_MOST_CHARACTERS:] if isinstance(name, str) else ""


def _function(frame: Frame) -> str:
    name = frame.get("name", "")
    return name[:_MOST_CHARACTERS] if isinstance(name, str) else ""


def _shown(frame: Frame) -> str:
    """Write a frame in one line: the last two parts of its file, the line and the function."""
    parts = re.split(r"[/\\]", _file(frame))
    line = frame.get("line", 0)
    number = line if type(line) is int and 0 <= line < 10**9 else 0
    name = "".join(each for each in _function(frame)[:60] if each.isprintable())
    place = "/".join(parts[-2:]) if len(parts) > 1 else parts[0]
    shown = "".join(each for each in place if each.isprintable())
    return f"{shown}:{number} {name}".strip()
