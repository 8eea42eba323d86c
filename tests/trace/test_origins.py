"""What is held for good is attributed to the user's own lines, and the batch is known as such."""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sysconfig
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from memfit.devices.catalogue import load_device
from memfit.job import Job
from memfit.prediction.importing import imported_on
from memfit.prediction.recording import record, record_steps
from memfit.trace.events import Category
from memfit.trace.origins import line_of_function, name_of_file

HERE = f"trace/{Path(__file__).name}"
FLOAT = 4
DEVICES = ("cpu", "t4")


def line_with(text: str) -> str:
    """Name the first line of this file that holds a text."""
    lines = Path(__file__).read_text("utf-8").splitlines()
    return f"{HERE}:{next(n for n, line in enumerate(lines, 1) if text in line)}"


LIBRARY = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x):
        return self.body(x) * self.scale
"""


@pytest.fixture
def library(tmp_path: Path):
    """Install a library with a model."""
    file = tmp_path / "site-packages" / "library.py"
    file.parent.mkdir()
    file.write_text(LIBRARY)
    spec = importlib.util.spec_from_file_location("library", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(trace) -> dict[Category, set[str]]:
    found: dict[Category, set[str]] = {}
    for block in trace.allocations:
        found.setdefault(block.category, set()).add(block.source_line)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_job_holds_is_of_the_users_lines(library, device: str) -> None:
    def model():
        return library.Net()  # the model's line

    def batch(size):
        return torch.randn(size, 64), torch.randn(size, 64)

    def optimizer(parameters):
        return torch.optim.AdamW(parameters)  # the optimizer's line

    job = Job(
        model=model,
        batch=batch,
        loss=lambda model, pair: (model(pair[0]) - pair[1]).square().mean(),
        optimizer=optimizer,
        batch_size=32,
    )
    steady = record(job, device=load_device(device)).steady
    lines = lines_of(steady)

    assert lines[Category.PARAMETERS] == {line_with("# the model's line")}
    assert lines[Category.BUFFERS] == {line_with("# the model's line")}
    assert lines[Category.OPTIMIZER_STATE] == {line_with("# the optimizer's line")}
    assert lines[Category.BATCH] == {line_with("def batch(size)")}
    sizes = [block.num_bytes for block in steady.allocations if block.category is Category.BATCH]
    assert sizes == [32 * 64 * FLOAT] * 2


def test_live_objects_are_of_the_functions_that_give_them(library) -> None:
    net = library.Net()
    job = Job(
        model=lambda: net,  # gives the model
        batch=lambda size: torch.randn(size, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        batch_size=32,
    )
    lines = lines_of(record(job).steady)

    assert lines[Category.PARAMETERS] == {line_with("# gives the model")}


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_ones_own_has_its_batch_its_frozen_weights_and_its_buffers(
    library, device: str
) -> None:
    place = "cuda" if device == "t4" else "cpu"

    def setup():
        frozen = library.Net().requires_grad_(False).to(place)
        head = nn.Linear(64, 8).to(place)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

        def step():
            optimizer.zero_grad()
            images = torch.randn(32, 64).to(place)  # the batch's line
            head(frozen(images)).square().mean().backward()
            optimizer.step()

        return step

    steady = record_steps(setup, load_device(device)).steady
    held = dict.fromkeys(Category, 0)
    for block in steady.allocations:
        held[block.category] += block.num_bytes

    assert held[Category.PARAMETERS] == (64 * 64 + 64 + 64 * 8 + 8) * FLOAT
    assert held[Category.BUFFERS] == 64 * FLOAT
    assert held[Category.BATCH] == 32 * 64 * FLOAT
    assert lines_of(steady)[Category.BATCH] == {line_with("# the batch's line")}


def test_a_few_rows_do_not_make_a_batch_of_the_whole_data() -> None:
    def setup():
        data = torch.randn(10_000, 64)
        model = nn.Linear(64, 8)

        def step():
            model(data[:32]).sum().backward()

        return step

    steady = record_steps(setup, load_device("cpu")).steady
    assert Category.BATCH not in {block.category for block in steady.allocations}


def test_what_a_module_made_is_no_batch() -> None:
    def setup():
        teacher, student = nn.Linear(64, 32).requires_grad_(False), nn.Linear(32, 8)

        def step():
            student(teacher(torch.randn(16, 64))).sum().backward()

        return step

    steady = record_steps(setup, load_device("cpu")).steady
    sizes = [block.num_bytes for block in steady.allocations if block.category is Category.BATCH]
    assert sizes == [16 * 64 * FLOAT]


@pytest.mark.parametrize(
    "path",
    [
        contextlib.__file__,
        runpy.__file__,
        torch.optim.__file__,
        line_of_function.__code__.co_filename,
        "<frozen runpy>",
        f"{sysconfig.get_path('scripts')}/torchrun",
    ],
)
def test_no_line_is_of_a_launcher_of_python_of_torch_or_of_memfit(path: str) -> None:
    assert name_of_file(path) == ""


def test_a_library_has_a_name_where_nothing_nearer_has_one() -> None:
    assert name_of_file(pytest.__file__) == "pytest/__init__.py"
    assert name_of_file(__file__) == HERE


def test_a_function_is_found_behind_what_wraps_it() -> None:
    def build(width):
        return width

    class Built:
        def __init__(self, *, makes_something=True):
            self.makes_something = makes_something

    assert line_of_function(partial(build, 1)) == line_with("def build(width)")
    assert line_of_function(Built) == line_with("def __init__(self, *, makes_something")
    assert line_of_function(torch.optim.AdamW) == ""


def test_a_file_with_transformers_is_imported_for_a_card(tmp_path: Path) -> None:
    """Dynamo lists torch's functions when it is first imported, each by one rule."""
    file = tmp_path / "job.py"
    file.write_text("import sys\nassert 'torch._dynamo' in sys.modules\n")

    assert imported_on(load_device("t4"), lambda reference: reference, f"{file}:job")
