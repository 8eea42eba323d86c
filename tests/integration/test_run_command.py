"""``memfit run`` with real child processes: what it passes on, what it writes, and why they ended."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.zoo.processes import SOURCE_FOLDER, TIMEOUT_SECONDS, environment, run_python

from memfit.journal.folder import Journal, read_journal, read_ranks
from memfit.journal.records import Reason

MEMFIT_RUN = ("-m", "memfit", "run", "--folder", "run")
TRAINING = """
    import sys
    import torch
    from torch import nn

    def train(num_steps, model, width=64, after=lambda step: None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(num_steps):
            model(torch.randn(8, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after(step)
"""


def write_script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(TRAINING) + textwrap.dedent(body))
    return path


def run(folder: Path, *words: str, options: tuple[str, ...] = (), **more: str):
    """Run a command under ``memfit run`` in a folder."""
    return run_python(*MEMFIT_RUN, *options, "--", *words, cwd=folder, env=environment(**more))


def run_script(folder: Path, body: str, *, options: tuple[str, ...] = (), **more: str):
    """Run a Python script under ``memfit run``; return the process and the journal."""
    script = write_script(folder, body)
    done = run(folder, sys.executable, script.name, options=options, **more)
    return done, read_journal(folder / "run")


def nothing_is_left(folder: Path) -> bool:
    """Return whether the folder holds whole files and nothing but the journal."""
    names = {path.name for path in folder.rglob("*")}
    return not any(name.startswith(".") or name.endswith(".part") for name in names)


# --- Scripts as they are ---


@pytest.mark.slow
def test_a_plain_script_runs_as_it_is_and_leaves_a_journal(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        train(12, nn.Linear(64, 64))
        print("read", sys.stdin.readline().strip(), "__file__" in dir(), sys.argv, __name__)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "read  True ['train.py'] __main__\n"
    assert journal.ending.reason is Reason.DONE
    assert [step.step for step in journal.steps] == [*range(1, 13)]
    assert journal.ending.num_steps == 12
    weights_bytes = (64 * 64 + 64) * 4
    measured = [step.peak_allocated_bytes for step in journal.steps]
    assert all(2 * weights_bytes <= peak < 4 * weights_bytes for peak in measured[1:4])
    assert journal.ending.peak_allocated_bytes == max(filter(None, measured))
    assert all(step.host_bytes > 2**20 for step in journal.steps)
    assert journal.facts.device == "cpu"
    assert journal.facts.command.endswith("train.py")
    assert "memfit: done: The command came to its end after 12 steps." in done.stderr
    assert nothing_is_left(tmp_path / "run")


def test_a_script_without_torch_and_its_exit_code_are_passed_on(tmp_path):
    code = "import sys; print('seen'); sys.exit(int('torch' in sys.modules) + 7)"
    done = run(tmp_path, sys.executable, "-c", code, options=("--json",))
    assert done.returncode == 7
    first, last = done.stdout.splitlines()
    assert first == "seen"
    result = json.loads(last)
    assert (result["reason"], result["exit_code"], result["folder"]) == ("error", 7, "run")
    assert "nothing was seen of the inside" in result["evidence"][0]
    assert result == {
        **json.loads((tmp_path / "run" / "reason.json").read_text()),
        "folder": "run",
    }


@pytest.mark.slow
def test_a_script_that_raises_is_told_with_its_line(tmp_path):
    done, journal = run_script(
        tmp_path, "train(3, nn.Linear(64, 64))\nraise ValueError('a bad sign')\n"
    )
    assert done.returncode == 1
    assert done.stderr.index("Traceback") < done.stderr.index("memfit: error: ValueError")
    assert journal.ending.reason is Reason.ERROR
    lines = (tmp_path / "train.py").read_text().splitlines()
    line = lines.index("raise ValueError('a bad sign')") + 1
    assert journal.ending.sentence == f"ValueError, at train.py:{line}: a bad sign"


@pytest.mark.slow
def test_the_scripts_own_sitecustomize_and_exception_hook_work_as_ever(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.was_here = __file__\n")
    done, journal = run_script(
        tmp_path,
        """
        assert sys.modules["sitecustomize"].__file__ == was_here
        sys.excepthook = lambda kind, error, traceback: print("mine:", error)
        train(2, nn.Linear(64, 64))
        raise RuntimeError("CUDA out of memory, so it says")
        """,
        PYTHONPATH=f"{SOURCE_FOLDER}{os.pathsep}{own}",
    )
    assert done.stdout == "mine: CUDA out of memory, so it says\n", done.stderr
    assert "Traceback" not in done.stderr
    assert journal.ending.reason is Reason.OUT_OF_MEMORY


@pytest.mark.slow
def test_workers_of_a_data_loader_and_forked_processes_write_nothing(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        import os
        from torch.utils.data import DataLoader
        model = nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = DataLoader(torch.randn(48, 64), batch_size=8, num_workers=2)
        train(1, model)
        if os.fork() == 0:
            kept = torch.empty(400_000_000)  # a budget of each process, not of its copies
            train(3, model)
            os._exit(0)
        assert os.wait()[1] == 0
        for epoch in range(2):
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
        """,
        options=("--budget", "1GiB"),
    )
    assert done.returncode == 0, done.stderr
    assert len(journal.steps) == 13
    assert journal.ending.reason is Reason.DONE
    assert all(step.peak_allocated_bytes for step in journal.steps)


@pytest.mark.slow
def test_watching_every_step_from_hook_to_hook_does_no_harm(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        import memfit.observe.peaks as peaks
        peaks.CpuPeaks.is_due = lambda *_: True
        peaks.note_living_blocks = lambda: None  # which takes long
        with torch.profiler.record_function("all of it"):
            train(300, nn.Linear(64, 64))
        """,
    )
    assert done.returncode == 0, done.stderr
    peaks = {step.peak_allocated_bytes for step in journal.steps[2:]}
    assert len(peaks) == 1, "equal steps have equal peaks"


@pytest.mark.slow
def test_a_python_without_memfit_is_attached_all_the_same(tmp_path):
    script = write_script(tmp_path, "train(3, nn.Linear(64, 64))")
    code = f"""
import importlib.util, sys
sys.path = [path for path in sys.path if not path.endswith("src")]
assert importlib.util.find_spec("memfit") is None
exec(open({script.name!r}).read())
"""
    done = run(tmp_path, sys.executable, "-X", "faulthandler", "-c", code)
    assert done.returncode == 0, done.stderr
    assert len(read_journal(tmp_path / "run").steps) == 3


WAITS = "import sys; print(any(type(f).__name__ == '_TorchFinder' for f in sys.meta_path))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "more", "waits", "evidence"),
    [
        (("-c", WAITS), {}, True, "nothing was seen of the inside"),
        (("-I", "-c", WAITS), {}, False, "nothing was seen of the inside"),
        (("-c", WAITS), {"MEMFIT_DISABLE": "1"}, False, "MEMFIT_DISABLE=1: nothing was attached"),
    ],
    ids=["as-ever", "isolated", "turned-off"],
)
def test_python_waits_for_torch_unless_it_cannot_or_is_not_to(
    tmp_path, words, more, waits, evidence
):
    done = run(tmp_path, sys.executable, *words, **more)
    assert (done.returncode, done.stdout) == (0, f"{waits}\n")
    assert read_journal(tmp_path / "run").ending.evidence[0].startswith(evidence)


@pytest.mark.slow
def test_what_cannot_be_started_is_an_error_as_in_a_shell(tmp_path):
    done = run(tmp_path, "no-such-program")
    assert done.returncode == 127
    assert "could not be started" in done.stderr
    (tmp_path / "notes.txt").write_text("")
    assert run(tmp_path, "./notes.txt").returncode == 126
    assert not (tmp_path / "run").exists()
    (tmp_path / "broken").write_bytes(b"\0no program")
    (tmp_path / "broken").chmod(0o755)
    assert run(tmp_path, "./broken").returncode == 126
    assert run(tmp_path, "true").returncode == 0, "the folder holds no run"


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    assert run(tmp_path, "true").returncode == 0
    before = (tmp_path / "run" / "reason.json").read_text()
    done = run(tmp_path, "false")
    assert done.returncode == 2
    assert "run holds a run already (run.json). Give another --folder, or" in done.stderr
    assert "replace it with --overwrite." in done.stderr
    assert (tmp_path / "run" / "reason.json").read_text() == before


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_begun_anew_when_that_is_asked_for(tmp_path):
    done, journal = run_script(tmp_path, "train(5, nn.Linear(64, 64))")
    stale = tmp_path / "run" / "rank-3"
    stale.mkdir()
    (stale / "steps.jsonl").write_text("{}\n")
    own = [tmp_path / "run" / name for name in ("model.pt", "plan.yaml")]
    for path in own:
        path.touch()
    assert len(journal.steps) == 5
    done, journal = run_script(tmp_path, "train(2, nn.Linear(64, 64))", options=("--overwrite",))
    assert done.returncode == 0, done.stderr
    assert [step.step for step in journal.steps] == [1, 2]
    assert read_ranks(tmp_path / "run").keys() == {0}
    assert all(path.exists() for path in own), "what is not of the journal stays"


# --- Memory that runs out ---


@pytest.mark.slow
def test_the_budget_is_enforced_in_backward_too_and_the_reason_says_where(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512))

            def forward(self, batch):
                return self.encoder(batch.repeat(4 ** sys.argv.count("large"), 1))

        model = Net()
        train(3, model)
        sys.argv += ["large"] * 5
        train(3, model)
        """,
        options=("--budget", "8MiB"),
    )
    ending = journal.ending
    assert done.returncode == 1
    assert ending.reason is Reason.BUDGET_EXCEEDED
    assert ending.ended_by == "budget-exceeded"
    assert "over the enforced budget of 8.0 MiB" in ending.sentence
    assert ", in encoder.0 (Linear), in the forward of step 4, at train.py:" in ending.sentence
    assert ending.budget_bytes == 8 * 2**20
    assert len(journal.steps) == ending.num_steps == 3
    assert "BudgetExceededError" in done.stderr


@pytest.mark.slow
def test_a_budget_that_backward_exceeds_names_backward_and_a_caught_error_counts(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        model = nn.Linear(1024, 1024)  # 4 MiB, and as much again for gradients
        try:
            train(3, model, width=1024)
        except RuntimeError as error:
            print(type(error).__name__)
            sys.exit(5)
        """,
        options=("--budget", "7MiB"),
    )
    ending = journal.ending
    assert (done.returncode, done.stdout) == (5, "BudgetExceededError\n")
    assert ending.reason is Reason.BUDGET_EXCEEDED
    assert "in the backward of step 1, at train.py:" in ending.sentence
    assert "the script caught the error, and ended with it" in ending.evidence


FAKE_FINDER = """
    import types
    fake = types.ModuleType("memfit.observe.leaks")
    class LeakFinder:
        failure = None
        def __init__(self, on_leak=None, *, overhead_fraction=0.005):
            self.on_leak, self.found = on_leak, []
        def boundary(self, stream, step, batch_bytes=None):
            from memfit.journal.records import LeakEvent
            if (stream, step) == ("train", 5):
                leak = LeakEvent(step=5, kind="list", holder="losses", chain=(),
                    source_line="train.py:9", growth_bytes_per_step=4e6, num_steps=5,
                    total_growth_bytes=20_000_000, place="host", sentence="losses grows.")
                self.found.append(leak)
                self.on_leak(leak)
        def finish(self):
            return tuple(self.found)
    fake.LeakFinder = LeakFinder
    sys.modules["memfit.observe.leaks"] = fake
"""


def leaking(num_steps: int) -> str:
    return f"""
        losses = []
        train({num_steps}, nn.Linear(64, 1), after=lambda _: losses.append(torch.zeros(1_000_000)))
        """


def run_with_fake_finder(folder: Path, body: str, *options: str) -> tuple[int, Journal]:
    (folder / "own").mkdir()
    fake = "import sys\n" + textwrap.dedent(FAKE_FINDER)
    (folder / "own" / "sitecustomize.py").write_text(fake)
    path = f"{SOURCE_FOLDER}{os.pathsep}{folder / 'own'}"
    done, journal = run_script(folder, body, options=options, PYTHONPATH=path)
    return done.returncode, journal


@pytest.mark.slow
def test_a_leak_that_fills_the_budget_is_the_reason(tmp_path):
    code, journal = run_with_fake_finder(tmp_path, leaking(1000), "--budget", "100MiB")
    ending = journal.ending
    assert code == 1
    assert (ending.reason, ending.ended_by) == (Reason.LEAK, "budget-exceeded")
    assert ending.sentence.startswith("losses grows. It ended so: ")
    assert "End the growth of losses at train.py:9" in ending.remedy
    assert [leak.holder for leak in ending.leaks] == ["losses"]
    assert journal.events == ending.leaks
    assert 20 <= ending.num_steps <= 27


@pytest.mark.slow
def test_a_run_that_ends_well_lists_its_leaks(tmp_path):
    code, journal = run_with_fake_finder(tmp_path, leaking(10))
    assert code == 0
    assert journal.ending.reason is Reason.DONE
    assert [leak.holder for leak in journal.ending.leaks] == ["losses"]


# --- Signals ---


@pytest.mark.slow
def test_a_killed_script_keeps_its_journal_and_sigkill_alone_is_a_signal(tmp_path):
    done, journal = run_script(
        tmp_path,
        """
        import os
        train(20, nn.Linear(64, 64), after=lambda step: step == 8 and os.kill(os.getpid(), 9))
        """,
    )
    assert done.returncode == 128 + signal.SIGKILL
    assert journal.ending.reason is Reason.SIGNAL
    assert journal.ending.signal == signal.SIGKILL
    assert len(journal.steps) >= 8, "a line is on the disk before the next step begins"
    assert "no sign of the host's out-of-memory killer was found" in journal.ending.evidence


SAVING = """
    import os, time
    print("ready", flush=True)
    try:
        train(10_000, nn.Linear(64, 64), after=lambda step: time.sleep(0.01))
    except KeyboardInterrupt:
        time.sleep(0.5)
        print("all", "safe", flush=True)
        raise
"""


def wait_for_steps(folder: Path) -> None:
    deadline_seconds = time.monotonic() + TIMEOUT_SECONDS
    while not (folder / "run" / "steps.jsonl").exists():
        assert time.monotonic() < deadline_seconds, "no step was made"
        time.sleep(0.02)


@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_script_once_and_memfit_waits(tmp_path):
    script = write_script(tmp_path, SAVING)
    words = [sys.executable, *MEMFIT_RUN, "--", sys.executable, script.name]
    process_id, terminal = pty.fork()
    if process_id == 0:  # the child has the new terminal and is in its foreground
        os.chdir(tmp_path)
        os.execve(sys.executable, words, environment())
    try:
        wait_for_steps(tmp_path)
        os.write(terminal, b"\x03")
        output = read_terminal(terminal)
        _, status = os.waitpid(process_id, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, output
    assert output.count("all safe") == 1
    assert output.count("KeyboardInterrupt") == 1
    ending = read_journal(tmp_path / "run").ending
    assert (ending.reason, ending.signal) == (Reason.INTERRUPTED, signal.SIGINT)
    assert nothing_is_left(tmp_path / "run")


def read_terminal(terminal: int) -> str:
    """Read what a terminal shows until its last process has gone."""
    output = b""
    while True:
        try:
            block = os.read(terminal, 4096)
        except OSError:  # the way in which Linux says so
            return output.decode()
        if not block:
            return output.decode()
        output += block


@pytest.mark.slow
def test_a_signal_for_memfit_is_handed_on_once_to_all_of_the_command(tmp_path):
    script = write_script(
        tmp_path,
        f"""
        import signal
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        {textwrap.indent(textwrap.dedent(SAVING), " " * 8).strip()}
        """,
    )
    shell = tmp_path / "train.sh"
    shell.write_text(f"trap 'true' INT TERM\n{sys.executable} {script.name}\necho after $?\nexit 3")
    process = subprocess.Popen(
        [sys.executable, *MEMFIT_RUN, "--", "bash", shell.name],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(tmp_path)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 3, err
    assert out == "ready\nall safe\nafter 130\n"
    ending = read_journal(tmp_path / "run").ending
    assert ending.reason is Reason.INTERRUPTED
    assert "SIGTERM" in ending.sentence


# --- Launchers ---


DISTRIBUTED = """
    import os
    import torch.distributed as dist
    dist.init_process_group("gloo")
    def after(step):
        if step == 3 and dist.get_rank() == 1 and "die" in sys.argv:
            os.kill(os.getpid(), 9)
    train(6, nn.parallel.DistributedDataParallel(nn.Linear(64, 64)), after=after)
    dist.destroy_process_group()
"""


def torchrun(folder: Path, *words: str):
    script = write_script(folder, DISTRIBUTED)
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run(folder, *module, "--nproc-per-node", "2", script.name, *words)


@pytest.mark.slow
def test_each_rank_of_torchrun_has_its_journal(tmp_path):
    done = torchrun(tmp_path)
    assert done.returncode == 0, done.stderr
    journals = read_ranks(tmp_path / "run")
    assert {rank: len(journal.steps) for rank, journal in journals.items()} == {0: 6, 1: 6}
    assert [journals[rank].facts.rank for rank in (0, 1)] == [0, 1]
    assert journals[1].facts.num_ranks == 2
    assert journals[0].ending.reason is Reason.DONE
    assert not (tmp_path / "run" / "rank-1" / "reason.json").exists()


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(tmp_path):
    done = torchrun(tmp_path, "die")
    assert done.returncode == 1
    ending = read_journal(tmp_path / "run").ending
    assert (ending.reason, ending.signal) == (Reason.SIGNAL, signal.SIGKILL)
    assert "SIGKILL ended rank 1, process " in ending.sentence


@pytest.mark.slow
def test_accelerate_launch_is_watched(tmp_path):
    script = write_script(
        tmp_path,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model, optimizer = nn.Linear(64, 1), None
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(6):
            accelerator.backward(model(torch.randn(8, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu"]
    done = run(tmp_path, *launch, script.name)
    assert done.returncode == 0, done.stderr
    journal = read_journal(tmp_path / "run")
    assert len(journal.steps) == 6
    assert journal.ending.reason is Reason.DONE


@pytest.mark.slow
def test_trainings_that_follow_each_other_in_a_shell_script_share_a_journal(tmp_path):
    script = write_script(tmp_path, "train(int(sys.argv[1]), nn.Linear(64, 64))")
    shell = tmp_path / "both.sh"
    shell.write_text("".join(f"{sys.executable} {script.name} {number}\n" for number in (3, 4)))
    done = run(tmp_path, "bash", shell.name)
    assert done.returncode == 0, done.stderr
    assert [step.step for step in read_journal(tmp_path / "run").steps] == [*range(1, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--allow-unplanned",)])
def test_a_loop_that_nothing_plans_is_refused_unless_it_may_train(tmp_path, options):
    words = ("--fit", "--budget", "1MiB", *options)
    done, journal = run_script(tmp_path, "train(3, nn.Linear(64, 64))", options=words)

    assert done.returncode == (0 if options else 1)
    assert journal.ending.num_steps == (3 if options else 0)
    assert journal.ending.is_planned is False
    assert journal.ending.budget_bytes == 2**20
    assert "memfit: WITHOUT A PLAN: no Trainer of Lightning or transformers" in done.stderr
    assert ("memfit: training WITHOUT A PLAN" in done.stderr) is bool(options)
