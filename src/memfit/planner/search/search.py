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

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence

from memfit.planner.search.candidates import Candidate, Evaluator, Refinement, Strategies
from memfit.planner.search.neighbours import TOLERANCE, Neighbours
from memfit.planner.search.options import Choices
from memfit.planner.search.queue import Entry, Node
from memfit.planner.search.recordings import Recorded
from memfit.planner.search.starting_points import beginnings
from memfit.strategies.activation_checkpointing import ActivationCheckpointing
from memfit.strategies.base import Strategy
from memfit.trace.events import Category

_MOST_RECORDINGS = 120
"""The queue is given up after so many; what is smallest is then sought directly."""
_MOST_EFFORT = 2
"""The same where effort is bounded, as a multiple of the bound."""
_MOST_ALIKE = 2
_LASTING = (Category.PARAMETERS, Category.BUFFERS, Category.OPTIMIZER_STATE)
_LARGEST_ERROR = 0.15
"""How far off estimates may be where nothing has shown by how much, as a share of the budget."""


class Search:
    """Find the fastest combination that fits.

    ``slack`` is the share of a step's time that is not worth another recording: what fits is taken
    when all that is left could be faster by no more than that.
    """

    def __init__(
        self,
        evaluate: Evaluator,
        choices: Choices,
        *,
        slack: float = 0.0,
        most_operators: float = float("inf"),
    ) -> None:
        self._recorded = Recorded(evaluate)
        self._choices = choices
        self._neighbours = Neighbours(choices, self._recorded.refused)
        self._slack = slack
        self._most_operators = most_operators
        self._queue: list[Entry] = []
        self._seen: set[Strategies] = set()
        self._nodes: list[Node] = []
        self._ratios: dict[Strategy, float] = {}
        self._savings: dict[Strategy, int] = {}

    @property
    def refused(self) -> dict[str, str]:
        """Return the strategies that turned out not to apply while recorded, with the reason."""
        return self._recorded.refused

    @property
    def tried(self) -> dict[Strategies, Candidate]:
        """Return every combination that was recorded."""
        return self._recorded.tried

    @property
    def least_seconds_left(self) -> float | None:
        """Get the least time of what was not recorded to save effort; None if there is nothing."""
        left = [e.seconds for e in self._queue if e.is_node] if self._is_spent() else []
        return min(left, default=None)

    def refinements(self) -> Iterator[Refinement]:
        """Yield every refinement that was estimated, recorded or not."""
        for node in self._nodes:
            if node.evaluated is not None:
                yield from node.evaluated.refinements

    def run(self) -> Candidate | None:
        """Return the fastest candidate that fits; None if none does."""
        for root in beginnings(self._recorded, self._choices):
            node = Node(root, 0, None)
            self._add(node, 0.0)
            self._open(node)
        found = None if self._is_hopeless() else self._first_that_fits()
        if found is None:
            smallest = self.smallest()
            found = smallest if smallest.prediction.fits else None
        return found

    def further(self, found: Sequence[Candidate], most_seconds: float) -> Candidate | None:
        """Go on after ``run`` and give one more that fits, up to a time; None if there is none.

        Of each combination only a few ways to recompute its blocks are given.
        """
        alike = Counter(without_recomputation(candidate) for candidate in found)
        enough = {strategies for strategies, num in alike.items() if num >= _MOST_ALIKE}
        self._queue = [e for e in self._queue if e.is_node or e.node.strategies not in enough]
        heapq.heapify(self._queue)
        return self._first_that_fits(most_seconds)

    def fastest_below(self, most_bytes: int) -> Candidate | None:
        """Return the fastest of what is known to stay below a peak, recorded; None if nothing does.

        Does not look for combinations that the search had no reason to try.
        """
        known = [
            (candidate.prediction.step_seconds, _peak_bytes(candidate), strategies)
            for strategies, candidate in self.tried.items()
        ]
        known += [(r.seconds, r.peak_bytes, r.strategies) for r in self.refinements()]
        known.sort(key=lambda entry: entry[:2])
        for _, expected_bytes, strategies in known:
            if expected_bytes <= most_bytes and self._is_allowed(strategies):
                candidate = self._recorded.attempt(strategies, in_full=True)
                if candidate and candidate.prediction.fits and _peak_bytes(candidate) <= most_bytes:
                    return candidate
        return None

    def smallest(self) -> Candidate:
        """Return the smallest peak that can be reached, for when nothing fits.

        Starts from the combination with the smallest peak to be expected, and from everything at
        once, and takes whatever strategy or halving lowers it most, until nothing does. Whole
        steps are recorded only of what seems to fit, since the others have the most micro-batches.
        """
        starts = [min(self._nodes, key=self._floor)]
        starts += [node for node in self._neighbours.strongest() if self._open(node)]
        node = min((self._descended(start) for start in starts), key=self._floor)
        for refinement in reversed(self._recorded.of(node.strategies).refinements):
            if self._recorded.attempt(refinement.strategies):
                break
        reached = [c for c in self.tried.values() if self._is_allowed(c.strategies)]
        for smallest in sorted(reached, key=_peak_bytes):
            if not smallest.prediction.fits:
                return smallest
            if confirmed := self._recorded.attempt(smallest.strategies, in_full=True):
                return confirmed
        return self._recorded.in_full(())

    def halved(self, strategies: Strategies) -> Candidate | None:
        """Record a combination with the next smaller micro-batch; None if none fits."""
        found = self._neighbours.halved(strategies)
        candidate = self._recorded.attempt(found, in_full=True) if found else None
        return candidate if candidate and candidate.prediction.fits else None

    def _descended(self, node: Node) -> Node:
        """Take whatever lowers a node's smallest peak most, until nothing does."""
        while not self._is_spent():
            children = [child for child in self._neighbours.smaller(node) if self._open(child)]
            best = min([node, *children], key=self._floor)
            if best is node:
                break
            node = best
        return node

    def _first_that_fits(self, most_seconds: float = float("inf")) -> Candidate | None:
        """Take entries from the queue until a candidate is the fastest of all that is left."""
        while self._queue and self._queue[0].seconds <= most_seconds:
            entry = self._next()
            if entry.candidate is not None:
                confirmed = self._confirmed(entry)
                if confirmed is not None:
                    return confirmed
            elif entry.refinement is not None:
                self._try_refinement(entry.node, entry.refinement)
            elif self._is_slower_by_now(entry):
                self._push(self._expected_seconds(entry.node), entry.peak_bytes, entry.node)
            elif self._may_go_on() and self._open(entry.node):
                self._opened(entry.node)
        return None

    def _next(self) -> Entry:
        """Take what could be fastest; within the slack, what fits, or halves a batch further."""
        if not self._slack:
            return heapq.heappop(self._queue)
        entries = self._queue
        if self._is_spent():
            entries = [entry for entry in entries if not entry.is_node]
        if not entries:
            return self._taken(min(self._queue, key=lambda e: (self._expected_floor(e.node), e)))
        first = min(entries)
        if self._needs_no_recording(first):
            return self._taken(first)
        most_seconds = first.seconds * (1 + self._slack)
        near = (entry for entry in entries if entry.seconds <= most_seconds)
        return self._taken(min(near, key=lambda e: (e.candidate is None, min(e.peak_bytes, 0), e)))

    def _taken(self, entry: Entry) -> Entry:
        self._queue.remove(entry)
        heapq.heapify(self._queue)
        return entry

    def _expected_floor(self, node: Node) -> float:
        """Estimate the smallest peak of a combination; nothing is known of what is new in it."""
        if node.parent is None or node.parent.evaluated is None:
            return 0.0
        added = set(node.strategies) - set(node.parent.strategies)
        if not added <= set(self._savings):
            return 0.0
        return node.parent.evaluated.floor_bytes - sum(self._savings[s] for s in added)

    def _is_spent(self) -> bool:
        return self._recorded.num_operators >= self._most_operators

    def _may_go_on(self) -> bool:
        """Return whether the queue is not given up yet."""
        is_given_up = self._recorded.num_operators >= _MOST_EFFORT * self._most_operators
        return len(self._recorded) < _MOST_RECORDINGS and not is_given_up

    def _needs_no_recording(self, entry: Entry) -> bool:
        """Return whether an entry only leaves the queue, or moves in it."""
        if entry.refinement is not None:
            return not self._may_fit(entry.node, entry.refinement)
        return entry.candidate is None and self._is_slower_by_now(entry)

    def _is_slower_by_now(self, entry: Entry) -> bool:
        """Return whether others that were recorded since have shown that a node takes longer."""
        return self._expected_seconds(entry.node) > entry.seconds * (1 + 1e-9)

    def _confirmed(self, entry: Entry) -> Candidate | None:
        """Record a candidate in full; put it back into the queue if that made it slower."""
        assert entry.candidate is not None, "asked of candidates only"
        candidate = self._recorded.attempt(entry.candidate, in_full=True)
        if candidate is None:
            return None
        if not candidate.prediction.fits:
            if entry.candidate == entry.node.strategies:
                self._opened(entry.node)  # what makes it smaller is needed after all
            return None
        if candidate.prediction.step_seconds > entry.seconds * (1 + 1e-9) and self._queue:
            self._push_candidate(entry.node, candidate)
            return None
        return candidate

    def _try_refinement(self, node: Node, refinement: Refinement) -> None:
        """Record a refinement unless it is estimated to be far over the budget."""
        if not self._may_fit(node, refinement):
            node.skipped.append(refinement)
            return
        candidate = self._recorded.attempt(refinement.strategies)
        if candidate is None:
            return
        node.correction_bytes = _peak_bytes(candidate) - refinement.peak_bytes
        if candidate.prediction.fits:
            self._push_candidate(node, candidate)
        skipped, node.skipped = node.skipped, []
        for larger in skipped:
            if self._may_fit(node, larger):
                self._push(larger.seconds, larger.peak_bytes, node, refinement=larger)
            else:
                node.skipped.append(larger)

    def _may_fit(self, node: Node, refinement: Refinement) -> bool:
        """Return whether a refinement is worth recording, by what others showed of the estimates.

        The smallest one is recorded to learn that, where nothing else has shown it.
        """
        evaluated = self._recorded.of(node.strategies)
        most_bytes = (evaluated.prediction.budget_bytes or 0) * (1 + TOLERANCE)
        if self._is_spent():
            most_bytes *= 1 - TOLERANCE  # nothing over the budget is tried any more
        if node.correction_bytes is not None:
            return refinement.peak_bytes + node.correction_bytes <= most_bytes
        if refinement is evaluated.refinements[-1]:
            most_bytes *= 1 + _LARGEST_ERROR
        return refinement.peak_bytes <= most_bytes

    def _open(self, node: Node) -> bool:
        """Record a node; False if it cannot be smaller than the node it came from."""
        if self._recorded.attempt(node.strategies) is None:
            return False
        node.evaluated = self._recorded.of(node.strategies)
        if node not in self._nodes:
            self._nodes.append(node)
        if node.parent is None or node.parent.evaluated is None:
            return True
        if self._choices.must_split and node.split == 1:
            return True
        mine, before = node.evaluated, node.parent.evaluated
        for added in set(node.strategies) - set(node.parent.strategies) - set(self._ratios):
            # The others were added before, so what each of them costs is known.
            ratio = mine.prediction.step_seconds / self._expected_seconds(node)
            self._ratios[added] = ratio
            self._savings[added] = before.floor_bytes - mine.floor_bytes
        return (
            mine.prediction.bounded_bytes() < before.prediction.bounded_bytes()
            or mine.floor_bytes < before.floor_bytes
        )

    def _opened(self, node: Node) -> None:
        """Queue what follows from a node: itself if it fits, else what makes it smaller."""
        evaluated = self._recorded.of(node.strategies)
        prediction = evaluated.prediction
        is_allowed = self._is_allowed(node.strategies)
        if prediction.fits and is_allowed:
            candidate = Candidate(strategies=node.strategies, prediction=prediction)
            self._push_candidate(node, candidate)
            return
        for refinement in evaluated.refinements if is_allowed else ():
            self._push(refinement.seconds, refinement.peak_bytes, node, refinement=refinement)
        for child in self._neighbours.children(node):
            self._add(child, max(prediction.step_seconds, self._expected_seconds(child)))

    def _expected_seconds(self, node: Node) -> float:
        """Multiply the time of the beginning by what each further member was seen to cost."""
        first = node
        while first.parent is not None:
            first = first.parent
        seconds = self._recorded.of(first.strategies).prediction.step_seconds
        for member in node.strategies:
            if member not in first.strategies:
                seconds *= self._ratios.get(member, 1.0)
        return seconds

    def _add(self, node: Node, least_seconds: float) -> None:
        """Queue a node, once."""
        if node.strategies not in self._seen:
            self._seen.add(node.strategies)
            # Halving is tried before other strategies that may cost as little: it can save most.
            self._push(least_seconds, -node.split, node)

    def _push_candidate(self, node: Node, candidate: Candidate) -> None:
        prediction = candidate.prediction
        self._push(
            prediction.step_seconds,
            prediction.bounded_bytes(),
            node,
            candidate=candidate.strategies,
        )

    def _push(
        self,
        seconds: float,
        peak_bytes: int,
        node: Node,
        *,
        refinement: Refinement | None = None,
        candidate: Strategies | None = None,
    ) -> None:
        shown = candidate or (refinement.strategies if refinement else node.strategies)
        labels = (str(len(shown)), *(strategy.label() for strategy in shown))
        entry = Entry(seconds, peak_bytes, labels, node, refinement, candidate)
        heapq.heappush(self._queue, entry)

    def _is_hopeless(self) -> bool:
        """Test whether what lives all the time and nothing acts on is over the budget by itself."""
        options = (*self._choices.splits, *(o for os in self._choices.fixed_size for o in os if o))
        reached = {category for option in options for category in option.acts_on}
        prediction = next(iter(self.tried.values())).prediction
        least_bytes = sum(
            prediction.by_category.get(category.value, 0)
            for category in _LASTING
            if category not in reached
        )
        return prediction.budget_bytes is not None and least_bytes > prediction.budget_bytes

    def _floor(self, node: Node) -> tuple[bool, int]:
        """Order nodes by the smallest peak to be expected; what is not allowed comes last."""
        return not self._is_allowed(node.strategies), self._recorded.of(node.strategies).floor_bytes

    def _is_allowed(self, strategies: Strategies) -> bool:
        """Return whether a combination has the micro-batches that were required, if any were."""
        return not self._choices.must_split or any(s in self._choices.splits for s in strategies)


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.prediction.bounded_bytes()


def without_recomputation(candidate: Candidate) -> Strategies:
    """Return the combination whose blocks a candidate recomputes."""
    return tuple(s for s in candidate.strategies if not isinstance(s, ActivationCheckpointing))
