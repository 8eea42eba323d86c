"""``memfit measure``: what a step takes here, by the allocator's own counters."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .command import Command, add_json_argument, write_json
from .job_arguments import (
    add_job_argument,
    add_plan_argument,
    add_verbose_argument,
    load_plan,
    status,
)

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.figures import Prediction
    from memfit.job import Job
    from memfit.strategies.plan import Plan


class MeasureCommand:
    """Run a few steps of a job on this machine and measure the peak of one.

    On the CPU every allocation and free is counted as torch's allocator reports it; on a CUDA
    device its counters are read. The prediction for the same step is shown beside it.
    """

    example = "memfit measure examples/transformer.py:job --plan plan.yaml"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, the device and the plan."""
        add_job_argument(parser)
        parser.add_argument(
            "--device",
            metavar="NAME",
            default="cpu",
            help="cpu, or cuda for a card here",
        )
        add_plan_argument(parser)
        add_verbose_argument(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Measure, and show the prediction beside it."""
        from memfit.job import load_job
        from memfit.measurement.measure import measure
        from memfit.reports.text import brief_measurement, measurement_table

        plan = load_plan(args.plan)
        job = load_job(args.job)
        with status(console, "running a few steps", quiet=args.json):
            measurement = measure(job, plan, device=args.device)
            prediction = None if args.json else _predicted(job, plan, args.device)
        if args.json:
            write_json(measurement.to_json())
        else:
            show = measurement_table if args.verbose else brief_measurement
            console.print(show(measurement, prediction))
        return 0


COMMAND: Command = MeasureCommand()


def _predicted(job: Job, plan: Plan | None, device: str) -> Prediction | None:
    """Predict the same step on the CPU, to show category by category; None where that fails."""
    from memfit.errors import RecordingError
    from memfit.prediction.predict import predict

    if device != "cpu":
        return None
    try:
        return predict(job, plan=plan)
    except RecordingError:
        return None
