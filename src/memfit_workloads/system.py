"""What a workload gives to be trained: model and data as a job, evaluation, and its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .planned_memory import PlannedMemory, plan_memory
from .ranks import Ranks

if TYPE_CHECKING:
    from rich.console import Console

    from memfit import Job, Run

    from .memory_settings import SystemSettings
    from .run_files import RunFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training came to."""

    metrics: dict[str, Any]
    own: dict[str, Any]
    """Entries of the result that this workload adds."""
    lines: tuple[str, ...]
    """What is said of it."""
    pictures: tuple[str, ...] = ()
    """PNG files in the run folder."""


class System(ABC):
    """One training run of a workload: all that `train` and the loop do not know themselves.

    The constructor loads the data and sets ``settings``, ``console``, ``folder``, ``job`` and
    ``state``, a data class that says how far training has come; the random state is set by `begin`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    remedy: ClassVar[str]
    """What to do about a loss that is no number."""
    main_files: ClassVar[str]
    """What to look at in the run folder."""

    settings: SystemSettings
    folder: RunFiles
    job: Job
    state: Any
    planned_memory: PlannedMemory
    run: Run
    ranks: Ranks = Ranks()
    """This process among those that train together; alone by default."""
    console: Console

    # Before the first step.

    @abstractmethod
    def checkpoint_to_resume(self) -> dict[str, Any] | None:
        """Read the checkpoint that the flags ask for, if it belongs to this run."""

    def plan(self) -> PlannedMemory:
        """Find the plan to train under."""
        return plan_memory(self.job, self.settings.memory_settings)

    def estimate(self) -> list[str]:
        """Return what is said of memory before the plan, line by line."""
        return []

    def outlook(self) -> dict[str, Any]:
        """Return how long training will take, once it is planned, as the result has it."""
        return {}

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""

    @abstractmethod
    def write_inputs(self) -> None:
        """Write what is needed beside the weights."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare for the first step, now that plan and run are there."""

    # The loop.

    @abstractmethod
    def is_over(self) -> bool:
        """Return whether training has come to its end."""

    @abstractmethod
    def next_batch(self) -> Any:
        """Return the batch of the next step, on the run's device."""

    @abstractmethod
    def step_done(self, loss: float, seconds: float) -> None:
        """Account for a step."""

    @abstractmethod
    def after_step(self) -> None:
        """Validate and save what is due."""

    @abstractmethod
    def progress(self) -> tuple[str, int, int]:
        """Return a description, the steps done and the steps in all."""

    @abstractmethod
    def place(self) -> str:
        """Name the step under way."""

    @abstractmethod
    def reached(self) -> str:
        """Say where training stops."""

    # Checkpoints.

    @abstractmethod
    def checkpoint(self) -> dict[str, Any]:
        """Return all that an exact continuation needs."""

    @abstractmethod
    def save_interrupted(self) -> Path:
        """Write a checkpoint of this very step, and return its place."""

    def model_state(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the run's model that a checkpoint holds."""
        state: dict[str, Any] = checkpoint["model_state_dict"]
        return state

    @abstractmethod
    def resumed(self, checkpoint: dict[str, Any]) -> None:
        """Take up what a checkpoint holds besides the run."""

    # The end.

    @abstractmethod
    def save_final(self) -> None:
        """Write the final model."""

    @abstractmethod
    def outcome(self) -> Outcome:
        """Evaluate what was trained, once the run is closed."""

    @abstractmethod
    def write_results(self, result: dict[str, Any], lines: Sequence[str]) -> None:
        """Write what was found."""
