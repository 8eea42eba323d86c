"""A run folder is added up right, in whatever state the run has left it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.reports import run_samples
from tests.reports.run_samples import FACTS, LEAK, PLANS, SMALL_LEAK, make_steps, write_run
from tests.zoo.processes import environment, imports_after
from tests.zoo.run_records import CLIMBED, OUT_OF_MEMORY
from tests.zoo.terminal import rendered

from memfit import Plan
from memfit.cli.main import main
from memfit.errors import DataError
from memfit.journal.plan_words import write_plan_words
from memfit.journal.records import Ending, Reason, StepRecord
from memfit.reports.run_contents import read_report
from memfit.reports.run_state import State
from memfit.reports.run_text import run_summary
from memfit.reports.run_wording import REASON_WORDS, headline_cards, verdict
from memfit.strategies.micro_batching import MicroBatching
from memfit.units import GIB, MIB

STEPS = make_steps(3, peak_allocated_bytes=lambda n: (100 - n) * MIB, host_bytes=lambda n: n * GIB)


def text_of(folder: Path, files: tuple[Path, ...] = ()) -> str:
    return rendered(run_summary(read_report(folder), files), width=100)


def cards_of(folder: Path) -> dict[str, tuple[str, str, str]]:
    return {
        card.label: (card.value, "; ".join(card.notes), card.tone)
        for card in headline_cards(read_report(folder))
    }


# --- Added up ---


def test_a_run_that_leaked_says_so_in_every_figure(tmp_path):
    cards = cards_of(run_samples.leaked(tmp_path))
    assert cards["Ended"] == (
        "A leak used up the memory",
        "exit code 1; then: over the budget",
        "bad",
    )
    assert cards["Leaks"][:2] == ("2 found", f"{LEAK.holder}; 3.80 GiB in all")
    assert cards["Budget"] == ("6.00 GiB", "94.1 % of it used; then exceeded", "bad")
    assert cards["Steps"] == ("3,400", "in 11 min 54 s; median 220 ms", "")
    assert cards["Out of memory"] == ("ended the run", "at the enforced budget", "bad")


@pytest.mark.parametrize(
    ("finds_leaks", "told"), [(True, "none found"), (None, "none found"), (False, "not looked for")]
)
def test_leaks_that_nobody_looked_for_are_not_said_to_be_absent(tmp_path, finds_leaks, told):
    facts = replace(FACTS, finds_leaks=finds_leaks)
    folder = write_run(tmp_path, facts, STEPS, (), ending_for(Reason.DONE))
    assert cards_of(folder)["Leaks"][0] == told


def test_a_leak_that_is_noted_twice_is_one_leak_with_its_latest_figures(tmp_path):
    ending = replace(ending_for(Reason.DONE), leaks=(replace(LEAK, total_growth_bytes=9 * GIB),))
    report = read_report(write_run(tmp_path, FACTS, STEPS, (SMALL_LEAK, LEAK), ending))
    assert [told.event.holder for told in report.leaks] == [LEAK.holder, SMALL_LEAK.holder]
    assert report.leaks[0].event.total_growth_bytes == 9 * GIB
    assert verdict(report).tone == "warn", "it came to its end, and yet"
    assert verdict(report).words == "Done, but 2 leaks were found"


def test_the_worst_leak_comes_first_whenever_and_on_whatever_rank_it_was_found(tmp_path):
    early = replace(LEAK, step=20, growth_bytes_per_step=9 * MIB, total_growth_bytes=40 * MIB)
    late = replace(SMALL_LEAK, step=3000, total_growth_bytes=900 * MIB)
    for rank, leak in ((0, late), (1, early)):
        facts = replace(FACTS, rank=rank, num_ranks=2)
        write_run(tmp_path, facts, STEPS, (leak,), ending_for(Reason.DONE), rank)
    report = read_report(tmp_path)
    assert [told.event.holder for told in report.leaks] == [LEAK.holder, SMALL_LEAK.holder]
    assert cards_of(tmp_path)["Leaks"][1] == f"{LEAK.holder}; 40.0 MiB in all"


@pytest.mark.parametrize(
    ("title", "command", "shown"),
    [
        ("train", "train.py --epochs 3", "train.py --epochs 3"),
        ("train", "python /home/me/train.py", "train.py"),
        ("train", "python -m project.train --seed 1", "project.train --seed 1"),
        ("memfit", "/usr/bin/memfit train conve --dataset umls", "memfit train conve --dataset umls"),
        ("__main__", "/lib/memfit/__main__.py train conve", "memfit train conve"),
        ("gpt-small", "train.py --size small", "gpt-small"),
        ("train", f"train.py {'--word ' * 30}", f"train.py{' --word' * 8} ..."),
        ("a run", "", "a run"),
    ],
)  # fmt: skip
def test_a_run_is_called_what_was_run(tmp_path, title, command, shown):
    facts = replace(FACTS, title=title, command=command)
    assert read_report(write_run(tmp_path, facts, STEPS)).title == shown


@pytest.mark.parametrize(
    ("reason", "ended_by", "notes"),
    [
        (Reason.BUDGET_EXCEEDED, "budget-exceeded", "at the enforced budget"),
        (Reason.LEAK, "out-of-memory", ""),
        (Reason.HOST_OUT_OF_MEMORY_KILLER, "host-out-of-memory-killer", "on the host"),
    ],
)
def test_a_run_that_memory_ended_was_not_never_out_of_memory(tmp_path, reason, ended_by, notes):
    folder = write_run(tmp_path, FACTS, STEPS, (), ending_for(reason, ended_by=ended_by))
    assert cards_of(folder)["Out of memory"] == ("ended the run", notes, "bad")


def ending_for(reason: Reason, **fields) -> Ending:
    words = {"ended_by": reason.value, "exit_code": 0, "sentence": "S.", "remedy": ""}
    return Ending(reason=reason, **{**words, **fields})


def test_a_run_that_began_as_it_is_began_without_strategies(tmp_path):
    folder = write_run(tmp_path, replace(FACTS, strategies=()), STEPS)
    Plan(strategies=(MicroBatching(micro_batch_size=8),)).save(folder / "plan.yaml")
    assert read_report(folder).begun_with == ()


def test_recoveries_and_climbs_are_counted_and_listed(tmp_path):
    folder = run_samples.recovered(tmp_path)
    report = read_report(folder)
    assert cards_of(folder)["Out of memory"] == (
        "twice",
        "each time run again; a larger plan tried again once",
        "warn",
    )
    changes = report.plan_changes()
    assert [told.event.step for told in changes] == [230, 610, 1210]
    assert [told.event.next_plan for told in changes] == [PLANS[1], PLANS[2], PLANS[1]]
    assert report.begun_with == PLANS[0]
    assert report.plan is not None
    assert [rung[1] for rung in report.plan.ladder] == [
        f"micro-batching({size})" for size in (32, 16, 8)
    ]
    assert report.timeline is not None
    assert report.timeline.step == 2


def test_the_predicted_peak_is_that_of_the_highest_step(tmp_path):
    (rank,) = read_report(run_samples.recovered(tmp_path)).ranks
    assert rank.predicted_peak_bytes == int(13.1 * GIB)
    assert rank.peak_allocated_bytes > rank.predicted_peak_bytes


def test_of_several_ranks_the_highest_counts_and_the_worst_ending(tmp_path):
    folder = run_samples.two_ranks(tmp_path)
    report = read_report(folder)
    assert report.highest_rank.rank == 1
    assert [rank.num_out_of_memory for rank in report.ranks] == [0, 1], "noted by 0, told of 1"
    write_run(tmp_path / "b", FACTS, STEPS, (), ending_for(Reason.DONE))
    write_run(tmp_path / "b", FACTS, STEPS, (), ending_for(Reason.ERROR), rank=1)
    assert read_report(tmp_path / "b").ending.reason is Reason.ERROR


def test_what_all_ranks_note_is_told_once(tmp_path):
    for rank in (0, 1):
        event = replace(OUT_OF_MEMORY, rank=1, cause=f"on {rank}")
        write_run(tmp_path, FACTS, STEPS, (event, CLIMBED), rank=rank)
    report = read_report(tmp_path)
    assert len(report.out_of_memory) == len(report.climbs) == 1
    assert len(report.plan_changes()) == 2


def test_a_later_rank_alone_is_still_a_run(tmp_path):
    write_run(tmp_path, FACTS, STEPS, rank=1)
    assert [rank.rank for rank in read_report(tmp_path).ranks] == [1]


# --- How it stands ---


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_words(reason, tmp_path):
    report = read_report(write_run(tmp_path, FACTS, STEPS, (), ending_for(reason)))
    found = verdict(report)
    assert found.words == REASON_WORDS[reason]
    assert found.sentence == "S."
    neutral = {Reason.DONE: "good", Reason.INTERRUPTED: ""}
    assert found.tone == neutral.get(reason, "bad")


@pytest.mark.parametrize(
    ("facts", "state", "words"),
    [
        (replace(FACTS, process_id=os.getpid()), State.GOING_ON, "Still running"),
        (FACTS, State.GONE, "Ended without a word"),
        (replace(FACTS, host_name=socket.gethostname()), State.GONE, "Ended without a word"),
        (replace(FACTS, host_name="elsewhere"), State.UNKNOWN, "No ending yet"),
        (replace(FACTS, process_id=2**70), State.UNKNOWN, "No ending yet"),
        (replace(FACTS, process_id=0), State.UNKNOWN, "No ending yet"),
        (None, State.UNKNOWN, "No ending yet"),
    ],
)
def test_a_run_without_an_ending_goes_on_or_is_gone(tmp_path, facts, state, words):
    report = read_report(write_run(tmp_path, facts, STEPS))
    assert report.state is state
    assert words in text_of(tmp_path)
    assert "The last step is 3, and the journal was last written at" in verdict(report).sentence


ENDLESS = """
import itertools, os, sys
from pathlib import Path
from memfit.journal.folder import JournalWriter
from memfit.journal.records import RunFacts, StepRecord

writer = JournalWriter(Path(sys.argv[1]))
started = "2026-01-01T00:00:00+00:00"
writer.begin(RunFacts(title="x", command="x", device="cpu", started_at=started, process_id=os.getpid()))
for step in itertools.count(1):
    writer.step(StepRecord(step=step, time_seconds=step, step_seconds=1.0, host_bytes=step))
    if step == 100:
        print("going", flush=True)
"""


def test_a_process_that_is_killed_leaves_a_journal_that_is_shown(tmp_path):
    words = [sys.executable, "-c", ENDLESS, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"going\n"
        going = read_report(tmp_path)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        waiting = read_report(tmp_path)
    gone = read_report(tmp_path)
    assert [report.state for report in (going, waiting, gone)] == [
        State.GOING_ON,
        State.GONE,
        State.GONE,
    ]
    assert 100 <= going.num_steps <= gone.num_steps
    assert "Ended without a word" in text_of(tmp_path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_that_ran_out_of_memory_at_last_says_how_often_before(tmp_path, count):
    ending = ending_for(Reason.OUT_OF_MEMORY)
    cards = cards_of(write_run(tmp_path, FACTS, STEPS, (OUT_OF_MEMORY,) * count, ending))
    value, notes, tone = cards["Out of memory"]
    assert value == ("once" if count else "ended the run")
    assert ("once more, which ended the run" in notes) == bool(count)
    assert tone == "bad"


# --- Odd journals ---


@pytest.mark.parametrize(
    ("steps", "peak"),
    [
        ([], "not measured"),
        (STEPS[:1], "99.0 MiB"),
        ([StepRecord(step=1, time_seconds=0.1, step_seconds=0.1)], "not measured"),
    ],
)
@pytest.mark.parametrize("facts", [FACTS, None])
def test_little_is_shown_where_little_is_known(tmp_path, steps, peak, facts):
    ending = ending_for(Reason.DONE)
    folder = write_run(tmp_path, facts, steps, (), ending)
    assert cards_of(folder)["Peak allocated"][0] == peak
    assert cards_of(folder)["Steps"][0] == str(len(steps))
    assert "Done. S." in text_of(folder)
    assert read_report(folder).title.partition(" ")[0] == (facts.title if facts else tmp_path.name)


def test_the_ending_knows_peaks_that_no_step_has(tmp_path):
    ending = ending_for(
        Reason.DONE, peak_allocated_bytes=3 * GIB, host_peak_bytes=9 * GIB, num_steps=7,
        budget_bytes=4 * GIB,
    )  # fmt: skip
    report = read_report(write_run(tmp_path, None, STEPS, (), ending))
    (rank,) = report.ranks
    assert (rank.peak_allocated_bytes, rank.host_peak_bytes, rank.num_steps) == (
        3 * GIB,
        9 * GIB,
        7,
    )
    assert report.budget_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("name", "content"),
    [("plan.yaml", "memfit_plan: 99"), ("timeline.json", "{}"), ("training.json", "{}")],
)
def test_a_file_beside_the_journal_that_cannot_be_read_is_named_and_the_rest_shown(
    tmp_path, name, content
):
    write_run(tmp_path, FACTS, STEPS)
    (tmp_path / name).write_text(content)
    (note,) = read_report(tmp_path).notes
    assert name in note
    assert "Left out" in text_of(tmp_path)


def test_a_folder_without_a_run_is_refused_with_the_reason(tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        read_report(tmp_path / "none")
    with pytest.raises(DataError, match="it holds no journal"):
        read_report(tmp_path)
    write_run(tmp_path / "first", FACTS, STEPS)
    with pytest.raises(DataError, match=r"holds some: .*first. Name one"):
        read_report(tmp_path)


# --- The terminal and JSON ---


def test_the_summary_names_what_matters(tmp_path):
    text = text_of(run_samples.leaked(tmp_path), (tmp_path / "report.html",))
    for words in (
        "A leak used up the memory.",
        "Call `metrics.reset()`",
        f"{LEAK.holder} (metric-state, made at train.py:88)",
        "Step 111 took 2.12 GiB, predicted 2.00 GiB",
    ):
        assert words in re.sub(r"\s+", " ", text)
    assert "report.html" in "".join(text.split())


def test_long_lists_end_with_a_count(tmp_path):
    events = [replace(CLIMBED, step=n) for n in range(1, 30)]
    assert "and 19 more" in text_of(write_run(tmp_path, FACTS, STEPS, events))


def test_ranks_stand_side_by_side(tmp_path):
    text = text_of(run_samples.two_ranks(tmp_path))
    assert re.search(r"0 +Out of memory +80 +220 ms +5\.80 GiB +6\.10 GiB +3\.00 GiB", text)
    assert re.search(r"1 +Out of memory +80 +220 ms +7\.20 GiB +7\.50 GiB +4\.00 GiB", text)


def test_json_has_the_figures_by_the_names_of_the_records(tmp_path, capsys):
    run_samples.two_ranks(tmp_path)
    assert main(["report", str(tmp_path), "--json", "--no-page"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["reason"] == "out-of-memory"
    assert found["state"] == "ended"
    assert found["peak_allocated_bytes"] == int((6.4 + 0.8) * GIB)
    assert [rank["num_out_of_memory"] for rank in found["ranks"]] == [0, 1]
    assert found["out_of_memory"][0]["rank"] == 1
    assert found["files"] == []
    assert sorted(path.name for path in tmp_path.glob("*.html")) == []


@pytest.mark.parametrize("name", sorted(run_samples.SAMPLES))
def test_every_sample_is_plain_json(name, tmp_path):
    report = read_report(run_samples.SAMPLES[name](tmp_path))
    assert json.loads(json.dumps(report.to_json(), allow_nan=False))["title"] == report.title


# --- The plan, in words ---


def with_plan(folder: Path) -> Path:
    write_run(folder, FACTS, STEPS)
    plan = Plan(strategies=(MicroBatching(micro_batch_size=4),), ladder=(Plan(),))
    plan.save(folder / "plan.yaml")
    write_plan_words(folder, plan.in_words())
    return folder


@pytest.mark.slow
def test_the_report_of_a_run_under_a_plan_leaves_torch_alone(tmp_path):
    code = (
        "import pathlib, memfit.reports.run_page, memfit.reports.run_text\n"
        "from memfit.reports.run_contents import read_report\n"
        f"report = read_report(pathlib.Path({str(with_plan(tmp_path))!r}))\n"
        "assert report.plan.strategies == ('micro-batching(4)',)\n"
    )
    assert not imports_after(code, "torch")


@pytest.mark.parametrize("spoilt", ["plan.yaml", "plan-words.json"])
def test_words_of_another_plan_do_not_count(tmp_path, spoilt):
    folder = with_plan(tmp_path)
    before = read_report(folder).plan
    if spoilt == "plan.yaml":
        Plan().save(folder / spoilt)
        assert read_report(folder).plan == Plan().in_words()
    else:
        (folder / spoilt).write_text('{"checksum": [')
        assert read_report(folder).plan == before
