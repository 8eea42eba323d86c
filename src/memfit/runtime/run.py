"""The Run: a job run under a plan, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from memfit.comparison.gradients import accumulate_gradients
from memfit.errors import MemfitError
from memfit.job import Job
from memfit.journal.records import Event, OutOfMemoryEvent
from memfit.live_state import Obstacle
from memfit.runtime.data_parallel import join_ranks
from memfit.runtime.evaluation import Evaluation
from memfit.runtime.found_plan import FoundPlan
from memfit.runtime.guard.guard import Guard
from memfit.runtime.largest_batch import LargestBatch, largest_batch
from memfit.runtime.planned_steps import DoneStep, PlannedSteps
from memfit.session.batches import BatchLayout
from memfit.session.session import PhaseListener, Session, open_session
from memfit.strategies.plan import Plan

if TYPE_CHECKING:
    from memfit.runtime.shards.checkpoint import ShardedCheckpoint

_IMPLEMENTATION_FLAGS = ("fused", "foreach")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: the loss (a detached scalar) and what it took."""

    loss: torch.Tensor
    num_samples: int
    step_seconds: float
    measured_peak_bytes: int | None
    """The peak of this step; None where it was not measured."""
    predicted_peak_bytes: int | None


class Run:
    """Run a job's steps under a plan.

    Made by ``memfit.start``. ``model`` and ``optimizer`` are the live objects.
    """

    def __init__(
        self,
        steps: PlannedSteps,
        *,
        guard: Guard | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> None:
        self._steps = steps
        self._guard = guard
        self._observer = steps.observer
        self._run_step: Callable[[Any, int], DoneStep]
        if guard is not None:
            self._run_step = guard.step
        else:
            self._run_step = lambda batch, _: steps.attempt(batch, before_update)
        self._found = FoundPlan(steps)
        self._evaluation = Evaluation(steps, self._observer.event)
        self._num_steps = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if error is not None:
            self._observer.failed(error)
        self.close()

    @property
    def plan(self) -> Plan:
        """Return the plan that is in force; a guard may take a smaller one."""
        return self._steps.plan

    @property
    def model(self) -> torch.nn.Module:
        """Return the live model."""
        return self._steps.session.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the live optimizer."""
        return self._steps.session.optimizer

    @property
    def num_steps(self) -> int:
        """Count the steps done so far."""
        return self._num_steps

    @property
    def measured_peak_bytes(self) -> int | None:
        """Return the highest peak measured so far; None before the first measured step."""
        return self._observer.peaks.highest_peak_bytes

    @property
    def events(self) -> Sequence[OutOfMemoryEvent]:
        """Return every time that a step ran out of memory and was run again."""
        return () if self._guard is None else tuple(self._guard.events)

    @property
    def not_put_back(self) -> Sequence[Obstacle]:
        """Return what the job's code can reach and change, and nobody can put back.

        A step that runs out of memory ends the run where there is any but locks.
        """
        return () if self._guard is None else self._guard.not_put_back

    def step(self, batch: Any) -> StepResult:
        """Run one step: gradients of the mean loss over the batch, clip, optimizer step.

        Args:
            batch: a pytree of tensors laid out like the job's ``batch``; it may hold fewer samples.
                Tensors that are not on the run's device are moved there.
        """
        try:
            done = self._run_step(batch, self._num_steps + 1)
        except Exception as error:
            self._observer.failed(error)
            raise
        self._num_steps += 1
        self._observer.end_step(
            self._num_steps,
            batch,
            plan=self.plan,
            num_samples=done.num_samples,
            micro_batch_size=self._steps.micro_batch_size,
        )
        return self._result(done)

    def part(self, batch: Any) -> Any:
        """Return this rank's part of a whole batch, as views; all of it where there is one rank.

        Raises:
            UsageError: if there are fewer samples than ranks.
        """
        session = self._steps.session
        if session.parallel is None:
            return batch
        return session.layout.part(batch, dist.get_world_size(), dist.get_rank())

    def evaluate(self, batch: Any, function: Callable[..., Any] | None = None) -> Any:
        """Evaluate a batch without gradients and in evaluation mode, in pieces if need be.

        Args:
            batch: laid out like the job's ``batch``.
            function: ``(model, batch)``, called on pieces if the batch does not fit whole; it gives
                a pytree of tensors with one row per sample, or means over the samples, or a
                ``memfit.Total``. None takes the job's loss.

        Raises:
            OutOfMemoryAfterAllError: if not even one sample fits, or the job's loss couples them.
            MemfitError: if what pieces give cannot be put together.
        """
        try:
            found = self._evaluation(batch, function, self._num_steps)
        except Exception as error:
            if self._guard is not None:
                self._guard.end_together(error)
            raise
        self._observer.evaluated(batch)
        return found

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Have events told as they happen."""
        self._observer.listen(listener)

    def rehearse(self, batch: Any) -> StepResult:
        """Run a step on a batch, find a plan under which it fits, and undo all but that.

        Raises:
            MemfitError: if the run is not guarded, or the step could not be undone.
            OutOfMemoryAfterAllError: if it fits under no plan.
        """
        if self._guard is None:
            msg = "A rehearsal has to be undone, and this run is not guarded: start(guard=True)."
            raise MemfitError(msg)
        return self._result(self._guard.rehearse(batch, self._num_steps + 1))

    def rehearse_largest(
        self, loader: Iterable[Any], *, most_seconds: float = 30.0
    ) -> tuple[StepResult, LargestBatch]:
        """Rehearse the largest batch that a loader can give, before training meets it.

        Args:
            loader: a ``DataLoader`` or anything that gives batches.
            most_seconds: how long to look for the largest batch.

        Raises:
            MemfitError: as ``rehearse`` does, or if the loader gives nothing.
        """
        largest = largest_batch(loader, most_seconds=most_seconds)
        return self.rehearse(largest.batch), largest

    def _result(self, done: DoneStep) -> StepResult:
        prediction = self.plan.prediction
        return StepResult(
            loss=done.loss,
            num_samples=done.num_samples,
            step_seconds=done.reading.step_seconds,
            measured_peak_bytes=done.reading.measured_peak_bytes,
            predicted_peak_bytes=prediction.peak_allocated_bytes if prediction else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep: model, optimizer, number of steps, the plan found."""
        return {
            "plan": self._found.state_dict(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self._num_steps,
            **{name: part.state_dict() for name, part in self._steps.session.stateful.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state given by ``state_dict``.

        The plan stays this run's own, unless the state is of a run that began with the same one and
        had to take a smaller one: then that is gone on with.
        """
        groups = self.optimizer.param_groups
        flags = [{key: group.get(key) for key in _IMPLEMENTATION_FLAGS} for group in groups]
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            _keep_types_of_scalars(self.optimizer, state["optimizer"])
            for name, part in self._steps.session.stateful.items():
                if name in state:
                    part.load_state_dict(state[name])
            self._num_steps = int(state["num_steps"])
            self._found.load_state_dict(state.get("plan"))
        finally:
            # The saved groups carry the implementation of the run that saved them.
            for group, own in zip(self.optimizer.param_groups, flags, strict=True):
                group.update((key, own[key]) for key in own if key in group)
            if self._guard is not None:
                self._guard.forget()

    def save_sharded(self, folder: str | Path) -> None:
        """Save what a checkpoint must keep, each rank its shards; all ranks call it.

        Besides what ``state_dict`` gives, each rank's random state is kept. A save that is
        interrupted leaves the one before it in the folder whole.

        Args:
            folder: that all ranks see; it holds one checkpoint, the latest.

        Raises:
            CheckpointError: on all ranks, if one could not write its part.
            OtherRankError: if another rank has died.
        """
        self._steps.passes.settle()
        run = {"num_steps": self._num_steps, "plan": self._found.state_dict()}
        self._in_shards(folder).save(run)

    def load_sharded(self, folder: str | Path) -> None:
        """Take up what ``save_sharded`` has saved, on as many ranks as there are now.

        Parameters and optimizer states are shared out anew. Buffers that differ from rank to rank
        and random states are each rank's own, where there are as many ranks as there were; else
        all take the buffers of the first, and go on with the random states that they have. The plan
        is gone on with as by ``load_state_dict``.

        Args:
            folder: of the checkpoint.

        Raises:
            CheckpointError: on all ranks, if one could not read it, or if it is of another model.
            OtherRankError: if another rank has died.
        """
        self._steps.passes.settle()
        try:
            run = self._in_shards(folder).load()
            self._num_steps = int(run["num_steps"])
            self._found.load_state_dict(run["plan"])
        finally:
            if self._guard is not None:
                self._guard.forget()

    def _in_shards(self, folder: str | Path) -> ShardedCheckpoint:
        from memfit.runtime.shards.checkpoint import ShardedCheckpoint  # noqa: PLC0415 - seconds

        return ShardedCheckpoint(self._steps.session, folder)

    def close(self) -> None:
        """Take the strategies off the model and the optimizer, and say that the run is over."""
        self._steps.close()
        if self._guard is not None:
            self._guard.close()
        self._observer.close()


def _keep_types_of_scalars(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalars the type that they were saved in: torch gives them that of their parameter.

    NAdam's product of momenta is float32 beside parameters in float64, and rounds so.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        own = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and not value.dim() and name in own:
                own[name] = value.detach().clone().to(own[name].device)


def open_plain_session(
    job: Job, device_type: str, layout: BatchLayout, plan: Plan | None = None
) -> Session:
    """Build a session that runs the job as it is, but placed as a plan wants it.

    A plan decides how ranks share the model, and which weights need not come to a GPU.
    """
    plan = plan or Plan()
    return open_session(
        job, device_type, layout, accumulate_gradients, plan.parallel, stays=plan.stays
    )


def unguarded_run(
    session: Session, plan: Plan, *, phase_listener: PhaseListener | None = None
) -> Run:
    """Get ready to run a few steps to record, measure or compare them."""
    before_update = join_ranks(session)
    return Run(
        PlannedSteps(session, plan, phase_listener=phase_listener), before_update=before_update
    )
