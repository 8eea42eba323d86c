"""Plans found without the planner's search: combinations of all settings, recorded one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from memfit.errors import MemfitError, StrategyError
from memfit.planner.search.candidates import Candidate, Refinement, Strategies
from memfit.planner.search.evaluation import JobEvaluator
from memfit.session.block_names import shorten_names
from memfit.strategies import CATALOGUE
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.activation_offload import ActivationOffload
from memfit.strategies.base import AbstractSplitting, Numerics, Strategy
from memfit.strategies.facts import JobFacts
from memfit.strategies.optimizer_implementation import (
    OfferedImplementations,
    OptimizerImplementation,
)
from memfit.strategies.plan import conflict, in_catalogue_order

SLACK = 1.4
"""Plans estimated to take longer than this many times the best estimate are not run."""
_MATRIX_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution")
_MOST_CALLS = 8
_ELSEWHERE = (ActivationCheckpointing, ActivationOffload)
"""Not combined like the others: blocks are chosen one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A combination with its recorded peak and the estimated seconds of its step."""

    strategies: Strategies
    peak_bytes: int
    seconds: float
    is_exact: bool
    refinements: tuple[Refinement, ...] = ()
    """What the planner would recompute, from the fastest to the smallest."""

    @property
    def family(self) -> tuple[str, ...]:
        """Name the strategies without their settings."""
        return tuple(dict.fromkeys(strategy.name for strategy in self.strategies))


class Enumeration:
    """Record combinations in stages.

    First all combinations of what neither splits the batch nor recomputes blocks, and the smallest
    that can be reached. Those that another one beats in peak and in time are then left out, the
    others split in all ways, and last of all given blocks to recompute. What is already estimated
    too slow for every budget is not extended: splitting and recomputing only add time.
    """

    def __init__(
        self, evaluator: JobEvaluator, budgets_bytes: Sequence[int], most_recordings: int
    ) -> None:
        self._evaluator = evaluator
        self._budgets_bytes = budgets_bytes
        self._facts = evaluator.plain.facts
        self._num_left = most_recordings
        self._found: dict[Strategies, Found | None] = {}
        self.failures: dict[str, str] = {}
        """Combinations that could not be recorded, though nothing says that they do not apply."""

    @property
    def found(self) -> list[Found]:
        """Return everything that could be recorded, the fastest first."""
        return sorted(filter(None, self._found.values()), key=lambda each: each.seconds)

    def run(self) -> None:
        """Record everything."""
        self._record_all(product_of(dimensions(self._facts)))
        bases = undominated(self.found)
        self._record_all(self._smallest())
        for split in settings_of(_splittings(), self._facts):
            self._record_all((*b.strategies, split) for b in bases if not self._is_too_slow(b))
        kept = {base.strategies for base in bases}
        nodes = [node for node in self.found if node.strategies in kept or _is_split(node)]
        variants = [(node, self._recomputing(node)) for node in undominated(nodes)]
        for rank in range(max((len(found) for _, found in variants), default=0)):
            ready = [(node, found) for node, found in variants if rank < len(found)]
            self._record_all(f[rank] for node, f in ready if not self._is_too_slow(node))

    def confirmed(self, found: Found) -> Found:
        """Record the whole step where only a part was."""
        if not found.is_exact:
            evaluated = self._evaluator.in_full(found.strategies)
            self._found[found.strategies] = found = _found(found.strategies, evaluated)
        return found

    def _record_all(self, combinations: Iterable[Sequence[Strategy]]) -> None:
        for members in combinations:
            strategies = in_catalogue_order(members)
            if not conflict(strategies):
                self._record(strategies)

    def _record(self, strategies: Strategies) -> None:
        """Record a combination; one that turns out not to apply is None."""
        if strategies in self._found or not self._num_left:
            return
        self._num_left -= 1
        self._found[strategies] = None
        try:
            evaluated = self._evaluator.in_short(strategies)
        except StrategyError:
            return
        except (MemfitError, RuntimeError) as error:
            self.failures[" + ".join(strategy.label() for strategy in strategies)] = str(error)
        else:
            self._found[strategies] = _found(strategies, evaluated)

    def _is_too_slow(self, node: Found) -> bool:
        """Return whether what is to be extended is too slow for every budget already."""
        best = [best_seconds(self.found, num_bytes) for num_bytes in self._budgets_bytes]
        return all(seconds is not None and node.seconds > SLACK * seconds for seconds in best)

    def _smallest(self) -> Iterator[Sequence[Strategy]]:
        """Yield the strongest settings of everything, whole and in single samples."""
        strongest = [options[-1] for options in dimensions(self._facts) if options[-1]]
        for split in (None, *list(settings_of(_splittings(), self._facts))[-1:]):
            members = [*strongest, split] if split else strongest
            while clash := _clashing(members):
                members.remove(clash)
            yield members
            found = self._found.get(in_catalogue_order(members))
            yield from (last.strategies for last in found.refinements[-1:]) if found else ()

    def _recomputing(self, node: Found) -> list[Sequence[Strategy]]:
        """Return ways to recompute blocks: the planner's own for each budget, and those by hand."""
        fitting = [
            next((each for each in node.refinements if each.peak_bytes <= num_bytes), None)
            for num_bytes in self._budgets_bytes
        ]
        chosen = [each.strategies for each in (*fitting, *node.refinements[-1:]) if each]
        by_hand = [(*node.strategies, strategy) for strategy in self._by_hand()]
        members = list(dict.fromkeys([*chosen, *by_hand]))
        return [each for each in members if not conflict(each)]

    def _by_hand(self) -> Iterator[Strategy]:
        if not self._facts.block_levels:
            return
        blocks = self._facts.block_levels[0]
        calls = (f"{name}.{call}" for name in _MATRIX_PRODUCTS for call in range(_MOST_CALLS))
        yield ActivationCheckpointing()
        yield ActivationCheckpointing(blocks=shorten_names(blocks[: (len(blocks) + 1) // 2]))
        yield ActivationCheckpointing(keep=tuple(calls))


def dimensions(facts: JobFacts) -> list[list[Strategy | None]]:
    """Give, for each strategy that keeps the results, its settings and going without it."""
    found: list[list[Strategy | None]] = []
    for kind in CATALOGUE:
        if issubclass(kind, (*_ELSEWHERE, AbstractSplitting)):
            continue
        options = list(settings_of([kind], facts))
        if kind is OptimizerImplementation:
            options = [
                kind(implementation=name) for name in facts.of(OfferedImplementations).names[:-1]
            ]
            options.sort(key=lambda option: option.settings()["implementation"] == "fused")
        if options:
            found.append([None, *options])
    return found


def settings_of(kinds: Iterable[type[Strategy]], facts: JobFacts) -> Iterator[Strategy]:
    """Yield the settings of strategies that apply and keep the results."""
    for kind in kinds:
        if kind.numerics.rank <= Numerics.SAME_IN_LAW.rank:
            options = (option for option in kind.options(facts) if not option.obstacle(facts))
            # The planner is not given room on the disk either.
            yield from (option for option in options if not option.needs_disk)


def product_of(dims: Sequence[Sequence[Strategy | None]]) -> Iterator[Sequence[Strategy]]:
    """Yield every choice of one setting from each, those with the fewest strategies first."""
    chosen = [[member for member in choice if member] for choice in product(*dims)]
    yield from sorted(chosen, key=len)


def best_seconds(found: Iterable[Found], budget_bytes: int) -> float | None:
    """Return the least estimated time of what fits; None if nothing does."""
    return min((each.seconds for each in found if each.peak_bytes <= budget_bytes), default=None)


def shortlist(found: Sequence[Found], budget_bytes: int, most: int) -> list[Found]:
    """Choose what is worth running: the fastest of each family first, then whatever is fast."""
    least_seconds = best_seconds(found, budget_bytes)
    near = [
        each
        for each in sorted(found, key=lambda each: each.seconds)
        if each.peak_bytes <= budget_bytes and each.seconds <= SLACK * (least_seconds or 0.0)
    ]
    first = {each.family: each for each in reversed(near)}
    leaders = [each for each in near if first[each.family] is each]
    others = [each for each in near if first[each.family] is not each]
    return [*leaders, *others][:most]


def undominated(found: Sequence[Found]) -> list[Found]:
    """Leave out what is beaten in peak and time by something that can be extended as well."""
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.seconds, each.peak_bytes)):
        beaten = any(
            other.peak_bytes <= each.peak_bytes and _excluded(other) <= _excluded(each)
            for other in kept
        )
        if not beaten:
            kept.append(each)
    return kept


def _excluded(found: Found) -> set[str]:
    """Name what cannot be added to a combination, because of a conflict."""
    kinds: list[type[Strategy]] = [*_splittings(), ActivationCheckpointing]
    return {kind.name for kind in kinds if conflict([*found.strategies, _any_of(kind)])}


def _any_of(kind: type[Strategy]) -> Strategy:
    return kind(micro_batch_size=1) if issubclass(kind, AbstractSplitting) else kind()


def _clashing(members: Sequence[Strategy]) -> Strategy | None:
    """Return a strategy that has to go so that the last one can stay."""
    return next((m for m in members[:-1] if conflict([m, members[-1]])), None)


def _is_split(found: Found) -> bool:
    return any(isinstance(strategy, AbstractSplitting) for strategy in found.strategies)


def _splittings() -> list[type[AbstractSplitting]]:
    return [kind for kind in CATALOGUE if issubclass(kind, AbstractSplitting)]


def _found(strategies: Strategies, evaluated: Candidate) -> Found:
    return Found(
        strategies=strategies,
        peak_bytes=evaluated.peak_bytes,
        seconds=evaluated.prediction.step_seconds,
        is_exact=evaluated.is_exact,
        refinements=tuple(evaluated.refinements),
    )
