"""Planning uses other processes, and says the same as without them."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import memfit
from memfit.cli.main import main
from memfit.errors import NoPlanFitsError, UsageError
from memfit.planner import one_placement
from memfit.planner.search import aside, foresight
from memfit.planner.search.aside import Aside, AsideSeries, can_fork
from memfit.planner.search.foresight import Foresight

pytestmark = pytest.mark.skipif(not can_fork(), reason="this machine makes no copies of processes")


def test_what_a_copy_finds_is_handed_over_and_changes_nothing_here():
    seen: list[int] = []

    def work() -> tuple[int, int]:
        seen.append(os.getpid())
        return seen[0], torch.get_num_threads()

    found = Aside(work).result()
    assert found is not None
    assert found[0] != os.getpid()
    assert found[1] == 1
    assert seen == []


@pytest.mark.parametrize(
    "work",
    [
        lambda: 1 / 0,
        lambda: lambda: None,
        lambda: os._exit(3),
        lambda: os.kill(os.getpid(), signal.SIGKILL),
    ],
    ids=["raises", "cannot be pickled", "exits", "is killed"],
)
def test_whatever_fails_in_a_copy_gives_nothing(work: Callable[[], object], capfd):
    assert Aside(work).result() is None
    assert capfd.readouterr() == ("", "")


def test_what_a_copy_prints_is_not_seen(capfd):
    assert Aside(lambda: os.write(1, b"again")).result() == 5
    assert capfd.readouterr() == ("", "")


def test_a_copy_that_hangs_is_given_up():
    task = Aside(lambda: time.sleep(60), most_seconds=0.2)
    began = time.perf_counter()
    assert task.result() is None
    assert time.perf_counter() - began < 10
    task.stop()  # a second time, which does nothing


def test_a_copy_that_gets_no_processor_is_not_waited_for():
    task = Aside(lambda: time.sleep(60))
    began = time.perf_counter()
    assert task.result() is None
    assert time.perf_counter() - began < 20


@pytest.mark.slow
def test_a_copy_that_works_is_waited_for(monkeypatch):
    monkeypatch.setattr(aside, "_LOOK_SECONDS", 0.05)

    def work() -> str:
        end = time.process_time() + 1.0
        while time.process_time() < end:
            pass
        return "done"

    monkeypatch.setattr(aside, "_LEAST_SHARE", 1e-6)  # however busy the machine is
    assert Aside(work).result() == "done"


def test_a_series_gives_what_comes_until_it_fails():
    def work():
        yield 1
        yield os.getpid()
        raise ValueError

    series = AsideSeries(work)
    assert series.next() == 1
    assert series.next() not in {None, os.getpid()}
    assert series.next() is None
    assert series.next() is None
    series.stop()  # a second time, which does nothing


def test_a_series_is_left_to_the_process_that_started_it():
    series = AsideSeries(lambda: iter("ab"))
    assert Aside(lambda: (series.next(), series.stop())).result() == (None, None)
    assert [series.next(), series.next()] == ["a", "b"]
    series.stop()


def test_an_interrupt_is_left_to_whoever_started_the_copy():
    def work() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "went on"

    assert Aside(work).result() == "went on"


def test_copies_end_with_their_parent():
    def parent() -> int:
        return Aside(lambda: time.sleep(60))._process.pid or 0

    # The copy is a daemon and may start none of its own, so a plain fork stands for the parent.
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, str(parent()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    child = int(os.read(read, 20))
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if _is_zombie(child):
            return
        time.sleep(0.05)
    pytest.fail(f"process {child} outlived its parent")


def _is_zombie(pid: int) -> bool:
    try:
        with pathlib.Path(f"/proc/{pid}/stat").open(encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def jobs() -> dict[str, tuple[memfit.Job, float]]:
    """Name jobs that are planned by recomputing, in pieces, and by a streamed head."""
    return {
        "blocks": (blocks_job(), 0.5),
        "pieces": (pieces_job(), 0.6),
        "head": (head_job(), 0.6),
    }


def blocks_job() -> memfit.Job:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values + self.down(functional.gelu(self.up(values)))

    return memfit.Job(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))),
        batch=lambda size: torch.randn(size, 32),
        # What mixes the samples leaves recomputing alone.
        loss=lambda model, batch: model(batch).std(dim=0).mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=512,
    )


def pieces_job() -> memfit.Job:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 8))

    return memfit.Job(
        model=build,
        batch=lambda size: (torch.randn(size, 16), torch.randint(8, (size,))),
        loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=128,
    )


def head_job() -> memfit.Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(2048, 32)
            self.head = nn.Linear(32, 2048)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return memfit.Job(
        model=Model,
        batch=lambda size: torch.randint(2048, (size, 16)),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=16,
    )


def outcome(job: memfit.Job, **wanted) -> object:
    """Return all that planning says but how long it took."""
    try:
        plan = memfit.plan(job, **wanted)
    except NoPlanFitsError as error:
        return str(error)
    plain = plan.to_json()
    plain["prediction"].pop("record_seconds")
    labels = [rung.labels() for rung in plan.ladder]
    return plain, plan.pareto, plan.considered, plan.notes, plan.refused, labels


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device"), [("blocks", "cpu"), ("pieces", "cpu"), ("head", "cpu"), ("head", "t4")]
)
def test_a_plan_is_the_same_in_any_number_of_processes(name, device, monkeypatch):
    job, share = jobs()[name]
    used = []
    result = aside.Aside.result
    monkeypatch.setattr(aside.Aside, "result", lambda self: used.append(self) or result(self))
    whole = memfit.predict(job, device=device)
    budget = int(share * (whole.peak_allocated_bytes))
    wanted = {"device": device, "budget": budget, "budget_of": "allocated"}
    alone = outcome(job, **wanted)
    assert not used
    together = outcome(job, **wanted, processes=3)
    assert used
    assert together == alone


@pytest.mark.slow
def test_where_every_copy_fails_the_plan_is_the_same(monkeypatch):
    job, share = jobs()["head"]
    budget = int(share * memfit.predict(job).peak_allocated_bytes)
    alone = outcome(job, budget=budget)
    monkeypatch.setattr(aside.Aside, "result", lambda self: self.stop())
    assert outcome(job, budget=budget, processes=3) == alone


@pytest.mark.slow
def test_no_process_is_left_behind(monkeypatch):
    started = []
    begin = aside.Aside.__init__

    def beginning(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        started.append(self._process)

    monkeypatch.setattr(aside.Aside, "__init__", beginning)
    job, share = jobs()["head"]
    budget = int(share * memfit.predict(job).peak_allocated_bytes)
    memfit.plan(job, budget=budget, processes=3)
    assert started
    assert not any(process.is_alive() for process in started)


def test_a_process_that_is_through_is_let_go_before_anyone_asks():
    ahead: Foresight = Foresight(
        record=lambda strategies: strategies,
        accept=lambda found: found,
        tell=lambda strategies: None,
        num_processes=2,
        most_seconds=10,
    )
    ahead.expect(["wrong"], is_sure=False)
    process = ahead._tasks["wrong"].aside._process
    while ahead._tasks["wrong"].is_running:
        time.sleep(0.01)
    ahead.expect(["next"], is_sure=False)
    assert not process.is_alive()
    assert ahead.take("wrong") == "wrong"
    ahead.close()


def test_an_answer_from_another_state_is_not_taken():
    task = Foresight(
        record=lambda strategies: strategies,
        accept=lambda found: None,
        tell=lambda strategies: None,
        num_processes=2,
        most_seconds=10,
    )
    task.expect([(), ()])
    assert task.take(()) is None
    task.close()


def test_what_is_surely_wanted_takes_the_place_of_guesses(monkeypatch):
    running: list[str] = []

    class Work:
        def __init__(self, work, niceness, most_seconds):
            self.name, self.is_running = work(), True
            running.append(f"{self.name}, {niceness}")

        def stop(self):
            running.append(f"no {self.name}")
            self.is_running = False

        def result(self):
            self.is_running = False
            return self.name

    monkeypatch.setattr(foresight, "Aside", Work)
    ahead: Foresight = Foresight(
        record=lambda strategies: strategies,
        accept=lambda found: found,
        tell=lambda strategies: None,
        num_processes=3,
        most_seconds=10,
    )
    ahead.expect(["guess 1", "guess 2", "guess 3"], is_sure=False)
    assert running == ["guess 1, 5", "guess 2, 5"]
    ahead.expect(["a", "guess 1", "b", "c", "d"])
    assert running[2:] == ["no guess 2", "b, 0", "c, 0"]
    assert ahead.take("a") is None  # this process does it
    assert ahead.take("guess 1") == "guess 1"
    assert ahead.take("b") == "b"
    assert running[5:] == []  # what is first, d, is left to this process
    ahead.close()
    assert running[5:] == ["no c"]


def test_the_number_of_processes_is_positive():
    with pytest.raises(UsageError, match="processes must be 1 or more, not 0"):
        memfit.plan(pieces_job(), budget="1GiB", processes=0)


def test_nothing_is_copied_where_a_card_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not can_fork()
    assert aside.usable_processes() == 1


@pytest.mark.slow
def test_the_command_uses_the_cores(monkeypatch, tmp_path, capsys):
    file = tmp_path / "job.py"
    file.write_text(
        "from tests.planner.test_beside import pieces_job\njob = pieces_job()\n", encoding="utf-8"
    )
    asked = []
    inside = one_placement.Foresight

    def making(**kwargs):
        asked.append(kwargs["num_processes"])
        return inside(**kwargs)

    monkeypatch.setattr(one_placement, "Foresight", making)
    monkeypatch.setattr(aside, "usable_processes", lambda: 2)
    words = ["plan", f"{file}:job", "--budget", "2MiB"]
    assert main(words) == 0
    assert main([*words, "--processes", "1"]) == 0
    assert asked == [2]
    capsys.readouterr()
