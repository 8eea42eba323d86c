"""``memfit verify``: proof on the job itself that plans keep the results."""

from __future__ import annotations

import argparse
from pathlib import Path
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

    from memfit.job import Job
    from memfit.strategies.plan import Plan
    from memfit.verification.proof import Verifications

_DTYPES = ("fp64", "fp32")


class VerifyCommand:
    """Run two planned steps of a job beside two plain ones, and compare what they change.

    Loss, every gradient, updated parameters and buffers are compared on the CPU, in fp64 where the
    job can. A plan earns `exact` only up to a relative error of 1e-10 there. Without --plan, every
    strategy that can apply is tried alone. A batch that is too large for this machine is made
    smaller, and the output says so. The exit code is 1 if a plan earns less than it claims.
    """

    example = "memfit verify examples/ragged_tokens.py:job"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, the plan and how to compare."""
        add_job_argument(parser)
        add_plan_argument(parser)
        parser.add_argument(
            "--batch-size",
            metavar="N",
            type=int,
            help="samples in a batch; by default the job's, or the most that this machine can do",
        )
        parser.add_argument(
            "--seed", metavar="N", type=int, default=0, help="of parameters, batch and dropout"
        )
        parser.add_argument(
            "--dtype",
            choices=_DTYPES,
            help="what to compare in; by default fp64, and fp32 for approximate plans",
        )
        parser.add_argument("--html", metavar="FILE", help="write a page about every parameter")
        add_verbose_argument(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Verify, and show what each plan claims and earns."""
        from memfit.job import load_job
        from memfit.reports.verification_text import brief_proof, proof_table

        if args.html:
            from memfit.reports.page import page_environment

            page_environment()  # missing, that is better said before minutes of running
        plan = load_plan(args.plan)
        job = load_job(args.job)
        proof = _proof(job, plan, args, console)
        if args.html:
            from memfit.files import write_atomically
            from memfit.reports.verification_html import verification_html

            write_atomically(Path(args.html), verification_html(proof, job=args.job).encode())
        if args.json:
            write_json(proof.to_json())
        else:
            console.print(proof_table(proof) if args.verbose else brief_proof(proof))
            if args.html:
                console.print(f"Wrote {args.html}.", markup=False)
        proof.check()
        return 0


COMMAND: Command = VerifyCommand()


def _proof(
    job: Job, plan: Plan | None, args: argparse.Namespace, console: Console
) -> Verifications:
    """Verify, saying which plan is being run where someone is watching."""
    import torch

    from memfit.errors import UsageError
    from memfit.verification.proof import verify_each

    if args.batch_size is not None and args.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {args.batch_size}.")
    dtypes = {"fp64": torch.float64, "fp32": torch.float32}
    with status(console, "predicting what fits here", quiet=args.json) as show:
        return verify_each(
            job,
            plan,
            dtype=dtypes.get(args.dtype),
            seed=args.seed,
            batch_size=args.batch_size,
            progress=lambda text: show(f"running: {text}"),
        )
