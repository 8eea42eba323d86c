"""Configuration files rewritten as one and put back, while the disk or the process fails."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path

from chaos_runs.outcomes import Outcome, names_disk
from chaos_runs.processes import forked, wait_for
from chaos_runs.stories import Fault, Story
from chaos_runs.system_calls import ERRORS, Blow, Watch
from memfit.configfile.history import State, records
from memfit.configfile.transaction import Rewrite, put_back_unfinished, undo_last, write_all
from memfit.errors import MemfitError

_MOST_SECONDS = 30.0
_NAMES = ("a.yaml", "conf/train.yaml", "conf/deep/ds.json", "pyproject.toml")
_REFUSED = 3
Contents = Mapping[str, bytes]


def edited(story: Story, root: Path) -> Outcome:
    """Carry out a story of configuration files in an empty folder."""
    return _Editing(story, root).outcome()


class _Editing:
    """A folder of files, what they held before and what they are to hold."""

    def __init__(self, story: Story, root: Path) -> None:
        chance = random.Random(story.seed)
        names = chance.sample(_NAMES, chance.randint(1, 4))
        self._story, self._root = story, root
        self._told = root / "told"
        self._told.mkdir()
        self._versions: list[Contents] = [
            {name: chance.randbytes(chance.choice([3, 200, 5000, 70_000])) for name in names}
            for _ in range(3)
        ]
        self._modes = {name: chance.choice([0o644, 0o600, 0o755]) for name in names}
        self._outcome = Outcome(story=story)

    def outcome(self) -> Outcome:
        """Do it undisturbed, to count the calls, then with what befalls it, then to the end."""
        is_undo = self._story.words == "undo"
        before, after = (1, 0) if is_undo else (0, 1)
        if self._story.words == "apply undo":
            before, after = 1, 2
        work = self._made(self._root / "wanted")
        watch = Watch(places=[work])
        self._lived(work, "wanted", watch)
        work = self._made(self._root / "found")
        for number, (fault,) in enumerate(self._story.lives):
            at = 1 + int(fault.at * max(1, watch.seen))
            own = Watch(places=[work], at=at, blow=Blow(fault.how))
            code, said = self._lived(work, f"life-{number}", own)
            if own.struck is not None:
                self._outcome.struck.append(f"{fault.how} at call {own.seen}, {own.struck.name}")
            self._look(work, (before, after), code, said, fault, is_first=number == 0)
            if self._outcome.violations or code == 0:
                break
        else:
            code, said = self._lived(work, "last", None)
            if code != 0:
                self._broken(f"cannot be done after the fault is over: {said}")
        if not self._outcome.violations:
            self._look_at_end(work, after)
        return self._outcome

    def _made(self, work: Path) -> Path:
        for name, content in self._versions[0].items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(self._modes[name])
            os.utime(path, ns=(10**18, 10**18))
        if self._story.words != "apply":
            write_all(work, self._rewrites(work, 0, 1))
        return work

    def _rewrites(self, work: Path, before: int, after: int) -> list[Rewrite]:
        olds, news = self._versions[before], self._versions[after]
        return [Rewrite(path=work / name, before=olds[name], after=news[name]) for name in olds]

    def _lived(self, work: Path, name: str, watch: Watch | None) -> tuple[int, str]:
        said = self._told / f"{name}.txt"
        child = forked(lambda: self._do(work), said, watch)
        ends = wait_for({child: watch}, _MOST_SECONDS)
        code, words = ends.codes[child], said.read_text(errors="replace")
        self._outcome.ended.append(f"{code} {words.strip()[:300]}")
        for left in ends.left:
            self._broken(f"a process is left behind: {left}")
        if ends.overtime:
            self._broken("it hangs")
        return code, words

    def _do(self, work: Path) -> int:
        """Put back what was cut off, as a command would, then apply or undo."""
        try:
            put_back_unfinished(work)
            if self._story.words == "undo":
                if records(work):  # a process that was killed had done all but to say so
                    undo_last(work)
            else:
                first = 0 if self._story.words == "apply" else 1
                now = {name: (work / name).read_bytes() for name in self._versions[0]}
                if now != self._versions[first + 1]:
                    write_all(work, self._rewrites(work, first, first + 1))
        except (MemfitError, OSError) as error:
            os.write(1, f"{type(error).__name__}: {error}\n".encode())
            where = isinstance(error, MemfitError) or bool(error.filename)
            return _REFUSED if where else 1
        return 0

    def _look(
        self,
        work: Path,
        versions: tuple[int, int],
        code: int,
        said: str,
        fault: Fault,
        *,
        is_first: bool,
    ) -> None:
        """Every file is old or new; an error names the fault, and leaves all files old."""
        kills = fault.how in (Blow.KILL, Blow.TEAR)
        before, after = (self._versions[each] for each in versions)
        for name in before:
            if (work / name).read_bytes() not in (before[name], after[name]):
                self._broken(f"{name} is neither old nor new")
            if (work / name).stat().st_mode & 0o777 != self._modes[name]:
                self._broken(f"{name} has another mode")
        if code < 0 and not kills:
            self._broken(f"it is ended by signal {-code}")
        if code > 0 and (kills or code != _REFUSED):
            self._broken(f"it ends with {code}: {said[-400:]}")
        if code == _REFUSED:
            self._look_at_refusal(work, before if is_first else {}, said, fault)

    def _look_at_refusal(self, work: Path, before: Contents, said: str, fault: Fault) -> None:
        """An error names the fault, and an apply that could put its files back has done so."""
        number = ERRORS.get(Blow(fault.how))
        if number is not None and not names_disk(said, number):
            self._broken(f"the error does not name the fault: {said[-400:]}")
        is_full = fault.how in (Blow.BRIEFLY, Blow.FULL, Blow.PARTLY, Blow.QUOTA)
        could_put_back = is_full and self._story.words != "undo"
        if could_put_back and any((work / each).read_bytes() != before[each] for each in before):
            self._broken("an error has left files that are new")

    def _look_at_end(self, work: Path, wanted: int) -> None:
        for name, content in self._versions[wanted].items():
            if (work / name).read_bytes() != content:
                self._broken(f"{name} is not what it was to be")
            if wanted == 0 and (work / name).stat().st_mtime_ns != 10**18:
                self._broken(f"{name} has another time")
        known = records(work)
        if any(record.state is not State.DONE for record in known):
            self._broken("a record is left open")
        expected = {work / file.backup for record in known for file in record.files}
        there = {each for each in work.rglob("*") if ".backup-" in each.name}
        if there != expected:
            self._broken(f"backups are {sorted(map(str, there ^ expected))} off")
        if parts := [each.name for each in work.rglob("*.part")]:
            self._broken(f"{parts} are left behind")

    def _broken(self, what: str) -> None:
        self._outcome.violations.append(what)
