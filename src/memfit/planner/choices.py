"""What the planner may combine: the settings of each strategy that this job and user allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memfit.errors import StrategyError, UsageError
from memfit.session.facts import JobFacts
from memfit.strategies import CATALOGUE, strategy_class
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.trace.events import Phase, Trace

Choice = Strategy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The planner's options.

    ``fixed_size`` holds, for each strategy, its settings and None for going without it; ``splits``
    the micro-batch settings from the largest to the smallest.
    """

    fixed_size: tuple[tuple[Choice, ...], ...]
    splits: tuple[Strategy, ...]
    must_split: bool
    """Whether a micro-batch setting was required by name."""
    refused: tuple[tuple[str, str], ...]
    """Strategies left out, each with the reason."""
    whole_batch_splits: tuple[Strategy, ...] = ()
    """Settings that compute the loss on the whole batch, for losses that couple samples."""
    may_recompute: bool = True
    """Whether blocks may be checkpointed, as the recorded step suggests."""

    def offers(self, name: str) -> bool:
        """Say whether a strategy may be used."""
        return any(
            option is not None and option.name == name
            for options in self.fixed_size
            for option in options
        )


def gather_choices(
    facts: JobFacts,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    *,
    may_use_disk: bool = False,
    calls_blocks_again: bool = False,
) -> Choices:
    """Ask every strategy of the catalogue for the settings it could have.

    Args:
        facts: what is known of the job.
        allow: names of strategies, or numerics classes, that may change the results.
        require: names of strategies that every plan must have.
        forbid: names of strategies that no plan may have.
        may_use_disk: whether tensors may be moved to disk.
        calls_blocks_again: whether a forward calls repeated blocks several times. The blocks to
            recompute are then offered whole; otherwise they are chosen from the recorded step.

    Raises:
        UsageError: if a name is unknown, or both required and forbidden.
        StrategyError: if a required strategy cannot apply.
    """
    _check_names(allow, require, forbid)
    fixed: list[tuple[Choice, ...]] = []
    splits: list[Strategy] = []
    whole_batch_splits: list[Strategy] = []
    refused: list[tuple[str, str]] = []
    for strategy in CATALOGUE:
        is_required = strategy.name in require
        options, reason = _options(strategy, facts, is_required or _is_allowed(strategy, allow))
        if not (may_use_disk or is_required):
            options, reason = _without_disk(options, reason)
        if strategy.name in forbid:
            options, reason = [], "it was forbidden."
        refused += [(strategy.name, reason)] if reason else []
        if is_required and not options:
            raise StrategyError(strategy.name, reason or "it has no settings for this job.")
        if issubclass(strategy, AbstractSplitting):
            (whole_batch_splits if strategy.keeps_batch_whole else splits).extend(options)
        elif options and (
            is_required or calls_blocks_again or strategy is not ActivationCheckpointing
        ):
            fixed.append((*([] if is_required else [None]), *options))
    if any(split.name in require for split in whole_batch_splits):
        splits = whole_batch_splits
    return Choices(
        fixed_size=tuple(fixed),
        splits=tuple(splits),
        must_split=any(split.name in require for split in splits),
        refused=tuple(refused),
        whole_batch_splits=tuple(whole_batch_splits),
        may_recompute=ActivationCheckpointing.name not in forbid,
    )


def _options(
    strategy: type[Strategy], facts: JobFacts, is_allowed: bool
) -> tuple[list[Strategy], str]:
    """Give the settings of a strategy that can apply, or the reason why none can."""
    if not is_allowed:
        reason = f"it is {strategy.numerics}; allow it by name with --allow {strategy.name}"
        return [], reason
    options: list[Strategy] = []
    reason = "there is nothing in this job that it could act on."
    for option in strategy.options(facts):
        obstacle = option.obstacle(facts)
        if obstacle is None:
            options.append(option)
        else:
            reason = obstacle
    return options, "" if options else reason


def calls_blocks_again(trace: Trace, facts: JobFacts) -> bool:
    """Say whether a forward calls some of the repeated blocks several times."""
    counts = Counter(call.module for call in trace.calls if call.phase is Phase.FORWARD)
    return any(counts[name] > 1 for names in facts.block_levels for name in names)


def without_pieces(choices: Choices, reason: str) -> Choices:
    """Leave out whatever computes the loss on micro-batches, for what computes it on the whole.

    Raises:
        StrategyError: if it is required by name.
    """
    cut = [split for split in choices.splits if split not in choices.whole_batch_splits]
    if not cut:
        return choices
    names = tuple(dict.fromkeys(split.name for split in cut))
    if choices.must_split:
        raise StrategyError(names[0], reason)
    refused = tuple((name, reason) for name in names)
    return replace(choices, splits=choices.whole_batch_splits, refused=(*choices.refused, *refused))


def _without_disk(options: list[Strategy], reason: str) -> tuple[list[Strategy], str]:
    """Leave out what writes to disk."""
    kept = [option for option in options if getattr(option, "to", "") != "disk"]
    if options and not kept:
        reason = "only the disk is left to move tensors to; give it room with --disk SIZE."
    return kept, reason


def _is_allowed(strategy: type[Strategy], allow: Sequence[str]) -> bool:
    if strategy.numerics.rank <= Numerics.SAME_IN_LAW.rank:
        return True
    return strategy.name in allow or str(strategy.numerics) in allow


def _check_names(allow: Sequence[str], require: Sequence[str], forbid: Sequence[str]) -> None:
    classes = [str(numerics) for numerics in Numerics]
    if both := sorted(set(require) & set(forbid)):
        raise UsageError(f"{both[0]} is both required and forbidden; leave out one of the two.")
    for name in (*allow, *require, *forbid):
        if name in classes and name in allow:
            continue
        try:
            strategy_class(name)
        except StrategyError as error:
            raise UsageError(str(error)) from None
