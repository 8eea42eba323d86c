"""What the planner may combine: the settings of each strategy that this job and user allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memfit.errors import StrategyError, UsageError
from memfit.figures import Refusal, RefusalKind
from memfit.planner.search.splits import SplitChecks, may_be_unproved
from memfit.planner.trial import BatchTrial
from memfit.strategies import CATALOGUE, strategy_class
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.strategies.data_parallel import AbstractDataParallel
from memfit.strategies.facts import JobFacts
from memfit.strategies.plan import clash, splitting_of
from memfit.trace.events import Phase, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a plan may be made of.

    ``options`` holds, for each strategy, its settings and None for going without it; ``splits``
    the micro-batch settings from the largest to the smallest.
    """

    options: tuple[tuple[Strategy | None, ...], ...]
    splits: tuple[AbstractSplitting, ...]
    must_split: bool
    """Whether a micro-batch setting was required by name."""
    refused: tuple[Refusal, ...]
    """Strategies left out."""
    may_recompute: bool = True
    """Whether blocks may be checkpointed, as the recorded step suggests."""
    slowdowns: Mapping[Strategy, float] = field(default_factory=dict, compare=False)
    """How many times as long a step takes at least with a strategy, where that is known."""
    split_checks: SplitChecks | None = field(default=None, compare=False)
    """Says which of the splits keep the results; None takes all of them."""

    @property
    def required(self) -> list[Strategy]:
        """Return the mildest settings of what every plan must have."""
        return [options[0] for options in self.options if options[0] is not None]

    def allows(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether a combination has the micro-batches that were required, if any were."""
        names = {split.name for split in self.splits}
        return not self.must_split or any(each.name in names for each in strategies)

    def obstacle(self, strategies: Sequence[Strategy]) -> tuple[str, str] | None:
        """Name the strategy whose micro-batches would not keep the results, and say why.

        It is looked into when it is first asked.
        """
        split = splitting_of(strategies)
        if self.split_checks is None or split is None:
            return None
        reason = self.split_checks.obstacle(split)
        return None if reason is None else (split.name, reason)

    def all_refused(self) -> tuple[Refusal, ...]:
        """Return what was left out, with the micro-batches that were looked into and may not be."""
        return (*self.refused, *self.refused_splits())

    def refused_splits(self) -> tuple[Refusal, ...]:
        """Return the micro-batches that were looked into and may not be taken."""
        return () if self.split_checks is None else self.split_checks.refused()

    def offers(self, name: str) -> bool:
        """Return whether a strategy may be used."""
        return any(
            option is not None and option.name == name
            for options in self.options
            for option in options
        )


def search_space(
    facts: JobFacts,
    allow: Sequence[str] = (),
    require: Sequence[str] = (),
    forbid: Sequence[str] = (),
    *,
    may_use_disk: bool = False,
    calls_blocks_again: bool = False,
    trial: BatchTrial | None = None,
    parallel: AbstractDataParallel | None = None,
) -> SearchSpace:
    """Ask every strategy of the catalogue for the settings it could have.

    Args:
        facts: what is known of the job.
        allow: names of strategies, or numerics classes, that may change the results.
        require: names of strategies that every plan must have.
        forbid: names of strategies that no plan may have.
        may_use_disk: whether tensors may be moved to disk.
        calls_blocks_again: whether a forward calls repeated blocks several times. The blocks to
            recompute are then offered whole; otherwise they are chosen from the recorded step.
        trial: settles on a real batch whether pieces keep the results, where that is not known.
        parallel: how ranks share the model, which every plan has then.

    Raises:
        UsageError: if a name is unknown, or both required and forbidden.
        StrategyError: if a required strategy cannot apply, or two of them exclude each other.
    """
    _check_names(allow, require, forbid)
    fixed: list[tuple[Strategy | None, ...]] = [] if parallel is None else [(parallel,)]
    splits: list[AbstractSplitting] = []
    refused: list[Refusal] = []
    for strategy in _kinds(require, parallel):
        is_required = strategy.name in require
        options, refusal = _options(strategy, facts, is_required or _is_allowed(strategy, allow))
        options, refusal = _among_ranks(parallel, strategy, options, refusal)
        if not (may_use_disk or is_required):
            options, refusal = _without_disk(strategy, options, refusal)
        if strategy.name in forbid:
            options = []
            refusal = _refused(strategy, RefusalKind.FORBIDDEN, "it was forbidden.")
        refused += [] if refusal is None else [refusal]
        if is_required and not options:
            none = "it has no settings for this job."
            raise StrategyError(strategy.name, none if refusal is None else refusal.sentence)
        found = [option.splitting for option in options if option.splitting is not None]
        splits += found
        is_chosen_from_step = strategy is ActivationCheckpointing and not calls_blocks_again
        if options and not found and (is_required or not is_chosen_from_step):
            fixed.append((*([] if is_required else [None]), *options))
    must_split = any(split.name in require for split in splits)
    if must_split:
        splits = [split for split in splits if split.name in require]
    unproved = may_be_unproved(CATALOGUE, allow)
    return SearchSpace(
        options=tuple(fixed),
        splits=tuple(splits),
        must_split=must_split,
        refused=tuple(refused),
        may_recompute=ActivationCheckpointing.name not in forbid,
        slowdowns={split: split.least_slowdown(facts) for split in splits},
        split_checks=SplitChecks(splits, facts, unproved, trial),
    )


def _options(
    strategy: type[Strategy], facts: JobFacts, is_allowed: bool
) -> tuple[list[Strategy], Refusal | None]:
    """Return the settings of a strategy that can apply, or why none can."""
    if not is_allowed:
        sentence = f"it is {strategy.numerics}; allow it by name with --allow {strategy.name}"
        return [], _refused(strategy, RefusalKind.NOT_ALLOWED, sentence)
    options: list[Strategy] = []
    sentence = strategy.none_offered
    for option in strategy.options(facts):
        # Whether pieces of some size keep the results is looked into when that size is considered.
        obstacle = option.unsuited(facts)
        if obstacle is None:
            options.append(option)
        else:
            sentence = obstacle
    return options, None if options else _refused(strategy, RefusalKind.UNSUITED, sentence)


def _kinds(
    require: Sequence[str], parallel: AbstractDataParallel | None
) -> Iterator[type[Strategy]]:
    """Yield the strategies that are left once it is settled how ranks share the model.

    Raises:
        StrategyError: if ranks have to share it, and nobody said how many there are.
    """
    for strategy in CATALOGUE:
        if not issubclass(strategy, AbstractDataParallel):
            yield strategy
        elif parallel is None and strategy.name in require:
            reason = "it is for several ranks; say how many with ranks=N, or --ranks N."
            raise StrategyError(strategy.name, reason)


def _among_ranks(
    parallel: AbstractDataParallel | None,
    strategy: type[Strategy],
    options: list[Strategy],
    refusal: Refusal | None,
) -> tuple[list[Strategy], Refusal | None]:
    """Leave out what does not go with how ranks share the model."""
    reason = None if parallel is None else parallel.refuses(strategy)
    if options and reason is not None:
        return [], _refused(strategy, RefusalKind.UNSUITED, reason)
    return options, refusal


def _refused(strategy: type[Strategy], kind: RefusalKind, sentence: str) -> Refusal:
    return Refusal(kind=kind, strategy=strategy.name, sentence=sentence)


def calls_blocks_again(trace: Trace, facts: JobFacts) -> bool:
    """Return whether a forward calls some of the repeated blocks several times."""
    counts = Counter(call.module for call in trace.calls if call.phase is Phase.FORWARD)
    return any(counts[name] > 1 for names in facts.block_levels for name in names)


def _without_disk(
    strategy: type[Strategy], options: list[Strategy], refusal: Refusal | None
) -> tuple[list[Strategy], Refusal | None]:
    """Leave out what writes to disk."""
    kept = [option for option in options if not option.needs_disk]
    if options and not kept:
        sentence = "only the disk is left to move tensors to; give it room with --disk SIZE."
        refusal = _refused(strategy, RefusalKind.NO_DISK, sentence)
    return kept, refusal


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
    if rule := clash(require):
        reason = f"{rule.second}, which is required as well, excludes it: {rule.reason}."
        raise StrategyError(rule.first, reason)
