"""An enforced budget counts what is really there, and its error is known to those who retry."""

from __future__ import annotations

import importlib
import sys
import weakref

import pytest
import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from tests.zoo.processes import run_python
from tests.zoo.small_jobs import mean_square_job
from torch import nn

import memfit
from memfit.journal.folder import read_journal
from memfit.journal.records import Reason
from memfit.observe.enforced_budget import BudgetExceededError, EnforcedBudget
from memfit.units import MIB

WIDTH = 2048
LARGE_JOB = mean_square_job(lambda: nn.Linear(WIDTH, WIDTH), WIDTH)


def error_of_a_budget() -> BudgetExceededError:
    with EnforcedBudget(1000), pytest.raises(BudgetExceededError) as caught:
        torch.zeros(5000)
    return caught.value


# --- What is counted ---


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "t4"])
def test_a_prediction_inside_is_not_counted_and_stays_the_same(device):
    expected = memfit.predict(LARGE_JOB, device).peak_allocated_bytes
    with EnforcedBudget(MIB) as budget:
        found = memfit.predict(LARGE_JOB, device).peak_allocated_bytes
    assert found == expected > 32 * MIB
    assert budget.highest_bytes < MIB


def test_tensors_without_memory_are_not_counted():
    with EnforcedBudget(10_000) as budget:
        torch.zeros(10**9, device="meta").add(1)
        held = torch.zeros(1000)
        assert budget.live_bytes == held.nbytes


# Torch makes columns and rows at once, so the indices of one are a view of twice their memory.
@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support is in beta")
@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (lambda: torch.eye(10).to_sparse(), 10 * (2 * 8 + 4)),
        (lambda: torch.eye(10).to_sparse_csr(), (11 + 2 * 10) * 8 + 10 * 4),
        (lambda: torch.eye(10).to_sparse_csc(), (11 + 2 * 10) * 8 + 10 * 4),
        (lambda: torch.eye(10).to_mkldnn(), 0),
    ],
    ids=["coo", "csr", "csc", "opaque"],
)
def test_sparse_tensors_are_their_parts_and_opaque_ones_go_uncounted(make, num_bytes):
    with EnforcedBudget(MIB) as budget:
        held = make()
        assert budget.live_bytes == num_bytes
        del held
        assert budget.live_bytes == 0


def test_training_with_sparse_gradients_goes_on_inside_a_budget():
    table = nn.Embedding(1000, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    ids = torch.arange(20)
    with EnforcedBudget(MIB) as budget:
        table(ids).sum().backward()
        assert budget.live_bytes >= 20 * (8 + 8 * 4)
        optimizer.step()
    with EnforcedBudget(500), pytest.raises(BudgetExceededError):
        table(ids).sum().backward()


@pytest.mark.slow
def test_a_watched_script_may_plan_itself_inside_its_budget(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import memfit, torch\n"
        "job = memfit.Job(model=lambda: torch.nn.Linear(2048, 2048),\n"
        "    batch=lambda size: torch.zeros(size, 2048), batch_size=4,\n"
        "    loss=lambda model, batch: model(batch).square().mean(),\n"
        "    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))\n"
        "print(memfit.predict(job).peak_allocated_bytes > 32 * 2**20)\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.zeros(2, 8)).sum().backward()\n"
        "optimizer.step()\n"
    )
    words = ("-m", "memfit", "run", "--folder", "run", "--budget", "2MiB", "--")
    done = run_python(*words, sys.executable, script.name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    ending = read_journal(tmp_path / "run").ending
    assert ending.reason is Reason.DONE
    assert ending.peak_allocated_bytes < 2 * MIB


# --- Who recognises the error ---


def is_oom_error(exception: BaseException) -> bool:
    """Lightning 2.6's rule, word for word but for what concerns cuDNN.

    Source: https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.0/src/lightning/pytorch/
    utilities/memory.py, is_cuda_out_of_memory and is_out_of_cpu_memory.
    """
    return (
        isinstance(exception, RuntimeError)
        and len(exception.args) == 1
        and (
            ("CUDA" in exception.args[0] and "out of memory" in exception.args[0])
            or "DefaultCPUAllocator: can't allocate memory" in exception.args[0]
        )
    )


@pytest.mark.slow
def test_accelerate_and_lightning_take_it_for_memory_that_ran_out():
    error = error_of_a_budget()
    assert should_reduce_batch_size(error)
    assert is_oom_error(error)
    assert not should_reduce_batch_size(RuntimeError("something else"))


@pytest.mark.slow
def test_the_installed_lightning_takes_it_so_too():
    pytest.importorskip("lightning")
    memory = importlib.import_module("lightning.pytorch.utilities.memory")
    assert memory.is_oom_error(error_of_a_budget())


def test_the_message_has_the_figures():
    message = str(error_of_a_budget())
    assert "aten.zeros.default wants 19.5 KiB beside 0 B" in message
    assert "over the enforced budget of 1000 B" in message


@pytest.mark.slow
def test_a_batch_size_that_fits_is_found_by_trying():
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        model, batch = nn.Linear(256, 256), torch.zeros(batch_size, 256)
        model(batch).square().mean().backward()
        return batch_size

    # Weights and gradients take 514 KiB, each sample 3 KiB and more beside them.
    with EnforcedBudget(640 * 1024):
        found = train()
    assert tried[0] == 64
    assert found == tried[-1] < 64


def test_a_budget_that_is_over_leaves_nothing_at_what_outlives_it():
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    watched = []
    for number in range(6):
        with EnforcedBudget(MIB) as budget:
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert budget.live_bytes > 0  # states and parameters, which go on living
        del budget
        if number:
            watched.append(len(weakref.finalize._registry))
    assert len(set(watched)) == 1


def test_what_is_freed_between_two_uses_of_a_budget_counts_no_more():
    budget = EnforcedBudget(MIB)
    with budget:
        kept = torch.ones(1000)
    assert budget.live_bytes == 4000
    del kept
    assert budget.live_bytes == 0
    with budget:
        torch.ones(2000)
    assert budget.highest_bytes == 8000
