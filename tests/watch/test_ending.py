"""Why a command ended is told from what was seen of it, memory first."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from tests.zoo.run_records import LEAK

from memfit.journal.folder import Journal
from memfit.journal.records import LeakEvent, Reason, StepRecord
from memfit.watch.ending import Seen, ending_of, leak_line, script_name
from memfit.watch.host_killer import LastSample
from memfit.watch.last_words import ErrorWords, LastWords
from memfit.watch.supervisor import CommandEnd

SIGN = "oom_kill in /proc/vmstat grew from 3 to 4"
MILLION = 1_000_000


def end(exit_code=0, *, signal_number=None, received=(), resident_bytes=0) -> CommandEnd:
    sample = LastSample(process_ids=frozenset({5}), resident_bytes=resident_bytes)
    return CommandEnd(
        exit_code=128 + signal_number if signal_number else exit_code,
        signal_number=signal_number,
        received=received,
        host_peak_bytes=resident_bytes,
        last_sample=sample,
    )


def error(failure=Reason.ERROR, **fields) -> ErrorWords:
    known = {
        "failure": failure,
        "type_name": "SomeError",
        "message": "it says why",
        "noted_at_seconds": 10.0,
        "step": 4,
        "is_uncaught": True,
    }
    return ErrorWords(**{**known, **fields})


def words(*errors, rank: int | None = 0, has_ended=True, process_id=5) -> LastWords:
    return LastWords(process_id=process_id, rank=rank, has_ended=has_ended, errors=errors)


def leak(growth_bytes=2 * MILLION, total_bytes=20 * MILLION) -> LeakEvent:
    return replace(
        LEAK, step=10, growth_bytes_per_step=growth_bytes, total_growth_bytes=total_bytes
    )


def journals(*events, num_steps=20, peak_bytes=100 * MILLION) -> dict[int, Journal]:
    step = StepRecord(
        step=num_steps, time_seconds=1.0, step_seconds=0.1, peak_allocated_bytes=peak_bytes
    )
    return {0: Journal(folder=Path(), facts=None, steps=(step,), events=events, ending=None)}


def told(command_end, *all_words, events=(), **fields):
    seen = {"words": all_words, "journals": journals(*events)}
    return ending_of(Seen(end=command_end, **{**seen, **fields}))


# --- What ended it ---


def test_a_command_that_succeeds_is_done_even_if_it_caught_errors_on_the_way():
    caught = error(Reason.OUT_OF_MEMORY, is_uncaught=False)
    ending = told(end(0), words(caught), events=(leak(),))
    assert ending.reason is Reason.DONE
    assert (ending.sentence, ending.remedy) == ("The command came to its end after 20 steps.", "")
    assert ending.leaks == (leak(),)
    assert ending.peak_allocated_bytes == 100 * MILLION


@pytest.mark.parametrize(
    "reason", [Reason.BUDGET_EXCEEDED, Reason.OUT_OF_MEMORY, Reason.LOST_CONTEXT, Reason.ERROR]
)
def test_the_kind_of_the_error_is_the_reason(reason):
    ending = told(end(1), words(error(reason, place="train.py:3", phase="forward")))
    assert (ending.reason, ending.ended_by) == (reason, reason.value)
    assert "in the forward of step 5, at train.py:3: it says why" in ending.sentence
    assert ending.remedy


def test_of_several_ranks_the_memory_error_counts_not_the_lost_connection_before_it():
    lost = words(error(noted_at_seconds=9.0), rank=0)
    out = words(error(Reason.OUT_OF_MEMORY, message="full"), rank=1, process_id=6)
    ending = told(end(1), lost, out)
    assert ending.reason is Reason.OUT_OF_MEMORY
    assert ending.evidence[0] == "rank 1, process 6 noted SomeError: full"


def test_an_error_that_was_caught_counts_less_than_one_that_was_not():
    caught = error(Reason.BUDGET_EXCEEDED, is_uncaught=False, noted_at_seconds=1.0)
    assert told(end(1), words(caught)).reason is Reason.BUDGET_EXCEEDED
    uncaught = error(Reason.OUT_OF_MEMORY)
    assert told(end(1), words(caught, uncaught)).reason is Reason.OUT_OF_MEMORY


def test_what_a_parent_hands_on_counts_less_than_what_the_process_noted():
    own = error(Reason.BUDGET_EXCEEDED, is_uncaught=False, message="own", wanted_bytes=3)
    handed_on = error(Reason.BUDGET_EXCEEDED, is_handed_on=True, message="-- Process 0 ended")
    ending = told(end(1), words(own), words(handed_on, rank=None, process_id=4))
    assert ending.evidence == ("rank 0, process 5 noted SomeError: own",)


def test_asked_to_end_is_interrupted_whatever_the_exit_code():
    for code in (0, 1, 130):
        ending = told(end(code, received=(signal.SIGINT,)), words())
        assert ending.reason is Reason.INTERRUPTED
        assert f"(SIGINT), and ended with exit code {code}" in ending.sentence


def test_a_signal_that_does_not_ask_for_the_end_is_no_interruption():
    assert told(end(0, received=(signal.SIGUSR1,)), words()).reason is Reason.DONE


def test_memory_that_ran_out_before_an_interruption_stays_the_reason():
    ending = told(end(1, received=(signal.SIGTERM,)), words(error(Reason.OUT_OF_MEMORY)))
    assert ending.reason is Reason.OUT_OF_MEMORY


def test_a_fault_in_native_code_is_a_signal_with_its_own_advice():
    ending = told(end(signal_number=signal.SIGSEGV), words(has_ended=False))
    assert (ending.reason, ending.signal) == (Reason.SIGNAL, signal.SIGSEGV)
    assert ending.exit_code == 139
    assert "PYTHONFAULTHANDLER" in ending.remedy


# --- SIGKILL ---


def test_sigkill_with_a_sign_of_the_killer_is_the_killer():
    ending = told(
        end(signal_number=signal.SIGKILL, resident_bytes=2**20),
        words(has_ended=False),
        killer_signs=(SIGN,),
    )
    assert ending.reason is Reason.HOST_OUT_OF_MEMORY_KILLER
    assert ending.evidence[0] == SIGN
    assert "1.0 MiB were resident" in ending.sentence
    assert (ending.exit_code, ending.signal) == (137, 9)


def test_sigkill_without_any_sign_is_a_signal_and_says_so():
    ending = told(end(signal_number=signal.SIGKILL), words(has_ended=False))
    assert ending.reason is Reason.SIGNAL
    assert "no sign of the host's out-of-memory killer was found" in ending.evidence


def test_other_ends_are_not_laid_to_the_killer():
    for other in (end(1), end(signal_number=signal.SIGSEGV)):
        ending = told(other, words(error()), killer_signs=(SIGN,))
        assert ending.reason is not Reason.HOST_OUT_OF_MEMORY_KILLER


@pytest.mark.parametrize(
    "told_by",
    [
        words(error(child_signal=9, child_ids=(6,)), rank=None, process_id=4),  # torchrun
        words(rank=None, process_id=4),  # a launcher that says nothing
    ],
)
def test_a_rank_that_vanished_below_a_launcher_was_killed(told_by):
    gone = words(rank=1, has_ended=False, process_id=6)
    ending = told(end(1), told_by, words(rank=0), gone, killer_signs=(SIGN,))
    assert ending.reason is Reason.HOST_OUT_OF_MEMORY_KILLER
    assert "ended rank 1, process 6" in ending.sentence


def test_a_shell_tells_of_the_signal_by_its_exit_code():
    gone = words(has_ended=False)
    assert told(end(137), gone).signal == signal.SIGKILL
    assert told(end(137), gone, killer_signs=(SIGN,)).reason is Reason.HOST_OUT_OF_MEMORY_KILLER
    assert told(end(255), gone).reason is Reason.ERROR


def test_a_rank_that_vanished_is_named_where_nobody_says_how():
    ending = told(end(1), words(has_ended=False, process_id=8))
    assert ending.reason is Reason.ERROR
    assert "rank 0, process 8 ended without a word" in ending.evidence


# --- Leaks ---


def over_budget(live_bytes, wanted_bytes):
    return words(error(Reason.BUDGET_EXCEEDED, live_bytes=live_bytes, wanted_bytes=wanted_bytes))


def test_a_leak_is_the_reason_if_there_was_room_without_it():
    failed = over_budget(95 * MILLION, 10 * MILLION)
    ending = told(end(1), failed, events=(leak(),), budget_bytes=100 * MILLION)
    assert (ending.reason, ending.ended_by) == (Reason.LEAK, "budget-exceeded")
    assert ending.sentence.startswith("losses grows. It ended so: ")
    assert ending.remedy.startswith("End the growth of losses at train.py:12")


def test_a_leak_is_not_the_reason_if_there_was_no_room_anyway():
    failed = over_budget(95 * MILLION, 60 * MILLION)
    ending = told(end(1), failed, events=(leak(),), budget_bytes=100 * MILLION)
    assert ending.reason is Reason.BUDGET_EXCEEDED
    assert ending.leaks == (leak(),)


def test_a_leak_goes_on_after_it_was_found():
    failed = over_budget(95 * MILLION, 40 * MILLION)  # 20 were lost by step 10, 40 by step 20
    ending = told(end(1), failed, events=(leak(),), budget_bytes=100 * MILLION)
    assert ending.reason is Reason.LEAK


@pytest.mark.parametrize(("total_bytes", "is_leak"), [(60 * MILLION, True), (MILLION, False)])
def test_without_exact_figures_a_leak_must_have_taken_a_tenth(total_bytes, is_leak):
    found = leak(growth_bytes=1.0, total_bytes=total_bytes)
    out = told(end(1), words(error(Reason.OUT_OF_MEMORY)), events=(found,))
    killed = told(
        end(signal_number=signal.SIGKILL, resident_bytes=200 * MILLION),
        words(has_ended=False),
        events=(found,),
        killer_signs=(SIGN,),
    )
    assert [out.reason is Reason.LEAK, killed.reason is Reason.LEAK] == [is_leak] * 2
    assert killed.ended_by == "host-out-of-memory-killer"


def test_an_error_that_has_nothing_to_do_with_memory_is_no_leak():
    assert told(end(1), words(error()), events=(leak(),)).reason is Reason.ERROR


def test_a_leak_is_named_in_one_line():
    assert leak_line(leak()) == "losses (list) grows by 1.9 MiB a step, made at train.py:12"


# --- What was not seen, and names ---


def test_silence_is_not_taken_for_health():
    assert "nothing was seen of the inside" in told(end(0)).evidence[0]
    assert told(end(0), words(rank=None)).evidence == ("no step of an optimizer of torch was seen",)
    assert told(end(0), failures=("no room",)).evidence[-1].endswith("be watched: no room")
    assert told(end(0), is_disabled=True).evidence == ("MEMFIT_DISABLE=1: nothing was attached",)
    assert told(end(1), words(), ended_afterwards=(7,)).evidence[-1].startswith("process 7 had")


def test_a_peak_of_few_steps_says_so():
    steps = tuple(
        StepRecord(step=n, time_seconds=1.0, step_seconds=0.1, peak_allocated_bytes=peak)
        for n, peak in enumerate((None, 5, 6, None, None), start=1)
    )
    journal = Journal(folder=Path(), facts=None, steps=steps, events=(), ending=None)
    ending = told(end(0), words(), journals={0: journal})
    (words_of_peak,) = ending.evidence
    assert words_of_peak == (
        "the peak was measured in 2 of 5 steps; "
        "evaluation and checkpoints between the others are not measured"
    )
    assert ending.peak_allocated_bytes == 6
    both = told(end(0), words(), journals={0: journal, 1: journal})
    assert "in 2 of 5 steps of rank 1; " in both.evidence[1]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --config a.sh", "train"),
        ("torchrun --nproc-per-node 2 src/fit.py", "fit"),
        ("bash go.sh", "go"),
        ("python -m package.training --epochs 3", "training"),
        ("/opt/bin/trainer --fast", "trainer"),
    ],
)
def test_a_run_is_named_after_its_script(command, name):
    assert script_name(command.split()) == name
    assert script_name(["sh", "-c", "cd src; exec python grow.py"]) == "grow"


def test_signals_without_a_name_are_told_by_their_number():
    ending = told(end(signal_number=40), words(has_ended=False))
    assert ending.reason is Reason.SIGNAL
    assert "signal 40" in ending.sentence


# --- Trainings that are to be planned ---

FIT = {"budget": MILLION, "allow": [], "refuses": True}


def test_a_refused_training_is_an_error_even_if_the_script_ends_well():
    told = replace(words(), is_planned=True, unplanned="No plan fits")
    found = ending_of(Seen(end=end(), words=(told,), journals={}, budget_bytes=MILLION, fit=FIT))

    assert (found.reason, found.exit_code) == (Reason.ERROR, 1)
    assert found.sentence == "Nothing was trained without a plan: No plan fits"
    assert "--allow-unplanned" in found.remedy
    assert (found.is_planned, found.unplanned) == (False, "No plan fits")
    assert found.budget_bytes == MILLION


def test_a_training_that_may_go_without_a_plan_says_that_it_did():
    told = replace(words(), unplanned="No plan fits")
    fit = {**FIT, "refuses": False}
    found = ending_of(Seen(end=end(), words=(told,), journals={}, fit=fit))

    assert (found.reason, found.exit_code) == (Reason.DONE, 0)
    assert (found.is_planned, found.unplanned) == (False, "No plan fits")


@pytest.mark.parametrize(
    ("fit", "seen_words", "is_planned"),
    [
        (None, (words(),), None),
        (FIT, (replace(words(), is_planned=True),), True),
        (FIT, (), False),
    ],
)
def test_only_what_was_seen_to_be_planned_is_said_to_be(fit, seen_words, is_planned):
    found = ending_of(Seen(end=end(), words=seen_words, journals={}, fit=fit))
    assert found.is_planned is is_planned
    assert bool(found.unplanned) is (is_planned is False)
