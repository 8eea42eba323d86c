"""Proves every exact strategy that applies to a job, alone, in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from memfit import Job, Plan
from memfit.errors import MemfitError
from memfit.strategies import CATALOGUE
from memfit.strategies.base import Numerics, Strategy
from memfit.strategies.facts import JobFacts
from memfit.verification.verify import Verifier


def prove_each(job: Job, facts: JobFacts) -> list[dict[str, Any]]:
    """Compare two steps under each strategy with plain ones, at half the batch.

    Args:
        job: what would be trained.
        facts: what a recording of the job has gathered.
    """
    job = replace(job, batch_size=max(2, job.batch_size // 2))
    facts = replace(facts, batch_size=job.batch_size)
    verifier = Verifier(job)
    return [_row(verifier, strategy) for strategy in _mildest_and_strongest(facts)]


def _mildest_and_strongest(facts: JobFacts) -> Iterator[Strategy]:
    for kind in CATALOGUE:
        if kind.numerics is not Numerics.EXACT:
            continue
        options = [option for option in kind.options(facts) if not option.obstacle(facts)]
        yield from dict.fromkeys([*options[:1], *options[-1:]])


def _row(verifier: Verifier, strategy: Strategy) -> dict[str, Any]:
    row: dict[str, Any] = {"strategy": strategy.label()}
    try:
        found = verifier.verify(Plan(strategies=(strategy,)), torch.float64)
    except (MemfitError, RuntimeError) as error:
        return row | {"keeps_promise": False, "failure": str(error), "largest_error": None}
    largest = found.deciding_error
    return row | {
        "claims": found.numerics,
        "earned": found.earned,
        "largest_error": largest if math.isfinite(largest) else None,
        "keeps_promise": found.keeps_promise,
    }
