"""What is asked of a script, and what its recording found: data that goes between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memfit.devices.spec import Device
from memfit.figures import Answer
from memfit.prediction.recording import StepRecording
from memfit.script.scanned_data import ScannedData


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptTarget:
    """A script or a module, and its arguments."""

    name: str
    """A path, or the name of a module."""
    is_module: bool = False
    attribute: str = ""
    """A name in the script, for what it builds rather than for all that it does."""
    arguments: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Return how the user would start it, or refer to it."""
        if self.attribute:
            return f"{self.name}:{self.attribute}"
        words = ["python", *(["-m"] if self.is_module else []), self.name, *self.arguments]
        return " ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptQuestion:
    """Which script is recorded, where, and for how long."""

    target: ScriptTarget
    device: Device
    num_steps: int = 3
    """Updates of the optimizer: the first makes its states, the last ones are steady."""
    most_seconds: float = 600.0
    is_skewed: bool = False
    allows: Sequence[str] = ()
    """What of the outside world it may reach: ``subprocess``, ``network``."""
    data_seconds: float | None = None
    """How long its training data is read for the shapes of batches; None: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverted:
    """A file that the script wrote, and that was kept out of the real file system."""

    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Something outside that the script wanted to reach."""

    kind: str
    what: str
    source_line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of the recorded history that belongs to one part of a run."""

    phase: str
    first_event: int
    last_event: int
    host_peak_bytes: int = 0
    """Of tensors on the host beside a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRecording:
    """What was recorded of a script."""

    recording: StepRecording
    spans: Sequence[Span] = ()
    answers: Sequence[Answer] = ()
    diverted: Sequence[Diverted] = ()
    refused: Sequence[Refused] = ()
    notes: Sequence[str] = ()
    is_whole: bool = False
    """Whether the script ended by itself, before enough of it was recorded."""
    missing: Sequence[str] = ()
    """Phases that were not reached."""
    draws_are_true: bool = True
    """Whether the host's random generator stood where that of a real run would."""
    decides_sizes: bool = False
    """Whether the size of a tensor rests on an answer."""
    data: ScannedData | None = None
    """The batches of its training data; None where they were not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailure:
    """Why a script could not be recorded, as facts of an error."""

    what: str
    remedy: str
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The folders of a recording: what is in them is dropped at its end."""

    folder: Path

    @property
    def written(self) -> Path:
        """Return where files go that the script writes."""
        return self.folder / "written"

    @property
    def temporary(self) -> Path:
        """Return the folder for temporary files."""
        return self.folder / "temporary"

    @property
    def progress(self) -> Path:
        """Return the file that says what is being done; the script's own output is not touched."""
        return self.temporary / ".progress-of-memfit"

    @property
    def question(self) -> Path:
        """Return the file that holds the question."""
        return self.folder / "question.pickle"

    @property
    def result(self) -> Path:
        """Return the file that holds what was found."""
        return self.folder / "result.pickle"
