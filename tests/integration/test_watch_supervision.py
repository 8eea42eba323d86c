"""A command is supervised to its end: the host's killer, what it leaves behind, its groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.journal.folder import read_journal
from memfit.journal.records import Reason
from memfit.observe.processes import started_at, tree_memory
from memfit.units import MIB
from memfit.watch import supervisor as supervisor_module
from memfit.watch.command import watch_command
from memfit.watch.host_killer import HostKillerSigns
from memfit.watch.supervisor import end_left_behind, supervise

ALLOCATING = """
import os, sys, time
open("pid", "w").write(str(os.getpid()))
held = []
while True:
    if len(held) < 60:
        held.append(bytearray(b"x" * 2_000_000))
    time.sleep(0.01)
"""
LIMIT_BYTES = 90 * MIB


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class KillerDouble(threading.Thread):
    """Do as the host's killer does: count, and send SIGKILL, when a process has too much."""

    def __init__(self, folder: Path, *, leaves_signs: bool) -> None:
        super().__init__(daemon=True)
        self.folder, self.leaves_signs = folder, leaves_signs
        self.root = folder / "root"
        for name in ("proc", "dev", "sys/fs/cgroup"):
            (self.root / name).mkdir(parents=True)
        (self.root / "proc" / "self").mkdir()
        (self.root / "proc" / "self" / "cgroup").write_text("0::/\n")
        (self.root / "dev" / "kmsg").write_text("")
        self._count(0)

    def _count(self, number: int) -> None:
        (self.root / "sys/fs/cgroup/memory.events").write_text(f"oom 0\noom_kill {number}\n")

    def run(self) -> None:
        deadline_seconds = time.monotonic() + 30
        while time.monotonic() < deadline_seconds:
            text = (self.folder / "pid").read_text() if (self.folder / "pid").exists() else ""
            if text and tree_memory(int(text)).resident_bytes > LIMIT_BYTES:
                break
            time.sleep(0.005)
        time.sleep(0.6)  # so that a sample is taken, however busy the machine
        if self.leaves_signs:
            self._count(1)
            line = f"3,1,1,-;Memory cgroup out of memory: Killed process {text} (python)\n"
            with (self.root / "dev" / "kmsg").open("a") as log:
                log.write(line)
        os.kill(int(text), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("leaves_signs", [True, False], ids=["killer", "somebody"])
@pytest.mark.parametrize("shell", [False, True], ids=["direct", "below-a-shell"])
def test_a_process_that_is_killed_for_its_memory_is_told_by_the_signs(here, leaves_signs, shell):
    killer = KillerDouble(here, leaves_signs=leaves_signs)
    killer.start()
    (here / "grow.py").write_text(ALLOCATING)
    command = [sys.executable, "grow.py"]
    words = ["sh", "-c", f"{' '.join(command)}; exit $?"] if shell else command
    signs = HostKillerSigns(killer.root)
    run = watch_command(words, folder=here / "run", signs=signs)
    signs.close()
    ending = run.ending
    assert ending == read_journal(here / "run").ending
    assert (ending.exit_code, ending.signal) == (137, 9)
    if not leaves_signs:
        assert ending.reason is Reason.SIGNAL
        return
    assert ending.reason is Reason.HOST_OUT_OF_MEMORY_KILLER
    assert ending.evidence[0] == "oom_kill in /sys/fs/cgroup/memory.events grew from 0 to 1"
    assert "Killed process" in ending.evidence[1]
    assert ending.host_peak_bytes > LIMIT_BYTES / 2


@pytest.mark.skipif(
    "MEMFIT_TEST_MEMORY_GROUP" not in os.environ,
    reason="MEMFIT_TEST_MEMORY_GROUP names no control group that the test may put limits below",
)
def test_the_real_killer_is_recognised(here):
    parent = Path(os.environ["MEMFIT_TEST_MEMORY_GROUP"])
    group = parent / f"memfit-{os.getpid()}"
    group.mkdir()
    is_first = (group / "memory.limit_in_bytes").exists()
    (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(LIMIT_BYTES))
    (here / "grow.py").write_text(ALLOCATING)
    join = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} grow.py"
    try:
        run = watch_command(["sh", "-c", join], folder=here / "run")
    finally:
        group.rmdir()
    assert run.ending.reason is Reason.HOST_OUT_OF_MEMORY_KILLER, run.ending.evidence


def test_processes_that_outlive_the_command_are_ended_with_time_to_save(here, monkeypatch):
    monkeypatch.setattr("memfit.watch.supervisor._GRACE_SECONDS", 0.3)
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit()))\n"
        "open('ready', 'w').close()\ntime.sleep(60)\n"
    )
    (here / "stay.py").write_text(code)
    shell = f"{sys.executable} stay.py & echo $! > pid; while [ ! -e ready ]; do sleep 0.05; done"
    signs = HostKillerSigns()
    end = supervise(["sh", "-c", f"{shell}; exit 4"], os.environ, signs)
    signs.close()
    assert end.exit_code == 4
    process_id = int((here / "pid").read_text())
    left = {process_id: started_at(process_id)}
    assert end_left_behind(left) == (process_id,)
    assert (here / "saved").exists()
    assert started_at(process_id) is None
    assert end_left_behind(left) == ()


def test_another_process_of_the_same_id_is_left_alone():
    own_id = os.getpid()
    assert end_left_behind({own_id: started_at(own_id) - 1}) == ()


def test_the_resident_memory_of_all_processes_below_is_added_up():
    own = tree_memory(os.getpid())
    assert os.getpid() in own.process_ids
    assert own.resident_bytes > 10 * MIB
    assert tree_memory(2**30).resident_bytes == 0


def test_signals_are_as_before_when_the_command_has_ended(here):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    watch_command(["true"], folder=here / "run")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_the_command_has_the_signals_that_it_would_have(here):
    script = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    words = ["sh", "-c", f'{sys.executable} -c "{script}" > mask']
    assert watch_command(words, folder=here / "run").ending.exit_code == 0
    assert (here / "mask").read_text() == "[]\n"


@pytest.mark.slow
def test_the_command_is_asked_to_end_if_memfit_is_killed(here):
    (here / "stay.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (open('ended', 'w').close(), sys.exit()))\n"
        "open('ready', 'w').close()\ntime.sleep(60)\n"
    )
    words = [sys.executable, "-m", "memfit", "run", "--", sys.executable, "stay.py"]
    process = subprocess.Popen(words)
    wait_for(here / "ready")
    process.kill()
    process.wait()
    wait_for(here / "ended")


def wait_for(path: Path) -> None:
    deadline_seconds = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline_seconds, f"no {path.name}"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("from_terminal", "has_own_group", "handed_on"),
    [
        (True, False, []),  # the terminal has sent it to the command too
        (False, False, [("one", signal.SIGINT)]),
        (True, True, [("group", signal.SIGINT)]),
        (False, True, [("group", signal.SIGINT)]),
    ],
)
def test_each_signal_is_handed_on_once(monkeypatch, from_terminal, has_own_group, handed_on):
    sent = []
    monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(("group", number)))
    child = SimpleNamespace(pid=0, send_signal=lambda number: sent.append(("one", number)))
    supervision = supervisor_module._Supervision(child, None, has_own_group=has_own_group)
    code = supervisor_module._FROM_KERNEL if from_terminal else 0
    supervision._hand_on(SimpleNamespace(si_signo=signal.SIGINT, si_code=code))
    assert sent == handed_on


@pytest.mark.slow
def test_without_a_folder_each_run_has_its_own(here):
    folders = {watch_command(["true"]).folder for _ in range(3)}
    assert len(folders) == 3
    assert all(folder.parent == Path("runs") and "-true" in folder.name for folder in folders)
