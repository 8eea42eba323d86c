"""A run tells its folder and its listeners what it does, and how it ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.reports.run_samples import LEAK
from tests.runtime.guard_faults import BATCH_SIZE, OutOfMemoryAt, build_job
from tests.zoo.processes import run_python
from tests.zoo.run_records import Noting

import memfit
from memfit import GuardSettings, Plan
from memfit.errors import MemfitWarning, OutOfMemoryAfterAllError, UsageError
from memfit.journal.folder import WATCH_FOLDER_VARIABLE, JournalWriter, read_journal
from memfit.journal.records import DriftEvent, OutOfMemoryEvent, Reason
from memfit.journal.timeline import read_timeline
from memfit.observe.starting import observe_loop
from memfit.strategies.micro_batching import MicroBatching
from memfit.trace.events import Phase

pytestmark = pytest.mark.usefixtures("small_heap", "unhurried_log")


@pytest.mark.slow
def test_a_folder_holds_steps_events_plan_timeline_and_end(tmp_path: Path) -> None:
    job = build_job(batch_norm=False)
    with memfit.start(job, Plan(), folder=tmp_path) as run:
        for number in range(5):
            with OutOfMemoryAt(name="log_softmax_backward", most=1 if number == 3 else 0):
                run.step(job.batch(BATCH_SIZE))
    journal = read_journal(tmp_path)
    assert [step.step for step in journal.steps] == [1, 2, 3, 4, 5]
    assert [step.micro_batch_size for step in journal.steps] == [8, 8, 8, 4, 4]
    assert [step.num_samples for step in journal.steps] == [8] * 5
    assert all(step.peak_allocated_bytes for step in journal.steps[:3])
    assert all(step.host_bytes for step in journal.steps)
    (event,) = journal.events
    assert isinstance(event, OutOfMemoryEvent)
    assert (event.step, event.next_plan) == (4, ("micro-batching(4)",))
    assert Plan.load(tmp_path / "plan.yaml").labels() == ("micro-batching(4)",)
    assert journal.ending is not None
    assert (journal.ending.reason, journal.ending.num_steps) == (Reason.DONE, 5)


def test_the_timeline_of_a_step_adds_up_and_knows_its_categories(tmp_path: Path) -> None:
    job = build_job()
    with memfit.start(job, folder=tmp_path) as run:
        for _ in range(4):
            run.step(job.batch(BATCH_SIZE))
        owned = {
            "parameters": sum(p.nbytes for p in run.model.parameters()),
            "optimizer state": sum(
                t.nbytes for s in run.optimizer.state.values() for t in s.values()
            ),
        }
    timeline = read_timeline(tmp_path)
    assert timeline is not None
    measured = timeline.measured
    sums = [
        sum(part[i] for part in measured.by_category.values())
        for i in range(len(measured.allocated_bytes))
    ]
    assert sums == list(measured.allocated_bytes)
    for name, num_bytes in owned.items():
        assert set(measured.by_category[name]) == {num_bytes}
    assert max(measured.by_category["gradients"]) == owned["parameters"]
    assert measured.by_category["gradients"][0] == measured.by_category["gradients"][-1] == 0
    assert max(measured.by_category["saved activations"]) > 0
    assert [name for _, name in measured.phases] == ["forward", "backward", "optimizer"]
    assert max(measured.allocated_bytes) == read_journal(tmp_path).steps[2].peak_allocated_bytes


@pytest.mark.slow
def test_a_run_that_cannot_go_on_says_so_and_one_that_goes_on_is_not_over(tmp_path: Path) -> None:
    job = build_job(batch_norm=False)
    plan = Plan(strategies=(MicroBatching(micro_batch_size=1),))
    ends = []
    for goes_on in (False, True):
        folder = tmp_path / str(goes_on)
        with memfit.start(job, plan, folder=folder) as run:
            with (
                OutOfMemoryAt(name="log_softmax_backward"),
                pytest.raises(OutOfMemoryAfterAllError),
            ):
                run.step(job.batch(BATCH_SIZE))
            if goes_on:
                run.step(job.batch(BATCH_SIZE))
        ends.append(read_journal(folder).ending)
    assert [end.reason for end in ends if end] == [Reason.OUT_OF_MEMORY, Reason.DONE]
    assert [end.exit_code for end in ends if end] == [4, 0]


@pytest.mark.slow
def test_a_plan_from_a_file_brings_its_prediction_and_budget_into_the_journal(tmp_path, ask):
    path, job = tmp_path / "plan.yaml", build_job(batch_norm=False)
    plan = memfit.plan(job, budget="1MiB", require=["micro-batching"])
    plan.save(path)
    with memfit.start(job, Plan.load(path), folder=tmp_path / "run") as run:
        results = [run.step(job.batch(BATCH_SIZE)) for _ in range(3)]
    predicted = plan.prediction.peak_allocated_bytes
    assert {each.predicted_peak_bytes for each in results} == {predicted}
    journal = read_journal(tmp_path / "run")
    assert journal.facts.budget_bytes == 2**20
    assert journal.steps[2].peak_allocated_bytes == pytest.approx(predicted, rel=0.01)
    shown = ask("report", str(tmp_path / "run"), "--no-page")
    assert (shown["budget_bytes"], shown["predicted_peak_bytes"]) == (2**20, predicted)


@pytest.mark.slow
def test_a_prediction_for_another_batch_is_not_held_against_the_run(tmp_path):
    path, job = tmp_path / "plan.yaml", build_job(batch_norm=False)
    memfit.plan(job, budget="1MiB").save(path)
    with memfit.start(replace(job, batch_size=2 * BATCH_SIZE), Plan.load(path)) as run:
        assert run.step(job.batch(2 * BATCH_SIZE)).predicted_peak_bytes is None


@pytest.mark.slow
def test_a_second_run_into_a_folder_is_refused_replaced_or_continues_it(tmp_path):
    job, folder = build_job(batch_norm=False), tmp_path / "run"

    def run_steps(num_steps, state=None, **options):
        with memfit.start(job, folder=folder, **options) as run:
            if state is not None:
                run.load_state_dict(state)
            for _ in range(num_steps):
                run.step(job.batch(BATCH_SIZE))
            return run.state_dict()

    def numbers():
        return [step.step for step in read_journal(folder).steps]

    state = run_steps(3)
    writer = JournalWriter(folder)
    writer.event(LEAK)
    writer.close()
    assert len(read_journal(folder).events) == 1
    with pytest.raises(UsageError, match=r"run holds a run already \(run\.json\)") as caught:
        run_steps(2)
    assert "earlier_run='overwrite'" in str(caught.value)
    assert "earlier_run='continue'" in str(caught.value)
    assert numbers() == [1, 2, 3]
    run_steps(2, state, earlier_run="continue")
    assert numbers() == [1, 2, 3, 4, 5]
    run_steps(1, earlier_run="overwrite")
    assert numbers() == [1]
    assert read_journal(folder).events == ()
    with pytest.raises(UsageError, match="must be one of 'refuse', 'overwrite', 'continue'"):
        run_steps(1, earlier_run="append")


def test_a_loop_that_is_observed_refuses_such_a_folder_too(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(UsageError, match="holds a run already"):
        observe_loop(model, optimizer, folder=tmp_path)
    observe_loop(model, optimizer, folder=tmp_path, earlier_run="overwrite").close()


@pytest.mark.slow
def test_a_script_that_closes_nothing_ends_its_journal_all_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import os, torch, memfit

job = memfit.Job(
    model=lambda: torch.nn.Linear(2, 1),
    batch=lambda size: torch.randn(size, 2),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
child = os.fork()
run = memfit.start(job, folder="fine" if child else "fails")
run.step(job.batch(4))
if not child:
    raise ValueError("no more data")
os.waitpid(child, 0)
"""
    )
    run_python(str(script), cwd=tmp_path, check=True)
    fine, ending = (read_journal(tmp_path / name).ending for name in ("fine", "fails"))
    assert fine is not None
    assert ending is not None
    assert (fine.reason, ending.reason) == (Reason.DONE, Reason.ERROR)
    assert ending.sentence == "no more data"


@pytest.mark.slow
def test_listeners_hear_everything_in_order() -> None:
    job = build_job(batch_norm=False)
    listener = Noting()
    settings = GuardSettings(climb_after_steps=1)
    with memfit.start(job, listeners=[listener], guard=settings) as run:
        with OutOfMemoryAt(name="log_softmax_backward", most=1):
            run.step(job.batch(BATCH_SIZE))
        run.step(job.batch(BATCH_SIZE))
    words = [word for word, _ in listener.heard]
    assert words == ["begin", "event", "step", "event", "step", "end"]


@pytest.mark.slow
def test_a_peak_that_leaves_the_predicted_one_is_a_warning_that_names_the_category() -> None:
    width = 512

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    job = memfit.Job(
        model=lambda: torch.nn.Linear(width, width),
        batch=lambda size: torch.randn(size, width),
        loss=loss,
        optimizer=torch.optim.SGD,
        batch_size=64,
    )
    plan = memfit.plan(job)
    told: list[Any] = []
    with memfit.start(job, plan) as run:
        run.listen(told.append)
        with pytest.warns(MemfitWarning, match="batch"):
            run.step(torch.randn(4096, width))
    (drift,) = told
    assert isinstance(drift, DriftEvent)
    assert drift.measured_bytes > drift.predicted_bytes


class Finder:
    """Stand in for the leak finder."""

    failure: str | None = None

    def __init__(self, on_leak: Any, *, overhead_fraction: float) -> None:
        self.on_leak = on_leak
        self.boundaries: list[tuple[str, int, int]] = []

    def boundary(self, stream: str, step: int, batch_bytes: int) -> None:
        self.boundaries.append((stream, step, batch_bytes))
        if len(self.boundaries) == 2:
            self.on_leak(LEAK)

    def finish(self) -> None:
        """Find nothing more."""


@pytest.fixture
def made(monkeypatch: Any) -> list[Finder]:
    """Return the finders that are made from now on."""
    made: list[Finder] = []

    def make(on_leak: Any, **settings: Any) -> Finder:
        made.append(Finder(on_leak, **settings))
        return made[-1]

    monkeypatch.setattr("memfit.observe.observer.LeakFinder", make)
    return made


def test_leaks_are_looked_for_only_where_that_is_asked_for(made: list[Finder]) -> None:
    job = build_job(batch_norm=False)
    memfit.start(job).close()
    assert made == []
    listener, told = Noting(), []
    with memfit.start(job, find_leaks=True, listeners=[listener]) as run:
        run.listen(told.append)
        batch = job.batch(BATCH_SIZE)
        num_bytes = BATCH_SIZE * (6 * 4 + 8)
        run.step(batch)
        with pytest.warns(MemfitWarning, match="grows"):
            run.evaluate(batch)
    assert made[0].boundaries == [("train", 1, num_bytes), ("evaluation", 1, num_bytes)]
    assert told == [LEAK]


@pytest.mark.usefixtures("made")
def test_a_finder_that_gives_up_is_no_all_clear(monkeypatch: Any) -> None:
    monkeypatch.setattr(Finder, "failure", "TypeError: unreadable")
    job = build_job(batch_norm=False)
    with memfit.start(job, find_leaks=True) as run:
        with pytest.warns(MemfitWarning, match="looked for no more .TypeError: unreadable."):
            run.step(job.batch(BATCH_SIZE))
        run.step(job.batch(BATCH_SIZE))


@pytest.mark.slow
def test_a_guarded_run_below_a_watch_tells_it_what_the_guard_did(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(WATCH_FOLDER_VARIABLE, str(tmp_path))
    job = build_job(batch_norm=False)
    with memfit.start(job, find_leaks=False) as run:
        with OutOfMemoryAt(name="log_softmax_backward", most=1):
            run.step(job.batch(BATCH_SIZE))
        with pytest.warns(MemfitWarning, match="grows"):
            run._observer.event(LEAK)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "out-of-memory"
    assert not (tmp_path / "steps.jsonl").exists()


@pytest.mark.filterwarnings("ignore:Leak, found")
def test_callbacks_of_an_ordinary_loop_get_what_a_run_gets(
    tmp_path: Path, made: list[Finder]
) -> None:
    job = build_job(batch_norm=False)
    batches = [job.batch(BATCH_SIZE) for _ in range(5)]
    with memfit.start(job, folder=tmp_path / "run", find_leaks=True) as run:
        for batch in batches:
            run.step(batch)
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    observer = observe_loop(model, optimizer, "cpu", folder=tmp_path / "loop", find_leaks=True)
    for number, batch in enumerate(batches, start=1):
        observer.begin_step(batch)
        loss = job.loss(model, batch)
        observer.phase(Phase.BACKWARD)
        loss.backward()
        observer.phase(Phase.OPTIMIZER)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del loss
        observer.end_step(number, batch)
    observer.close()
    of_run, of_loop = read_journal(tmp_path / "run"), read_journal(tmp_path / "loop")
    peaks = [[each.peak_allocated_bytes for each in one.steps[:3]] for one in (of_run, of_loop)]
    assert peaks[0] == peaks[1]
    assert None not in peaks[0]
    assert [each.step for each in of_loop.steps] == [each.step for each in of_run.steps]
    assert of_loop.events == of_run.events == (LEAK,)
    assert made[0].boundaries == made[1].boundaries
    assert of_run.ending is not None
    assert of_loop.ending == of_run.ending
    timeline = read_timeline(tmp_path / "loop")
    assert timeline is not None
    assert max(timeline.measured.allocated_bytes) == peaks[1][2]
    assert [name for _, name in timeline.measured.phases] == ["forward", "backward", "optimizer"]
