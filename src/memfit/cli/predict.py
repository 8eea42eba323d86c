"""``memfit predict``: what a step would take, without running it."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from memfit.errors import NoPlanFitsError, UsageError

from .card_comparison import show_cards
from .command import Command, add_json_argument, write_json
from .job_arguments import (
    add_budget_arguments,
    add_depth_argument,
    add_device_argument,
    add_plan_argument,
    add_rank_arguments,
    add_verbose_argument,
    load_plan,
    read_ranks,
)
from .predicted_answers import Answer, answer_job
from .prediction_files import add_file_arguments, write_files
from .question import Question
from .script_arguments import add_script_arguments, is_script, run_script

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.figures import Prediction

_TOP = 10


class PredictCommand:
    """Predict the peak memory and the time of one training step, or of a whole script.

    Nothing is trained and no GPU is needed: the step is recorded with shapes only. For a GPU it is
    recorded on a virtual card, with the operators that CUDA would choose, and replayed through a
    simulation of PyTorch's caching allocator.

    FILE.py alone is a script: it runs unchanged, on its real data and the virtual card, until its
    steps are recorded; what it would write is dropped. Its own arguments come after `--`. NAME in
    FILE.py:NAME is a memfit.Job, a transformers.Trainer, a tuple of lightning.Trainer,
    LightningModule and data, or a function without arguments that returns one of these or a
    function that does one step. With a budget the exit code is 3 when it does not fit.

    Several devices are compared: repeat --device, or give it names with commas, a pattern such as
    'rtx-40*', or `all`. What would be recorded alike on them is recorded once.
    """

    example = "memfit predict examples/transformer.py:job --device a100-40gb"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the step, devices, budget, plan, allocator and outputs."""
        parser.add_argument(
            "job",
            nargs="?",
            metavar="FILE.py[:NAME]",
            help="a script, or what has this name in a Python file",
        )
        add_script_arguments(parser)
        add_device_argument(parser, several=True)
        add_rank_arguments(parser)
        add_budget_arguments(parser)
        add_plan_argument(parser)
        parser.add_argument(
            "--allocator",
            metavar="TEXT",
            help="what PYTORCH_ALLOC_CONF would hold, such as expandable_segments:True",
        )
        parser.add_argument(
            "--top",
            metavar="N",
            type=int,
            default=_TOP,
            help=f"how many of the largest allocations to name (default {_TOP})",
        )
        add_depth_argument(parser)
        add_verbose_argument(parser)
        add_file_arguments(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Record the step for every device, judge it, and show what was found."""
        question = _read_question(args)  # before torch is imported, which takes seconds
        from memfit.job import BuildsTrainerError
        from memfit.virtual.tensors import ValuesNeededError

        if is_script(args):
            return run_script(args, question, console)
        try:
            found = answer_job(args, question, console)
        except (BuildsTrainerError, ValuesNeededError) as reason:
            if isinstance(reason, ValuesNeededError) and question.plan is not None:
                raise
            return run_script(args, question, console)
        if len(question.devices) > 1:
            cards = [
                (each.card, each.to_json(args.job))
                for each in found.answers
                if each.card is not None
            ]
            return show_cards(args, console, found, cards)
        (answer,) = found.answers
        saved = answer.to_json(args.job)
        written = write_files(
            args,
            answer.prediction,
            answer.lives,
            saved=saved,
            advice=answer.advice,
            job=args.job,
        )
        if args.json:
            write_json(saved)
        else:
            _show(answer, console, args)
            for path in written:
                console.print(f"Wrote {path}.", markup=False)
        return 0 if answer.prediction.fits is not False else NoPlanFitsError.exit_code


COMMAND: Command = PredictCommand()


def _read_question(args: argparse.Namespace) -> Question:
    """Read and check the words of the command, before anything is loaded."""
    from memfit.allocator.settings import AllocatorSettings
    from memfit.devices.several import devices_meant
    from memfit.prediction.budget import MemoryBudget, read_budget

    for option, number in (("--top", args.top), ("--depth", args.depth)):
        if number is not None and number < 1:
            raise UsageError(f"{option} must be at least 1, not {number}.")
    devices = devices_meant(args.device or ["cpu"])
    if len(devices) > 1 and (args.png or args.save):
        msg = "--save and --png are for one device; name one. --html compares several."
        raise UsageError(msg)
    return Question(
        devices=devices,
        budget=MemoryBudget(num_bytes=read_budget(args.budget), of=args.budget_of),
        settings=AllocatorSettings.parse(args.allocator or ""),
        num_holders=args.top,
        ranks=read_ranks(args),
        plan=load_plan(args.plan),
    )


def _show(answer: Answer, console: Console, args: argparse.Namespace) -> None:
    """Show a prediction on a screen, or in full."""
    from memfit.reports.brief_text import brief_prediction
    from memfit.reports.text import prediction_table

    if args.verbose:
        shown = prediction_table(answer.prediction, answer.advice, top=args.top, depth=args.depth)
    else:
        commands = _next_commands(answer.prediction, args)
        shown = brief_prediction(answer.prediction, answer.advice, commands, depth=args.depth)
    console.print(shown)


def _next_commands(prediction: Prediction, args: argparse.Namespace) -> list[str]:
    """Say what may be typed about the same job, which a step of one's own is not."""
    if prediction.batch_size is None or args.ranks is not None:
        return []
    if args.plan is not None:
        return [f"`memfit verify {args.job} --plan {args.plan}` proves that results are kept."]
    asked = shlex.join([args.job, *_words_of_budget(prediction, args)])
    if prediction.fits is False:
        return [f"`memfit plan {asked}` finds the fastest way that fits."]
    return [f"`memfit plan {asked}` looks for what is faster and fits."]


def _words_of_budget(prediction: Prediction, args: argparse.Namespace) -> list[str]:
    """Return the words with which the same device and budget are asked for."""
    words = ["--device", prediction.device] if args.device else []
    words += ["--budget", args.budget] if args.budget else []
    return words + (["--budget-of", args.budget_of] if args.budget_of else [])
