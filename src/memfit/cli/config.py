"""``memfit config``: training settings for a card, and where they are written."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.units import GIB

from .apply import whole_number
from .command import Command, add_json_argument, write_json

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_PATH = Path("conf/config.yaml")


class ConfigCommand:
    """Work out the NAICS training's settings for a card, and write them into its conf/ folder.

    For each stage of the curriculum: micro-batch, accumulation, positives and negatives, the
    expected memory with its parts, and how much of the card that is. The figures are those of the
    memory guide's own formula, beside memfit's prediction where there is one. Micro-batch x devices
    x accumulation is the target exactly, or the exit code is 3. Without --apply nothing is written;
    with it the files get numbered backups, and `memfit undo` puts them back.
    """

    example = "memfit config --gpu-memory 23.6 --target-effective-batch 225"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the card, the target and the files."""
        card = parser.add_mutually_exclusive_group(required=True)
        card.add_argument("--auto", action="store_true", help="detect the card of this machine")
        card.add_argument(
            "--gpu-memory", metavar="GB", type=_positive, help="a card of so much memory"
        )
        card.add_argument("--device", metavar="NAME", help="a card of `memfit devices`")
        parser.add_argument(
            "--profile",
            action="store_true",
            help="run a step on the card, or without one on the CPU, and compare",
        )
        parser.add_argument("--apply", action="store_true", help="write the files, with backups")
        parser.add_argument(
            "--target-effective-batch",
            metavar="N",
            type=whole_number,
            default=256,
            help="samples between two updates, over all devices (default: 256)",
        )
        parser.add_argument(
            "--devices", metavar="N", type=whole_number, default=1, help="how many train together"
        )
        parser.add_argument(
            "--safety-margin",
            metavar="PART",
            type=_fraction,
            default=0.85,
            help="how much of the card may be used (default: 0.85)",
        )
        parser.add_argument(
            "--config-path",
            metavar="PATH",
            type=Path,
            help="config.yaml, with the stages beside it (default: conf/config.yaml)",
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Choose, compare, write if asked to, and show."""
        settings = importlib.import_module("memfit_workloads.card_settings")
        files = importlib.import_module("memfit_workloads.card_settings_files")
        text = importlib.import_module("memfit_workloads.card_settings_text")
        estimate = importlib.import_module("memfit_workloads.reference_estimate")

        card = _card(settings, args)
        wanted = settings.Wanted(
            effective_size=args.target_effective_batch,
            num_devices=args.devices,
            safety_margin=args.safety_margin,
        )
        model_cfg = estimate.ModelConfig()
        stages = settings.settings_for(card, wanted, model_cfg)
        config = args.config_path or _DEFAULT_PATH
        known = config if config.exists() else None
        stages = settings.with_predictions(stages, card, wanted, model_cfg, known)
        running = importlib.import_module("memfit_workloads.card_profile")
        profiles = running.profile(stages, known) if args.profile else []
        written = None
        if args.apply or args.config_path or config.exists():
            written = files.write_settings(config, stages, write=args.apply)
        if args.json:
            found = text.as_json(card, stages, wanted, written)
            write_json({**found, "profiles": [asdict(each) for each in profiles]})
        else:
            lines = text.settings_lines(card, stages, wanted, written)
            lines += text.profile_lines(profiles)
            console.out("\n".join(lines), highlight=False)
        return 0


COMMAND: Command = ConfigCommand()


def _card(settings: Any, args: argparse.Namespace) -> Any:
    if args.auto:
        return settings.detected_card()
    if args.device:
        return settings.named_card(args.device)
    return settings.card_of(round(args.gpu_memory * GIB))


def _positive(text: str) -> float:
    number = _number(text)
    if not number > 0:
        msg = f"{text!r} is no size in GB; write it as 24 or 23.6"
        raise argparse.ArgumentTypeError(msg)
    return number


def _fraction(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 1:
        msg = f"{text!r} is no part of 1, such as 0.85"
        raise argparse.ArgumentTypeError(msg)
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
