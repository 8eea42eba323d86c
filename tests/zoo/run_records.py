"""Made-up records of a run (facts, a step, an event of each kind, its end), and who hears them."""

from __future__ import annotations

from memfit.journal.records import (
    DriftEvent,
    Ending,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    Reason,
    RunFacts,
    StepRecord,
    UnprovedPlanEvent,
)
from memfit.units import GIB, MIB

FACTS = RunFacts(
    title="resnet", command="job.py:job", device="cpu", started_at="2026-01-01T00:00:00+00:00",
    process_id=3, budget_bytes=2 * GIB, strategies=("tiling",),
)  # fmt: skip
STEP = StepRecord(
    step=120, time_seconds=25.0, step_seconds=0.21, peak_allocated_bytes=int(1.43 * GIB),
    peak_reserved_bytes=int(1.6 * GIB), predicted_peak_bytes=int(1.45 * GIB), allocator_retries=0,
    host_bytes=int(3.1 * GIB), micro_batch_size=32, num_samples=64,
)  # fmt: skip
OUT_OF_MEMORY = OutOfMemoryEvent(
    step=7, phase="backward", cause="x", plan=("micro-batching(32)",),
    next_plan=("micro-batching(16)",), num_steps_repeated=2,
)  # fmt: skip
UNPROVED = UnprovedPlanEvent(
    step=1,
    plan=("micro-batching(16)",),
    strategy="micro-batching",
    reason="The loss calls a function that is written in C.",
    trial="the same loss on one batch.",
)
CLIMBED = PlanClimbedEvent(step=90, plan=("micro-batching(16)",), next_plan=())
DRIFT = DriftEvent(
    step=9, predicted_bytes=100 * MIB, measured_bytes=120 * MIB, category="buffers",
    predicted_category_bytes=0, measured_category_bytes=20 * MIB,
)  # fmt: skip
LEAK = LeakEvent(
    step=30, kind="list", holder="losses", chain=("train.py: losses", "[7]"),
    source_line="train.py:12", growth_bytes_per_step=4.0, total_growth_bytes=40, num_steps=10,
    place="host", sentence="losses grows.",
)  # fmt: skip
ENDING = Ending(
    reason=Reason.LEAK, ended_by="out-of-memory", exit_code=1, sentence="It leaked.", remedy="Stop.",
    leaks=(LEAK,),
)  # fmt: skip


class Noting:
    """Listen, note what is heard, and perhaps fail."""

    def __init__(self, fails_at: str = "") -> None:
        self.heard: list[tuple[str, object]] = []
        self._fails_at = fails_at

    def __getattr__(self, name):
        def hear(value):
            self.heard.append((name, value))
            if name == self._fails_at:
                raise OSError("disk full")

        return hear
