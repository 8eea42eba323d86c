"""Pages of every kind, small and huge, made of records on paper: what a browser is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tests.reports.run_samples import recovered, two_ranks
from tests.reports.step_samples import PLANNED, TRAINING
from tests.reports.test_cards import FAST, SLOW, SMALL, card
from tests.reports.test_compare_reports import comparison, save
from tests.reports.test_plan_reports import PLAN
from tests.reports.test_verification_page import BROKEN, EXACT
from tests.zoo.predictions import make_prediction
from tests.zoo.run_records import CLIMBED, DRIFT, ENDING, LEAK, OUT_OF_MEMORY, STEP
from tests.zoo.run_records import FACTS as RUN_FACTS

from memfit.figures import Prediction, Timeline
from memfit.journal.folder import JournalWriter
from memfit.prediction.compared_cards import best_first
from memfit.prediction.lives import Life
from memfit.prediction.recorded_table import Cell
from memfit.reports.cards_html import cards_html
from memfit.reports.compare_html import compare_html
from memfit.reports.plan_html import plan_html
from memfit.reports.prediction_html import prediction_html
from memfit.reports.run_contents import read_report
from memfit.reports.run_page import run_html
from memfit.reports.table_html import table_html
from memfit.reports.training import write_training
from memfit.reports.verification_html import verification_html
from memfit.units import GIB, MIB
from memfit.verification.proof import Verifications

EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
STEP_TIMELINE = Timeline(
    allocated_bytes=[100 * MIB, 300 * MIB, 700 * MIB, 300 * MIB, 100 * MIB],
    by_category={
        "parameters": [100 * MIB] * 5,
        "saved activations": [0, 200 * MIB, 600 * MIB, 200 * MIB, 0],
    },
    phases=[(0, "forward"), (3, "backward")],
)
NUM_BLOCKS = 400
MODULES = tuple(
    f"transformer.encoder.layers.{block}.{part}"
    for block in range(NUM_BLOCKS)
    for part in ("norm", "up", "act", "down", "attention.out_proj")
)
LONG_JOB = "experiments/ablations/2026/very_long_folder_name/train_language_model.py:make_job"
LONG_PLAN = (
    "activation-checkpointing(blocks=" + " ".join(MODULES[::5]) + ")",
    "micro-batching(2)",
    "optimizer-offload(to=disk)",
)


def life(begin: int, end: int, mib: int, module: str, category: str = "saved activations") -> Life:
    """Make blocks that live over a part of the step."""
    return Life(
        begin=begin, end=end, num_bytes=mib * MIB, num_blocks=1, category=category, module=module,
        source_line="model.py:7",
    )  # fmt: skip


LIVES = (
    life(0, 6, 100, "encoder", "parameters"),
    life(1, 4, 200, "encoder.first"),
    life(2, 3, 380, EVIL),
)


def _huge_step() -> Prediction:
    """Make the step of two thousand modules: up in forward, down in backward."""
    half = len(MODULES)
    saved = [*range(1, half + 1), *range(half - 1, -1, -1)]
    own = 2 * half * MIB
    total = [own + MIB * count for count in saved]
    return replace(
        PLANNED,
        peak_allocated_bytes=max(total),
        by_category={"parameters": own, "saved activations": half * MIB},
        budget_bytes=8 * GIB,
        by_module=dict.fromkeys(MODULES, 3 * MIB),
        timeline=Timeline(
            allocated_bytes=total,
            by_category={
                "parameters": [own] * len(total),
                "saved activations": [MIB * count for count in saved],
            },
            phases=[(0, "forward"), (half, "backward")],
        ),
    )


def _huge_prediction(_: Path) -> str:
    lives = [life(0, 2 * len(MODULES) + 1, 2, module, "parameters") for module in MODULES]
    lives += [
        life(place, 2 * len(MODULES) - place, 1, module) for place, module in enumerate(MODULES)
    ]
    return prediction_html(_huge_step(), (), job=LONG_JOB, lives=lives)


def _huge_plan(_: Path) -> str:
    rows = [
        replace(row, strategies=(*LONG_PLAN, f"tiling({number})"), chosen=False)
        for row in PLAN.considered
        for number in range(30)
    ]
    plan = replace(PLAN, prediction=_huge_step(), considered=[*PLAN.considered, *rows])
    return plan_html(plan, job=LONG_JOB)


def _huge_proof(_: Path) -> str:
    errors = {f"{module}.weight": 1e-12 * place for place, module in enumerate(MODULES)}
    proved = [
        replace(
            EXACT,
            strategies=(LONG_PLAN[0], f"micro-batching({size})"),
            worst=f"gradient of {MODULES[-1]}.weight",
            gradient_errors=errors,
            parameter_errors=errors,
        )
        for size in range(1, 9)
    ]
    return verification_html(Verifications(batch_size=8, verifications=proved), job=LONG_JOB)


def _huge_cards(_: Path) -> str:
    names = [f"workstation-card-{number}-{8 + 2 * number}gb" for number in range(60)]
    cards = best_first(
        [card(name, 8 + 2 * place, 3 / (1 + place)) for place, name in enumerate(names)]
    )
    failures = {"odd-card": "no speeds are known of it. " * 5}
    return cards_html(cards, job=LONG_JOB, failures=failures)


def _table(sizes: Iterable[int], plans: Iterable[str], job: str) -> str:
    settings = {"sequence_length": 4096, "vocabulary": 128_256}
    cells = [
        Cell(
            batch_size=size,
            settings=settings,
            plan=plan,
            prediction=make_prediction(size * MIB, budget_bytes=64 * MIB, fits=size <= 64),
        )
        for plan in plans
        for size in sizes
    ]
    cells[-1] = replace(cells[-1], prediction=None, reason="the batch is too small for the plan.")
    return table_html(cells, job=job, device="cpu")


def _comparison(folder: Path, names: Iterable[str]) -> str:
    folder.mkdir()
    held = {f"{name}.py:7": MIB * (1 + place) for place, name in enumerate(names)}
    before = save(folder / "before.json", {line: n for line, n in held.items() if n > MIB})
    after = save(folder / "after.json", {line: 11 * n for line, n in held.items()})
    return compare_html(comparison(before, after))


def _huge_run(folder: Path) -> str:
    writer = JournalWriter(folder)
    writer.begin(RUN_FACTS)
    for number in range(1, 5001):
        writer.step(replace(STEP, step=number, time_seconds=number * 0.2))
    for number in range(2000):
        event = replace((OUT_OF_MEMORY, CLIMBED, DRIFT, LEAK)[number % 4], step=1 + 2 * number)
        is_leak = number % 4 == 3
        writer.event(replace(event, holder=MODULES[number]) if is_leak else event)
    writer.end(ENDING)
    write_training(folder, replace(TRAINING, planned=_huge_step(), title=LONG_JOB))
    return run_html(read_report(folder))


PAGES: Mapping[str, Callable[[Path], str]] = {
    "prediction": lambda _: prediction_html(
        replace(PLANNED, timeline=STEP_TIMELINE), (), job=EVIL, lives=LIVES
    ),
    "plan": lambda _: plan_html(PLAN, job="job.py:job"),
    "cards": lambda _: cards_html([FAST, SLOW, SMALL], job=EVIL),
    "run": lambda folder: run_html(read_report(recovered(folder))),
    "ranks": lambda folder: run_html(read_report(two_ranks(folder))),
    "proof": lambda _: verification_html(
        Verifications(batch_size=8, verifications=(EXACT, BROKEN)), job="job.py:job"
    ),
    "table": lambda _: _table((8, 64, 512), ("plain",), EVIL),
    "comparison": lambda folder: _comparison(folder, ("net", EVIL)),
    "huge-prediction": _huge_prediction,
    "huge-plan": _huge_plan,
    "huge-cards": _huge_cards,
    "huge-run": _huge_run,
    "huge-proof": _huge_proof,
    "huge-table": lambda _: _table(
        [2**power for power in range(16)], [f"plan-{number}.yaml" for number in range(20)], LONG_JOB
    ),
    "huge-comparison": lambda folder: _comparison(
        folder, [module.replace(".", "/") for module in MODULES]
    ),
}
