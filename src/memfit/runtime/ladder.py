"""The smaller plans that a run may go on with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from memfit.errors import StrategyError
from memfit.session.coupling import find_coupling
from memfit.session.session import Session
from memfit.strategies.base import AbstractSplitting
from memfit.strategies.batchnorm_replay import BatchNormReplay
from memfit.strategies.micro_batching import MicroBatching
from memfit.strategies.plan import Plan, in_catalogue_order


def smaller_plans(plan: Plan, session: Session) -> Iterator[Plan]:
    """Yield the plans below one: its ladder, from the top, and then ever smaller micro-batches.

    Raises:
        StrategyError: once there is nothing more that would keep the results, with the reason.
    """
    for number, rung in enumerate(plan.ladder):
        yield replace(rung, device=plan.device, ladder=plan.ladder[number + 1 :])
    yield from _halved(plan, session)


def _halved(plan: Plan, session: Session) -> Iterator[Plan]:
    """Yield plans with the micro-batch halved, and halved again.

    Raises:
        StrategyError: if it is one sample already, or the loss couples samples.
    """
    splits = [s for s in plan.strategies if isinstance(s, AbstractSplitting)]
    size = splits[0].micro_batch_size if splits else session.job.batch_size
    if size <= 1:
        raise StrategyError(MicroBatching.name, "micro-batches have one sample already.")
    coupling = find_coupling(session.job, session.layout)
    if coupling is not None and coupling.forbids_pieces:
        raise StrategyError(MicroBatching.name, coupling.sentence)
    others = [s for s in plan.strategies if not isinstance(s, AbstractSplitting)]
    while size > 1:
        size //= 2
        for splitting in (MicroBatching, BatchNormReplay):
            strategies = in_catalogue_order([*others, splitting(micro_batch_size=size)])
            yield replace(plan, strategies=strategies, prediction=None, ladder=())
