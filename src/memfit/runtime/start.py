"""Starts a Run: builds the job here and puts guard and observer around its steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

from memfit.devices.spec import CPU, CUDA
from memfit.errors import DeviceUnavailableError, MemfitWarning, StrategyError
from memfit.job import Job
from memfit.journal.folder import REFUSE
from memfit.listeners.protocol import StepListener
from memfit.observe.observer import LEAKS_FRACTION, StepObserver
from memfit.observe.peaks import peaks_on
from memfit.observe.starting import check_run_folder, rank_here, start_observing
from memfit.runtime.data_parallel import GradientAverage, join_ranks, unwrapped
from memfit.runtime.first_step_check import check_split
from memfit.runtime.guard.attempts import Attempts
from memfit.runtime.guard.guard import Guard, GuardSettings
from memfit.runtime.guard.ranks import ranks_here
from memfit.runtime.joining import join_for, part_of_this_rank
from memfit.runtime.planned_steps import PlannedSteps
from memfit.runtime.run import Run, open_plain_session
from memfit.runtime.shards.refusals import refuse_what_does_not_go_with_shards
from memfit.runtime.shards.shard_ranks import ShardRanks
from memfit.runtime.shards.whole_job import whole_job
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout
from memfit.session.session import Session
from memfit.strategies.fact_finding import gather_facts
from memfit.strategies.plan import Plan


def start(
    job: Job,
    plan: Plan | None = None,
    *,
    device: str | None = None,
    guard: bool | GuardSettings = True,
    average_gradients: bool = False,
    folder: str | Path | None = None,
    listeners: Iterable[StepListener] = (),
    find_leaks: bool = False,
    earlier_run: str = REFUSE,
) -> Run:
    """Build a job's model and optimizer here and get ready to run its steps under a plan.

    Args:
        job: what to train. Under a plan for several ranks, each takes its part of the batch, and
            ``run.step`` is given that part. A model in ``DistributedDataParallel`` is taken out of
            it, and its gradients are averaged over the ranks before the update.
        plan: how; None runs the job as it is.
        device: ``cpu`` or a CUDA device of this machine (``cuda``, ``cuda:1``); None takes the
            kind of device that the plan was made for.
        guard: whether a step that runs out of memory is undone and run again under the next
            plan of the ladder, or how. With several ranks all of them agree on every step.
        average_gradients: whether gradients are averaged over the ranks of torch's default process
            group. Not to be asked for where the loss itself exchanges what it needs.
        folder: where the run's journal, the plan in force and the timeline of a step are written,
            for `memfit report`; None writes nothing.
        listeners: are told of steps and events, for TensorBoard, W&B or the terminal.
        find_leaks: whether to look for what keeps growing; found leaks are events and warnings.
            Looking takes 0.5 % of the time, and after a suspicion up to 3 s and 2 % in all.
        earlier_run: what to do with a run that lies in ``folder`` already: ``refuse`` it,
            ``overwrite`` its journal, or ``continue`` that, for a run that goes on from a
            checkpoint.

    Raises:
        UsageError: if ``folder`` holds another run, which is not to be replaced or continued, or if
            the plan is for another number of ranks.
        StrategyError: if a strategy of the plan cannot apply to the job.
        DeviceUnavailableError: if the device is not in this machine.
    """
    plan = plan or Plan()
    if device is None:
        device = CPU if plan.device == CPU else CUDA
    device_type = device.partition(":")[0]
    join_for(plan, device_type)
    check_run_folder(folder, earlier_run)
    job = part_of_this_rank(job, plan, device_type)
    layout = find_layout(job)
    plan = _with_own_prediction(plan, job)
    if device_type != "cpu" and not torch.cuda.is_available():
        raise DeviceUnavailableError(device, "torch sees no CUDA device")
    session = open_plain_session(job, device_type, layout, plan)
    average = _averaging(session, asked_for=average_gradients)
    _agree(session, plan, averages=average is not None)
    observer = StepObserver(
        peaks_on(device_type, takes_timeline=folder is not None),
        owned=session.owned_tensors,
        leaks_fraction=LEAKS_FRACTION if find_leaks else None,
    )
    steps = PlannedSteps(session, plan, observer=observer, try_split=check_split)
    if average is not None and session.updates_in_backward:
        reason = "gradients are averaged over ranks before the update, and it leaves none."
        raise StrategyError("optimizer-in-backward", reason)
    start_observing(
        observer, device_type, plan, folder=folder, listeners=listeners, earlier_run=earlier_run
    )
    if steps.checks is not None:
        steps.checks.on_event = observer.event_of_next_step
    if guard is False or not _can_be_undone(steps):
        return Run(steps, before_update=average)
    ranks = ranks_here() if session.agreement is None else ShardRanks()
    settings = guard if isinstance(guard, GuardSettings) else GuardSettings()
    if settings.folder is None:
        settings = replace(settings, folder=Path(folder or ""))
    attempts = Attempts(steps, ranks, average)
    return Run(steps, guard=Guard(steps, attempts, ranks, settings, observer.event))


def _with_own_prediction(plan: Plan, job: Job) -> Plan:
    """Leave out a prediction that was made for a job of another batch size."""
    is_own = plan.prediction is None or plan.prediction.batch_size == job.batch_size
    return plan if is_own else replace(plan, prediction=None)


def _agree(session: Session, plan: Plan, *, averages: bool) -> None:
    """Have ranks that share a model agree on their passes.

    Raises:
        StrategyError: if the plan or averaged gradients do not go with such a model.
    """
    if session.agreement is None:
        return
    if session.facts is None:
        whole = whole_job(session.job, session.model)
        gather_facts(session, separation=Separation(whole, session.layout))
    if averages:
        reason = (
            "gradients of shards are averaged in backward, and average_gradients does so again."
        )
        raise StrategyError("sharded model", f"{reason} Leave it out.")
    refuse_what_does_not_go_with_shards(plan.strategies)


def _can_be_undone(steps: PlannedSteps) -> bool:
    """Return whether passes that were cut can be put back; warn where they cannot."""
    if steps.session.agreement is None or steps.passes.can_be_put_back:
        return True
    msg = (
        "The model exchanges shards with other ranks in forward and backward, and was not sharded "
        "by torch.distributed.fsdp.fully_shard of torch 2.13 or newer, so that a pass cannot be "
        "undone on one of them: the run is not guarded against running out of memory."
    )
    warnings.warn(msg, MemfitWarning, stacklevel=3)
    return False


def _averaging(session: Session, *, asked_for: bool) -> Callable[[], None] | None:
    """Have ranks agree, and unwrap DistributedDataParallel; return what averages gradients."""
    shared = join_ranks(session)
    if session.parallel is not None:
        return shared
    model = unwrapped(session.model)
    is_wrapped = model is not session.model
    session.model = model
    if not (is_wrapped or asked_for) or rank_here()[1] < 2:
        return None
    session.is_one_of_several = True
    return GradientAverage(session, broadcasts_buffers=is_wrapped)
