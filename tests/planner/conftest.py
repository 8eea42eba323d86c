"""What the tests of planning share."""

from __future__ import annotations

import pytest

from memfit.planner.search.evaluation import JobEvaluator


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """List what is recorded, besides the job as it is."""
    seen: list[object] = []
    record = JobEvaluator._recorded_now

    def noted(self, strategies, job):
        seen.append(strategies)
        return record(self, strategies, job)

    monkeypatch.setattr(JobEvaluator, "_recorded_now", noted)
    return seen
