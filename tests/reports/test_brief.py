"""One screen says whether it fits, what it takes, what holds that, and what to do next."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.reports.step_samples import MEASURED, PLAIN, PLANNED
from tests.reports.test_plan_reports import PLAN, RECOMPUTED, ROWS, make_plan, make_remedy, refused
from tests.zoo.terminal import rendered

from memfit.figures import Advice, Answer, Certainty, Holder, Interval, Prediction, Topic
from memfit.peak_changes.moments import StepMoments
from memfit.prediction.advice import in_order
from memfit.reports.brief_plan_text import brief_plan, trade_rows
from memfit.reports.brief_text import SCREEN_LINES, brief_prediction
from memfit.reports.plan_rows import lost_remedies, refusals
from memfit.reports.script_text import brief_script, script_text
from memfit.reports.text import brief_measurement, prediction_table
from memfit.reports.verification_text import brief_proof, proof_table
from memfit.script.prediction import PhasePeak, ScriptPrediction
from memfit.strategies.base import Strategy
from memfit.units import GIB, MIB
from memfit.verification.proof import Verifications
from memfit.verification.result import Verification

COMMAND = "`memfit plan job.py:job` finds the fastest way that fits."
ADVICE = [
    Advice(topic=topic, num_bytes=number * MIB, part_fraction=0.1, subject="8")
    for number, topic in enumerate(Topic, 1)
]
ON_CARD = replace(
    PLAIN,
    device="a100-40gb",
    certainty=Certainty.TABLE,
    budget_of="process",
    budget_bytes=40 * GIB,
    fits=True,
    intervals={"process": Interval(low_bytes=3 * GIB, high_bytes=5 * GIB)},
    by_category={name: (9 - n) * 100 * MIB for n, name in enumerate("abcdefgh")},
    by_module={
        "": GIB,
        **{f"transformer.h.{n}.mlp.c_fc": 130 * MIB for n in range(12)},
        **{f"transformer.h.{n}.attn.c_attn": 90 * MIB for n in range(12)},
        "lm_head": 80 * MIB,
        "wte": 10 * MIB,
    },
    largest=(
        Holder(
            num_bytes=333 * MIB,
            category="saved activations",
            module="lm_head",
            operator="addmm",
            source_line="train.py:12",
        ),
    ),
    answers=(Answer(source_line="train.py:40", operator="item", given="1.0"),),
    notes=("The model is in evaluation mode", "another", "a third"),
)
SCRIPT = ScriptPrediction(
    script="python train.py",
    prediction=ON_CARD,
    phases=[
        PhasePeak(
            phase=name,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            process_bytes=peak,
            host_peak_bytes=MIB,
        )
        for name, peak in (("load", GIB), ("steady step", 4 * GIB), ("evaluation", 6 * GIB))
    ],
    step_peaks_bytes=[GIB],
    moments=StepMoments(lines=(), moments=()),
    answers=ON_CARD.answers,
)


def test_a_prediction_is_one_screen_with_the_verdict_first() -> None:
    expected = """\
Does not fit the budget of 2.00 GiB: peak allocated 3.00 GiB, 1.00 GiB too much.
Predicted step on cpu
  peak       3.00 GiB allocated (exact), 4.00 GiB process
  of budget  150.0 % of 2.00 GiB
  step       800 ms, an estimate, batch size 256
  plan       none: the step as it is

What holds the peak
  saved activations  2.00 GiB  66.7 %  ███████████████
  parameters         1.00 GiB  33.3 %  ███████
In which modules
  encoder  2.00 GiB  66.7 %  ███████████████
  (step)   1.00 GiB  33.3 %  ███████

Next
  -  `memfit plan job.py:job` finds the fastest way that fits.
  --verbose shows all that was found."""
    assert rendered(brief_prediction(PLAIN, (), [COMMAND])) == expected


@pytest.mark.parametrize(
    ("prediction", "advice"), [(PLAIN, []), (ON_CARD, ADVICE), (PLANNED, ADVICE)]
)
def test_nothing_takes_more_than_a_screen(prediction: Prediction, advice: list[Advice]) -> None:
    for width in (80, 120):
        output = rendered(brief_prediction(prediction, advice, [COMMAND]), width)
        assert len(output.splitlines()) <= SCREEN_LINES, output
        assert "\N{HORIZONTAL ELLIPSIS}" not in output


@pytest.mark.parametrize("width", [40, 60])
def test_a_narrow_terminal_cuts_names_and_no_figure(width: int) -> None:
    output = rendered(brief_prediction(ON_CARD, ADVICE, [COMMAND]), width)

    assert max(map(len, output.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in output
    for figure in ("900.0 MiB", "12 x 220.0 MiB", "2.58 GiB", "3.00 GiB"):
        assert figure in output


def test_what_a_card_takes_is_named_with_its_interval_line_and_notes() -> None:
    output = " ".join(rendered(brief_prediction(ON_CARD, ADVICE, [COMMAND])).split())

    for part in (
        "3.00 GiB allocated, 3.50 GiB reserved, 4.00 GiB process (table)",
        "10.0 % of 40.00 GiB; likely 3.00 to 5.00 GiB",
        "largest 333.0 MiB of saved activations: addmm at train.py:12",
        "Answered without being known, which figures may rest on: train.py:40.",
        "The model is in evaluation mode.",
        "12 x 220.0 MiB",
    ):
        assert part in output, part
    assert "another" not in output


def test_a_depth_unfolds_what_a_screen_folds() -> None:
    assert "transformer.h.*.mlp.c_fc" in rendered(prediction_table(ON_CARD, depth=2))
    folded = rendered(brief_prediction(ON_CARD, (), (), depth=1))
    assert "transformer.h.*  12 x" in folded
    assert "c_fc" not in folded


def test_a_plan_is_told_in_words_with_its_results() -> None:
    planned = replace(
        PLANNED, strategies=("micro-batching(8)", "bf16"), numerics="approximate", host_bytes=MIB
    )
    output = rendered(brief_prediction(planned, (), ()))

    assert "run the batch in pieces of 8 (micro-batching)" in output
    assert re.search(r"^ +compute forward and loss in bf16 \(bf16\)$", output, re.MULTILINE)
    assert "results    approximate: close to the plain step, not equal to it" in output
    assert "1.0 MiB on the host" in output


def test_advice_stands_in_the_order_of_what_it_is_worth() -> None:
    ordered = [each.topic for each in in_order(ADVICE)]

    assert ordered == [
        Topic.MICRO_BATCH,
        Topic.SAVED_ACTIVATIONS,
        Topic.OPTIMIZER_TEMPORARIES,
        Topic.EXPANDABLE_SEGMENTS,
        Topic.GUESSED_TERM,
        Topic.BYTES_PER_SAMPLE,
    ]


# --- Plans ---


def test_a_plan_stands_beside_the_step_as_it_is() -> None:
    output = rendered(brief_plan(PLAN, [COMMAND]))

    assert output.startswith("Fits the budget of 150.0 MiB: peak allocated 140.0 MiB, 10.0 MiB")
    assert len(output.splitlines()) <= SCREEN_LINES
    assert re.search(r"as it is +400\.0 MiB +1\.1 s$", output, re.MULTILINE)
    assert re.search(r"this plan +140\.0 MiB +-65\.0 % +1 s +-9\.1 %", output)
    assert re.search(r"more memory +160\.0 MiB +-60\.0 % +960 ms +-12\.7 % +with e", output)
    assert re.search(r"less memory +120\.0 MiB +-70\.0 % +1\.2 s +\+9\.1 %", output)
    assert re.search(r"--allow bf16 +70\.0 MiB .* changes the results", output)
    assert "run the batch in pieces of 8 (micro-batching)" in output
    assert "compute blocks.0-11 again in backward, but for 4 results" in output


def test_a_plain_plan_is_compared_with_nothing() -> None:
    chosen = replace(ROWS[6], chosen=True, fits=True)
    plan = replace(make_plan(400, 1.1), considered=(chosen,))

    assert [row.name for row in trade_rows(plan)] == ["this plan"]
    output = rendered(brief_plan(plan))
    assert "none: the step as it is" in output
    assert "to plain" not in output


def test_what_would_have_saved_most_is_told_first() -> None:
    remedies = (
        make_remedy("tiling", 10, "x"),
        make_remedy("micro-batching", 150, "y"),
        make_remedy("loss-chunking", 160, "z"),
    )
    total = "its mean is over ragged tokens; return memfit.Total(sum, count). " * 4
    reasons = (
        refused("tiling", "nothing wide."),
        refused("loss-chunking", Strategy.none_offered),
        refused("micro-batching", total),
    )
    around = {"considered": ROWS, "remedies": remedies, "refused": reasons}
    plan = replace(make_plan(140, 1.0, RECOMPUTED), **around)

    assert list(refusals(plan).values()) == [["loss-chunking"], ["micro-batching"], ["tiling"]]
    assert [each.names for each in lost_remedies(plan)] == ["micro-batching"]
    output = " ".join(rendered(brief_plan(plan)).split())
    assert "micro-batching could take off up to 150.0 MiB, but its mean is over" in output
    assert lost_remedies(replace(PLAN, **around)) == (), "it is cut already"
    around["remedies"] += (make_remedy("batchnorm-replay", 150, "not needed"),)
    assert lost_remedies(replace(plan, **around)) == (), "it could be cut"


def test_a_plan_with_much_to_say_is_one_screen() -> None:
    long = f"`memfit verify {'folder/' * 14}job.py:job --plan plan.yaml` proves it."
    plan = replace(PLAN, reasons=("because " * 14, "since " * 20), notes=("note " * 60,))
    output = rendered(brief_plan(plan, [long]))

    assert len(output.splitlines()) <= SCREEN_LINES


# --- Measurements, proofs and scripts ---


def test_a_measurement_says_first_how_far_the_prediction_was_off() -> None:
    output = rendered(brief_measurement(MEASURED, PLANNED))

    assert output.startswith(
        "The step took 1.56 GiB and 1.25 s; predicted were 1.50 GiB (-4.00 %)."
    )
    assert len(output.splitlines()) <= SCREEN_LINES
    assert (
        "predicted"
        not in rendered(
            brief_measurement(replace(MEASURED, predicted_peak_bytes=None))
        ).splitlines()[0]
    )


def test_a_script_is_judged_by_its_worst_phase() -> None:
    output = rendered(brief_script(SCRIPT, [COMMAND]))

    assert output.startswith("Fits the budget of 40.00 GiB: process 6.00 GiB, 34.00 GiB to spare.")
    assert "The highest peak is that of evaluation: 6.00 GiB" in output
    assert len(output.splitlines()) <= SCREEN_LINES
    assert "train.py:40" in output
    assert "Terms" not in output
    assert "Answered without knowing" in rendered(script_text(SCRIPT, top=3))


def test_a_proof_says_first_whether_claims_are_kept() -> None:
    nothing = Verifications(batch_size=4, verifications=(), notes=(), failed=())
    assert rendered(brief_proof(nothing)).startswith("No plan could be tried.")
    kept = Verification(
        numerics="exact",
        loss_error=0.0,
        gradient_error=2e-16,
        parameter_error=0.0,
        buffer_error=0.0,
        worst_gradient="w",
        earned="exact",
        worst="gradient of w",
        dtype="float64",
        bound=1e-10,
        batch_size=4,
        strategies=("micro-batching(2)",),
    )
    both = replace(nothing, verifications=(kept, replace(kept, is_proof=False)))
    assert " ".join(rendered(brief_proof(both)).split()).startswith(
        "All 2 plans keep what is claimed; where that is exact, the largest error is 2.0e-16; 1 as far"
    )
    broken = replace(kept, earned="approximate")
    output = rendered(brief_proof(replace(nothing, verifications=(kept, broken))))
    assert output.startswith("1 of 2 plans do not keep what is claimed: micro-batching(2).")
    assert "gradient of w" not in output
    assert "gradient of w" in rendered(proof_table(replace(nothing, verifications=(kept,))))
