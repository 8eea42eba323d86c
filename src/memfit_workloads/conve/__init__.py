"""ConvE: link prediction in a knowledge graph, with an exact one-to-many loss in bounded memory."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .arguments import add_arguments, command_of
from .settings import settings_from

if TYPE_CHECKING:
    from rich.console import Console


class ConvEWorkload:
    """Train ConvE on a knowledge graph and rank the test triples."""

    name = "conve"
    summary = "ConvE: predict missing links of a knowledge graph"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags."""
        add_arguments(parser)

    def run(self, args: argparse.Namespace, progress_console: Console) -> dict[str, Any]:
        """Train, and give the final metrics and peaks."""
        settings = settings_from(args, command_of(args))
        from .train import train

        return train(settings, progress_console)


WORKLOAD = ConvEWorkload()
