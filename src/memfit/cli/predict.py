"""``memfit predict``: what a step would take, without running it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memfit.errors import NoPlanFitsError, UsageError

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
    status,
)
from .prediction_files import add_file_arguments, write_files
from .question import Question
from .script_arguments import add_script_arguments, is_script, run_script

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.devices.spec import Device
    from memfit.figures import Prediction
    from memfit.job import Job, StepBuilder
    from memfit.peak_changes.moments import StepMoments
    from memfit.prediction.advice import Advice, LargestMicroBatch, PredictedJob
    from memfit.prediction.lives import Life
    from memfit.prediction.recording import Recording, StepRecording

Progress = Callable[[str], object]
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
    """

    example = "memfit predict examples/transformer.py:job --device a100-40gb"
    takes_script_arguments = True

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
        from memfit.job import BuildsTrainerError
        from memfit.virtual.tensors import ValuesNeededError

        question = _read_question(args)
        if is_script(args):
            return run_script(args, question, console)
        try:
            found = _answers(args, question, console)
        except (BuildsTrainerError, ValuesNeededError) as reason:
            if isinstance(reason, ValuesNeededError) and question.plan is not None:
                raise
            return run_script(args, question, console)
        shown, values = found[0], [answer.to_json(args.job) for answer in found]
        written = write_files(
            args,
            shown.prediction,
            shown.lives,
            saved=values[0],
            advice=shown.advice,
            job=args.job,
        )
        if args.json:
            write_json(values[0] if len(values) == 1 else values)
        else:
            _show(found, console, args)
            for path in written:
                console.print(f"Wrote {path}.", markup=False)
        fits = any(answer.prediction.fits is not False for answer in found)
        return 0 if fits else NoPlanFitsError.exit_code


COMMAND: Command = PredictCommand()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What was found for one device."""

    prediction: Prediction
    moments: StepMoments
    advice: Sequence[Advice] = ()
    micro_batch: LargestMicroBatch | None = None
    lives: Callable[[], Sequence[Life]] = tuple
    """Gives the lives of its blocks, which only a page shows."""

    def to_json(self, source: str) -> dict[str, Any]:
        """Return everything as plain values."""
        from dataclasses import asdict

        from memfit.peak_changes.saved import prediction_document
        from memfit.reports.wording import advice_sentence, verdict

        found = self.micro_batch
        fields = {
            **self.prediction.to_json(),
            "verdict": verdict(self.prediction),
            "advice": [{**asdict(entry), "text": advice_sentence(entry)} for entry in self.advice],
            "largest_micro_batch_size": None if found is None else found.micro_batch_size,
            "largest_micro_batch_reason": "" if found is None else found.reason,
        }
        return prediction_document(source, fields, self.moments)


def _read_question(args: argparse.Namespace) -> Question:
    """Read and check the words of the command, before anything is loaded."""
    from memfit.allocator.settings import AllocatorSettings
    from memfit.devices.catalogue import load_device
    from memfit.prediction.budget import MemoryBudget, read_budget

    for option, number in (("--top", args.top), ("--depth", args.depth)):
        if number is not None and number < 1:
            raise UsageError(f"{option} must be at least 1, not {number}.")
    named = [load_device(name) for name in args.device or ["cpu"]]
    devices = list({device.name: device for device in named}.values())
    if len(devices) > 1 and (args.html or args.png or args.save):
        msg = "--save, --html and --png are for one device; give --device once."
        raise UsageError(msg)
    return Question(
        devices=devices,
        plan=load_plan(args.plan),
        budget=MemoryBudget(num_bytes=read_budget(args.budget), of=args.budget_of),
        settings=AllocatorSettings.parse(args.allocator or ""),
        num_holders=args.top,
        ranks=read_ranks(args),
    )


def _answers(args: argparse.Namespace, question: Question, console: Console) -> list[_Answer]:
    """Find the answers, device by device, saying what is being done where someone is watching."""
    from memfit.virtual.process_group import one_rank_of

    answers: list[_Answer] = []
    with status(console, "recording the step", quiet=args.json) as show:
        for device in question.devices:
            with one_rank_of(question.placement_on(device)):
                answers.append(_answer_on(device, args.job, question, show))
    return answers


def _answer_on(device: Device, path: str, question: Question, show: Progress) -> _Answer:
    """Find the answer for a device."""
    from memfit.job import BuildsJobError, Job, load_target
    from memfit.prediction.importing import imported_on

    target = imported_on(device, load_target, path)
    show(f"recording the step on {device.name}")
    if isinstance(target, Job):
        return _job_answer(target, device, question, show)
    try:
        return _step_answer(target, device, question)
    except BuildsJobError:
        return _job_answer(target.function(), device, question, show)


def _step_answer(builder: StepBuilder, device: Device, question: Question) -> _Answer:
    """Record any code for a device."""
    from memfit.prediction.predict import evaluate_steps
    from memfit.prediction.recording import record_steps

    recording = record_steps(builder, device)
    if question.plan is not None:
        raise UsageError(
            f"--plan changes how memfit runs a memfit.Job, and {builder.name} builds a "
            "step of its own. Leave --plan out, or describe the step as a memfit.Job."
        )
    prediction = evaluate_steps(recording, device, **question.judged_by)
    return _answer(recording, prediction, device, question)


def _job_answer(job: Job, device: Device, question: Question, progress: Progress) -> _Answer:
    """Record a job for a device."""
    from memfit.prediction.advice import PredictedJob
    from memfit.prediction.predict import evaluate, part_under, with_other_spread
    from memfit.prediction.recording import record
    from memfit.session.batches import find_layout
    from memfit.strategies.plan import Plan

    plan = question.plan or Plan()
    job = part_under(plan, job)
    layout = find_layout(job)
    recording = record(job, plan, layout, device=device)
    again = partial(record, job, plan, layout, device=device, facts=recording.facts)

    def judge(recorded: Recording) -> Prediction:
        return evaluate(job, recorded, device, plan, **question.judged_by)

    prediction = with_other_spread(judge(recording), recording, again, judge)
    predicted = PredictedJob(
        job=job,
        plan=plan,
        layout=layout,
        device=device,
        settings=question.settings,
        recording=recording,
        prediction=prediction,
    )
    progress(f"looking for what would change the answer on {device.name}")
    return _answer(recording, prediction, device, question, job=predicted)


def _answer(
    recording: StepRecording,
    prediction: Prediction,
    device: Device,
    question: Question,
    *,
    job: PredictedJob | None = None,
) -> _Answer:
    """Add to a prediction what is asked of it: advice alone, micro-batches in a comparison."""
    from memfit.prediction.advice import advise, largest_holders, largest_micro_batch
    from memfit.prediction.lives import lives_of
    from memfit.prediction.step_moments import step_moments

    holders = largest_holders(recording, device, question.num_holders)
    prediction = replace(prediction, largest=holders)
    moments = step_moments(recording, device)
    if len(question.devices) > 1:
        found = None if job is None else largest_micro_batch(job)
        return _Answer(prediction=prediction, moments=moments, micro_batch=found)
    advice = advise(recording, prediction, device, question.settings, job)
    lives = partial(lives_of, recording, device)
    return _Answer(prediction=prediction, moments=moments, advice=advice, lives=lives)


def _show(answers: Sequence[_Answer], console: Console, args: argparse.Namespace) -> None:
    """Show one prediction on a screen or in full, several as a comparison."""
    from memfit.reports.brief_text import brief_prediction
    from memfit.reports.text import comparison_table, prediction_table

    if len(answers) > 1:
        found = [answer.micro_batch for answer in answers if answer.micro_batch is not None]
        console.print(comparison_table([answer.prediction for answer in answers], found))
        return
    (answer,) = answers
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
    asked = shlex.join([args.job, *_words_of_budget(args)])
    if prediction.fits is False:
        return [f"`memfit plan {asked}` finds the fastest way that fits."]
    return [f"`memfit plan {asked}` looks for what is faster and fits."]


def _words_of_budget(args: argparse.Namespace) -> list[str]:
    """Return the words with which the same device and budget are asked for."""
    words = ["--device", args.device[0]] if args.device else []
    words += ["--budget", args.budget] if args.budget else []
    return words + (["--budget-of", args.budget_of] if args.budget_of else [])
