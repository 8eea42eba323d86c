"""Loads the user's modules that code imports as it runs, and sees which it asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import _bootstrap, import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import _disable_current_modes

from memfit.live_state.named_globals import imported_names, names_at_hand, note_asked_for
from memfit.live_state.ownership import is_users_namespace, package_of
from memfit.live_state.state import LiveState

_FIND = "_find_and_load"
"""What ``importlib.import_module`` calls always, and an import statement where the module is not
loaded (cpython/Lib/importlib/_bootstrap.py, cpython/Python/import.c)."""


@contextmanager
def imports_seen(own: frozenset[str], tell: Callable[[ModuleType], None]) -> Iterator[None]:
    """Tell of modules of the user's when they are asked for, before anything uses them.

    Args:
        own: packages that count as the user's, wherever they are installed.
        tell: is given the module, loaded.
    """
    find, depth = getattr(_bootstrap, _FIND), 0

    def seen(name: str, import_: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            module = find(name, import_) if name in sys.modules else _loaded(find, name, import_)
        finally:
            depth -= 1
        is_known = isinstance(module, ModuleType)
        if not depth and is_known and is_users_namespace(vars(module), own):
            _note(module, own)
            tell(module)
        return module

    with patch.object(_bootstrap, _FIND, seen):
        yield


def _loaded(find: Callable[..., Any], name: str, import_: Any) -> Any:
    """Load a module whose tensors are real and stay, whatever is being recorded."""
    try:
        with _disable_current_modes():
            return find(name, import_)
    except (RuntimeError, AssertionError):  # it makes tensors on a device that is not here
        return find(name, import_)


def _note(module: ModuleType, own: frozenset[str]) -> None:
    """Note which function of the user's has asked."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_users_namespace(frame.f_globals, own):
        frame = frame.f_back
    if frame is not None:
        note_asked_for(frame.f_code, module)


def load_imports(roots: Mapping[str, object]) -> None:
    """Load the user's modules that code names and will load as it runs, to know what they keep."""
    state = LiveState(roots, copies_content=False)
    functions = [each for found in state.found() for each in found.functions]
    names = (n for each in functions for n in (*imported_names(each), *names_at_hand(each)))
    for name in dict.fromkeys(names):
        parent, _, last = name.rpartition(".")
        if name in sys.modules or not last.isidentifier() or hasattr(sys.modules.get(parent), last):
            continue
        with suppress(Exception):  # that is for the code to meet, if it comes to this import at all
            spec = find_spec(package_of(name))
            file = {"__name__": name, "__file__": spec.origin} if spec is not None else {}
            if file and is_users_namespace(file, state.own_packages):
                import_module(name)
