"""Plans and guards a framework's trainer inside a watched script, which does not know of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

_METHODS = {
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
    "transformers.trainer": "train",
}
"""What begins the training of a module's Trainer."""


def fit_trainers(wanted: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Have every trainer of a framework that begins from here on do so under a plan.

    Args:
        wanted: what the framework's integration is given.
        note: told why a trainer is left alone.
    """
    for name in _METHODS:
        if name in sys.modules:
            _wrap(sys.modules[name], wanted, note)
    sys.meta_path.insert(0, _TrainerFinder(wanted, note))


class _TrainerFinder:
    """Find the modules of trainers as other finders do, and wrap them once they have been run.

    Args:
        wanted: what the framework's integration is given.
        note: told why a trainer is left alone.
    """

    def __init__(self, wanted: Mapping[str, Any], note: Callable[[str], None]) -> None:
        self._wanted, self._note = wanted, note

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a trainer's module, to be followed by the wrapping; else nothing."""
        if name not in _METHODS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._wrap_after(spec.loader)
                return spec
        return None

    def _wrap_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            _wrap(module, self._wanted, self._note)

        loader.exec_module = exec_module


def _wrap(module: ModuleType, wanted: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Have trainings of a module's Trainer planned, unless the script does so itself."""
    kind: Any = module.Trainer
    method = _METHODS[module.__name__]
    begin = getattr(kind, method)
    join = _add_callback if method == "fit" else _attach

    @wraps(begin)
    def begun(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            join(trainer, {**wanted, "on_refusal": note})
        except Exception as error:  # noqa: BLE001 - whatever fails here must not reach the script
            note(f"the trainer is not planned: {type(error).__name__}: {error}")
        return begin(trainer, *args, **kwargs)

    setattr(kind, method, begun)


def _add_callback(trainer: Any, wanted: Mapping[str, Any]) -> None:
    callback: Any = import_module("memfit.integrations.lightning").MemfitCallback
    if not any(isinstance(each, callback) for each in trainer.callbacks):
        trainer.callbacks.append(callback(**wanted))


def _attach(trainer: Any, wanted: Mapping[str, Any]) -> None:
    integration: Any = import_module("memfit.integrations.transformers")
    if not integration.is_attached(trainer):
        integration.attach(trainer, **wanted)
