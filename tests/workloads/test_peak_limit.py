"""A run that went above its budget ends with exit code 3 and its figures."""

import json

import pytest

import memfit_workloads
from memfit.cli.main import main
from memfit.errors import PeakAboveBudgetError
from memfit.units import GIB
from memfit_workloads.peak_limit import check_peak

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


@pytest.mark.parametrize("workload", memfit_workloads.workload_names())
def test_a_run_above_its_budget_says_so_in_json_and_ends_with_exit_code_3(
    workload, monkeypatch, capsys
):
    class Training:
        summary = "trains"

        def add_arguments(self, parser):
            pass

        def run(self, args, console):
            return check_peak({**RESULT, "budget_bytes": 2 * GIB})

    monkeypatch.setattr(memfit_workloads, "load_workload", lambda name: Training())
    assert main(["train", workload, "--json"]) == 3
    written = capsys.readouterr()
    told = json.loads(written.out)
    assert (told["is_within_budget"], told["measured_peak_bytes"]) == (False, 3 * GIB)
    assert "above the budget" in written.err
