"""Waits in every Python process below ``memfit run`` until torch is imported.

Python imports a module of this name by itself when it starts. Until torch is imported this does
next to nothing; a process that never imports it is left alone. Another ``sitecustomize`` that this
one shadows is run as if this one were not there. Runs in whatever Python the script has,
which may be older than what memfit needs, or may not have memfit installed: so no import but of
modules that are loaded already, and no newer syntax.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_HERE = __file__.rpartition(os.sep)[0]
_FOLDER = os.environ.get("MEMFIT_WATCH_FOLDER")
_OLDEST_PYTHON = (3, 11)


class _TorchFinder:
    """Find torch as the other finders do, and attach when it has been run."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of torch, to be followed by ``_attach``; nothing for other modules."""
        if name != "torch":
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    _attach_after(self, spec.loader)
                    return spec
        return None


def _attach_after(finder: Any, loader: Any) -> None:
    """Have a loader attach once it has run its module."""
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        del loader.exec_module
        execute(module)
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
        _attach()

    loader.exec_module = exec_module


def _attach() -> None:
    try:
        if sys.version_info < _OLDEST_PYTHON:
            _note("its Python is older than 3.11")
            return
        for folder in os.environ.get("MEMFIT_WATCH_SOURCE", "").split(os.pathsep):
            _make_importable(folder)
        from memfit.watch.inside.attaching import attach  # noqa: PLC0415 - only now

        attach()
    except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the script
        _note(type(error).__name__ + ": " + str(error))


def _make_importable(folder: str) -> None:
    """Make memfit, or what it needs, importable where the script's Python does not have it."""
    import importlib.util  # noqa: PLC0415 - only now

    name = os.path.basename(folder)  # noqa: PTH119 - pathlib is not loaded yet
    if not name or importlib.util.find_spec(name) is not None:
        return
    first = folder + os.sep + "__init__.py"
    spec = importlib.util.spec_from_file_location(name, first, submodule_search_locations=[folder])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _note(reason: str) -> None:
    """Tell ``memfit run`` why nothing is seen of this process."""
    try:
        name = "{}{}.watch{}{}.failed".format(_FOLDER, os.sep, os.sep, os.getpid())  # noqa: UP032
        with open(name, "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib is not loaded yet
            file.write(reason)
    except OSError:
        return  # the folder has gone; there is nobody left to tell


def _chain() -> None:
    """Run the ``sitecustomize`` that this one shadows."""
    import importlib.machinery  # noqa: PLC0415 - loaded by site already
    import importlib.util  # noqa: PLC0415 - as above

    sys.path[:] = [path for path in sys.path if path != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("MEMFIT_DISABLE") != "1" and _FOLDER:
    sys.meta_path.insert(0, _TorchFinder())
_chain()
