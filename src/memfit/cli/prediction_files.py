"""The files of a prediction that ``memfit predict`` was asked for: JSON, a page, a picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import json_text

if TYPE_CHECKING:
    from memfit.figures import Advice, Prediction
    from memfit.prediction.lives import Life
    from memfit.script.prediction import PhasePeak


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the files."""
    parser.add_argument(
        "--save", metavar="FILE", help="write the prediction (JSON), for memfit compare"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page about the step")
    parser.add_argument("--png", metavar="FILE", help="draw the memory over one step")


def own_device(prediction: Prediction) -> dict[str, str]:
    """Return what a saved prediction needs to be compared without the file of its device."""
    from memfit.devices.device_file import is_own_file, own_text

    name = prediction.device
    return {"device_file": own_text(name)} if is_own_file(name) else {}


def write_files(
    args: argparse.Namespace,
    prediction: Prediction,
    lives: Callable[[], Sequence[Life]],
    *,
    saved: Mapping[str, Any],
    advice: Sequence[Advice] = (),
    phases: Sequence[PhasePeak] = (),
    job: str,
) -> list[str]:
    """Write what was asked for, and give the paths; all are made before one is written.

    Args:
        args: of the command.
        prediction: what is shown.
        lives: gives the lives of its blocks, which only a page shows.
        saved: what ``memfit compare`` reads.
        advice: what would change the answer.
        phases: of a script's run.
        job: how the step was named.
    """
    from memfit.files import write_atomically

    contents: list[tuple[str, bytes]] = []
    if args.save:
        contents.append((args.save, json_text(saved).encode()))
    if args.html:
        from memfit.reports.prediction_html import prediction_html

        page = prediction_html(prediction, advice, job=job, lives=lives(), phases=phases)
        contents.append((args.html, page.encode()))
    if args.png:
        from memfit.reports.plots import png_bytes
        from memfit.reports.prediction_html import prediction_picture

        contents.append((args.png, png_bytes(prediction_picture(prediction))))
    for path, content in contents:
        write_atomically(Path(path), content)
    return [path for path, _ in contents]
