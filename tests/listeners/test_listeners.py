"""Listeners hear everything in order, write what they say they do, and never end a training run."""

from __future__ import annotations

import io
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
from rich.console import Console
from tests.zoo.run_records import (
    CLIMBED,
    DRIFT,
    ENDING,
    FACTS,
    LEAK,
    OUT_OF_MEMORY,
    STEP,
    UNPROVED,
    Noting,
)

from memfit.errors import MissingExtraError
from memfit.journal.folder import read_journal, read_ranks
from memfit.journal.records import Event, StepRecord
from memfit.journal.sentences import event_sentence
from memfit.listeners import live_line as live_line_module
from memfit.listeners.collection import Listeners
from memfit.listeners.journal import JournalListener
from memfit.listeners.live_line import LiveLine, step_line
from memfit.listeners.scalars import scalars
from memfit.listeners.tensor_board import TensorBoardListener
from memfit.listeners.weights_and_biases import WandbListener
from memfit.units import GIB

BARE = StepRecord(step=1, time_seconds=0.5, step_seconds=0.4)

# --- The collection ---


def test_all_listeners_hear_everything_in_order():
    listeners = [Noting(), Noting()]
    told = Listeners(listeners)
    told.begin(FACTS)
    told.step(STEP)
    told.event(LEAK)
    told.end(ENDING)
    expected = [("begin", FACTS), ("step", STEP), ("event", LEAK), ("end", ENDING)]
    assert [listener.heard for listener in listeners] == [expected, expected]


@pytest.mark.parametrize("fails_at", ["begin", "step", "event", "end"])
def test_a_listener_that_fails_is_dropped_with_one_warning_and_the_others_go_on(fails_at):
    failing, other = Noting(fails_at), Noting()
    told = Listeners([failing, other])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        told.begin(FACTS)
        told.step(STEP)
        told.event(LEAK)
        told.step(STEP)
        told.end(None)
    (warning,) = found
    assert "Noting failed (OSError: disk full)" in str(warning.message)
    assert [name for name, _ in failing.heard][-1] == fails_at
    assert [name for name, _ in other.heard] == ["begin", "step", "event", "step", "end"]


def test_an_interruption_is_not_swallowed():
    class Interrupted(Noting):
        def step(self, record):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Listeners([Interrupted()]).step(STEP)


def test_the_end_is_told_once_and_listeners_can_be_added():
    late = Noting()
    told = Listeners()
    told.step(STEP)
    told.add(late)
    told.end(None)
    told.end(ENDING)
    assert late.heard == [("end", None)]
    assert len(told) == 0


# --- The journal ---


def test_the_journal_listener_writes_a_journal(tmp_path):
    listener = JournalListener(tmp_path / "run")
    listener.begin(FACTS)
    listener.step(STEP)
    listener.event(CLIMBED)
    listener.end(ENDING)
    journal = read_journal(listener.folder)
    assert (journal.facts, journal.steps, journal.events) == (FACTS, (STEP,), (CLIMBED,))
    assert journal.ending == ENDING


def test_an_end_that_nobody_knows_leaves_no_reason(tmp_path):
    listener = JournalListener(tmp_path)
    listener.step(STEP)
    listener.end(None)
    assert read_journal(tmp_path).ending is None


def test_each_rank_writes_into_a_folder_of_its_own(tmp_path):
    for rank in (0, 1):
        for listener in (JournalListener(tmp_path / "run"), TensorBoardListener(tmp_path / "logs")):
            listener.begin(replace(FACTS, rank=rank, num_ranks=2))
            listener.step(STEP)
            listener.end(None)
    assert [journal.facts.rank for journal in read_ranks(tmp_path / "run").values()] == [0, 1]
    for folder in (tmp_path / "logs", tmp_path / "logs" / "rank-1"):
        assert len([*folder.glob("events.out.*")]) == 1


# --- TensorBoard ---


def test_what_was_not_measured_has_no_scalar():
    assert scalars(BARE, 0) == {"memory/ooms": 0}


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    listener = TensorBoardListener(tmp_path)
    listener.begin(FACTS)
    listener.step(BARE)
    listener.event(OUT_OF_MEMORY)
    listener.step(STEP)
    listener.end(ENDING)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    values = {
        tag: [(point.step, point.value) for point in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    expected = {
        "memory/peak_allocated_gib": 1.43, "memory/peak_reserved_gib": 1.6, "memory/host_gib": 3.1,
        "memory/predicted_peak_gib": 1.45, "memory/alloc_retries": 0, "memory/micro_batch_size": 32,
    }  # fmt: skip
    assert values.pop("memory/ooms") == [(1, 0), (120, 1)]
    assert values == {tag: [(120, pytest.approx(value))] for tag, value in expected.items()}
    texts = {
        tag.removesuffix("/text_summary"): read.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in read.Tags()["tensors"]
    }
    assert texts["memory/events"] == event_sentence(OUT_OF_MEMORY)
    assert "tiling" in texts["memory/run"]
    assert texts["memory/ending"] == "leak: It leaked."


@pytest.mark.parametrize(
    ("package", "module", "make"),
    [
        ("tensorboard", "torch.utils.tensorboard", lambda: TensorBoardListener("x")),
        ("wandb", "wandb", lambda: WandbListener()),
    ],
)
def test_a_missing_package_is_named_with_the_pip_line(monkeypatch, package, module, make):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'memfit\[{package}\]'"):
        make()


# --- W&B ---


class FakeRun:
    """Take what a wandb run takes: a call without commit waits for the next one with it."""

    def __init__(self) -> None:
        self.history, self.pending = [], {}
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.set_up(values))
        self.metrics, self.summary, self.step, self.exit_code = [], {}, 0, None

    def set_up(self, values):
        self.settings = values

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, values, commit=True):
        self.pending.update(values)
        if commit:
            self.history.append(self.pending)
            self.pending, self.step = {}, self.step + 1

    def finish(self, exit_code=None):
        self.exit_code = exit_code


def test_a_wandb_run_of_its_own_is_begun_and_finished(monkeypatch):
    run = FakeRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda: run))
    listener = WandbListener()
    listener.begin(FACTS)
    listener.step(BARE)
    listener.event(OUT_OF_MEMORY)
    listener.step(STEP)
    listener.end(ENDING)
    assert run.metrics == [("memory/*", "memory/step")]
    assert [row["memory/step"] for row in run.history] == [1, 7, 120]
    assert run.history[1]["memory/events"] == event_sentence(OUT_OF_MEMORY)
    assert run.history[2]["memory/peak_allocated_gib"] == pytest.approx(1.43)
    assert run.history[2]["memory/ooms"] == 1
    assert run.summary == {"memory/ending": "leak: It leaked."}
    assert run.settings["memfit"]["strategies"] == ["tiling"]
    assert run.exit_code == 1


def test_in_a_wandb_run_of_the_caller_the_callers_steps_stay_its_own():
    run = FakeRun()
    listener = WandbListener(run)
    for number, peak in enumerate((2, 3, 1), start=1):
        listener.step(
            StepRecord(step=number, time_seconds=0, step_seconds=0, peak_allocated_bytes=peak * GIB)
        )
    listener.event(LEAK)
    listener.event(DRIFT)
    assert run.step == 0
    run.log({"loss": 1.0})
    listener.step(BARE)
    listener.end(None)
    (row,) = run.history
    assert row["loss"] == 1.0
    assert row["memory/peak_allocated_gib"] == 3, "the highest of the steps in between"
    assert row["memory/events"].splitlines() == [event_sentence(LEAK), event_sentence(DRIFT)]
    assert run.pending == {"memory/step": 1, "memory/ooms": 0}
    assert run.exit_code is None


# --- The line in the terminal ---


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(live_line_module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def terminal(*, is_terminal: bool, width: int = 140) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=is_terminal, width=width, highlight=False, color_system=None
    )
    return console, written


def test_a_step_is_one_line():
    assert step_line(STEP, STEP.peak_allocated_bytes) == (
        "step 120 · 210 ms · peak 1.43 GiB (predicted 1.45) · reserved 1.60 · host 3.10 GiB · "
        "micro-batch 32 · retries 0"
    )
    assert step_line(BARE, None) == "step 1 · 400 ms"


def test_in_a_terminal_the_line_is_drawn_in_place(clock):
    console, written = terminal(is_terminal=True)
    line = LiveLine(console=console)
    line.begin(FACTS)
    for number in (1, 2, 3):
        line.step(StepRecord(step=number, time_seconds=0, step_seconds=0.5))
        clock.seconds += 0.06
    line.event(OUT_OF_MEMORY)
    line.end(None)
    shown = written.getvalue()
    assert "step 2 ·" not in shown, "ten times a second are enough"
    assert shown.count("\n") == 2, "one for the event, one at the end"
    assert shown.count("\r\x1b[2K") == 3
    assert event_sentence(OUT_OF_MEMORY) in shown
    assert shown.endswith("step 3 · 500 ms\n")


def test_a_line_never_wraps(clock):
    console, written = terminal(is_terminal=True, width=40)
    LiveLine(console=console).step(STEP)
    assert len(written.getvalue()) == 39
    assert written.getvalue().endswith("…")


def test_outside_of_a_terminal_a_line_is_written_now_and_then(clock):
    console, written = terminal(is_terminal=False)
    line = LiveLine(console=console, log_seconds=30)
    for number in range(1, 9):
        line.step(StepRecord(step=number, time_seconds=0, step_seconds=0.5))
        clock.seconds += 10
    line.event(DRIFT)
    line.end(ENDING)
    assert written.getvalue().splitlines() == [
        "step 1 · 500 ms",
        "step 4 · 500 ms",
        "step 7 · 500 ms",
        event_sentence(DRIFT),
        "step 8 · 500 ms",
        "It leaked. Stop.",
    ]


def test_only_the_first_of_several_ranks_speaks(clock):
    console, written = terminal(is_terminal=True)
    line = LiveLine(console=console)
    line.begin(replace(FACTS, rank=1, num_ranks=2))
    line.step(STEP)
    line.event(OUT_OF_MEMORY)
    line.end(ENDING)
    assert written.getvalue() == ""


def test_a_log_may_hold_events_alone(clock):
    console, written = terminal(is_terminal=False)
    line = LiveLine(console=console, log_seconds=None)
    line.step(STEP)
    events = (OUT_OF_MEMORY, CLIMBED, DRIFT, LEAK, UNPROVED)
    assert {type(event) for event in events} == set(get_args(Event))
    for event in events:
        line.event(event)
    assert written.getvalue().splitlines() == [event_sentence(event) for event in events]


def test_the_latest_peak_stays_where_a_step_was_not_measured(clock):
    console, written = terminal(is_terminal=False)
    line = LiveLine(console=console, log_seconds=0)
    line.step(STEP)
    line.step(BARE)
    assert "peak 1.43 GiB" in written.getvalue().splitlines()[1]


def test_a_terminal_without_dots_gets_bars(clock):
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=140)
    LiveLine(console=console).step(BARE)
    assert raw.getvalue() == b"step 1 | 400 ms\n"


def test_the_live_line_is_dropped_like_any_listener_when_its_terminal_is_gone(clock):
    file = io.StringIO()
    file.close()
    told = Listeners([LiveLine(console=Console(file=file, width=100))])
    with pytest.warns(RuntimeWarning, match="LiveLine failed"):
        told.step(STEP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told.step(STEP)


# --- Words ---


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            OUT_OF_MEMORY,
            (
                "Step 7 ran out of memory in backward; it goes on with micro-batching(16) instead "
                "of micro-batching(32); 2 steps before it were repeated."
            ),
        ),
        (
            CLIMBED,
            "Step 90 tries a larger plan again: the plain step instead of micro-batching(16).",
        ),
        (
            DRIFT,
            (
                "Step 9 took 120.0 MiB, predicted 100.0 MiB (+20.00 %); what differs is buffers: "
                "20.0 MiB instead of 0 B."
            ),
        ),
        (LEAK, "Leak, found at step 30: losses grows."),
        (
            UNPROVED,
            (
                "micro-batching could not be proved to keep the results: The loss calls a function "
                "that is written in C. Tried before step 1: the same loss on one batch."
            ),
        ),
    ],
)
def test_each_event_has_its_sentence(event, words):
    assert event_sentence(event) == words
