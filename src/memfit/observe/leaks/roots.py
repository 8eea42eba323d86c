"""Finds where a look begins: the program's own modules and the frames that are running."""

from __future__ import annotations

import sys
import sysconfig
import types
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .contents import frame_variables, isinstance_of, module_namespace

_LIBRARIES = tuple(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        str(Path(__file__).parents[2]),
    }
)
_PARTS = ("site-packages", "dist-packages", "<frozen", "<__array")


@dataclass(slots=True, kw_only=True)
class Root:
    """One namespace: the variables of a module or of a running function."""

    name: str
    """``""`` for the main program, the module's name, or ``main() in train.py``."""
    is_frame: bool
    variables: list[tuple[Any, Any]]


@lru_cache(maxsize=4096)
def is_user_file(path: str) -> bool:
    """Test whether a file is part of the program, not of Python, an installed package or memfit."""
    if any(part in path for part in _PARTS):
        return False
    return not path.startswith(_LIBRARIES)


def user_frames() -> list[types.FrameType]:
    """Return the running frames of the program, the outermost first."""
    frames: list[types.FrameType] = []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def user_modules() -> list[tuple[str, dict[str, Any]]]:
    """Return the program's modules that are imported, the main one first."""
    found: list[tuple[str, dict[str, Any]]] = []
    for name in _user_module_names(len(sys.modules)):
        module = sys.modules.get(name)
        if module is not None and isinstance_of(module, types.ModuleType):
            found.append((name, module_namespace(module)))
    return found


@lru_cache(maxsize=1)
def _user_module_names(num_modules: int) -> tuple[str, ...]:
    """Find the names, anew only when the number of modules has changed."""
    found = []
    assert num_modules, "Python itself has modules"
    for name, module in list(sys.modules.items()):
        if isinstance_of(module, types.ModuleType):
            file = module_namespace(module).get("__file__")
            if name == "__main__" or (type(file) is str and is_user_file(file)):
                found.append(name)
    return tuple(sorted(found, key=lambda name: name != "__main__"))


def roots() -> list[Root]:
    """Return the namespaces of the program, each once."""
    frames = user_frames()
    namespaces: dict[int, tuple[str, dict[str, Any]]] = {}
    for name, namespace in user_modules():
        namespaces.setdefault(id(namespace), (name, namespace))
    for frame in frames:
        known = frame.f_globals.get("__name__")
        known = known if type(known) is str else ""
        namespaces.setdefault(id(frame.f_globals), (known, frame.f_globals))
    found = [
        Root(
            name="" if name == "__main__" else name,
            is_frame=False,
            variables=[(key, value) for key, value in namespace.items() if type(key) is str],
        )
        for name, namespace in namespaces.values()
    ]
    for frame in frames:
        code = frame.f_code
        name = f"{code.co_name}() in {Path(code.co_filename).name}"
        found.append(Root(name=name, is_frame=True, variables=frame_variables(frame)))
    return found


def user_line() -> str:
    """Return the innermost line of the program that is running, as ``file.py:12``."""
    frames = user_frames()
    if not frames:
        return ""
    return f"{Path(frames[-1].f_code.co_filename).name}:{frames[-1].f_lineno}"
