"""Finds what strategies and the planner need to know of a job; asks each strategy for its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from memfit.separation.separation import Separation
from memfit.session.session import Session
from memfit.strategies import CATALOGUE
from memfit.strategies.facts import JobFacts, shared_facts


def gather_facts(
    session: Session,
    *,
    separation: Separation | None = None,
    probed: Sequence[object] = (),
    draws_random: bool | None = None,
) -> JobFacts:
    """Look at a session's model and optimizer: once, before strategies change them.

    Args:
        session: of the job.
        separation: what is known of the job's pieces already.
        probed: what ``probes`` have found in a step.
        draws_random: whether a step draws random numbers, if one has been seen.
    """
    if session.facts is None:
        found = shared_facts(session, separation)
        own = (kind.own_facts(session) for kind in CATALOGUE)
        session.facts = replace(found, own=tuple(each for each in own if each is not None))
    facts: JobFacts = session.facts
    return replace(
        facts,
        own=(*facts.own, *probed),
        draws_random=facts.draws_random if draws_random is None else draws_random,
    )


@contextmanager
def probes() -> Iterator[Callable[[], list[object]]]:
    """Watch a step for every strategy; return what gives the facts that only a step shows."""
    with ExitStack() as stack:
        found = [stack.enter_context(kind.probe()) for kind in CATALOGUE]
        yield lambda: [each for probe in found if (each := probe()) is not None]
