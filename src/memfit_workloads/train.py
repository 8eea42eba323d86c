"""The way of every workload: from its settings to a trained model inside a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import memfit
from memfit.errors import MissingExtraError
from memfit.journal.folder import CONTINUE, OVERWRITE
from memfit.journal.sentences import event_sentence
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import write_run_page
from memfit.reports.training import Training, write_training
from memfit.units import format_seconds

from .loop import fit, resume
from .peak_limit import check_peak
from .planned_memory import peaks_line, planning, short_run_lines, show_plan

_MANY = 1000
_LONG_STEP_SECONDS = 20.0

if TYPE_CHECKING:
    from .system import Outcome, System


def train(system: System) -> dict[str, Any]:
    """Train a system as its settings say, and return what ``--json`` ends with.

    Raises:
        DataError: if a file or checkpoint cannot be used.
        UsageError: if the output folder holds another run.
        NoPlanFitsError: if no plan keeps training inside the budget.
        MemfitError: if training diverges; no final model is written then.
        PeakAboveBudgetError: if its tensors took more than the budget; all files are written.
        KeyboardInterrupt: after Ctrl-C, with a checkpoint in place.
    """
    checkpoint = system.checkpoint_to_resume()
    with planning(system.console):
        system.planned_memory = system.plan()
    if system.ranks.is_first:
        _say(system, *system.estimate())
        show_plan(system.planned_memory, system.console)
        _say(system, *_outlook_lines(system.outlook()))
    planned = system.planned_memory
    if system.settings.watching.dry_run:
        return _planned_only(system)
    if system.ranks.is_first:
        _begin_folder(system, is_new=checkpoint is None)
    system.run = memfit.start(
        system.job,
        planned.plan,
        device=planned.run_device,
        folder=system.folder.root,
        # The first rank has made its folder ready; the others have to do so themselves.
        earlier_run=CONTINUE if system.ranks.is_first or checkpoint else OVERWRITE,
        listeners=system.settings.watching.listeners(),
        find_leaks=system.settings.watching.find_leaks,
    )
    system.run.listen(lambda event: _say(system, event_sentence(event)))
    with system.run:
        system.begin()
        if checkpoint is not None:
            resume(system, checkpoint)
        fit(system)
        result = _finish(system) if system.ranks.is_first else {}
        system.ranks.wait()
    if system.ranks.group is None:
        check_peak(result)
    return result


def _outlook_lines(outlook: dict[str, Any]) -> tuple[str, ...]:
    """Say how long an epoch is."""
    if not outlook:
        return ()
    seconds = format_seconds(outlook["epoch_seconds"])
    return (f"an epoch: {outlook['epoch_steps']:,} steps, predicted to take {seconds}",)


def _planned_only(system: System) -> dict[str, Any]:
    """Return the result of a dry run, which makes no folder."""
    planned = system.planned_memory
    _say(system, f"--dry-run: planned for {planned.planned.device}; nothing was trained or written")
    return {
        "workload": system.name,
        "metrics": {},
        **planned.to_json(),
        "step_seconds": planned.planned.step_seconds,
        **system.outlook(),
        "measured_peak_bytes": None,
        "run_folder": None,
    }


def _begin_folder(system: System, *, is_new: bool) -> None:
    """Make the folder ready, and write what is known before the first step."""
    folder = system.folder
    if is_new:
        folder.begin(overwrite=system.settings.overwrite, num_ranks=system.ranks.num_ranks)
    else:
        folder.resume()
    folder.write_json("config.json", system.config())
    system.planned_memory.plan.save(folder.root / "plan.yaml")
    system.write_inputs()


def _finish(system: System) -> dict[str, Any]:
    """Write the final model, evaluate what was trained, and report."""
    system.save_final()
    system.run.close()  # weights are evaluated in the model as the job built it
    outcome = system.outcome()
    planned = system.planned_memory
    peak_bytes = system.run.measured_peak_bytes
    result = {
        "workload": system.name,
        "metrics": outcome.metrics,
        **outcome.own,
        **planned.to_json(),
        "measured_peak_bytes": peak_bytes,
        "run_folder": str(system.folder.root),
    }
    _report(system, outcome)
    where = f"run folder: {system.folder.root} ({system.main_files})"
    short = short_run_lines(planned, _num_updates(system))
    lines = [*outcome.lines, peaks_line(planned, peak_bytes), *short, where]
    system.write_results(result, lines)
    _say(system, *lines)
    return result


def _num_updates(system: System) -> int:
    """Return how often the optimizer has stepped; many where its states do not say."""
    counts = [state.get("step", _MANY) for state in system.run.optimizer.state.values()]
    is_scaled = any(each.startswith("fp16") for each in system.planned_memory.plan.labels())
    return max((int(count) for count in counts), default=0 if is_scaled else _MANY)


def _report(system: System, outcome: Outcome) -> None:
    """Measure one step; write training.json, and report.html where that can be drawn.

    Steps that take long are not run again for that: the run's own peak has to do.
    """
    planned, folder = system.planned_memory, system.folder.root
    is_long = planned.planned.step_seconds > _LONG_STEP_SECONDS
    measured = None
    if not is_long or system.run.measured_peak_bytes is None:
        measured = memfit.measure(planned.job, planned.plan, device=planned.run_device)
    training = Training(
        title=system.title,
        command=system.settings.command,
        budget_bytes=planned.budget_bytes,
        plain=planned.plain,
        planned=planned.planned,
        considered=planned.considered,
        measured=measured,
        run_peak_bytes=system.run.measured_peak_bytes,
        results=outcome.metrics,
        pictures=outcome.pictures,
    )
    write_training(folder, training)
    try:
        write_run_page(read_report(folder))
    except MissingExtraError as error:
        _say(system, f"No report.html: {error}")


def _say(system: System, *lines: str) -> None:
    """Print lines as they are."""
    for line in lines:
        system.console.print(line, markup=False, soft_wrap=True)
