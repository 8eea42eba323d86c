"""What memfit claims of micro-batching, against what is true of losses and models of practice.

Run: python benchmarks/bench_exactness.py        (five minutes on two cores)

The blind half of the cases was written before any public repository was looked at, the public half
follows the code of public repositories; neither was written with the analysis at hand. What is true
of each is computed here anew, in fp64, by running its step whole and in pieces.
``--only NAME ...`` prints the rows of some cases and writes nothing.
"""

from __future__ import annotations

import argparse

import torch
from exactness.case import Case
from exactness.registry import all_cases
from exactness.scoring import Claim, Row, as_json, row, summary
from exactness.truth import truth_of
from results_file import save_result

from memfit import Plan, verify
from memfit.separation.batch_conditions import broken_condition
from memfit.separation.separation import Separation
from memfit.session.batches import find_layout, real_batch
from memfit.strategies.micro_batching import MicroBatching

NAME = "exactness"
NUM_PIECES = 4


def claimed(case: Case) -> Claim:
    """Ask memfit of which class micro-batching in ``NUM_PIECES`` pieces is for a case's job.

    What it promises is run, in fp64, beside the plain step.
    """
    job = case.build()
    layout = find_layout(job)
    split = MicroBatching(micro_batch_size=job.batch_size // NUM_PIECES)
    found = split.separability(Separation(job, layout))
    if found.is_refuted:
        return Claim(numerics="different", reason=found.sentence)
    if not found.is_proved:
        return Claim(numerics="unproved", reason=found.sentence)
    broken = broken_condition(layout, real_batch(job, job.batch_size), found.conditions)
    if broken is not None:
        return Claim(numerics="different", reason=broken.sentence)
    numerics = "same-in-law" if found.draws else "exact"
    run = verify(case.build(), Plan(strategies=(split,)))
    return Claim(numerics=numerics, earned=run.earned, run_error=run.deciding_error)


def main() -> None:
    """Ask about all cases, print what is wrong and write the table."""
    parser = argparse.ArgumentParser(description="Score claims of exactness on ordinary losses.")
    parser.add_argument("--only", nargs="*", default=())
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [_row(case) for case in all_cases() if not arguments.only or case.name in arguments.only]
    if arguments.only:
        return
    save_result(NAME, {"num_pieces": NUM_PIECES, **summary(rows), "rows": as_json(rows)})


def _row(case: Case) -> Row:
    found = row(case, claimed(case), truth_of(case))
    print(f"{found.verdict:10} {found.name:45} {found.claimed:12} {found.reason}", flush=True)
    return found


if __name__ == "__main__":
    main()
