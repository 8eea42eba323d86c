"""Made-up runs as the journals that they would have left, for the tests of what is shown of them.

Run: python tests/reports/run_samples.py FOLDER    # writes one folder per run into it
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from tests.reports.step_samples import METRICS, TRAINING

from memfit.figures import Timeline
from memfit.journal.folder import JournalWriter, rank_folder
from memfit.journal.records import (
    DriftEvent,
    Ending,
    LeakEvent,
    OutOfMemoryEvent,
    PlanClimbedEvent,
    Reason,
    RunFacts,
    StepRecord,
)
from memfit.journal.timeline import StepTimeline, write_timeline
from memfit.reports.training import METRICS_NAME, write_training
from memfit.units import GIB, MIB

FACTS = RunFacts(
    title="train.py",
    command="memfit run --budget 6GiB -- python train.py --epochs 90 --batch-size 256",
    device="cpu",
    started_at="2026-03-02T09:14:05+00:00",
    process_id=2**31 - 1,
    budget_bytes=6 * GIB,
)
NO_PROCESS = 2**31 - 1
LEAK = LeakEvent(
    step=600,
    kind="metric-state",
    holder="model.head.metrics.auroc.preds",
    chain=("train.py: trainer", ".model", ".head", ".metrics['auroc']", ".preds"),
    source_line="train.py:88",
    growth_bytes_per_step=1.1 * MIB,
    total_growth_bytes=int(3.8 * GIB),
    num_steps=3400,
    place="host",
    sentence=(
        "`model.head.metrics.auroc.preds` grows by 1.1 MiB with every validation batch and is "
        "never reset. Call `metrics.reset()` at the end of each validation."
    ),
)
SMALL_LEAK = replace(
    LEAK,
    step=900,
    kind="list",
    holder="losses",
    chain=("train.py: main", "losses"),
    source_line="train.py:41",
    growth_bytes_per_step=9000.0,
    total_growth_bytes=int(31 * MIB),
    sentence="`losses` keeps a tensor with its graph per step. Append `loss.item()` instead.",
)


def make_steps(num_steps: int, **curves: Callable[[int], float | None]) -> list[StepRecord]:
    """Make steps, each field but the times a function of the step's number."""
    return [
        StepRecord(
            step=number,
            time_seconds=0.21 * number,
            step_seconds=0.2 + 0.02 * (number % 3),
            **{name: _whole(curve(number)) for name, curve in curves.items()},
        )
        for number in range(1, num_steps + 1)
    ]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def write_run(folder: Path, facts, steps, events=(), ending=None, rank: int = 0) -> Path:
    """Write the journal of one rank."""
    writer = JournalWriter(rank_folder(folder, rank))
    if facts is not None:
        writer.begin(facts)
    for record in steps:
        writer.step(record)
    for event in events:
        writer.event(event)
    if ending is None:
        writer.close()
    else:
        writer.end(ending)
    return folder


def leaked(folder: Path) -> Path:
    """Write a run whose metrics grew until the budget was used up."""
    noise = random.Random(1)
    steps = make_steps(
        3400,
        peak_allocated_bytes=lambda n: (
            (1.9 + 0.0011 * n + 0.05 * noise.random()) * GIB if n < 4 or n % 37 == 0 else None
        ),
        host_bytes=lambda n: (2.4 + 0.0011 * n) * GIB,
        predicted_peak_bytes=lambda n: 2.0 * GIB,
        micro_batch_size=lambda n: 256,
        num_samples=lambda n: 256,
    )
    drift = DriftEvent(
        step=111,
        predicted_bytes=2 * GIB,
        measured_bytes=int(2.12 * GIB),
        category="gradients, saved activations and temporaries",
        predicted_category_bytes=int(1.4 * GIB),
        measured_category_bytes=int(1.52 * GIB),
    )
    ending = Ending(
        reason=Reason.LEAK,
        ended_by="budget-exceeded",
        exit_code=1,
        sentence=(
            "Step 3,401 went over the enforced budget of 6.00 GiB, and "
            "`model.head.metrics.auroc.preds` accounts for 3.80 GiB of it."
        ),
        remedy="Call `metrics.reset()` at the end of each validation (train.py:88).",
        evidence=(
            "aten::cat wanted 12.0 MiB beside 5.99 GiB, in validate (train.py:88)",
            "retained memory grew by 1.1 MiB per step over 3,400 equal steps",
        ),
        num_steps=3400,
        host_peak_bytes=int(6.2 * GIB),
        budget_bytes=6 * GIB,
        leaks=(LEAK, SMALL_LEAK),
    )
    return write_run(folder, FACTS, steps, (drift, LEAK, SMALL_LEAK), ending)


def killed_by_host(folder: Path) -> Path:
    """Write a run that the host's out-of-memory killer ended."""
    steps = make_steps(
        412,
        peak_allocated_bytes=lambda n: 7.2 * GIB,
        peak_reserved_bytes=lambda n: 8.1 * GIB,
        host_bytes=lambda n: (6 + 0.02 * n + 2 * (n > 380)) * GIB,
        allocator_retries=lambda n: 0,
        micro_batch_size=lambda n: 32,
    )
    ending = Ending(
        reason=Reason.HOST_OUT_OF_MEMORY_KILLER,
        ended_by="host-out-of-memory-killer",
        exit_code=137,
        sentence="The host ran out of memory and its kernel killed the process (SIGKILL).",
        remedy="Use fewer DataLoader workers, or a host with more than 16.0 GiB.",
        evidence=(
            "memory.events: oom_kill went from 0 to 1",
            "the process held 15.7 GiB 0.3 s before, of 16.0 GiB in its cgroup",
        ),
        num_steps=412,
        host_peak_bytes=int(16.1 * GIB),
        signal=9,
    )
    facts = replace(
        FACTS,
        title="finetune.sh",
        command="memfit run -- bash finetune.sh",
        device="NVIDIA A10G",
        budget_bytes=None,
    )
    return write_run(folder, facts, steps, (), ending)


def over_budget(folder: Path) -> Path:
    """Write a run that went over its budget in its third step."""
    steps = make_steps(
        2,
        peak_allocated_bytes=lambda n: 1.2 * GIB + 300 * MIB * n,
        host_bytes=lambda n: 2.9 * GIB,
    )
    ending = Ending(
        reason=Reason.BUDGET_EXCEEDED,
        ended_by="budget-exceeded",
        exit_code=1,
        sentence="Step 3 went over the enforced budget of 2.00 GiB in forward.",
        remedy="Plan for it: `memfit plan job.py:job --budget 2GiB`.",
        evidence=(
            "aten::addmm wanted 512.0 MiB beside 1.71 GiB, in Decoder.forward (model.py:31)",
        ),
        num_steps=2,
        peak_allocated_bytes=int(2.21 * GIB),
        budget_bytes=2 * GIB,
    )
    facts = replace(
        FACTS, command="memfit run --budget 2GiB -- python train.py", budget_bytes=2 * GIB
    )
    return write_run(folder, facts, steps, (), ending)


PLANS = (
    ("bf16", "micro-batching(64)"),
    ("bf16", "micro-batching(32)"),
    (
        "bf16",
        "activation-checkpointing(blocks=layers.0-23, keep=addmm.0 addmm.1)",
        "micro-batching(32)",
    ),
)
PLAN_FILE = """memfit_plan: 1
device: t4
numerics: approximate
strategies:
- name: bf16
- name: micro-batching
  micro_batch_size: 64
ladder:
- - name: bf16
  - name: micro-batching
    micro_batch_size: 32
- - name: bf16
  - name: micro-batching
    micro_batch_size: 16
- - name: bf16
  - name: micro-batching
    micro_batch_size: 8
"""


def level(number: int) -> float:
    """Return the GiB that a step of the recovered run takes."""
    return 13.1 if number < 230 else 9.4 if number < 610 else 6.8 if number < 1210 else 9.4


def recovered(folder: Path) -> Path:
    """Write a run that came through two out-of-memory errors and climbed again."""
    noise = random.Random(2)

    steps = make_steps(
        1500,
        peak_allocated_bytes=lambda n: (level(n) + 0.35 * noise.random()) * GIB,
        peak_reserved_bytes=lambda n: (level(n) + 1.1) * GIB,
        predicted_peak_bytes=lambda n: level(n) * GIB,
        host_bytes=lambda n: 3.1 * GIB,
        allocator_retries=lambda n: 3 if n > 230 else 0,
        micro_batch_size=lambda n: 64 if n < 230 else 32,
        num_samples=lambda n: 512,
    )
    cause = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 14.56 GiB"
    )
    events = [
        OutOfMemoryEvent(
            step=230, phase="backward", cause=cause, plan=PLANS[0], next_plan=PLANS[1],
            num_steps_repeated=0,
        ),
        OutOfMemoryEvent(
            step=610, phase="optimizer", cause=cause, plan=PLANS[1], next_plan=PLANS[2],
            num_steps_repeated=14,
        ),
        PlanClimbedEvent(step=1210, plan=PLANS[2], next_plan=PLANS[1]),
    ]  # fmt: skip
    ending = Ending(
        reason=Reason.DONE,
        ended_by="done",
        exit_code=0,
        sentence="1,500 steps in 5 min 15 s; two of them ran out of memory and were run again.",
        remedy="",
        num_steps=1500,
    )
    facts = replace(
        FACTS,
        title="gpt-small",
        command="examples/transformer.py:job",
        device="NVIDIA T4",
        budget_bytes=int(14.56 * GIB),
        strategies=PLANS[0],
    )
    write_run(folder, facts, steps, events, ending)
    (folder / "plan.yaml").write_text(PLAN_FILE)
    write_timeline(
        folder,
        StepTimeline(step=2, measured=make_timeline(1.02), predicted=make_timeline(1.0)),
    )
    return folder


def make_timeline(factor: float) -> Timeline:
    """Make a step of 600 events: activations rise in forward and fall in backward."""
    lasting, states = 3 * GIB, 4 * GIB
    saved = [
        int(factor * 5 * GIB * math.sin(math.pi * n / 500)) if n < 500 else 0 for n in range(600)
    ]
    gradients = [int(GIB * min(1, max(0, (n - 250) / 250))) for n in range(600)]
    parts = {
        "parameters": [lasting] * 600,
        "optimizer state": [states] * 600,
        "gradients": gradients,
        "saved activations": saved,
    }
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    return Timeline(
        allocated_bytes=totals,
        by_category=parts,
        phases=[(0, "forward"), (250, "backward"), (500, "optimizer")],
    )


def two_ranks(folder: Path) -> Path:
    """Write a run of two ranks, of which the second ran out of memory for good."""
    for rank, gib in ((0, 5.0), (1, 6.4)):
        facts = replace(
            FACTS,
            title="ddp.py",
            command="memfit run -- torchrun --nproc-per-node 2 ddp.py",
            device="NVIDIA T4",
            budget_bytes=8 * GIB,
            rank=rank,
            num_ranks=2,
        )
        steps = make_steps(
            80,
            peak_allocated_bytes=lambda n, gib=gib: (gib + 0.01 * n) * GIB,
            peak_reserved_bytes=lambda n, gib=gib: (gib + 1.1) * GIB,
            host_bytes=lambda n, rank=rank: (3.0 + rank) * GIB,
            allocator_retries=lambda n, rank=rank: 4 * rank,
        )
        events = [
            OutOfMemoryEvent(
                step=40, phase="forward", cause="CUDA out of memory. Tried to allocate 1.00 GiB",
                plan=(), next_plan=("micro-batching(16)",), num_steps_repeated=0, rank=1,
            )
        ] if rank == 0 else []  # fmt: skip
        ending = Ending(
            reason=Reason.OUT_OF_MEMORY,
            ended_by="out-of-memory",
            exit_code=1,
            sentence="Rank 1 ran out of memory in step 81: it asked for 512.0 MiB.",
            remedy="Give it a smaller batch, or plan for 8GiB with `memfit plan`.",
            num_steps=80,
        )
        write_run(folder, facts, steps, events, ending, rank)
    return folder


def trained(folder: Path) -> Path:
    """Write a run of a training system inside its budget."""
    steps = make_steps(
        3, peak_allocated_bytes=lambda n: 1590 * MIB, predicted_peak_bytes=lambda n: 1536 * MIB
    )
    ending = Ending(
        reason=Reason.DONE, ended_by="done", exit_code=0, sentence="3 steps were run.", remedy=""
    )
    write_run(folder, replace(FACTS, budget_bytes=2 * GIB), steps, (), ending)
    write_training(folder, TRAINING)
    lines = (json.dumps({**line, "valid": {"both": {"mrr": 0.125}}}) + "\n" for line in METRICS)
    (folder / METRICS_NAME).write_text("".join(lines) + '{"epoch": 3, "lo')
    return folder


SAMPLES: Mapping[str, Callable[[Path], Path]] = {
    "leaked": leaked,
    "killed-by-host": killed_by_host,
    "over-budget": over_budget,
    "recovered": recovered,
    "two-ranks": two_ranks,
    "trained": trained,
}


if __name__ == "__main__":
    for name, write in SAMPLES.items():
        write(Path(sys.argv[1]) / name)
