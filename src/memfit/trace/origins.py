"""Tells which line of the user's code made a parameter, a buffer or an optimizer.

What makes a tensor is most often a library: a layer's constructor, the optimizer's first step, the
move of a model to the card. The line that helps is the one that a user can change.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer

from memfit.trace.events import CodeLine

OWN_FOLDERS = (
    *(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])),
    "<",
)
"""How the paths of torch's and memfit's own code begin, and of code that is in no file."""
_MEMFIT = f"{Path(__file__).parents[1]}{os.sep}"
_CALLERS = tuple(
    f"{_MEMFIT}{folder}{os.sep}"
    for folder in ("cli", "measurement", "planner", "prediction", "runtime", "session")
)
"""What of memfit calls the user's code: beyond it are no lines that made anything."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LAUNCHERS = f"{sysconfig.get_path('scripts')}{os.sep}"
_STANDARD_LIBRARY = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")
)

_LINES: dict[int, tuple[weakref.ref[Any], dict[str, str]]] = {}
"""By the identity of a module or an optimizer: the lines of its members, by name."""
_ITSELF = ""
_CODE_LINES: dict[str, CodeLine] = {}
"""Where each line is that was named, by its name."""


def line_of_caller() -> str:
    """Name the innermost line that is neither torch's, memfit's, Python's nor a launcher's."""
    return _innermost(lambda _path: True)


def line_of_user() -> str:
    """Name the innermost line of the user's own code; of a library's where there is none."""
    return _innermost(_is_users) or line_of_caller()


def line_of_function(function: Callable[..., Any]) -> str:
    """Name the line where a function begins; empty for what is not the user's."""
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        function = vars(function).get("__init__", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None or not name_of_file(code.co_filename):
        return ""
    return _named(code, code.co_firstlineno)


def code_line(line: str) -> CodeLine | None:
    """Return where a line is that was named here; None for others."""
    return _CODE_LINES.get(line)


def lines_of_members(module: torch.nn.Module) -> Mapping[str, str]:
    """Return the lines that gave a module its parameters and buffers, by their names in it."""
    return _lines_of(module)


def line_of_optimizer(optimizer: Optimizer) -> str:
    """Name the line that made an optimizer; empty where nobody watched."""
    return _lines_of(optimizer).get(_ITSELF, "")


@contextmanager
def origins_noted() -> Iterator[None]:
    """Note inside which lines make parameters, buffers and optimizers."""
    handles = [
        register_module_parameter_registration_hook(_note_member),
        register_module_buffer_registration_hook(_note_member),
    ]
    make: Any = Optimizer.__init__

    @functools.wraps(make)
    def make_and_note(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        _note(optimizer, _ITSELF)
        make(optimizer, *args, **kwargs)

    try:
        with patch.object(Optimizer, "__init__", make_and_note):
            yield
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def name_of_file(path: str) -> str:
    """Shorten a path to its last folder and name; empty for code that no user looks for."""
    if path.startswith((*OWN_FOLDERS, _LAUNCHERS)):
        return ""
    if path.startswith(_STANDARD_LIBRARY) and not any(folder in path for folder in _INSTALLED):
        return ""
    return "/".join(Path(path).parts[-2:])


def _is_users(path: str) -> bool:
    return not any(folder in path for folder in _INSTALLED)


def _innermost(is_wanted: Callable[[str], bool]) -> str:
    """Name the innermost line of a file that has a name and is wanted."""
    frame: FrameType | None = sys._getframe(2)
    asked_in = "" if frame is None else frame.f_code.co_filename
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_CALLERS) and code.co_filename != asked_in:
            return ""
        if name_of_file(code.co_filename) and is_wanted(code.co_filename):
            return _named(code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _named(code: CodeType, number: int) -> str:
    """Write a line as ``folder/file.py:12``, and note where it is."""
    line = f"{name_of_file(code.co_filename)}:{number}"
    if line not in _CODE_LINES:
        _CODE_LINES[line] = CodeLine(code.co_filename, code.co_qualname, number)
    return line


def _note_member(module: torch.nn.Module, name: str, _member: object) -> None:
    _note(module, name)


def _note(owner: object, name: str) -> None:
    """Note the line that is running, for a member of an owner."""
    found = _LINES.get(id(owner))
    if found is None or found[0]() is not owner:
        key = id(owner)
        watch = weakref.ref(owner, lambda gone: _forget(key, gone))
        found = _LINES[key] = (watch, {})
    found[1][name] = line_of_user()


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    """Drop what is known of an owner that has died."""
    found = _LINES.get(key)
    if found is not None and found[0] is gone:
        del _LINES[key]


def _lines_of(owner: object) -> Mapping[str, str]:
    found = _LINES.get(id(owner))
    return found[1] if found is not None and found[0]() is owner else {}
