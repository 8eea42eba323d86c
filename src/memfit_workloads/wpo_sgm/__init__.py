"""WPO-SGM: a kernel score model with learned precisions, streamed exactly over its centres."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from typing import TYPE_CHECKING, Any

from .arguments import add_arguments, command_of
from .settings import TrainingSettings, settings_from

if TYPE_CHECKING:
    from rich.console import Console

    from .setups import setup_chunked_training as setup_chunked_training
    from .setups import setup_gradient_accumulation_training as setup_gradient_accumulation_training
    from .setups import setup_model_parallel_training as setup_model_parallel_training

_SETUPS = (
    "setup_chunked_training",
    "setup_gradient_accumulation_training",
    "setup_model_parallel_training",
)


class WpoSgmWorkload:
    """Train a mixture of Gaussian kernels whose precisions a network gives."""

    name = "wpo-sgm"
    summary = "WPO-SGM: a kernel score model over thousands of centres"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_arguments(parser)

    def run(self, args: argparse.Namespace, progress_console: Console) -> dict[str, Any]:
        """Train, here or in several processes, and give the final metrics and peaks."""
        settings = settings_from(args, command_of(args))
        from .ranks import is_a_rank

        if settings.strategy.name == "model_parallel" and not is_a_rank():
            return _trained_by_ranks(settings, progress_console)
        from .train import train

        return train(settings, progress_console)


def _trained_by_ranks(settings: TrainingSettings, console: Console) -> dict[str, Any]:
    """Start processes that train together, and give what the first of them found."""
    from .ranks import start_ranks

    start_ranks(shlex.split(settings.command)[1:], settings.strategy.num_ranks, console)
    result: dict[str, Any] = json.loads((settings.folder / "result.json").read_text())
    return result


def __getattr__(name: str) -> Any:
    """Import the set-ups for existing scripts when they are asked for; they need torch."""
    if name in _SETUPS:
        return getattr(importlib.import_module(".setups", __name__), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


WORKLOAD = WpoSgmWorkload()
