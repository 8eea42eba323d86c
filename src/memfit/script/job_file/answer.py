"""Writes a job file, compares its peak with the recorded script, and says what was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from memfit.devices.catalogue import load_device
from memfit.errors import MemfitError
from memfit.files import write_atomically
from memfit.script.job_file.writing import JobNotWritten, JobQuestion, write_job
from memfit.script.prediction import step_peaks
from memfit.script.question import ScriptQuestion, ScriptTarget
from memfit.script.recording import record_script

_MOST_RELATIVE = 0.01
"""Of the first step's peak; more means that the job does something else than the script."""
_MOST_RELATIVE_WITH_VALUES = 0.03
"""Where sizes depend on values: a recorded script has stand-ins for them."""


class DraftError(MemfitError):
    """Say why a job was not accepted, and where its draft lies."""

    def __init__(self, script: str, reason: str, draft: Path | None) -> None:
        self.reason = reason
        kept = (
            "No draft was written. Write the four functions by hand: docs/start.md."
            if draft is None
            else f"What there is was kept as {draft}, to be put right by hand."
        )
        super().__init__(f"No job can be written from {script}: {reason.rstrip('.')}. {kept}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAnswer:
    """A job file that was written, and how its first step compares with the script's."""

    output: str
    batch_size: int
    num_backwards: int
    optimizer: str
    script_loss: float
    relative_loss_error: float
    script_first_step_bytes: int
    first_step_peak_bytes: int
    script_step_peaks_bytes: Sequence[int]
    """Of all recorded steps: names that a script keeps alive make later ones higher."""
    steady_step_peak_bytes: int
    is_measured: bool
    left_out: Sequence[tuple[int, str]]

    script_other_bytes: int
    """What the script holds when the step begins, besides its model and the batch: a data set in
    memory, a copy with averaged weights; below zero if workers of a loader hold the batch."""

    @property
    def relative_peak_error(self) -> float:
        """Return by how much the job's first step takes more than the script's.

        What the script holds besides model and batch is not part of its step.
        """
        expected_bytes = self.script_first_step_bytes - self.script_other_bytes
        return self.first_step_peak_bytes / expected_bytes - 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {
            **asdict(self),
            "left_out": [{"line": line, "text": text} for line, text in self.left_out],
            "relative_peak_error": self.relative_peak_error,
        }


def job_from_script(script: Path, arguments: Sequence[str], output: Path) -> JobAnswer:
    """Write a job file from a script, and keep it if it is the script's step.

    The loss is compared in a real run on the CPU, with the script's first batch, weights and random
    states; the peak with a recording of the script.

    Args:
        script: the training script.
        arguments: its own arguments.
        output: where the job file is written; a draft goes beside it, with ``.draft`` added.

    Raises:
        NoJobError: if the script's text cannot be translated.
        DraftError: if the job differs from the script, or cannot be run.
        RecordingError: if the script cannot be recorded.
    """
    script, output = script.resolve(), output.resolve()
    question = JobQuestion(script=script, arguments=tuple(arguments), output=output)
    found = write_job(question)
    if isinstance(found, JobNotWritten):
        raise DraftError(script.name, found.reason, _draft(output, found.text))
    target = ScriptTarget(name=str(script), arguments=tuple(arguments))
    cpu = load_device("cpu")
    recorded = record_script(ScriptQuestion(target=target, device=cpu, num_steps=2))
    peaks = step_peaks(recorded.recording, cpu)
    first = recorded.recording.marks[0].first_event
    answer = JobAnswer(
        output=output.name,
        batch_size=found.batch_size,
        num_backwards=found.num_backwards,
        optimizer=found.optimizer,
        script_loss=found.loss.script,
        relative_loss_error=found.loss.relative_error,
        script_first_step_bytes=peaks[0],
        first_step_peak_bytes=found.first_step_peak_bytes,
        script_step_peaks_bytes=peaks,
        steady_step_peak_bytes=found.steady_step_peak_bytes,
        is_measured=found.is_measured,
        left_out=found.left_out,
        script_other_bytes=sum(
            delta for _, delta in islice(recorded.recording.history.deltas(), first)
        )
        - found.own_bytes,
    )
    most = _MOST_RELATIVE_WITH_VALUES if found.is_measured else _MOST_RELATIVE
    if abs(answer.relative_peak_error) > most:
        reason = (
            f"the peak of its first step is {answer.first_step_peak_bytes:,} bytes, the script's "
            f"{answer.script_first_step_bytes:,}, of which {answer.script_other_bytes:,} are "
            f"neither model nor batch ({answer.relative_peak_error:+.1%})"
        )
        raise DraftError(script.name, reason, _draft(output, found.text))
    write_atomically(output, found.text)
    return answer


def _draft(output: Path, text: str) -> Path | None:
    if not text:
        return None
    draft = output.with_name(output.name + ".draft")
    write_atomically(draft, text)
    return draft
