"""The page of a proof has every parameter, and what is above its bound stands out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from memfit.reports.verification_html import verification_html
from memfit.verification.proof import Verifications
from memfit.verification.result import Verification

pytest.importorskip("jinja2", reason="pages need the html extra")

EXACT = Verification(
    numerics="exact",
    loss_error=0.0,
    gradient_error=3e-12,
    parameter_error=2e-12,
    buffer_error=0.0,
    worst_gradient="head.weight",
    earned="exact",
    worst="gradient of head.weight",
    dtype="float64",
    bound=1e-10,
    batch_size=8,
    strategies=("micro-batching(2)",),
    gradient_errors={"encoder.weight": 0.0, "head.weight": 3e-12},
    parameter_errors={"encoder.weight": 2e-12, "head.weight": 1e-13},
)
BROKEN = replace(
    EXACT,
    earned="different",
    strategies=("<b>fault</b>",),
    gradient_errors={"encoder.weight": 0.25, "head.weight": math.inf},
    notes=("it is off",),
)


def page_of(*verifications: Verification) -> str:
    return verification_html(
        Verifications(batch_size=8, verifications=verifications), job="job.py:job"
    )


def rows_of(page: str, heading: str) -> list[str]:
    section = page.partition(f"<h2>{heading}")[2].partition("</table>")[0]
    return re.findall(r"<tr>(<td.*?)</tr>", section, flags=re.DOTALL)


def chart_of(page: str) -> dict:
    return json.loads(re.search(r'id="page-data">(.*?)</script>', page)[1])["errors"]


def test_a_proof_that_holds_says_so_and_names_every_parameter() -> None:
    page = page_of(EXACT)
    assert "1 plan kept what was claimed." in page
    rows = rows_of(page, "Parameters, the furthest off first")
    assert ["head.weight" in row for row in rows] == [True, False]
    assert 'data-value="3e-12">3.0e-12' in rows[0]
    assert 'data-value="0.0">0<' in rows[1]
    assert 'class="number no"' not in page
    chart = chart_of(page)
    assert chart["names"] == ["encoder.weight", "head.weight"]
    assert chart["plans"][0]["errors"] == [0.0, 3e-12]
    assert chart["bound"] == 1e-10


def test_what_is_above_its_bound_stands_out_and_comes_first() -> None:
    page = page_of(EXACT, BROKEN)
    assert "Of 2 plans, 1 earned less than claimed." in page
    assert '<p class="verdict bad">' in page
    first, second = rows_of(page, "Parameters, the furthest off first")
    assert "head.weight" in first
    assert "no number" in first
    assert 'class="number no" data-value="0.25"' in second
    assert "&lt;b&gt;fault&lt;/b&gt;" in first
    assert "<b>fault" not in page
    assert chart_of(page)["plans"][1]["errors"] == [0.25, None]


def test_plans_of_hundreds_of_blocks_are_named_in_brief() -> None:
    blocks = " ".join(f"layers.{number}" for number in range(500))
    errors = {f"layers.{number}.weight": 1e-12 for number in range(500)}
    plan = (f"activation-checkpointing(blocks={blocks})",)
    page = page_of(replace(EXACT, strategies=plan, gradient_errors=errors))
    assert page.count("activation-checkpointing(blocks=500 modules)") > 500
    assert blocks not in page


def test_what_is_no_proof_is_not_called_one() -> None:
    page = page_of(replace(EXACT, is_proof=False, earned="unproved", notes=("fp32 only",)))
    assert "1 plan ran as claimed; of 1 it is no proof." in page
    assert "fp32 only" in page


def test_a_proof_without_parameters_has_no_chart() -> None:
    page = page_of(replace(EXACT, gradient_errors={}, parameter_errors={}))
    assert "<script" not in page
    assert "Gradient of each parameter" not in page


def test_json_leaves_single_parameters_out() -> None:
    assert not {"gradient_errors", "parameter_errors"} & set(EXACT.to_json())
