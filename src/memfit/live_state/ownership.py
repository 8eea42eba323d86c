"""Tells the user's own modules from those of torch, Python and other packages."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OTHERS = frozenset(("torch", "torchvision", "torchaudio", "numpy", "memfit"))
_REPORTING = frozenset(
    (
        *("logging", "tqdm", "rich", "wandb", "tensorboard", "tensorboardX", "mlflow", "comet_ml"),
        *("matplotlib", "warnings", "_pytest", "pytest", "pdb"),
        *("torch.utils.tensorboard", "torch.profiler"),
        *("lightning", "pytorch_lightning", "lightning_fabric"),
    )
)
"""What shows, logs or drives a training: its state has no part in the results of a step."""
_DRIVING = (
    *("torch.utils.tensorboard", "torch.profiler", "datasets.", "accelerate.data_loader"),
    # Groups of processes, meshes and what shards a model: a step leaves them as it found them.
    *("torch.distributed.", "torch._C._distributed"),
    *("transformers.trainer_callback", "transformers.training_args", "transformers.integrations"),
)
"""The same, of packages whose other parts have state that counts."""
_DATA_OF_TRAINERS = frozenset(
    ("train_dataset", "eval_dataset", "data_collator", "processing_class", "callback_handler")
)
"""Attributes of transformers' Trainer from which no step reads what it changes."""
_FOLDERS = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for key in ("stdlib", "platstdlib")
    if (folder := sysconfig.get_path(key))
)
_INSTALLED = ("site-packages", "dist-packages")


def package_of(module_name: str) -> str:
    """Name the outermost package."""
    return module_name.partition(".")[0]


def is_users_namespace(namespace: Mapping[str, Any], own: frozenset[str]) -> bool:
    """Return whether a module's globals belong to the user's code.

    Args:
        namespace: the globals.
        own: packages that count as the user's, wherever they are installed.
    """
    name, file = namespace.get("__name__"), namespace.get("__file__")
    return _is_users(
        name if isinstance(name, str) else "", file if isinstance(file, str) else "", own
    )


def is_users_module(name: str, own: frozenset[str]) -> bool:
    """Return whether a module belongs to the user's code; one that is not known does."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return _is_users(name, file if isinstance(file, str) else "", own)


@functools.cache
def _is_users(name: str, file: str, own: frozenset[str]) -> bool:
    package = package_of(name)
    if package in _OTHERS or package in _REPORTING or package in sys.builtin_module_names:
        return False
    if package in own:
        return True
    if package in sys.stdlib_module_names:
        return False
    if not file:
        return True
    path = Path(file)
    return not any(part in _INSTALLED for part in path.parts) and not file.startswith(_FOLDERS)


def is_reporting(kind: type) -> bool:
    """Return whether objects of a type only show or log what happens."""
    return _is_reporting(kind.__module__ if isinstance(kind.__module__, str) else "")


@functools.cache
def _is_reporting(name: str) -> bool:
    return package_of(name) in _REPORTING or name.startswith(_DRIVING)


@functools.cache
def not_followed(kind: type) -> frozenset[str]:
    """Name the attributes of a class's objects that are not looked into."""
    is_trainer = any(base.__module__ == "transformers.trainer" for base in kind.__mro__)
    return _DATA_OF_TRAINERS if is_trainer else frozenset()
