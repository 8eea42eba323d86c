"""What the loops of all frameworks share, apart from any framework."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.errors import JobFunctionError
from memfit.integrations.windows import as_without_a_plan, flags_of, set_flags


def test_what_a_model_raises_comes_out_as_without_a_plan():
    cause = RuntimeError("the module's own")

    with pytest.raises(RuntimeError, match="the module's own") as caught, as_without_a_plan():
        raise JobFunctionError("loss", "a tensor", "it failed") from cause

    assert caught.value is cause
    assert caught.value.__suppress_context__


def test_an_error_of_memfit_itself_stays_what_it_is():
    with pytest.raises(JobFunctionError), as_without_a_plan():
        raise JobFunctionError("loss", "a tensor", "it returned none")


def test_groups_say_again_what_they_said_before_a_plan():
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), foreach=True)
    own = flags_of(optimizer.param_groups)
    set_flags(optimizer.param_groups, [{"foreach": False, "fused": True}])
    assert flags_of(optimizer.param_groups) == [{"foreach": False, "fused": True}]

    set_flags(optimizer.param_groups, own)

    assert flags_of(optimizer.param_groups) == [{"foreach": True, "fused": None}]
