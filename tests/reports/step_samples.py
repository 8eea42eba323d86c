"""Made-up predictions and measurements of one step, for the tests of what is shown of them."""

from __future__ import annotations

from dataclasses import replace

from memfit.figures import (
    Certainty,
    ConsideredPlan,
    Holder,
    Measurement,
    Prediction,
    Term,
    Timeline,
)
from memfit.reports.training import Training
from memfit.units import GIB, MIB


def make_timeline(*peaks_mib: int) -> Timeline:
    """Make a step that holds 100 MiB of parameters and these saved activations."""
    activations = [peak * MIB for peak in peaks_mib]
    return Timeline(
        allocated_bytes=[100 * MIB + value for value in activations],
        by_category={
            "parameters": [100 * MIB] * len(activations),
            "saved activations": activations,
        },
        phases=[(0, "forward"), (len(activations) // 2, "backward")],
    )


PLAIN = Prediction(
    device="cpu",
    batch_size=256,
    peak_allocated_bytes=3 * GIB,
    peak_reserved_bytes=3 * GIB + 512 * MIB,
    process_bytes=4 * GIB,
    first_step_peak_bytes=3 * GIB + 1 * MIB,
    step_seconds=0.8,
    by_category={"saved activations": 2 * GIB, "parameters": 1 * GIB, "batch": 0},
    by_module={"encoder": 2 * GIB, "": 1 * GIB},
    strategies=(),
    numerics="exact",
    certainty=Certainty.EXACT,
    budget_bytes=2 * GIB,
    fits=False,
    timeline=make_timeline(0, 900, 2972, 500, 0),
)
CHOSEN = ("micro-batch(2)", "checkpoint(encoder)")
PLANNED = replace(
    PLAIN,
    peak_allocated_bytes=GIB + 512 * MIB,
    first_step_peak_bytes=GIB + 513 * MIB,
    step_seconds=1.0,
    by_category={"saved activations": 512 * MIB, "parameters": 1 * GIB},
    by_module={"encoder": 512 * MIB, "": 1 * GIB},
    strategies=CHOSEN,
    fits=True,
    terms=(
        Term(name="blocks", num_bytes=1537 * MIB, certainty=Certainty.EXACT, source="recorded"),
        Term(name="context", num_bytes=77 * MIB, certainty=Certainty.GUESS, source="no record"),
    ),
    largest=(
        Holder(num_bytes=333 * MIB, category="parameters", module="encoder", operator="aten::to"),
        Holder(num_bytes=222 * MIB, category="temporaries", module="", operator="aten::mm"),
    ),
    timeline=make_timeline(0, 400, 1436, 300, 0),
)
MEASURED = Measurement(
    device="cpu",
    batch_size=256,
    peak_allocated_bytes=1600 * MIB,
    peak_reserved_bytes=None,
    process_bytes=5 * GIB,
    first_step_peak_bytes=1601 * MIB,
    step_seconds=1.25,
    by_category={"saved activations": 576 * MIB, "parameters": 1 * GIB},
    strategies=CHOSEN,
    numerics="exact",
    predicted_peak_bytes=PLANNED.peak_allocated_bytes,
    timeline=make_timeline(0, 410, 1500, 310, 0),
)
REFUSED = ConsideredPlan(
    strategies=(),
    numerics="exact",
    peak_bytes=3 * GIB,
    step_seconds=0.8,
    fits=False,
    chosen=False,
    reason="1.00 GiB above the budget.",
)
ROWS = (
    REFUSED,
    replace(
        REFUSED,
        strategies=CHOSEN,
        peak_bytes=1536 * MIB,
        step_seconds=1.0,
        fits=True,
        chosen=True,
        reason="The fastest exact plan that fits.",
    ),
    replace(
        REFUSED,
        strategies=("bf16",),
        numerics="approximate",
        peak_bytes=1717 * MIB,
        step_seconds=0.52,
        fits=True,
        reason="Approximate numerics were not allowed.",
    ),
)
TRAINING = Training(
    title="conve on <FB15k-237>",
    command="memfit train conve --budget 2GiB",
    budget_bytes=2 * GIB,
    plain=PLAIN,
    planned=PLANNED,
    considered=ROWS,
    measured=MEASURED,
    run_peak_bytes=1590 * MIB,
    results={"test_mrr": 0.3251, "hits": {"at_1": 0.237}, "train_seconds": 123.0},
)
METRICS = (
    {"epoch": 1, "loss": 2.125, "valid_mrr": 0.125, "seconds": 61.0},
    {"epoch": 2, "loss": 1.75, "valid_mrr": 0.25, "seconds": 62.0, "peak_bytes": 1601 * MIB},
)
