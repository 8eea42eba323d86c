"""TracIn: which training triples made a prediction. The command ``memfit tracin``."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

from .arguments import add_arguments as add_arguments
from .settings import settings_from

if TYPE_CHECKING:
    from rich.console import Console


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Trace as the flags say; torch is imported here. Gives what ``--json`` ends with."""
    settings = settings_from(args)
    module = importlib.import_module(f"{__name__}.tracing")
    result: dict[str, Any] = module.trace(settings, console)
    return result
