"""Optional packages, imported where a row needs them; torchvision even without its compiled part.

Only the Python definitions of models are needed. torchvision registers fake versions of compiled
operators while it is imported, which fails where its compiled part does not fit the installed
torch; those registrations are left out then. Since transformers imports torchvision wherever it
finds it, torchvision and timm have a folder of their own, which is searched only in here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from memfit.errors import MemfitError

_REGISTRATIONS = ("register_fake", "register_autograd", "register_kernel")
_OWN_FOLDER = Path(sys.prefix) / "accuracy"
"""Where the Makefile installs requirements.txt, in the environment but outside its packages."""


class CannotRebuild(MemfitError):  # noqa: N818 - reads as the sentence that it writes
    """Say what a row lacks, so that its step cannot be built."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The row cannot be rebuilt: {reason}. Leave it out, or complete what is missing."
        )


def load_package(name: str) -> ModuleType:
    """Import a package that some rows need.

    Raises:
        CannotRebuild: if the package is not installed.
    """
    with _own_folder():
        _load_torchvision()  # transformers and timm import it whenever it is installed
        if name == "torchvision" and "torchvision" not in sys.modules:
            raise CannotRebuild("the package torchvision is not installed")
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise CannotRebuild(f"the package {name} cannot be imported ({error})") from error


@contextmanager
def _own_folder() -> Iterator[None]:
    """Search the folder of the vision models too, after all others."""
    folder = str(_OWN_FOLDER)
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _load_torchvision() -> None:
    """Import torchvision if it is installed, with or without its compiled operators."""
    if "torchvision" in sys.modules:
        return
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        with ExitStack() as stack:
            for name in _REGISTRATIONS:
                usual = getattr(torch.library, name)
                replaced = patch.object(torch.library, name, _except_torchvision(usual))
                stack.enter_context(replaced)
            importlib.import_module("torchvision")


def _except_torchvision(register: Callable[..., Any]) -> Callable[..., Any]:
    """Make a registration do nothing for operators of torchvision."""

    def register_others(operator: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(operator, str) and operator.startswith("torchvision::"):
            return _unchanged if not args and kwargs.get("func") is None else None
        return register(operator, *args, **kwargs)

    return register_others


def _unchanged(function: Any) -> Any:
    return function
