"""Writes a job out of a script and proves it, in a process of its own."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memfit.allocator.simulate import CPU_RULES, peak_bytes
from memfit.devices.catalogue import load_device
from memfit.errors import MemfitError, RecordingError
from memfit.files import write_atomically
from memfit.job import Job
from memfit.measurement.measure import measure
from memfit.prediction.recording import record
from memfit.script.compiled_files import compiled_files
from memfit.script.drawn_batches import DrawnBatches
from memfit.script.job_file.facts import SeenScript
from memfit.script.job_file.first_step import FirstStep
from memfit.script.job_file.loop import NoJobError, TrainingLoop, find_training_loop
from memfit.script.job_file.loss import cut_loss
from memfit.script.job_file.prelude import sort_prelude
from memfit.script.job_file.proof import (
    Losses,
    OtherThanScriptError,
    compare,
    compare_window,
    first_batch,
    load_text,
    padding_of,
    parts_of_first_update,
)
from memfit.script.job_file.text import Cut, job_text, left_out_lines
from memfit.script.kernel_lock import lock_writes
from memfit.script.overlay import Overlay
from memfit.script.question import ScriptTarget, Workplace
from memfit.script.recorded_run import import_libraries
from memfit.script.steps import EnoughRecordedError
from memfit.script.target import run_target
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan
from memfit.trace.events import trace_of_step
from memfit.virtual.loaders import loaders_in_process

_MANY_BATCHES = 16
_MODULE = "memfit.script.job_file.writing"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuestion:
    """Which script a job is written from, and where its file will lie."""

    script: Path
    arguments: tuple[str, ...]
    output: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenJob:
    """The text of a job file, and how it compares with its script."""

    text: str
    loss: Losses
    first_step_peak_bytes: int
    steady_step_peak_bytes: int
    is_measured: bool
    """Whether the peaks were measured, because the job cannot be recorded without values."""
    batch_size: int
    num_backwards: int
    optimizer: str
    left_out: tuple[tuple[int, str], ...]
    own_bytes: int
    """Of the model and the whole first batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNotWritten:
    """Why no job could be written, and its text as far as it came."""

    reason: str
    text: str = ""
    details: str = field(default="", repr=False)


def write_job(question: JobQuestion) -> WrittenJob | JobNotWritten:
    """Run a script up to its first update on the CPU, and write a job of what was seen there.

    The script runs for real, in a process of its own whose files are dropped.

    Raises:
        NoJobError: if its text shows already that no job can be written.
    """
    find_training_loop(question.script)
    with tempfile.TemporaryDirectory(prefix="memfit-job-") as folder:
        place = Workplace(folder=Path(folder).resolve())
        place.written.mkdir()
        place.temporary.mkdir()
        place.question.write_bytes(pickle.dumps(question))
        exit_code = subprocess.call(
            [sys.executable, "-P", "-m", _MODULE, str(place.folder)],
            stdout=sys.stderr.fileno(),
            env=_environment(place),
        )
        if not place.result.exists():
            return JobNotWritten(reason=f"the script's process ended with exit code {exit_code}")
        found = pickle.loads(place.result.read_bytes())
    assert isinstance(found, (WrittenJob, JobNotWritten)), "the two things that a child writes"
    return found


def _environment(place: Workplace) -> dict[str, str]:
    return {
        **os.environ,
        "TMPDIR": str(place.temporary),
        "MPLCONFIGDIR": str(place.temporary),
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def main(folder: str) -> int:
    """Write the job that a folder's question asks for, and what was found."""
    place = Workplace(folder=Path(folder))
    question: JobQuestion = pickle.loads(place.question.read_bytes())
    import_libraries()
    lock_writes([place.folder])
    made = _Making(question)
    try:
        found: WrittenJob | JobNotWritten = made.run(place)
    except OtherThanScriptError as error:
        found = JobNotWritten(reason=str(error), text=made.text)
    except NoJobError as error:
        where = "" if error.line is None else f"line {error.line}: "
        found = JobNotWritten(reason=f"{where}{error.reason}", text=made.text)
    except MemfitError as error:
        found = JobNotWritten(reason=str(error), text=made.text, details=traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - code of the user's, whatever it raises
        reason = f"{type(error).__name__}: {error}"
        found = JobNotWritten(reason=reason, text=made.text, details=traceback.format_exc())
    write_atomically(place.result, pickle.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the script are not waited for


class _Making:
    """Makes one job, and keeps its text for when something fails."""

    def __init__(self, question: JobQuestion) -> None:
        self._question = question
        self.text = ""

    def run(self, place: Workplace) -> WrittenJob:
        """Run the script, write the text, load it and compare it."""
        question = self._question
        loop = find_training_loop(question.script)
        first = FirstStep(loop)
        overlay = Overlay(place.written, [place.temporary])
        with ExitStack() as stack:
            for each in (
                *loaders_in_process(nullcontext, _always),
                *compiled_files(overlay),
                *overlay.replacements(),
            ):
                stack.enter_context(each)
            target = ScriptTarget(name=str(question.script), arguments=question.arguments)
            with suppress(EnoughRecordedError, SystemExit), first:
                run_target(target, _nothing)
            seen, live = first.seen()
            cut = _cut(loop, seen, question)
            num_rows = _num_rows(cut, first)
            seen.micro_batch_size = num_rows or 1  # known once the file can be loaded
            self.text = job_text(cut, question.output)
            module = load_text(self.text, question.output, question.script.parent)
            if not num_rows:
                seen.micro_batch_size = module.drawn.num_samples // seen.num_backwards
                self.text = job_text(cut, question.output)
                module = load_text(self.text, question.output, question.script.parent)
            if seen.num_backwards > 1:
                seen.padding = padding_of(islice(module.batches(), _MANY_BATCHES))
            if seen.padding:
                self.text = job_text(cut, question.output)
                module = load_text(self.text, question.output, question.script.parent)
            return self._proved(module, cut, first, live)

    def _proved(
        self, module: ModuleType, cut: Cut, first: FirstStep, live: torch.nn.Module
    ) -> WrittenJob:
        batch = first_batch(module, cut, first)
        loss = compare(module, cut, first, live, batch)
        compare_window(module, cut)
        parts = parts_of_first_update(cut, first, batch)
        peaks = [_peaks(module.job, each, cut.seen) for each in _repeated(parts)]
        first_bytes, steady_bytes, is_measured = map(max, zip(*peaks, strict=True))
        optimizer = cut.seen.optimizer
        leaves = [*live.parameters(), *live.buffers(), *tree_leaves(parts)]
        return WrittenJob(
            text=self.text,
            loss=loss,
            first_step_peak_bytes=first_bytes,
            steady_step_peak_bytes=steady_bytes,
            is_measured=is_measured,
            batch_size=cut.seen.micro_batch_size * cut.seen.num_backwards,
            num_backwards=cut.seen.num_backwards,
            optimizer=optimizer.name,
            left_out=tuple(left_out_lines(cut)),
            own_bytes=sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor)),
        )


def _cut(loop: TrainingLoop, seen: SeenScript, question: JobQuestion) -> Cut:
    prelude = sort_prelude(loop, seen)
    loss = cut_loss(loop, prelude, seen)
    return Cut(loop=loop, prelude=prelude, loss=loss, seen=seen, arguments=question.arguments)


def _num_rows(cut: Cut, first: FirstStep) -> int:
    """Count the samples of the script's first batch; 0 if it is fetched inside the iteration."""
    assert first.start is not None, "the loop has been seen"
    values = [first.start.names.get(name) for name in cut.loss.batch_names]
    try:
        return DrawnBatches(lambda: [tuple(values)]).num_samples
    except MemfitError:
        return 0


def _repeated(parts: Sequence[Any]) -> list[list[Any]]:
    """Return updates that take together what one of different parts does.

    The first part runs before there are gradients, and the longest of the others with them. Parts
    of one update are filled up to one length in a job, which the script does not do.
    """
    first, *others = parts
    if not others:
        return [[first]]
    longest = max(others, key=_num_elements)
    with_gradients = [longest] * len(parts)
    if _num_elements(first) <= _num_elements(longest):
        return [with_gradients]
    return [[first], with_gradients]


def _num_elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def _peaks(job: Job, parts: Sequence[Any], seen: SeenScript) -> tuple[int, int, bool]:
    """Return the peaks of the job's first and second step, and whether they had to be measured.

    Args:
        job: that was written.
        parts: batches of one length that both steps see.
        seen: what the script has shown.
    """
    drawn = DrawnBatches(lambda: list(parts), window=len(parts))
    plan = None
    if len(parts) > 1:
        plan = Plan(strategies=(MicroBatching(micro_batch_size=seen.micro_batch_size),))
    same = replace(job, batch=drawn.of_size, batch_size=len(parts) * seen.micro_batch_size)
    try:
        recording = record(same, plan, device=load_device("cpu"))
    except RecordingError:
        measured = measure(same, plan)
        return measured.first_step_peak_bytes, measured.peak_allocated_bytes, True
    first, steady = (
        peak_bytes(trace_of_step(recording.history, mark), CPU_RULES) for mark in recording.marks
    )
    return first, steady, False


def _always(_asked: object) -> bool:
    return True


def _nothing() -> None:
    """Do nothing after the steps of a function: a whole script is run here."""


if __name__ == "__main__":
    # Under the module's own name, so that what is pickled here can be read there.
    sys.exit(importlib.import_module(_MODULE).main(sys.argv[1]))
