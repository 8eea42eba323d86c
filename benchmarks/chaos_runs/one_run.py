"""Carries out one story: undisturbed, then with what befalls it, and looks at what is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from chaos_runs.faults import AT_OPERATORS
from chaos_runs.invariants import Found, Life, broken_in
from chaos_runs.lives import OLD_PLAN, Place, live
from chaos_runs.outcomes import Outcome
from chaos_runs.processes import Ends, forked, wait_for
from chaos_runs.stories import OF_FILES, OF_RANK, Fault, Story
from chaos_runs.system_calls import Blow, Watch

MOST_SECONDS = 300.0
"""A process that takes longer hangs, on a busy machine as well."""
UNUSABLE = "unusable"


def trained(story: Story, root: Path) -> Outcome:
    """Carry out a story of a training in an empty folder."""
    return _Training(story, root).outcome()


class _Training:
    """The processes of one story, one after the other."""

    def __init__(self, story: Story, root: Path) -> None:
        self._story = story
        self._root = root
        self._strategies: Sequence[Mapping[str, Any]] = ()
        self._num_operators: list[int] = [1] * story.num_ranks
        self._num_calls: dict[tuple[int, str], int] = {}
        self._outcome = Outcome(story=story)

    def outcome(self) -> Outcome:
        wanted = self._undisturbed()
        if wanted is None:
            return self._outcome
        place = Place(self._root / "found")
        place.make()
        OLD_PLAN.save(place.plan)
        old_plan, new_plan = place.plan.read_bytes(), (self._root / "wanted/work/plan.yaml")
        found = Found(
            story=self._story,
            wanted=wanted,
            place=place,
            plans=(old_plan, new_plan.read_bytes()),
        )
        for number, faults in enumerate((*self._story.lives, ())):
            life = self._lived(place, number, faults)
            found.lives.append(life)
            self._outcome.ended.append(life.summary)
            self._outcome.violations += broken_in(found)
            if self._outcome.violations or (not faults and life.is_done):
                break
            if life.is_done:  # what comes after would find a training that is over
                break
        return self._outcome

    def _undisturbed(self) -> Life | None:
        """Train with nothing in the way; None where that is refused."""
        place = Place(self._root / "wanted")
        place.make()
        life = self._lived(place, 0, (), counts=True)
        if not life.is_done:
            self._outcome.unusable = life.summary
            return None
        self._strategies = self._outcome.strategies = life.told[0]["strategies"]
        self._num_operators = [each.get("num_operators", 1) or 1 for each in life.told]
        return life

    def _lived(
        self, place: Place, number: int, faults: Sequence[Fault], *, counts: bool = False
    ) -> Life:
        """Have all ranks live once."""
        watches: dict[int, Watch | None] = {}
        ranks: list[int] = []
        for rank in range(self._story.num_ranks):
            own = [fault for fault in faults if fault.rank == rank]
            watch = self._watch(place, rank, own)
            if counts:
                watch = Watch(places=[place.work, place.tmp])
            action = partial(
                live,
                self._story,
                place,
                number,
                [fault for fault in own if fault.kind in AT_OPERATORS],
                num_operators=self._num_operators[rank],
                strategies=None if counts else self._strategies,
                rank=rank,
            )
            child = forked(action, place.told / f"said-{number}-{rank}.txt", watch)
            watches[child] = watch
            ranks.append(child)
        ends = wait_for(watches, MOST_SECONDS)
        if counts:
            for rank, child in enumerate(ranks):
                watch = watches[child]
                self._num_calls[rank, "work"] = 0 if watch is None else watch.seen
        for rank, child in enumerate(ranks):
            watch = watches[child]
            if watch is not None and watch.struck is not None:
                struck = f"{watch.blow} at call {watch.seen}, {watch.struck.name}"
                self._outcome.struck.append(f"{struck} {Path(watch.struck.path).name}, rank {rank}")
        return self._read(place, number, ranks, ends, faults)

    def _watch(self, place: Place, rank: int, faults: Sequence[Fault]) -> Watch | None:
        """Say which call of a process is struck."""
        of_files = [fault for fault in faults if fault.kind == OF_FILES]
        if not of_files:
            return None
        fault = of_files[0]
        at = 1 + int(fault.at * self._num_calls.get((rank, "work"), 1))
        places = [place.work, place.tmp] if fault.area == "tmp" else [place.work]
        return Watch(places=places, at=at, blow=Blow(fault.how))

    def _read(
        self, place: Place, number: int, ranks: Sequence[int], ends: Ends, faults: Sequence[Fault]
    ) -> Life:
        told: list[dict[str, Any]] = []
        for rank, child in enumerate(ranks):
            path = place.told / f"life-{number}-{rank}.pt"
            said = (place.told / f"said-{number}-{rank}.txt").read_text(errors="replace")
            code = ends.codes[child]
            content: dict[str, Any] = {"ended": "killed" if code < 0 else "crashed"}
            if path.exists() and code == 0:
                content = torch.load(path, weights_only=False)
            if code < 0 and any(each.kind == OF_RANK and each.rank == rank for each in faults):
                self._outcome.struck.append(f"rank {rank} is lost")
            content |= {"code": code, "said": said, "is_overtime": child in ends.overtime}
            told.append(content)
            self._outcome.struck += content.get("struck", [])
        return Life(number=number, told=told, faults=tuple(faults), ends=ends)
