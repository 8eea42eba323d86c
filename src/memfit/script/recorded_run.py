"""Runs a script on a virtual device and puts together what was seen of it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfit.errors import RecordingError
from memfit.kernels.cuda.card import Card
from memfit.prediction.placed_recorder import card_of, recording_on
from memfit.prediction.recording import StepRecording
from memfit.prediction.refusals import check_placed, clear_refusals, code_at_fault
from memfit.script.compiled_files import compiled_files
from memfit.script.data_scan import DataScan, recorded_copy
from memfit.script.host_meter import HostMeter
from memfit.script.mapped_files import MappedFiles
from memfit.script.outside import Outside
from memfit.script.overlay import Overlay
from memfit.script.question import ScriptQuestion, ScriptRecording, ScriptTarget, Workplace
from memfit.script.saved_objects import SavedObjects
from memfit.script.steps import EnoughRecordedError, RecordedTime, StepCounter
from memfit.script.target import run_target
from memfit.script.weight_files import WeightFiles
from memfit.trace.phases import StepFollower
from memfit.trace.recorder import Recorder
from memfit.virtual.assumptions import Assumptions
from memfit.virtual.known_values import value_of
from memfit.virtual.loaders import loaders_in_process
from memfit.virtual.process_group import alone_in_scripts
from memfit.virtual.with_values import TensorsWithValues, with_values

_LIBRARIES_FIRST = ("transformers.utils.import_utils", "safetensors.torch")
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_SEAM = "on_advance_end"
_EVERY_EPOCH = 1


def import_libraries() -> None:
    """Import what has to be there before recording begins: its functions are replaced by name."""
    for name in _LIBRARIES_FIRST:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def record_run(
    question: ScriptQuestion, place: Workplace, outside: Outside, notes: tuple[str, ...] = ()
) -> ScriptRecording:
    """Run a script in this process, on a virtual device, until its steps are recorded.

    Everything that is replaced is put back, but modules that the script imports stay.

    Args:
        question: what is recorded, and for how long.
        place: where files go that the script writes.
        outside: is on while the script runs.
        notes: what is known beforehand, for the user to read.

    Raises:
        RecordingError: if the script fails or makes no update.
    """
    started = time.perf_counter()
    card = card_of(question.device)
    assumptions = Assumptions(is_skewed=question.is_skewed)
    overlay = Overlay(place.written, [place.temporary])
    with (
        code_at_fault(card),
        clear_refusals(),
        _recording(question, card, assumptions, overlay, place) as seen,
        ExitStack() as stack,
        outside,
    ):
        for replacement in outside.replacements():
            stack.enter_context(replacement)
        notes += _run_until_enough(question.target, seen.counter)
        notes += seen.counter.notes()
    if not seen.recorder.marks:
        raise RecordingError(
            f"{question.target.name} came to its end without an update by a torch.optim.Optimizer, "
            "or the time for it did",
            "Give it the arguments with which it trains, after `--`, or more --most-seconds.",
        )
    check_placed(seen.recorder, card)
    return ScriptRecording(
        recording=StepRecording(
            history=seen.recorder.history,
            marks=seen.recorder.marks,
            card=card,
            record_seconds=time.perf_counter() - started,
        ),
        spans=seen.counter.spans,
        answers=assumptions.answers,
        diverted=overlay.diverted(),
        refused=outside.refused,
        notes=(*notes, *seen.mode.compiled_code.notes()),
        is_whole=not (seen.counter.was_late or seen.counter.has_steps),
        missing=seen.counter.missing(),
        draws_are_true=seen.mode.draws_are_true,
        decides_sizes=assumptions.decide_sizes,
        data=None if seen.scan is None else seen.scan.found(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What watches a script."""

    recorder: Recorder
    counter: StepCounter
    mode: TensorsWithValues
    scan: DataScan | None


@dataclass(frozen=True, slots=True)
class _DataReader:
    """Pass what loaders are asked for to the scan, when its time has come."""

    scan: DataScan
    counter: StepCounter

    def instead(self, iterator: Any, fetch: Callable[[Any], Any]) -> tuple[Any] | None:
        """Return what the scan gives in the place of training data after the steps."""
        if not self.counter.may_be_given(iterator._dataset):
            return None
        before_seconds = self.scan.scan_seconds
        given = self.scan.instead(iterator, fetch)
        self.counter.allow_more_seconds(self.scan.scan_seconds - before_seconds)
        return given

    def fetched(self, iterator: Any, batch: Any) -> None:
        """Tell the scan of what is not evaluated."""
        if torch.is_grad_enabled() and not self.scan.is_finished:
            self.scan.fetched(iterator, batch)


@contextmanager
def _recording(
    question: ScriptQuestion,
    card: Card | None,
    assumptions: Assumptions,
    overlay: Overlay,
    place: Workplace,
) -> Iterator[_Seen]:
    """Record everything inside, with loaders, saved objects and files replaced."""
    host = HostMeter()
    with ExitStack() as stack:
        recorder, made = stack.enter_context(
            recording_on(card, make_mode=with_values(assumptions), beside=host.meet)
        )
        mode = cast(TensorsWithValues, made)
        stack.enter_context(StepFollower(recorder))
        scan = None
        if question.data_seconds is not None:
            scan = DataScan(
                question.data_seconds,
                recorder.paused,
                recorded_copy(has_card=card is not None, keep_values=mode.keep_values),
                place.progress.write_text,
            )
        time_of_events = RecordedTime(recorder, host)
        counter = stack.enter_context(
            StepCounter(time_of_events, question.num_steps, question.most_seconds, scan)
        )
        files = MappedFiles(mode, recorder.paused)
        reader = None if scan is None else _DataReader(scan, counter)
        for replacement in (
            *loaders_in_process(recorder.paused, counter.may_fetch, reader, _receiver(mode, host)),
            *WeightFiles(files).replacements(),
            *SavedObjects(mode, counter.writing, files).replacements(),
            *compiled_files(overlay),
            *alone_in_scripts(),
            *overlay.replacements(),
        ):
            stack.enter_context(replacement)
        counter.when_enough = partial(
            _end_epochs, stack, counter.ends_epoch, counter.stop_if_enough
        )
        yield _Seen(recorder=recorder, counter=counter, mode=mode, scan=scan)


def _receiver(mode: TensorsWithValues, host: HostMeter) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes a tensor in that a worker of a data loader sent through shared memory."""

    def received(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        if not isinstance(tensor, FakeTensor):
            host.meet(tensor)
            return mode.with_known_values(tensor, tensor.device)
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        values = value_of(tensor)
        if values is not None:
            mode.keep_values(own, values)
        return own

    return received


def _run_until_enough(target: ScriptTarget, counter: StepCounter) -> tuple[str, ...]:
    """Run a script as Python would, until enough of it is recorded."""
    try:
        run_target(target, counter.function_ended)
    except EnoughRecordedError:
        return ()
    except SystemExit as end:
        if end.code not in (None, 0) and not counter.has_seen_all:
            what = f"the script ended with exit code {end.code}"
            raise RecordingError(what, "Start it as usual first, with the same arguments.") from end
    except Exception as error:
        # Its training data has been cut short, which not every script expects.
        if not counter.has_steps:
            raise
        if counter.has_seen_all:
            return ()
        reason = str(error).partition("\n")[0]
        return (f"After its steps the script ended with {type(error).__name__}: {reason}",)
    return ()


def _end_epochs(
    stack: ExitStack, is_enough: Callable[[], bool], stop_if_enough: Callable[[], None]
) -> None:
    """Have Lightning's loops, where they are imported, end their epochs once there is enough.

    Where data ends before its time, Lightning's loop skips the validation at the end of the epoch,
    and callbacks that ask for what it measures raise. So the batch of the last recorded step is
    made the last one: ``_TrainingEpochLoop.on_advance_end`` validates behind it, and the epoch ends
    with its checkpoint (lightning/pytorch/loops/training_epoch_loop.py, read at Lightning 2.6).

    Args:
        stack: which puts the loops back.
        is_enough: whether all steps are recorded.
        stop_if_enough: called at the end of an epoch, when its checkpoint is written.
    """

    def before_batch_ends(loop: Any) -> None:
        if is_enough():
            _make_last(loop)

    for package in _PACKAGES:
        batches = _loop(package, "training_epoch_loop", "_TrainingEpochLoop")
        epochs = _loop(package, "fit_loop", "_FitLoop")
        if batches is not None:
            ends = _around(getattr(batches, _SEAM), before_batch_ends, _nothing)
            stack.enter_context(patch.object(batches, _SEAM, ends))
        if epochs is not None:
            ends = _around(getattr(epochs, _SEAM), _nothing, lambda _: stop_if_enough())
            stack.enter_context(patch.object(epochs, _SEAM, ends))


def _loop(package: str, module: str, name: str) -> Any:
    """Return a loop's class; None where it is not imported, or has no such end."""
    found = getattr(sys.modules.get(f"{package}.loops.{module}"), name, None)
    return found if hasattr(found, _SEAM) else None


def _around(
    go_on: Callable[..., Any], before: Callable[[Any], None], after: Callable[[Any], None]
) -> Callable[..., Any]:
    @functools.wraps(go_on)
    def on_advance_end(loop: Any, *args: Any) -> Any:
        before(loop)
        out = go_on(loop, *args)
        after(loop)
        return out

    return on_advance_end


def _nothing(_loop: Any) -> None:
    """Leave a loop as it is."""


def _make_last(loop: Any) -> None:
    """Make the batch that was just trained on the last one of its epoch."""
    trainer = loop.trainer
    loop.batch_progress.is_last_batch = True
    trainer.fit_loop.max_batches = loop.batch_progress.current.ready
    # Validation comes at the end of an epoch, or after a number of batches: here both are now.
    trainer.check_val_every_n_epoch = _EVERY_EPOCH
    trainer.val_check_batch = loop.batch_progress.current.ready
