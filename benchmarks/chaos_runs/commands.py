"""Commands whose output nobody reads to its end, whose disk fails, or which are killed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_runs.lives import OLD_PLAN
from chaos_runs.outcomes import Outcome, names_disk
from chaos_runs.processes import Ends, forked, wait_for
from chaos_runs.stories import OF_PIPE, Fault, Story
from chaos_runs.system_calls import ERRORS, Blow, Watch
from memfit import Plan
from memfit.errors import MemfitError
from memfit.journal.folder import JournalWriter
from memfit.journal.records import Ending, Reason, RunFacts, StepRecord

_MOST_SECONDS = 90.0
_BROKEN_PIPE = 141
_OLD = b"old\n"
_JOB = """
import torch, memfit
job = memfit.Job(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)),
    batch=lambda size: torch.randn(size, 8),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=8,
)
"""
_SCRIPT = "echo begun; echo told >&2; sleep ${CHAOS_SLEEP_SECONDS}; echo ended; exit 3"
_COMMANDS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "predict": (("predict", "job.py:job", "--save", "out.json"), ("out.json",)),
    "plan": (("plan", "job.py:job", "--save", "plan.yaml"), ("plan.yaml",)),
    "report": (("report", "run"), ("run/report.html",)),
    "devices": (("devices",), ()),
    "doctor": (("doctor",), ()),
    "measure": (("measure", "job.py:job", "--json"), ()),
    "run": (("run", "--folder", "watched", "--overwrite", "--", "sh", "-c", _SCRIPT), ()),
}
"""The words of each, and the files that it writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str
    ends: Ends


def called(story: Story, root: Path) -> Outcome:
    """Carry out a story of a command in an empty folder."""
    return _Calling(story, root).outcome()


class _Calling:
    """A command in a folder of its own."""

    def __init__(self, story: Story, root: Path) -> None:
        self._story, self._root = story, root
        self._words, self._files = _COMMANDS[story.words]
        self._outcome = Outcome(story=story)
        (root / "told").mkdir()

    def outcome(self) -> Outcome:
        """Call it undisturbed, then with what befalls it, then once more."""
        work = _made(self._root / "wanted")
        watch = Watch(places=[work])
        wanted = self._called(work, "wanted", watch)
        work = _made(self._root / "found")
        ((fault,),) = self._story.lives
        own = None
        if fault.kind != OF_PIPE:
            at = 1 + int(fault.at * max(1, watch.seen))
            own = Watch(places=[work], at=at, blow=Blow(fault.how))
        found = self._called(work, "found", own, fault, len(wanted.out))
        if own is not None and own.struck is not None:
            self._outcome.struck.append(f"{fault.how} at call {own.seen}, {own.struck.name}")
        elif own is None:
            self._outcome.struck.append(f"{fault.how} closed")
        self._look(work, wanted, found, fault, is_struck=own is not None and own.struck is not None)
        again = self._called(work, "again", None)
        if again.code != wanted.code:
            self._broken(f"afterwards it ends with {again.code}: {again.err[-400:]}")
        self._look_at_files(work, is_over=True)
        return self._outcome

    def _called(
        self,
        work: Path,
        name: str,
        watch: Watch | None,
        fault: Fault | None = None,
        most_characters: int = 0,
    ) -> _End:
        told = self._root / "told"
        paths = {"out": told / f"{name}.out", "err": told / f"{name}.err"}
        ends_of = {each: os.open(path, os.O_WRONLY | os.O_CREAT) for each, path in paths.items()}
        watches: dict[int, Watch | None] = {}
        if fault is not None and fault.kind == OF_PIPE:
            readable, writable = os.pipe()
            num = int(fault.at * most_characters) if fault.at > 0.3 else 0
            watches[forked(lambda: _read(readable, writable, num), told / "reader.txt")] = None
            os.close(readable)
            for each in ends_of if fault.how == "both" else [fault.how]:
                os.close(ends_of[each])
                ends_of[each] = os.dup(writable)
            os.close(writable)
        sleep_seconds = "0.05" if fault is None or fault.how not in ("kill", "tear") else "60"
        child = forked(
            lambda: self._call(work, ends_of["out"], ends_of["err"], sleep_seconds),
            told / "outer.txt",
            watch,
        )
        for each in ends_of.values():
            os.close(each)
        watches[child] = watch
        ends = wait_for(watches, _MOST_SECONDS)
        said = {each: path.read_text(errors="replace") for each, path in paths.items()}
        said["err"] += (told / "outer.txt").read_text(errors="replace")
        self._outcome.ended.append(f"{ends.codes[child]} {said['err'].strip()[-300:]}")
        return _End(code=ends.codes[child], out=said["out"], err=said["err"], ends=ends)

    def _call(self, work: Path, out: int, err: int, sleep_seconds: str) -> int:
        """Be the command, to the last flush at its exit."""
        from memfit.cli.main import main  # noqa: PLC0415 - the command's own modules

        os.chdir(work)
        os.environ |= {
            "HOME": str(work),
            "TMPDIR": str(work),
            "MEMFIT_CACHE_DIR": str(work / "cache"),
            "CHAOS_SLEEP_SECONDS": sleep_seconds,
        }
        os.environ.pop("XDG_CACHE_HOME", None)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        code = main([*self._words])
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return 120  # as the interpreter ends where its last flush fails
        return code

    def _look(
        self, work: Path, wanted: _End, found: _End, fault: Fault, *, is_struck: bool
    ) -> None:
        """No process stays, nothing is said that only a developer reads, and the end is named."""
        for left in found.ends.left:
            self._broken(f"a process is left behind: {left}")
        if found.ends.overtime:
            self._broken("it hangs")
        for word in ("Traceback", "Exception ignored", "unexpected "):
            if word in found.err:
                self._broken(f"it says {word!r}: {found.err[-600:]}")
        if found.code not in self._codes(wanted, fault, is_struck=is_struck):
            last = found.err.strip().rpartition("\n")[2]
            if found.code != 1 or not _names(last, fault):
                self._broken(f"it ends with {found.code}: {found.err[-600:]}")
        self._look_at_files(work, is_over=False)

    def _codes(self, wanted: _End, fault: Fault, *, is_struck: bool) -> set[int]:
        """Return the exit codes that need no word about the fault."""
        if fault.kind == OF_PIPE:
            return {wanted.code, _BROKEN_PIPE}
        if is_struck and fault.how in (Blow.KILL, Blow.TEAR):
            return {wanted.code, -9}
        return {wanted.code}

    def _look_at_files(self, work: Path, *, is_over: bool) -> None:
        for name in self._files:
            path = work / name
            content = path.read_bytes() if path.exists() else b""
            if not is_over and (content == _OLD or content == (work / "old.yaml").read_bytes()):
                continue
            if not _is_whole(path, content):
                self._broken(f"{name} is neither old nor new: {content[:200]!r}")

    def _broken(self, what: str) -> None:
        self._outcome.violations.append(what)


def _names(line: str, fault: Fault) -> bool:
    """Return whether a line is an error that names what was done to the disk."""
    number = None if fault.kind == OF_PIPE else ERRORS.get(Blow(fault.how))
    return number is not None and line.startswith("memfit: error: ") and names_disk(line, number)


def _is_whole(path: Path, content: bytes) -> bool:
    if path.suffix == ".html":
        return content.rstrip().endswith(b"</html>")
    if path.suffix == ".json":
        try:
            return isinstance(json.loads(content), dict)
        except ValueError:
            return False
    try:
        Plan.load(path)
    except MemfitError:
        return False
    return True


def _read(readable: int, writable: int, num_bytes: int) -> int:
    os.close(writable)
    while num_bytes > 0 and (read := os.read(readable, num_bytes)):
        num_bytes -= len(read)
    return 0


def _made(work: Path) -> Path:
    """Make the folder that a command finds."""
    work.mkdir()
    (work / "job.py").write_text(_JOB)
    (work / "out.json").write_bytes(_OLD)
    OLD_PLAN.save(work / "plan.yaml")
    OLD_PLAN.save(work / "old.yaml")
    journal = JournalWriter(work / "run")
    (work / "run" / "report.html").write_bytes(_OLD)
    facts = {"title": "run", "command": "train.py", "device": "cpu", "process_id": 1}
    journal.begin(RunFacts(**facts, started_at="2026-01-01T00:00:00+00:00"))
    for step in range(1, 40):
        peak_bytes = 1_000_000 + step
        journal.step(
            StepRecord(
                step=step,
                time_seconds=0.1 * step,
                step_seconds=0.1,
                peak_allocated_bytes=peak_bytes,
            )
        )
    done = Reason.DONE
    words = {"sentence": "The command ended.", "remedy": ""}
    journal.end(Ending(reason=done, ended_by=done, exit_code=0, num_steps=39, **words))
    return work
