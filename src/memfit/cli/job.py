"""``memfit job``: a memfit.Job written out of a training script."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import UsageError

from .command import Command, add_json_argument, write_json
from .job_arguments import status

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.script.job_file.answer import JobAnswer


class JobCommand:
    """Write the four functions of a memfit.Job out of a training script.

    The script runs on the CPU, for real, up to its first update; what it would write is dropped.
    The job file holds the script's own statements, or imports its definitions: build_model,
    batches, compute_loss, make_optimizer, and a loop with run.step that trains under plan.yaml if
    that is there. It is compared with the script: model and optimizer, the loss of the script's
    first batch with the same weights and random states, and the peak of the first step. What
    cannot be translated is refused with its line; a job that differs is kept as FILE.draft, and
    the exit code is 1. The script's own arguments come after `--`.
    """

    example = "memfit job train.py --output job_train.py -- --batch-size 32"
    takes_script_arguments = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the script and where the job is written."""
        parser.add_argument("script", metavar="FILE.py", help="a training script")
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="where the job is written (default: job_NAME.py beside this folder's files)",
        )
        parser.add_argument(
            "--force", action="store_true", help="replace the output file if it is there"
        )
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Write the job, compare it, and show what was found."""
        from memfit.script.job_file.answer import job_from_script

        script = Path(args.script)
        if not script.is_file():
            raise UsageError(f"There is no script {args.script}.")
        output = Path(args.output or f"job_{script.stem}.py")
        if output.exists() and not args.force:
            raise UsageError(f"{output} is there already; --force replaces it.")
        with status(console, f"running {script.name} up to its first update", quiet=args.json):
            found = job_from_script(script, tuple(args.script_arguments), output)
        if args.json:
            write_json(found.to_json())
        else:
            for line in _lines(found):
                console.print(line, markup=False, soft_wrap=True)
        return 0


COMMAND: Command = JobCommand()


def _lines(found: JobAnswer) -> list[str]:
    from memfit.units import format_bytes

    how = "measured" if found.is_measured else "predicted"
    parts = f", as {found.num_backwards} parts of an update" if found.num_backwards > 1 else ""
    script_peak = format_bytes(found.script_first_step_bytes)
    job_peak = format_bytes(found.first_step_peak_bytes)
    loss = f"{found.script_loss:.6g}, the script's up to {found.relative_loss_error:.1e}"
    error = f"{found.relative_peak_error:+.2%}"
    other = format_bytes(abs(found.script_other_bytes))
    besides = f", {other} of it neither model nor batch" if found.script_other_bytes > 0 else ""
    peak = f"{job_peak} ({how}), the script's {script_peak}{besides} ({error})"
    lines = [
        f"Wrote {found.output}. It trains as it is: python {found.output} [STEPS].",
        f"  loss of the first batch  {loss}",
        f"  peak of the first step   {peak}",
        f"  effective batch          {found.batch_size}{parts}",
    ]
    if found.is_measured:
        lines.append(
            "  Sizes in its step depend on values that nothing bounds: memfit measure runs it, and "
            "it cannot be planned."
        )
    if found.left_out:
        lines.append("  Left out of the loop, as comments in the file:")
        lines += [f"    line {number}: {text}" for number, text in found.left_out]
    return lines
