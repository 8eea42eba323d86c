"""Inside a script: which steps count, which loaders train, what is measured, what errors say."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from tests.zoo.run_records import FACTS
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from memfit.journal.folder import JournalWriter, read_journal
from memfit.journal.records import Reason
from memfit.observe.enforced_budget import BudgetExceededError
from memfit.observe.peaks import CpuPeaks
from memfit.observe.processes import ResidentMemory
from memfit.units import MIB
from memfit.watch.inside import loaders as loaders_module
from memfit.watch.inside import script_watch as script_watch_module
from memfit.watch.inside.budgets import WatchedBudget, limit_cards
from memfit.watch.inside.errors_seen import describe_error, describe_here
from memfit.watch.inside.loaders import Loaders
from memfit.watch.inside.process_record import ProcessRecord
from memfit.watch.inside.script_watch import RankJournal, RankTakenError, ScriptWatch
from memfit.watch.inside.step_ends import StepEnds, is_inside_own_step
from memfit.watch.last_words import read_words, words_folder
from memfit.watch.settings import WatchSettings, settings_from, watched_environment


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


# --- Steps ---


def ends_of(sequence: str) -> list[bool]:
    """Tell for each letter, which stands for an optimizer, whether its step ends a step."""
    ends, optimizers = StepEnds(), {letter: sgd() for letter in sequence}
    return [ends.is_end(optimizers[letter]) for letter in sequence]


@pytest.mark.parametrize(
    ("sequence", "num_steps"),
    [
        ("aaaa", 4),
        ("abababab", 4),  # a generator and a discriminator
        ("abcabcabc", 3),  # an optimizer for each parameter
        ("aaabaaab", 6),  # the leader more often
        ("aaabbb", 6),  # a training after the other, or L-BFGS after Adam
        ("aaabbbaaa", 8),  # and the first one again, which may as well take turns
        ("abababccc", 6),  # a training after one with two optimizers
        ("abbbbbb", 6),  # a leader only at the beginning
    ],
)
def test_one_optimizer_ends_the_steps(sequence, num_steps):
    assert sum(ends_of(sequence)) == num_steps


def test_a_training_that_begins_while_the_optimizer_of_another_lives_has_all_its_steps():
    assert ends_of("aaabb") == [True] * 5
    assert ends_of("ababcc") == [True, False, True, False, True, True]
    assert ends_of("abb") == [True, False, True], "may be a part of the first step"


def test_the_first_step_of_another_leader_is_known():
    ends, optimizers = StepEnds(), {letter: sgd() for letter in "ab"}
    begun = [ends.has_new_leader for letter in "aaaabbb" if ends.is_end(optimizers[letter])]
    assert begun == [False] * 4 + [True] + [False] * 2


def test_a_leader_that_has_gone_is_followed_by_the_next():
    ends, first = StepEnds(), sgd()
    assert ends.is_end(first)
    del first
    assert ends.is_end(sgd())


def test_a_step_that_calls_its_parents_step_counts_once():
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            other.step()
            return super().step(closure)

    counted = []

    def hook(optimizer, args, kwargs):
        counted.append((optimizer, is_inside_own_step(optimizer)))

    other, own = sgd(), Own([nn.Parameter(torch.zeros(3))], lr=0.1)
    handle = register_optimizer_step_post_hook(hook)
    try:
        own.step()
    finally:
        handle.remove()
    assert counted == [(other, False), (own, True), (own, False)]


# --- Loaders ---


@pytest.fixture
def loaders(monkeypatch):
    """Hook loaders as a script's are, and put everything back."""
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    monkeypatch.setattr(kind, "__init__", kind.__init__)
    monkeypatch.setattr(kind, "__next__", kind.__next__)
    return Loaders()


def test_loaders_have_the_names_of_their_variables_and_training_is_told_from_validation(loaders):
    num_steps, fetched = 0, []
    loaders_module.hook_loaders(
        loaders.begin_pass,
        lambda iterator: fetched.append(loaders.wanted(iterator, num_steps)),
        lambda iterator, batch: None,
    )

    class Data:
        def __init__(self):
            self.held_out = DataLoader(torch.zeros(4, 1), batch_size=2)

        def validate(self):
            with torch.no_grad():
                return [*self.held_out]

    train_loader = DataLoader(torch.zeros(6, 1), batch_size=2)
    for _ in train_loader:
        num_steps += 1
    Data().validate()
    for _ in DataLoader(torch.zeros(4, 1), batch_size=2):
        pass
    seen = [(fetch.stream, fetch.number, fetch.is_training) for fetch in fetched]
    assert seen == [
        ("train_loader", 1, False),  # nothing tells yet that it trains
        *[("train_loader", 1, True)] * 3,
        ("held_out", 1, False),
        ("held_out", 2, False),
        ("held_out", 3, False),
        ("loader", 1, False),
        ("loader", 2, False),
        ("loader", 3, False),
    ]


def test_two_loaders_of_one_name_are_two_streams(loaders):
    made = [DataLoader(torch.zeros(2, 1)) for _ in range(2)]
    for loader in made:
        loaders.begin_pass(iter(loader), loader, sys._getframe())
    assert sorted(loaders._known.values()) == ["loader", "loader-2"]


def test_a_validation_without_no_grad_stays_one_when_epochs_go_by(loaders):
    loader = DataLoader(torch.zeros(2, 1))
    for num_steps in (5, 9):
        iterator = iter(loader)
        loaders.begin_pass(iterator, loader, sys._getframe())
        assert not loaders.wanted(iterator, num_steps).is_training
        assert not loaders.wanted(iterator, num_steps).is_training


# --- Peaks ---


@pytest.fixture
def cpu_peaks(monkeypatch):
    """Make peaks that give way to profiles, and put torch's profiler back."""
    for name in ("_prepare_profiler", "_enable_profiler"):
        original = getattr(torch.autograd.profiler, name)
        monkeypatch.setattr(torch.autograd.profiler, name, original)
    peaks = CpuPeaks()
    script_watch_module._before_profiles(peaks.close)
    yield peaks
    peaks.close()


def end(peaks) -> int | None:
    reading = peaks.end()
    peaks.account(reading, 1.0)
    return reading.measured_peak_bytes


@pytest.mark.slow
def test_the_peak_is_what_lived_before_and_what_grew(cpu_peaks, others_bytes):
    cpu_peaks.begin(1, None)
    torch.zeros(1000, 1000)
    assert end(cpu_peaks) - others_bytes == 4_000_000


@pytest.mark.slow
def test_a_profile_of_the_script_goes_before_also_in_the_middle_of_a_step(cpu_peaks):
    cpu_peaks.begin(1, None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.zeros(10) + 1
        cpu_peaks.begin(2, None)
    assert any(event.key == "aten::add" for event in profile.key_averages())
    assert end(cpu_peaks) is None
    cpu_peaks.begin(3, None)
    assert end(cpu_peaks) is None, "for good"


@pytest.mark.slow
def test_a_batch_that_comes_while_its_step_is_watched_is_the_largest_known(cpu_peaks):
    for _ in range(3):
        cpu_peaks.begin(0, None)
        cpu_peaks.begin(100, None)
        assert end(cpu_peaks) is not None
    cpu_peaks.begin(0, None)
    cpu_peaks.begin(100, None)
    assert end(cpu_peaks) is None
    cpu_peaks.begin(101, None)
    assert end(cpu_peaks) is not None


def test_cards_are_limited_when_they_are_first_used(monkeypatch):
    waiting, limits = [], []
    monkeypatch.setattr(torch.cuda, "is_available", None)  # to ask would start the driver
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    card = type("Card", (), {"total_memory": 8 * MIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: limits.append(args)
    )
    limit_cards(2 * MIB)
    assert limits == []
    waiting[0]()
    assert limits == [(0.25, 0), (0.25, 1)]


# --- Errors ---


class Block(nn.Module):
    def forward(self, batch):
        return batch + torch.zeros(MIB, batch.shape[1])


def error_of(act) -> BaseException:
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - any of them is wanted
        return error
    raise AssertionError


def test_an_error_says_what_where_and_when():
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"block": Block()})["block"])
    with WatchedBudget(2 * MIB, lambda error: None):
        words = describe_error(error_of(lambda: model(torch.zeros(1, 3))), step=4, is_uncaught=True)
    assert words.failure is Reason.BUDGET_EXCEEDED
    assert (words.module, words.phase) == ("1 (Block)", "forward")
    assert words.operator == "aten.zeros.default"
    assert words.wanted_bytes == 12 * MIB
    assert words.place.startswith("tests/watch/test_inside.py:") or words.place.endswith(
        f":{Block.forward.__code__.co_firstlineno + 1}"
    )


def test_an_error_that_the_script_catches_is_described_when_it_is_raised():
    noted = []
    parameter = nn.Parameter(torch.zeros(1000))
    loss = (parameter * 2).sum()
    budget = WatchedBudget(100, lambda error: noted.append(describe_here(error, step=0)))
    with budget, pytest.raises(BudgetExceededError):
        loss.backward()
    assert (noted[0].phase, noted[0].is_uncaught) == ("backward", False)
    assert "watch/test_inside.py:" in noted[0].place


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "lost-context"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB"), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory. 2 GiB allowed; of it"), "budget-exceeded"),
        (MemoryError(), "out-of-memory"),
        (KeyboardInterrupt(), "interrupted"),
        (ValueError("no"), "error"),
    ],
)
def test_errors_are_told_apart(error, failure):
    words = describe_error(error, step=0, is_uncaught=True)
    assert words.failure == failure
    assert (words.place, words.phase, words.module) == ("", "", "")


def test_the_error_of_a_child_that_torch_hands_on_is_known_by_its_text():
    handed_on = type("ProcessRaisedException", (Exception,), {})
    for text, failure in (
        ("-- Process 0\nTraceback\nRuntimeError: CUDA out of memory.", Reason.OUT_OF_MEMORY),
        ("-- Process 0\nmemfit.x.BudgetExceededError: over", Reason.BUDGET_EXCEEDED),
        ("-- Process 0\nValueError: no", Reason.ERROR),
    ):
        words = describe_error(handed_on(text), step=0, is_uncaught=True)
        assert (words.failure, words.is_handed_on) == (failure, True)


def test_launchers_tell_how_their_processes_ended():
    error = RuntimeError("two\nlines")
    ends = ((4, -15), (5, -9), (6, 1))
    error.failures = {pid: type("F", (), {"exitcode": code, "pid": pid}) for pid, code in ends}
    words = describe_error(error, step=0, is_uncaught=True)
    assert (words.child_signal, words.child_ids, words.message) == (9, (5,), "two")
    words = describe_error(subprocess.CalledProcessError(-15, "x"), step=0, is_uncaught=True)
    assert (words.child_signal, words.child_ids) == (15, ())
    words = describe_error(subprocess.CalledProcessError(1, "x"), step=0, is_uncaught=True)
    assert words.child_signal is None


# --- The journal ---


@pytest.fixture
def folder(tmp_path):
    JournalWriter(tmp_path).begin(FACTS)
    words_folder(tmp_path).mkdir()
    return tmp_path


@pytest.fixture
def watch(folder):
    settings = WatchSettings(folder=folder, finds_leaks=False)
    watch = ScriptWatch(settings, ProcessRecord(folder), None)
    yield watch
    watch.is_off = False
    watch.finish()


@pytest.mark.slow
def test_steps_are_written_as_they_end(folder, watch):
    optimizer = sgd()
    for _ in range(5):
        watch.optimizer_stepped(optimizer, (), {})
    watch.finish()
    steps = read_journal(folder).steps
    assert [step.step for step in steps] == [1, 2, 3, 4, 5]
    assert [step.peak_allocated_bytes is not None for step in steps] == [False, *[True] * 3, False]
    assert read_words(folder)[0].rank == 0


@pytest.mark.slow
def test_steps_of_another_thread_and_of_a_child_are_not_taken_for_the_scripts(folder, watch):
    optimizer = sgd()
    watch.optimizer_stepped(optimizer, (), {})
    thread = threading.Thread(target=watch.optimizer_stepped, args=(optimizer, (), {}))
    thread.start()
    thread.join()
    watch.leave()
    watch.optimizer_stepped(optimizer, (), {})
    watch.finish()
    assert len(read_journal(folder).steps) == 1


@pytest.mark.slow
def test_a_thread_that_reads_a_loader_ahead_does_not_become_the_one_that_trains(folder, watch):
    thread = threading.Thread(target=watch.batch_given, args=(None, torch.zeros(4)))
    thread.start()
    thread.join()
    watch.optimizer_stepped(sgd(), (), {})
    watch.finish()
    assert len(read_journal(folder).steps) == 1


@pytest.mark.slow
def test_what_ends_the_watching_ends_its_instruments_as_well(watch):
    optimizer = sgd()
    watch.optimizer_stepped(optimizer, (), {})
    assert torch.autograd._profiler_enabled(), "the second step is watched"
    watch._observer._leaks = finder = Finder()
    watch.safely(lambda: 1 / 0)
    assert not torch.autograd._profiler_enabled()
    assert finder.is_abandoned


@pytest.mark.slow
def test_a_finder_that_gave_up_is_no_all_clear(folder, watch):
    watch._observer._leaks = finder = Finder()
    finder.failure = "TypeError: unreadable"
    watch.optimizer_stepped(sgd(), (), {})
    assert read_words(folder)[0].notes == (
        "leaks were looked for until step 1: TypeError: unreadable",
    )


def test_a_failure_in_watching_is_noted_and_ends_it(folder, watch, monkeypatch):
    def fail(self):
        raise OSError("no room")

    monkeypatch.setattr(ResidentMemory, "num_bytes", fail)
    optimizer = sgd()
    watch.optimizer_stepped(optimizer, (), {})
    watch.optimizer_stepped(optimizer, (), {})
    assert watch.is_off
    assert read_words(folder)[0].notes == ("watching ended: OSError: no room",)


class Finder:
    """Stand in for the leak finder."""

    failure: str | None = None

    def __init__(self) -> None:
        self.boundaries = []
        self.is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True

    finish = abandon

    def boundary(self, *args) -> None:
        self.boundaries.append(args)


@pytest.mark.slow
def test_the_leak_finder_hears_of_each_boundary_by_its_stream(watch, loaders):
    optimizer = sgd()
    watch._observer._leaks = finder = Finder()
    loaders_module.hook_loaders(watch.loader_begun, watch.batch_wanted, watch.batch_given)
    train_loader = DataLoader(torch.zeros(6, 2), batch_size=2)
    val_loader = DataLoader(torch.zeros(4, 2), batch_size=2)
    for _ in train_loader:
        watch.optimizer_stepped(optimizer, (), {})
    with torch.no_grad():
        assert len([*val_loader]) == 2
    steps = [("train", number, 16) for number in (1, 2, 3)]
    assert finder.boundaries == [*steps, ("val_loader", 1, None), ("val_loader", 2, None)]


def test_a_rank_is_claimed_by_one_living_process_at_a_time(folder):
    claim = words_folder(folder) / "rank-0.claim"
    RankJournal(folder, 0, 1, "cpu")
    assert claim.read_text() == str(os.getpid())
    with pytest.raises(RankTakenError):
        RankJournal(folder, 0, 1, "cpu")
    claim.write_text("999999999")
    RankJournal(folder, 0, 1, "cpu")
    assert claim.read_text() == str(os.getpid())


def test_settings_reach_the_inside(tmp_path):
    settings = WatchSettings(folder=tmp_path, budget_bytes=5, finds_leaks=False)
    watched = watched_environment(settings, {"PYTHONPATH": "/own", "MEMFIT_WATCH_LEAKS": "1"})
    assert settings_from(watched) == settings
    assert watched["PYTHONPATH"].endswith(f"attach{os.pathsep}/own")
    assert settings_from({**watched, "MEMFIT_DISABLE": "1"}) is None
    assert settings_from({}) is None
    assert (
        settings_from(watched_environment(WatchSettings(folder=tmp_path), watched)).budget_bytes
        is None
    )


def test_what_takes_long_takes_a_third_of_one_hundredth():
    shares = script_watch_module._PEAKS_FRACTION + script_watch_module._LEAKS_FRACTION
    assert shares <= 0.003, "the hooks take the rest of one hundredth"


def test_words_of_another_version_are_read_as_far_as_they_are_known(folder):
    record = ProcessRecord(folder)
    record.note("something")
    (path,) = words_folder(folder).glob("*.json")
    path.write_text(path.read_text().replace('"notes"', '"later": 1, "notes"', 1))
    assert read_words(folder)[0].notes == ("something",)
