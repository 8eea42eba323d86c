"""What a user brings is checked, and each fault is named with what to do about it."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.zoo.job_files import LINEAR_JOB as SOURCE
from torch import nn

import memfit
from memfit import MemfitError, Total
from memfit.errors import (
    BatchSizeIgnoredError,
    JobError,
    JobFileError,
    JobFunctionError,
    JobNameError,
    LossNotScalarError,
    StrategyError,
)
from memfit.job import expected_signature, load_job
from memfit.session.batches import find_layout


@pytest.fixture
def job_file(tmp_path):
    """Return a function that writes a job file."""

    def write(source: str, name: str = "my_job.py") -> str:
        path = tmp_path / name
        path.write_text(source)
        return str(path)

    return write


# --- Loading ---


def test_a_job_is_loaded_by_file_and_name(job_file):
    job = load_job(f"{job_file(SOURCE)}:job")
    assert job.batch_size == 8
    assert isinstance(job.model(), nn.Linear)


def test_the_name_may_be_left_out_where_there_is_one_job(job_file):
    assert load_job(job_file(SOURCE)).batch_size == 8


def test_a_name_may_be_a_function_that_builds_the_job(job_file):
    path = job_file(SOURCE + "\ndef build():\n    return job\n")
    assert load_job(f"{path}:build").batch_size == 8


def test_a_job_file_may_import_what_lies_beside_it(job_file):
    job_file("batch_size = 5\n", "its_neighbour.py")
    path = job_file("from its_neighbour import batch_size\n" + SOURCE.replace("=8", "=batch_size"))
    before = list(sys.path)
    assert load_job(path).batch_size == 5
    assert sys.path[: len(before)] == before  # its folder comes last, for what functions import


@pytest.mark.parametrize(
    ("reference", "error", "fragments"),
    [
        ("no_such.py:job", JobFileError, ["no_such.py", "there is no such file", "FILE.py:name"]),
        ("", JobFileError, ["there is no such file", "FILE.py:name"]),
        (".", JobFileError, ["there is no such file"]),
    ],
)
def test_a_missing_file_is_named(reference, error, fragments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        load_job(reference)
    assert all(fragment in str(caught.value) for fragment in fragments)


@pytest.mark.parametrize(
    ("source", "name", "error", "message"),
    [
        (f"{SOURCE}\nother = job\n", ":jobs", JobNameError, r"named 'jobs'\. .*: job, other"),
        (f"{SOURCE}\nother = job\n", "", JobNameError, "The jobs there: job, other"),
        ("x = 1", ":x", JobNameError, r"No memfit\.Job is seen in it"),
        ("x = 1\n\ndef f(:\n", "", JobFileError, r"my_job\.py.*SyntaxError.*\(line 3\)"),
        ("import json\nx = 1 / 0\n", ":x", JobFileError, r"ZeroDivisionError: .*\(line 2\)"),
        (
            "import no_such_package\n",
            ":no_such_package",
            JobFileError,
            "ModuleNotFoundError: .*no_such_package",
        ),
        (SOURCE.replace("=8", "=0"), "", JobError, "whole number of at least 1, not 0"),
    ],
)
def test_a_file_without_the_job_that_is_asked_for_is_refused(
    job_file, source, name, error, message
):
    with pytest.raises(error, match=message):
        load_job(f"{job_file(source)}{name}")


def test_a_file_that_is_not_python_is_refused(job_file):
    with pytest.raises(JobFileError, match="not a Python file"):
        load_job(job_file("model: 1\n", "job.yaml"))


@pytest.mark.parametrize(
    "ask",
    [
        memfit.predict,
        memfit.plan,
        memfit.measure,
        lambda job: memfit.verify(job, memfit.Plan()),
        lambda job: memfit.start(job, memfit.Plan()),
    ],
    ids=["predict", "plan", "measure", "verify", "start"],
)
def test_what_is_no_job_is_told_what_one_is(ask):
    with pytest.raises(JobError, match=r"memfit\.Job is needed, not a function.*predict_step"):
        ask(lambda: None)


# --- Fields ---


@pytest.mark.parametrize("function", ["model", "batch", "loss", "optimizer"])
def test_what_is_no_function_is_refused(regression_job, function):
    with pytest.raises(JobError, match=f"Job.{function} must be a function, not int"):
        replace(regression_job, **{function: 3})


@pytest.mark.parametrize(
    ("function", "value"),
    [
        ("model", lambda width: nn.Linear(width, 1)),
        ("batch", lambda: torch.zeros(3)),
        ("loss", lambda model: model.weight.sum()),
        ("optimizer", lambda parameters, lr: torch.optim.SGD(parameters, lr=lr)),
        ("loss", lambda *, model, batch: model(batch).sum()),
    ],
)
def test_a_wrong_signature_is_shown_beside_the_right_one(regression_job, function, value):
    with pytest.raises(JobError) as caught:
        replace(regression_job, **{function: value})
    assert f"Job.{function} must be {expected_signature(function)}" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [nn.ReLU, partial(nn.Linear, 4, 1), lambda width=4: nn.Linear(width, 1), lambda *args: args],
)
def test_whatever_can_be_called_in_the_right_way_is_taken(regression_job, value):
    assert replace(regression_job, model=value).model is value


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "8", None])
def test_a_batch_size_that_is_no_positive_whole_number_is_refused(regression_job, batch_size):
    with pytest.raises(JobError, match="batch_size must be a whole number of at least 1"):
        replace(regression_job, batch_size=batch_size)


# --- What the functions give ---

each_act = pytest.mark.parametrize(
    "act", [memfit.predict, memfit.plan, memfit.measure], ids=lambda act: act.__name__
)

NOT_SCALAR = {
    "vector": (lambda model, batch: model(batch[0]), r"a tensor of shape \(10, 4\)"),
    "float": (lambda model, batch: 0.5, "a float"),
    "none": (lambda model, batch: None, "a NoneType"),
    "tuple": (lambda model, batch: (model(batch[0]).sum(), 3), "a tuple"),
    "total": (lambda model, batch: Total(model(batch[0]), 3), "a tensor of shape"),
    "detached": (lambda model, batch: model(batch[0]).sum().detach(), "nothing would be trained"),
}


@pytest.mark.parametrize("name", NOT_SCALAR)
@each_act
def test_a_loss_that_is_no_scalar_is_named_with_a_remedy(regression_job, name, act):
    loss, found = NOT_SCALAR[name]
    with pytest.raises(LossNotScalarError, match=found) as caught:
        act(replace(regression_job, loss=loss))
    assert ".mean()" in str(caught.value)


def test_a_loss_that_is_no_scalar_is_named_when_it_is_really_run(regression_job):
    job = replace(regression_job, loss=NOT_SCALAR["vector"][0])
    with pytest.raises(LossNotScalarError):
        memfit.start(job).step(job.batch(10))


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (lambda size: torch.zeros(7, 16), r"\(7, 16\)"),
        (lambda size: {"a": torch.zeros(2), "n": size}, r"\(2,\)"),
        (lambda size: None, "no tensor is found"),
    ],
)
def test_a_batch_that_ignores_its_argument_is_named_with_its_shapes(regression_job, batch, shapes):
    with pytest.raises(BatchSizeIgnoredError, match=shapes) as caught:
        find_layout(replace(regression_job, batch=batch))
    assert "grows with the batch size" in str(caught.value)


def fail(*_args):
    raise OSError("the file is gone")


@pytest.mark.parametrize("function", ["model", "batch", "optimizer", "loss"])
@each_act
def test_a_function_that_fails_is_named_with_its_reason_and_signature(
    regression_job, function, act
):
    with pytest.raises(JobFunctionError, match="OSError: the file is gone") as caught:
        act(replace(regression_job, **{function: fail}))
    assert f"The job's {function} failed" in str(caught.value)
    assert expected_signature(function) in str(caught.value)


@pytest.mark.parametrize(
    ("function", "value", "found"),
    [
        ("model", lambda: None, "a NoneType"),
        ("optimizer", lambda parameters: None, "a NoneType"),
    ],
)
@each_act
def test_a_function_that_gives_something_else_is_named(regression_job, function, value, found, act):
    with pytest.raises(JobFunctionError, match=f"it returned {found}"):
        act(replace(regression_job, **{function: value}))


@pytest.mark.slow
def test_a_step_whose_sizes_nobody_can_bound_is_refused_with_another_way(regression_job):
    def loss(model, batch):
        return regression_job.loss(model, batch).reshape(1).unique().sum()

    with pytest.raises(MemfitError, match="depends on the values of tensors") as caught:
        memfit.predict(replace(regression_job, loss=loss))
    assert "`memfit measure`" in str(caught.value)


def test_an_error_reaches_another_process_whole():
    error = StrategyError("bf16", "it is broken.")
    same = pickle.loads(pickle.dumps(error))
    assert (str(same), same.strategy, type(same)) == (str(error), "bf16", StrategyError)
