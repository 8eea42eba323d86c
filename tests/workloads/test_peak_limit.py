"""A run that went above its budget ends with exit code 3 and its figures."""

import pytest

from memfit.units import GIB
from memfit_workloads.peak_limit import PeakAboveBudgetError, check_peak

RESULT = {
    "budget_bytes": 3 * GIB,
    "measured_peak_bytes": 3 * GIB,
    "predicted_peak_bytes": GIB,
    "run_folder": "runs/x",
}


@pytest.mark.parametrize("told", [{}, {"budget_bytes": None}, {"measured_peak_bytes": None}])
def test_a_peak_within_the_budget_is_passed_over(told):
    check_peak({**RESULT, **told})


def test_a_peak_above_the_budget_ends_with_exit_code_3():
    with pytest.raises(PeakAboveBudgetError, match=r"1\.00 GiB above the budget of 2") as caught:
        check_peak({**RESULT, "budget_bytes": 2 * GIB})
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
