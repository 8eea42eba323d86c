"""Records plans for a search, and takes those that an earlier call has kept from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace

import torch
from torch.utils._pytree import tree_leaves

from memfit.errors import StrategyError
from memfit.job import Job
from memfit.planner.cache.recording_cache import RecordingCache
from memfit.planner.search.candidates import Candidate, Strategies
from memfit.planner.search.evaluation import Foreseen, JobEvaluator
from memfit.prediction.recording import Recording
from memfit.separation.findings import Findings
from memfit.separation.separation import Separation
from memfit.session.batches import BatchLayout, shapes_of
from memfit.strategies.activation_offload import ActivationOffload

Name = tuple[object, ...]
"""All that a recording depends on besides the job and the device."""


@dataclass(frozen=True, slots=True)
class JobCache:
    """A cache, for batches of such a shape; with None in its place nothing is kept."""

    cache: RecordingCache | None = None
    batch: str = ""
    """Writes the shapes and types of a batch, which may change where no code does."""

    @classmethod
    def of(cls, cache: RecordingCache | None, job: Job, layout: BatchLayout) -> JobCache:
        """Look at a job's batches, where anything is kept."""
        if cache is None:
            return cls()
        leaves = tree_leaves(shapes_of(job, job.batch_size))
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
        return cls(cache, repr((shapes, layout.dims, job.batch_size)))

    def get(self, *name: object) -> object | None:
        """Return what was kept under a name."""
        return None if self.cache is None else self.cache.get(self.batch, *name)

    def put(self, value: object, *name: object) -> None:
        """Keep a value under a name."""
        if self.cache is not None:
            self.cache.put(value, self.batch, *name)

    def has(self, *name: object) -> bool:
        """Return whether something is kept under a name."""
        return self.cache is not None and self.cache.has(self.batch, *name)

    def plain(self, job: Job, layout: BatchLayout, record: Callable[[], Recording]) -> Recording:
        """Return the recording of the job as it is, made now if it was not kept."""
        kept = self.get("plain")
        if self.cache is not None and isinstance(kept, dict):
            self.cache.num_found += 1
            facts = replace(kept["facts"], separation=Separation(job, layout))
            return Recording(**{**kept, "facts": facts})
        found = record()
        if not found.spill.has_moved and not found.spill.peak_host_bytes:
            values = {each.name: getattr(found, each.name) for each in fields(found)}
            del values["spill"]
            self.put({**values, "facts": replace(found.facts, separation=None)}, "plain")
        return found

    def learn(self, separation: Separation | None, *name: object) -> None:
        """Tell of what was found out about pieces of a batch."""
        found = self.get("findings", *name)
        if separation is not None and isinstance(found, Findings):
            separation.learn(found)

    def keep_findings(self, separation: Separation | None, *name: object) -> None:
        """Keep what was found out about pieces of a batch."""
        if self.cache is None or separation is None:
            return
        found = separation.findings()
        # What a trial could not tell may be for want of memory, which there is another time.
        told = {k: each for k, each in found.settled.items() if each.is_settled or each.is_refuted}
        self.put(replace(found, settled=told), "findings", *name)


@dataclass(frozen=True, slots=True)
class KeptRecordings:
    """Record a job under combinations of strategies, each once for all calls."""

    evaluator: JobEvaluator
    kept: JobCache
    besides: dict[Strategies, Candidate] = field(default_factory=dict)
    """What copies of this process found besides what they were asked."""

    def in_short(self, strategies: Strategies) -> Candidate:
        """Record the step, with a few micro-batches only where there are many."""
        return self._of("short", strategies, self.evaluator.in_short)

    def in_full(self, strategies: Strategies) -> Candidate:
        """Record the whole step; of a long one, what stands for it."""
        return self._of("full", strategies, self.evaluator.in_full)

    def before_proof(self, strategies: Strategies) -> None:
        """Record pieces while a copy looks into them, unless an earlier call has recorded them."""
        if not self.is_known(strategies):
            self.evaluator.record_before_proof(strategies)

    def accept(self, found: Foreseen) -> Candidate | None:
        """Take over what a copy of this process has recorded in short, and keep it."""
        name = self._name("short", found.candidate.strategies)
        candidate = self.evaluator.accept(found)
        if candidate is not None:
            self.kept.put(found, *name)
            for each in found.besides:
                alone = replace(found, candidate=each, besides=())
                self.kept.put(alone, *self._name("short", each.strategies))
                self.besides[each.strategies] = each
        return candidate

    def is_known(self, strategies: Strategies) -> bool:
        """Return whether a combination was recorded in short by an earlier call."""
        return self.kept.has(*self._name("short", strategies))

    def _of(
        self, kind: str, strategies: Strategies, record: Callable[[Strategies], Candidate]
    ) -> Candidate:
        name = self._name(kind, strategies)
        found = self.kept.get(*name)
        candidate = self.evaluator.accept(found) if isinstance(found, Foreseen) else None
        if self.kept.cache is not None and candidate is not None:
            if obstacle := self.evaluator.space.obstacle(strategies):
                raise StrategyError(*obstacle)  # it was allowed, or told by a trial, in that call
            self.kept.cache.num_found += 1
            return self.evaluator.under_budget(candidate)
        if kind == "short" and strategies in self.besides:
            return self.besides[strategies]
        new = self.evaluator.learning(record, strategies)
        self.kept.put(new, *name)
        return new.candidate

    def _name(self, kind: str, strategies: Strategies) -> Name:
        """Name a recording by all that it depends on besides the job and the device."""
        evaluator = self.evaluator
        return (
            *(kind, strategies, evaluator.has_unlike_pieces),
            *(evaluator.space.may_recompute, evaluator.space.offers(ActivationOffload.name)),
        )
