"""Searches for the fastest combination that fits; every peak that counts was recorded.

Best first, as in A* (Hart, Nilsson, Raphael 1968): combinations wait in a queue, ordered by the
least time that they can take, and the first that is known to fit when its turn comes is the
fastest. Adding a strategy or halving the micro-batch is taken to cost time or nothing, except for
strategies that may make a step faster: those are settled beforehand, each recorded alone.

Estimates order the queue and leave out what cannot fit by far; they accept nothing.

Where recording takes long, the effort is bounded: when it is spent, the fastest of what was
estimated from recordings is taken, and further combinations are recorded only where none of that
fits, those first that may become smallest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from memfit.errors import StrategyError
from memfit.figures import PlanSoFar
from memfit.planner.search.candidates import Candidate, Evaluator, Refinement, Strategies
from memfit.planner.search.first_plan import FirstPlan
from memfit.planner.search.guesses import Guesses
from memfit.planner.search.neighbours import Neighbours
from memfit.planner.search.options import SearchSpace
from memfit.planner.search.patience import Patience
from memfit.planner.search.pieces import (
    TOLERANCE,
    is_hopeless,
    is_ruled_out,
    least_time_ratio,
    likely_pieces,
)
from memfit.planner.search.queue import Entry, SearchQueue
from memfit.planner.search.recordings import Recordings
from memfit.planner.search.refinements import without_recomputation
from memfit.planner.search.relaxation import relaxed
from memfit.planner.search.reserve import reserve_beside
from memfit.planner.search.starting_points import starting_points
from memfit.planner.search.tree import SearchNode, SearchTree
from memfit.strategies.plan import in_catalogue_order, splitting_of

OnBetter = Callable[[PlanSoFar], None]

_MOST_RECORDINGS = 120
"""The queue is given up after so many; what is smallest is then sought directly."""
_MOST_ALIKE = 2
_LEAST_SAVING = 0.002
"""Of the budget: what saves less is not taken further, as it would take as many recordings."""
_LARGEST_ERROR = 0.15
"""How far off estimates may be where nothing has shown by how much, as a share of the budget."""


class Search:
    """Find the fastest combination that fits.

    ``slack`` is the share of a step's time that is not worth another recording: what fits is taken
    when all that is left could be faster by no more. ``is_long``: recording a step takes long.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        space: SearchSpace,
        *,
        slack: float = 0.0,
        is_long: bool = False,
        most_operators: float = float("inf"),
        patience: Patience | None = None,
        on_better: OnBetter | None = None,
    ) -> None:
        self.space = space
        self.is_long = is_long
        self.patience = patience or Patience()
        self.recordings = Recordings(evaluate, most_operators, self.patience, self._notice)
        self.best_so_far: Candidate | None = None
        """The fastest of what was recorded in full and fits."""
        self.neighbours = Neighbours(space, self.recordings.refused)
        self.tree = SearchTree(self.recordings, space)
        self._slack = slack
        self._on_better = on_better
        self._queue = SearchQueue()
        self._first_plan = FirstPlan(
            recordings=self.recordings,
            neighbours=self.neighbours,
            tree=self.tree,
            space=space,
            try_refinement=self._try_refinement,
            is_found=lambda: self.best_so_far is not None,
        )
        self._guesses = Guesses(space, self.neighbours, self._may_fit)
        self._seen: set[Strategies] = set()
        self._has_children = False
        """Whether a combination did not fit, so that what makes it smaller was queued."""

    @property
    def least_seconds_left(self) -> float | None:
        """Get the least time of what was not recorded to save effort; None if there is nothing."""
        if not self.recordings.is_spent:
            return None
        return min((e.seconds for e in self._queue.entries if e.is_node), default=None)

    @property
    def is_over(self) -> bool:
        """Return whether the best so far has to do."""
        return self.patience.is_over

    def run(self) -> Candidate | None:
        """Return the fastest candidate that fits; None if none does.

        When the time is over, or the user interrupts it, that is the best so far.

        Raises:
            KeyboardInterrupt: if it is interrupted before anything that fits was recorded.
        """
        try:
            self._run()
            return self.fastest_recorded()
        except KeyboardInterrupt:
            if self.best_so_far is None:
                raise
            self.patience.interrupt()
            return self.best_so_far

    def fastest_recorded(self) -> Candidate | None:
        """Return the fastest of all that was recorded and fits, whatever it was recorded for.

        What was recorded in short, and would be it, is recorded in full.
        """
        tried = self.recordings.tried.values()
        shorts = [each for each in tried if not each.is_exact and self._may_be_taken(each)]
        for short in sorted(shorts, key=lambda each: each.cost):
            best = self.best_so_far
            if best is None or (not self.is_over and short.cost < best.cost):
                self.recordings.attempt(short.strategies, in_full=True)
        return self.best_so_far

    def _run(self) -> Candidate | None:
        likely = self._first_plan.begin()
        self._look_ahead()
        self._first_plan.go_on(likely)
        for root in starting_points(self.recordings, self.space, is_long=self.is_long):
            node = SearchNode(root, 0, None)
            self._add(node)
            self.tree.open(node)
        if self.best_so_far is None:
            self._first_plan.look_for_any()
        found = None
        if not is_hopeless(self.recordings.tried.values(), self.space):
            found = self._first_that_fits()
        if found is None:
            reached = self.smallest()
            found = reached if reached.prediction.fits else None
        if found is None or self.is_over:
            return found
        # For the report, whether pieces may be taken. Where some may, nothing is said of others.
        checks = self.space.split_checks
        if self._has_children and checks is not None and not checks.allows_some:
            self.neighbours.halved(in_catalogue_order(self.space.required))
        return relaxed(found, self.recordings, self.neighbours)

    def _look_ahead(self) -> None:
        """Have pieces of a batch looked into beside this process, if any may be needed."""
        checks = self.space.split_checks
        if checks is None or not self.recordings.looks_ahead or self.best_so_far is not None:
            return
        recorded = sorted(self.recordings.tried.values(), key=lambda each: each.cost)
        likely = (likely_pieces(each, self.space) for each in recorded)
        checks.look_ahead([*dict.fromkeys(filter(None, likely))])

    @property
    def num_left(self) -> int:
        """Count what waits that may be faster than the best so far, by its estimates."""
        best = self.best_so_far
        most_seconds = float("inf") if best is None else best.prediction.step_seconds
        return sum(each.seconds < most_seconds for each in self._queue.entries)

    def _notice(self, candidate: Candidate) -> None:
        """Keep a recorded candidate that is the best so far."""
        if not (candidate.is_exact and self._may_be_taken(candidate)):
            return
        if self.best_so_far is not None and self.best_so_far.cost <= candidate.cost:
            return
        self.best_so_far, self.patience.has_plan = candidate, True
        if self._on_better is not None:
            plain = next(iter(self.recordings.tried.values()))
            found = PlanSoFar(
                strategies=tuple(strategy.label() for strategy in candidate.strategies),
                peak_bytes=candidate.peak_bytes,
                step_seconds=candidate.prediction.step_seconds,
                plain_step_seconds=plain.prediction.step_seconds,
                num_recorded=len(self.recordings.tried),
                num_left=self.num_left,
                elapsed_seconds=self.patience.elapsed_seconds,
            )
            self._on_better(found)

    def _may_be_taken(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits and has what is required."""
        return bool(candidate.prediction.fits) and self.space.allows(candidate.strategies)

    def further(self, found: Sequence[Candidate], most_seconds: float) -> Candidate | None:
        """Go on after ``run`` and give one more that fits, up to a time; None if there is none.

        Of each combination only a few ways to recompute its blocks are given.
        """
        alike = Counter(without_recomputation(candidate.strategies) for candidate in found)
        enough = {strategies for strategies, num in alike.items() if num >= _MOST_ALIKE}
        self._queue.keep_where(lambda e: e.is_node or e.node.strategies not in enough)
        return self._first_that_fits(most_seconds)

    def smallest(self) -> Candidate:
        """Return the smallest candidate that can be reached, for when nothing fits.

        Starts from the combination with the smallest peak to be expected, and from everything at
        once, and takes whatever strategy or halving lowers it most, until nothing does. Whole
        steps are recorded only of what seems to fit, since the others have the most micro-batches.

        Raises:
            StrategyError: if no plan with what is required could be recorded.
        """
        recordings, space, tree = self.recordings, self.space, self.tree
        starts = [min(tree.nodes, key=tree.floor)]
        starts += [node for node in self.neighbours.strongest() if tree.open(node)]
        ends = [self._descended(start) for start in starts]
        node = min(ends, key=tree.floor)
        for refinement in reversed(recordings.of(node.strategies).refinements):
            if recordings.attempt(refinement.strategies):
                break
        reached = [c for c in recordings.tried.values() if space.allows(c.strategies)]
        for candidate in sorted(reached, key=lambda each: each.peak_bytes):
            if not candidate.prediction.fits:
                return candidate
            if confirmed := recordings.attempt(candidate.strategies, in_full=True):
                return confirmed
        name = (space.splits if space.must_split else space.required)[0].name
        reasons = (reason for failed, reason in recordings.refused.items() if name in failed)
        raise StrategyError(name, next(reasons, "no plan with it could be recorded."))

    def _descended(self, node: SearchNode) -> SearchNode:
        """Take whatever lowers a node's smallest peak most, until nothing does."""
        while not self.recordings.is_spent:
            self.recordings.expect([child.strategies for child in self.neighbours.smaller(node)])
            children = [child for child in self.neighbours.smaller(node) if self.tree.open(child)]
            best = min([node, *children], key=self.tree.floor)
            if best is node:
                break
            node = best
        return node

    def perhaps_faster(self, strategies: Strategies) -> Iterator[Candidate]:
        """Record and yield what fits and may be faster than a combination against all estimates."""
        for found in self.neighbours.perhaps_faster(strategies):
            candidate = self.recordings.attempt(found, in_full=True)
            if candidate is not None and candidate.prediction.fits:
                yield candidate

    def _first_that_fits(self, most_seconds: float = float("inf")) -> Candidate | None:
        """Take entries from the queue until a candidate is the fastest of all that is left."""
        while self._queue.entries and self._queue.entries[0].seconds <= most_seconds:
            if self.is_over and self.best_so_far is not None:
                return self.best_so_far
            entry = self._next()
            # What looks into pieces would get what guesses leave of the processor.
            if not (entry.is_node and self._is_looked_into(entry.node)):
                likely = self._guesses.after(entry, self._queue.entries, may_open=self._may_go_on())
                self.recordings.expect(likely, is_sure=False)
            if entry.candidate is not None:
                confirmed = self._confirmed(entry)
                if confirmed is not None:
                    return confirmed
            elif entry.refinement is not None:
                self._try_refinement(entry.node, entry.refinement)
            else:
                self._open(entry)
        return None

    def _open(self, entry: Entry) -> None:
        """Record a node, and queue what follows from it."""
        if self._is_slower_by_now(entry):
            self._queue.push_node(entry.node, self._least_seconds(entry.node))
        elif is_ruled_out(entry.node, self.tree.nodes, self.space):
            return
        elif self._is_refused(entry.node):
            for other in self.neighbours.instead(entry.node):
                self._add(other)
        elif self._may_go_on() and self._opened(entry.node):
            self._expand(entry.node)

    def _is_refused(self, node: SearchNode) -> bool:
        """Return whether a node's pieces may not be taken.

        While another process looks into them, they are recorded here.
        """
        if self._is_looked_into(node) and self._may_go_on():
            self.recordings.expect(())
            self.recordings.before_proof(node.strategies)
        return self.space.obstacle(node.strategies) is not None

    def _is_looked_into(self, node: SearchNode) -> bool:
        """Return whether another process looks into the pieces of a node by now."""
        split, checks = splitting_of(node.strategies), self.space.split_checks
        return split is not None and checks is not None and checks.is_awaited(split)

    def _opened(self, node: SearchNode) -> bool:
        """Record a node, and its plan in reserve beside it; False if it cannot be smaller."""
        reserve = reserve_beside(node, self.space) if self.is_long else None
        if reserve is not None:
            self.recordings.expect([node.strategies])  # instead of what else was begun with
            self.recordings.expect([reserve], is_sure=False)
        is_smaller = self.tree.open(node, _LEAST_SAVING)
        if reserve is not None and not (node.candidate and node.candidate.prediction.fits):
            self.recordings.expect(())
        return is_smaller

    def _next(self) -> Entry:
        """Take what could be fastest; within the slack, what fits, or halves a batch further."""
        queue, tree = self._queue, self.tree
        if not self._slack:
            return queue.pop()
        entries = queue.entries
        if self.recordings.is_spent:
            entries = [entry for entry in entries if not entry.is_node]
        if not entries:
            floors = ((tree.expected_floor_bytes(e.node), e) for e in queue.entries)
            return queue.take(min(floors)[1])
        first = min(entries)
        if self._needs_no_recording(first):
            return queue.take(first)
        most_seconds = first.seconds * (1 + self._slack)
        near = (entry for entry in entries if entry.seconds <= most_seconds)
        return queue.take(min(near, key=lambda e: (e.candidate is None, min(e.peak_bytes, 0), e)))

    def _may_go_on(self) -> bool:
        """Return whether the queue is not given up yet."""
        recordings = self.recordings
        return len(recordings.tried) < _MOST_RECORDINGS and not recordings.is_given_up

    def _needs_no_recording(self, entry: Entry) -> bool:
        """Return whether an entry only leaves the queue, or moves in it."""
        if entry.refinement is not None:
            return not self._may_fit(entry.node, entry.refinement)
        return entry.candidate is None and self._is_slower_by_now(entry)

    def _is_slower_by_now(self, entry: Entry) -> bool:
        """Return whether others that were recorded since have shown that a node takes longer."""
        return self._least_seconds(entry.node) > entry.seconds * (1 + 1e-9)

    def _confirmed(self, entry: Entry) -> Candidate | None:
        """Record a candidate in full; put it back into the queue if that made it slower."""
        assert entry.candidate is not None, "asked of candidates only"
        candidate = self.recordings.attempt(entry.candidate, in_full=True)
        if candidate is None:
            return None
        if not candidate.prediction.fits:
            if entry.candidate == entry.node.strategies:
                self._expand(entry.node)  # what makes it smaller is needed after all
            return None
        is_slower = candidate.prediction.step_seconds > entry.seconds * (1 + 1e-9)
        if is_slower and self._queue.entries:
            self._queue.push_candidate(entry.node, candidate)
            return None
        return candidate

    def _try_refinement(self, node: SearchNode, refinement: Refinement) -> None:
        """Record a refinement unless it is estimated to be far over the budget."""
        if not self._may_fit(node, refinement):
            node.skipped.append(refinement)
            return
        candidate = self.recordings.attempt(refinement.strategies)
        if candidate is None:
            return
        node.learn(refinement, candidate)
        if candidate.prediction.fits:
            self._queue.push_candidate(node, candidate)
        skipped, node.skipped = node.skipped, []
        for larger in skipped:
            if self._may_fit(node, larger):
                self._queue.push_refinement(node, larger)
            else:
                node.skipped.append(larger)

    def _may_fit(self, node: SearchNode, refinement: Refinement) -> bool:
        """Return whether a refinement is worth recording, by what others showed of the estimates.

        The smallest one of a kind is recorded to learn that, where nothing else has shown it, and
        where others were too low but its own estimate is not: they may be off by something else.
        """
        whole = self.recordings.of(node.strategies)
        most_bytes = (whole.prediction.budget_bytes or 0) * (1 + TOLERANCE)
        if self.recordings.is_spent:
            most_bytes *= 1 - TOLERANCE  # nothing over the budget is tried any more
        is_smallest = refinement is node.smallest_like(refinement, whole.refinements)
        if node.correction_bytes(refinement) is not None:
            if node.expected_bytes(refinement) <= most_bytes:
                return True
            return is_smallest and refinement.peak_bytes <= most_bytes
        if is_smallest:
            most_bytes *= 1 + _LARGEST_ERROR
        return refinement.peak_bytes <= most_bytes

    def _expand(self, node: SearchNode) -> None:
        """Queue what follows from a node: itself if it fits, else what makes it smaller."""
        candidate = self.recordings.of(node.strategies)
        is_allowed = self.space.allows(node.strategies)
        if candidate.prediction.fits and is_allowed:
            self._queue.push_candidate(node, candidate)
            return
        for refinement in candidate.refinements if is_allowed else ():
            if refinement.strategies in self.recordings.tried:  # for a first plan
                node.learn(refinement, self.recordings.of(refinement.strategies))
            self._queue.push_refinement(node, refinement)
        budget_bytes = candidate.prediction.budget_bytes or 0
        is_near = candidate.floor_bytes <= budget_bytes * (1 + TOLERANCE)
        self._has_children = True
        for child in self.neighbours.children(node):
            if is_near or not (self.tree.adds_little(child) or self.tree.acts_on_little(child)):
                self._add(child)

    def _add(self, node: SearchNode) -> None:
        """Queue a node, once, by the least time that it is expected to take."""
        if node.strategies in self._seen:
            return
        self._seen.add(node.strategies)
        self._queue.push_node(node, self._least_seconds(node))

    def _least_seconds(self, node: SearchNode) -> float:
        """Bound the time of a node and of what follows from it, by what is known by now."""
        before = None if node.parent is None else node.parent.candidate
        if before is None:
            return 0.0
        ratio = least_time_ratio(node, self.tree, self.space)
        return max(before.prediction.step_seconds, self.tree.expected_seconds(node) * ratio)
