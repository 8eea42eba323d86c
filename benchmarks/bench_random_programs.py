"""What is proved of random programs over a batch, against what cutting the batch really does.

Run: python benchmarks/bench_random_programs.py        (ten minutes on one core)

Each program is a few random operators behind a small model, and a loss of a few random terms; most
mix samples somewhere. Its gradient at the full batch and in pieces is computed directly, in fp64,
for three draws of weights and batch. ``--first`` and ``--count`` choose programs and write nothing.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

import torch
from random_programs.program import PIECE_SIZE, Program, error_in_pieces, make_program
from results_file import save_result

from memfit.separation.separation import Separation
from memfit.session.batches import find_layout

NAME = "random_programs"
COUNT = 3_000
EQUAL_BELOW, WRONG_ABOVE = 1e-9, 1e-7


def main() -> None:
    """Judge programs and write the table."""
    parser = argparse.ArgumentParser(description="Compare proofs with the truth at random.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    seeds = range(arguments.first, arguments.first + arguments.count)
    counts, false = judged(seeds)
    print(dict(counts))
    if arguments.count == COUNT and not arguments.first:
        save_result(NAME, {"num_programs": counts.total(), **counts, "false": false})


def judged(seeds: range) -> tuple[Counter[str], list[int]]:
    """Count what is true and what is claimed; list the programs that are wrongly proved."""
    counts: Counter[str] = Counter()
    false = []
    begun = time.perf_counter()
    for seed in seeds:
        program = make_program(seed)
        if program is None:
            continue
        error, outcome = error_in_pieces(program), claimed(program)
        true = "same" if error <= EQUAL_BELOW else "other" if error > WRONG_ABOVE else "unclear"
        counts[f"{true}_{outcome}"] += 1
        if true != "same" and outcome == "proved":
            false.append(seed)
            print(f"FALSE {seed}: {error:.1e} {program.names}", flush=True)
        if seed % 100 == 0:
            print(f"{seed}: {time.perf_counter() - begun:.0f} s {dict(counts)}", flush=True)
    return counts, false


def claimed(program: Program) -> str:
    """Return what is claimed of a program in pieces: proved, refuted or not_known."""
    job = program.job()
    found = Separation(job, find_layout(job)).of(PIECE_SIZE)
    return found.outcome.value.replace("-", "_")


if __name__ == "__main__":
    main()
