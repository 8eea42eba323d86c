"""What the keys of a record may hold. Each check says what was found and what is needed. No torch.

All of them raise FieldError; `manifest` adds the file and the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import NDArray

RGB, INFRARED = "video.path", "video.ir_path"
MASK, BOXES = "targets.mask_path", "targets.boxes_path"
FILES = (RGB, INFRARED, MASK, BOXES)
"""The keys that name files."""
PROMPT = "prompt"
QUANTITIES = ("x", "y", "z", "vx", "vy", "vz", "range", "bearing", "elevation")
GROUPS: Mapping[str, tuple[str, ...]] = {
    "video": ("fps", "ir_path", "path"),
    "motion": ("kinematics",),
    "object": ("class_id", "conf"),
    "labels": ("event", "severe"),
    "targets": ("boxes_path", "mask_path"),
}
_OPTIONAL = "targets"
_SHAPE = f"3 lists, one per moment, of 9 numbers each: {', '.join(QUANTITIES)}"
_LARGEST = float(np.finfo(np.float32).max)
_MOST_SHOWN = 40


class FieldError(Exception):
    """Say what a record holds that it cannot hold, and what is needed."""


def unused_keys(told: Mapping[str, Any]) -> tuple[str, ...]:
    """List keys that mean nothing, unless they look like one that does."""
    known = (*GROUPS, PROMPT)
    unused = sorted(key for key in told if key not in known)
    for key in unused:
        group, dot, name = key.partition(".")
        if dot and group in GROUPS:
            msg = (
                f'found the key "{cut(key)}"; keys are nested: {{"{group}": {{"{cut(name)}": …}}}}.'
            )
            raise FieldError(msg)
        near = get_close_matches(key, known, n=1, cutoff=0.8)
        if near:
            msg = f'found the key "{cut(key)}"; did you mean "{near[0]}"? Rename it, or drop it.'
            raise FieldError(msg)
    return tuple(unused)


def group_of(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what a record says under a key, without the keys that are null."""
    known = GROUPS[name]
    group = told.get(name)
    keys = ", ".join(f'"{key}": …' for key in known)
    needed = f"needed is an object such as {{{keys}}}."
    if group is None and name == _OPTIONAL:
        return {}
    if group is None:
        msg = f"{name} is missing; {needed}"
        raise FieldError(msg)
    if not isinstance(group, dict):
        msg = f"{name} is {shown(group)}; {needed}"
        raise FieldError(msg)
    for key in group:
        if key not in known:
            msg = f'{name} has the key "{cut(key)}"; known are {", ".join(known)}.'
            raise FieldError(msg)
    return {key: value for key, value in group.items() if value is not None}


def files_of(told: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that a record names, by key."""
    found: dict[str, str] = {}
    for key in FILES:
        group, _, name = key.partition(".")
        value = group_of(told, group).get(name)
        if value is None:
            if key == RGB:
                msg = f"{RGB} is missing; needed is the path of a clip."
                raise FieldError(msg)
            continue
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            msg = f"{key} is {shown(value)}; needed is the path of a file."
            raise FieldError(msg)
        found[key] = value
    return found


def label(labels: Mapping[str, Any], name: str) -> float:
    """Read a label."""
    if name not in labels:
        msg = f"labels.{name} is missing; needed is 0 or 1."
        raise FieldError(msg)
    value = labels[name]
    if not isinstance(value, bool | int | float) or value not in {0, 1}:
        msg = f"labels.{name} is {shown(value)}; needed is 0 or 1."
        raise FieldError(msg)
    return float(value)


def number(
    group: Mapping[str, Any], key: str, needed: str, is_right: Callable[[float], bool]
) -> float | None:
    """Read a number that may be absent."""
    value = group.get(key.partition(".")[2])
    if value is None:
        return None
    number = _finite(value)
    if number is None or not is_right(number):
        msg = f"{key} is {shown(value)}; needed is {needed}, or no such key."
        raise FieldError(msg)
    return number


def class_id(group: Mapping[str, Any], num_classes: int) -> int:
    """Read the class."""
    needed = f"a whole number from 0 to {num_classes - 1}, the classes of the model"
    if "class_id" not in group:
        msg = f"object.class_id is missing; needed is {needed}."
        raise FieldError(msg)
    value = group["class_id"]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_classes:
        msg = f"object.class_id is {shown(value)}; needed is {needed}."
        raise FieldError(msg)
    return value


def kinematics(motion: Mapping[str, Any]) -> NDArray[np.float32]:
    """Read the motion at three moments: (3, 9)."""
    moments = motion.get("kinematics")
    if moments is None:
        msg = f"motion.kinematics is missing; needed are {_SHAPE}."
        raise FieldError(msg)
    if not isinstance(moments, list) or len(moments) != 3:
        found = f"{len(moments)} lists" if _holds_lists(moments) else shown(moments)
        msg = f"motion.kinematics is {found}; needed are {_SHAPE}."
        raise FieldError(msg)
    for place, moment in enumerate(moments, 1):
        where = f"motion.kinematics, moment {place},"
        if not isinstance(moment, list):
            msg = f"{where} is {shown(moment)}; needed are {_SHAPE}."
            raise FieldError(msg)
        if len(moment) != len(QUANTITIES):
            msg = f"{where} has {len(moment)} numbers; needed are 9: {', '.join(QUANTITIES)}."
            raise FieldError(msg)
        for name, value in zip(QUANTITIES, moment, strict=True):
            _check_quantity(f"{where} {name}", name, value)
    return np.asarray(moments, dtype=np.float32)


def _check_quantity(where: str, name: str, value: Any) -> None:
    """Refuse what cannot be a quantity of a motion."""
    number = _finite(value)
    if number is None:
        msg = f"{where} is {shown(value)}; needed is a finite number."
        raise FieldError(msg)
    turn = {"bearing": 2 * math.pi, "elevation": math.pi / 2}.get(name)
    if turn is not None and abs(number) > turn + 1e-3:
        msg = f"{where} is {shown(value)}; needed are radians, from {-turn:.4g} to {turn:.4g}."
        raise FieldError(msg)
    if name == "range" and number < 0:
        msg = f"{where} is {shown(value)}; needed is a distance in metres, 0 or more."
        raise FieldError(msg)


def _finite(value: Any) -> float | None:
    """Return a number that float32 can hold, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    is_held = -_LARGEST <= value <= _LARGEST  # false of NaN, and exact for any whole number
    return float(value) if is_held else None


def _holds_lists(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, list) for x in value)


def kind(value: Any) -> str:
    """Name the kind of a JSON value."""
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """Show a JSON value in a few characters."""
    return cut(json.dumps(value, ensure_ascii=False))


def cut(text: str) -> str:
    """Keep a text short, and on one line."""
    kept = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
    return "".join(each if each.isprintable() else "?" for each in kept)
