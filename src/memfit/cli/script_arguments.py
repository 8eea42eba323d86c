"""Scripts among the arguments of ``memfit predict``: what they are, and how they are answered."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import UsageError
from memfit.job import makes_jobs

from .card_comparison import exit_code_of, show_cards
from .command import write_json
from .device_by_device import for_each_device
from .job_arguments import status
from .prediction_files import own_device, write_files
from .question import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console

    from memfit.devices.spec import Device
    from memfit.prediction.compared_cards import ComparedCard
    from memfit.script.prediction import ScriptPrediction
    from memfit.script.question import ScriptQuestion, ScriptRecording, ScriptTarget

_STEPS = 3
_MOST_SECONDS = 300.0
_DATA_SECONDS = 60.0
_ALLOWED = ("subprocess", "network")


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what concerns scripts alone."""
    parser.add_argument(
        "-m", dest="module", metavar="MODULE", help="a module, as python -m runs it"
    )
    add_recording_arguments(parser)
    parser.add_argument(
        "--data",
        action="store_true",
        help="of a script: read its training data, and record the steps of the largest batches",
    )
    parser.add_argument(
        "--data-seconds",
        metavar="N",
        type=float,
        default=_DATA_SECONDS,
        help=f"how long the data is read at most (default {_DATA_SECONDS:.0f})",
    )


def add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare for how long a script is recorded, and what it may reach."""
    parser.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=_STEPS,
        help=f"of a script: how many updates are recorded (default {_STEPS})",
    )
    parser.add_argument(
        "--most-seconds",
        metavar="N",
        type=float,
        default=_MOST_SECONDS,
        help=f"of a script: when to end with what is there (default {_MOST_SECONDS:.0f})",
    )
    parser.add_argument(
        "--allow-outside",
        metavar="KIND",
        action="append",
        choices=_ALLOWED,
        default=[],
        help="of a script: let it start programs (subprocess) or connect (network)",
    )


def is_script(args: argparse.Namespace) -> bool:
    """Return whether a script is meant, rather than a name in a file.

    Raises:
        UsageError: if nothing is named, or two things are.
    """
    if args.module is not None:
        if args.job is not None:
            raise UsageError(f"-m {args.module} and {args.job} are two things; name one of them.")
        return True
    if args.job is None:
        msg = "Name what is predicted: FILE.py, FILE.py:NAME or -m MODULE."
        raise UsageError(msg)
    path, colon, _ = args.job.partition(":")
    if colon or not Path(path).is_file():
        return False  # a missing file is told as for jobs
    return bool(args.script_arguments) or not makes_jobs(Path(path))


def run_script(args: argparse.Namespace, question: Question, console: Console) -> int:
    """Record the script for every device, judge it, and show what was found."""
    from memfit.reports.script_text import brief_script, script_text

    if question.plan is not None:
        msg = "--plan changes how memfit runs a memfit.Job, and a script runs as it is."
        raise UsageError(msg)
    if question.ranks is not None:
        msg = (
            "--ranks records a memfit.Job or a function that returns a step, and a script or a "
            "trainer is recorded as the one process that it is. Leave --ranks out, or describe the "
            "step as a memfit.Job."
        )
        raise UsageError(msg)
    target = _target(args)
    with status(console, f"recording {target.name}", quiet=args.json) as show:
        recordings: list[tuple[str, ScriptRecording]] = []

        def answer_on(
            device: Device, tell: Callable[[str], object]
        ) -> tuple[ScriptPrediction, ComparedCard]:
            return _answer(question, recordings, _asked(args, target, device), tell)

        found = for_each_device(question.devices, answer_on, show, passes_on=(UsageError,))
    if len(question.devices) > 1:
        cards = [(card, _to_json(each) | card.to_json()) for each, card in found.answers]
        return show_cards(args, console, found, cards)
    answer = found.answers[0][0]
    saved = _to_json(answer)
    written = write_files(
        args,
        answer.prediction,
        answer.lives,
        saved=saved,
        phases=answer.phases,
        job=answer.script,
    )
    if args.json:
        write_json(saved)
    else:
        text = (
            script_text(answer, top=question.num_holders, depth=args.depth)
            if args.verbose
            else brief_script(answer, _next_commands(answer, args), depth=args.depth)
        )
        console.print(text)
        for path in written:
            console.print(f"Wrote {path}.", markup=False)
    return exit_code_of([answer.prediction])


def _next_commands(answer: ScriptPrediction, args: argparse.Namespace) -> list[str]:
    """Say what may be typed about the same script."""
    if args.module is not None or ":" in args.job:
        return []
    words = f" -- {shlex.join(args.script_arguments)}" if args.script_arguments else ""
    if answer.prediction.fits is False:
        return [f"`memfit job {args.job}{words}` writes a job, which `memfit plan` makes fit."]
    return [f"`memfit run -- python {args.job}{words.removeprefix(' --')}` trains, watched."]


def _to_json(answer: ScriptPrediction) -> dict[str, Any]:
    """Return everything as plain values, with the keys that every prediction has."""
    from memfit.peak_changes.saved import prediction_document
    from memfit.reports.wording import verdict

    own = own_device(answer.prediction)
    fields = {**answer.to_json(), **own, "verdict": verdict(answer.prediction), "advice": []}
    return prediction_document(answer.script, fields, answer.moments)


def _answer(
    question: Question,
    recordings: list[tuple[str, ScriptRecording]],
    asked: ScriptQuestion,
    tell: Callable[[str], object],
) -> tuple[ScriptPrediction, ComparedCard]:
    """Find the answer for one device, from a recording for another one that would be the same."""
    from memfit.prediction.compared_cards import compared_card
    from memfit.script.prediction import predict_recorded_script
    from memfit.script.recording import record_script

    device = asked.device
    recorded_for, found = next(_alike(recordings, device), (device.name, None))
    if found is None:
        found = record_script(asked, tell)
        recordings.append((device.name, found))
    uneven = replace(asked, is_skewed=True, data_seconds=None)
    skewed = record_script(uneven) if found.decides_sizes else None
    answer = predict_recorded_script(
        asked.target.title,
        found,
        device,
        budget=question.budget,
        settings=question.settings,
        skewed=skewed,
    )
    card = compared_card(
        answer.prediction,
        found.recording,
        device,
        recorded_for=recorded_for,
        needed_bytes=answer.worst_bytes,
    )
    return answer, card


def _asked(args: argparse.Namespace, target: ScriptTarget, device: Device) -> ScriptQuestion:
    from memfit.script.question import ScriptQuestion

    return ScriptQuestion(
        target=target,
        device=device,
        num_steps=args.steps,
        most_seconds=args.most_seconds,
        allows=args.allow_outside,
        data_seconds=args.data_seconds if args.data else None,
    )


def _alike(
    recordings: Sequence[tuple[str, ScriptRecording]], device: Device
) -> Iterator[tuple[str, ScriptRecording]]:
    """Yield what was recorded and would have gone the same way on a device."""
    from memfit.prediction.shared_recordings import would_be_alike

    for recorded_for, found in recordings:
        if not found.decides_sizes and would_be_alike(found.recording.card, device):
            yield recorded_for, found


def _target(args: argparse.Namespace) -> ScriptTarget:
    from memfit.script.question import ScriptTarget

    if args.steps < 1:
        raise UsageError(f"--steps must be at least 1, not {args.steps}.")
    if args.data_seconds <= 0:
        raise UsageError(f"--data-seconds must be more than 0, not {args.data_seconds:g}.")
    path, _, attribute = ("", "", "") if args.module else args.job.partition(":")
    return ScriptTarget(
        name=args.module or path,
        is_module=args.module is not None,
        attribute=attribute,
        arguments=tuple(args.script_arguments),
    )
