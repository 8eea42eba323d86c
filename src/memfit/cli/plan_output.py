"""What ``memfit plan`` writes and shows once there is a plan, ready before any of it is written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.devices.spec import CPU
from memfit.files import check_place, write_atomically

from .command import json_text, write_json_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

    from memfit.errors import NoPlanFitsError
    from memfit.planner.result.planning_result import PlanningResult

_RUNG = ("strategies", "numerics", "proof", "reasons", "prediction")
_FORM = ("job", "save", "pareto", "html", "verbose", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput:
    """The files of a plan, by name, and what is shown of it."""

    files: Mapping[str, bytes]
    json_text: str
    """Empty where a report is shown."""
    segments: Sequence[Segment]
    """The report, laid out for the terminal."""

    def write(self, console: Console) -> None:
        """Write the files, and show the rest."""
        for path, content in self.files.items():
            write_atomically(Path(path), content)
        if self.json_text:
            write_json_text(self.json_text)
            return
        from rich.segment import Segments

        console.print(Segments(self.segments))
        for path in self.files:
            console.print(f"Wrote {path}.", markup=False)


def form_of(args: argparse.Namespace, console: Console) -> tuple[object, ...]:
    """Return all that the output of a plan depends on besides the plan."""
    asked = (getattr(args, name) for name in _FORM)
    return (*asked, console.width, console.encoding, console.legacy_windows)


def check_can_write(args: argparse.Namespace) -> None:
    """Find out before a long search whether its files can be made, and where they are to lie.

    Raises:
        MissingExtraError: if a package for a picture or a page is not installed.
        OSError: if no file can be written to a place.
    """
    for path in filter(None, (args.save, args.pareto, args.html)):
        check_place(Path(path))
    if args.pareto:
        from memfit.reports.pareto_plot import check_can_draw

        check_can_draw()
    if args.html:
        from memfit.reports.plan_html import check_can_render

        check_can_render()


def output_of(plan: PlanningResult, args: argparse.Namespace, console: Console) -> PlanOutput:
    """Make all that was asked for."""
    return PlanOutput(
        files=_files(plan, args),
        json_text=json_text(_as_json(plan)) if args.json else "",
        segments=() if args.json else _report(plan, args, console),
    )


def write_what_was_tried(
    error: NoPlanFitsError, args: argparse.Namespace, console: Console
) -> None:
    """Write the picture and the page that were asked for, of the smallest plan, as none fits.

    A plan that does not fit is not saved.
    """
    if error.smallest_plan is None or not (args.pareto or args.html):
        return
    plan: PlanningResult = error.smallest_plan()
    wanted = argparse.Namespace(**{**vars(args), "save": None})
    for path, content in _files(plan, wanted).items():
        write_atomically(Path(path), content)
        if not args.json:
            console.print(f"Wrote {path}, of what was tried.", markup=False)


def _files(plan: PlanningResult, args: argparse.Namespace) -> dict[str, bytes]:
    """Make the plan's file, its picture and its page."""
    files: dict[str, bytes] = {}
    if args.save:
        files[args.save] = plan.to_yaml().encode()
    if args.pareto:
        from memfit.reports.pareto_plot import pareto_figure
        from memfit.reports.plots import png_bytes

        files[args.pareto] = png_bytes(pareto_figure(plan))
    if args.html:
        from memfit.reports.plan_html import plan_html

        files[args.html] = plan_html(plan, job=args.job).encode()
    return files


def _as_json(plan: PlanningResult) -> dict[str, Any]:
    """Return the plan, its prediction and everything that lies around it."""
    prediction = plan.prediction
    assert prediction is not None, "the planner predicts what it plans"
    rungs = (rung.to_json() for rung in plan.ladder)
    return {
        **plan.to_json(),
        **prediction.to_json(),
        "strategies": plan.to_json()["strategies"],
        "placements": [asdict(each) for each in plan.placements],
        "considered": [asdict(considered) for considered in plan.considered],
        "ladder": [{name: rung[name] for name in _RUNG} for rung in rungs],
        "pareto": [asdict(point) for point in plan.pareto],
        "approximations": [asdict(each) for each in plan.approximations],
        "remedies": [asdict(remedy) for remedy in plan.remedies],
        "notes": list(plan.notes),
        "refused": [
            {"kind": str(each.kind), "strategy": each.strategy, "reason": each.sentence}
            for each in plan.refused
        ],
        "ended_early": plan.ended_early,
    }


def _report(plan: PlanningResult, args: argparse.Namespace, console: Console) -> list[Segment]:
    """Lay out the chosen plan on a screen, or with all that lies around it."""
    from memfit.reports.brief_plan_text import brief_plan
    from memfit.reports.text import plan_report

    shown = plan_report(plan) if args.verbose else brief_plan(plan, _next_commands(plan, args))
    return [*console.render(shown)]


def _next_commands(plan: PlanningResult, args: argparse.Namespace) -> list[str]:
    """Say what may be typed once there is a plan."""
    if args.save is None:
        return ["`--save plan.yaml` keeps the plan, for training, `measure` and `verify`."]
    words = f"{args.job} --plan {args.save}"
    needs_card = any(each.needs_card for each in plan.strategies)
    commands = (
        []
        if needs_card or plan.parallel is not None
        else [f"`memfit verify {words}` proves that results are kept."]
    )
    if args.device == CPU:
        commands.append(f"`memfit measure {words}` runs it here.")
    return [*commands, f'In training: `memfit.start(job, memfit.Plan.load("{args.save}"))`.']
