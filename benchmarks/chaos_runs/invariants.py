"""What has to hold of every run, whatever was broken in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from chaos_runs.lives import Place
from chaos_runs.outcomes import names_disk
from chaos_runs.processes import Ends
from chaos_runs.stories import OF_ERROR, OF_FILES, OF_MEMORY, OF_RANK, Fault, Story
from chaos_runs.system_calls import ERRORS, Blow
from memfit import Plan
from memfit.errors import MemfitError
from memfit.journal.folder import holds_journal, rank_folder, read_journal

TOLERANCE = 1e-7
"""Of runs that went on under another plan, in fp64, relative to the largest value of a tensor."""
_NOTHING = 1e-9
"""Values below are the rounding of what is zero, as gradients of a bias before a normalisation."""
LOST_SECONDS = 45.0
"""Ranks have to end within this time after one of them is lost."""
_KILLS = {str(Blow.KILL), str(Blow.TEAR)}
_CANNOT_CLEAN = {str(Blow.READ_ONLY), str(Blow.BROKEN)}


@dataclass(slots=True, kw_only=True)
class Life:
    """What is known of one process of a run, or of all its ranks."""

    number: int
    told: list[dict[str, Any]]
    faults: tuple[Fault, ...]
    ends: Ends

    @property
    def is_done(self) -> bool:
        """Return whether training came to its end."""
        return all(each["ended"] == "done" for each in self.told)

    @property
    def summary(self) -> str:
        """Say how it ended, in a few words."""
        words = []
        for each in self.told:
            what = f"{each['type']}: {each['message']}" if each["ended"] == "error" else ""
            last = each.get("said", "").strip().rpartition("\n")[2]
            what = what or (last if each["ended"] == "crashed" else "")
            words.append(f"{each['ended']} ({each['code']}) {what}".strip()[:600])
        return "; ".join(words)


@dataclass(slots=True, kw_only=True)
class Found:
    """What is there to be looked at after a process of a story has ended."""

    story: Story
    wanted: Life
    """The undisturbed run."""
    place: Place
    plans: tuple[bytes, bytes]
    """The plan file before and after."""
    lives: list[Life] = field(default_factory=list)

    @property
    def life(self) -> Life:
        """Return the latest."""
        return self.lives[-1]


def broken_in(found: Found) -> list[str]:
    """Say what does not hold after the latest process."""
    checks = (_process, _ending, _state, _memory, _files, _journal)
    return [f"life {found.life.number}: {said}" for check in checks for said in check(found)]


def _process(found: Found) -> Iterator[str]:
    """No process hangs, crashes or is left behind."""
    life = found.life
    for left in life.ends.left:
        yield f"a process is left behind: {left}"
    for rank, each in enumerate(life.told):
        if each["is_overtime"]:
            yield f"rank {rank} hangs: {each['said'][-800:]}"
        elif each["ended"] == "crashed":
            yield f"rank {rank} ends with code {each['code']}: {each['said'][-800:]}"
        elif each["ended"] == "killed" and not _may_be_killed(life.faults, rank):
            yield f"rank {rank} is ended by signal {-each['code']}: {each['said'][-800:]}"
        if "Traceback" in each["said"]:
            yield f"rank {rank} prints a traceback: {each['said'][-800:]}"
    if any(fault.kind == OF_RANK for fault in life.faults) and life.ends.seconds > LOST_SECONDS:
        yield f"the ranks took {life.ends.seconds:.0f} s to end after one was lost"


def _may_be_killed(faults: Sequence[Fault], rank: int) -> bool:
    return any(
        fault.rank == rank
        and (fault.kind == OF_RANK or (fault.kind == OF_FILES and fault.how in _KILLS))
        for fault in faults
    )


def _ending(found: Found) -> Iterator[str]:
    """An error says which fault it is from; without a fault there is none."""
    faults, story = found.life.faults, found.story
    for rank, each in enumerate(found.life.told):
        if each["ended"] != "error":
            continue
        said = f"{each['type']}: {each['message'][:500]}"
        if not faults:
            yield f"rank {rank} cannot go on after the fault is over: {said}"
        elif not _names(each, faults, is_own=story.num_ranks == 1):
            yield f"rank {rank} ends with an error that does not name the fault: {said}"
        elif "\n" in each["message"].strip() and each["is_memfit"]:
            yield f"rank {rank}: an error of several lines: {said}"


_OF_RANKS = ("OtherRankError", "CheckpointError")


def _names(told: Mapping[str, Any], faults: Sequence[Fault], *, is_own: bool) -> bool:
    """Return whether an error names one of the faults."""
    if told["type"] in _OF_RANKS and not is_own:
        return True
    for fault in faults:
        if fault.kind == OF_MEMORY and (told["is_given_up"] or "out of memory" in told["message"]):
            return True
        if fault.kind == OF_ERROR and "of the user's own" in told["message"]:
            return True
        number = ERRORS.get(Blow(fault.how)) if fault.kind == OF_FILES else None
        if number is not None and _names_disk(told, number):
            return True
    return False


def _names_disk(told: Mapping[str, Any], number: int) -> bool:
    """Return whether an error says what is wrong with the disk, and where."""
    says_what = names_disk(told["message"], number)
    says_where = told["is_memfit"] or bool(told["filename"])
    return says_what and says_where


def _state(found: Found) -> Iterator[str]:
    """What a run has computed is what it would have computed undisturbed, at each of its steps."""
    changes_plan = found.story.ladder != "same"
    tolerance = TOLERANCE if changes_plan and _has_run_out(found) else 0.0
    for rank, each in enumerate(found.life.told):
        wanted = found.wanted.told[rank]
        for step, state in each.get("states", {}).items():
            if step in wanted["states"]:
                yield from _differs(
                    f"rank {rank}, step {step}", state, wanted["states"][step], tolerance
                )
        losses = {str(k): v for k, v in each.get("losses", {}).items()}
        others = {str(k): v for k, v in wanted["losses"].items() if str(k) in losses}
        yield from _differs(f"rank {rank}, losses", losses, others, tolerance)
        if "given up" in each:
            step = int(each["given up"]["num_steps"])
            if each["type"] != "UpdateCutError":
                where = f"rank {rank}, given up after step {step}"
                state, other = (
                    _without_rates(s) for s in (each["given up"], wanted["states"][step])
                )
                yield from _differs(where, state, other, tolerance)
        if each["ended"] == "done" and found.story.num_steps not in each["states"]:
            yield f"rank {rank} is done without its last step"


def _without_rates(state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Leave out learning rates, which the loop sets before a step."""
    return {name: each for name, each in state.items() if not name.startswith("rate.")}


def _memory(found: Found) -> Iterator[str]:
    """What was planned for a budget stays inside it, in whatever way it went on."""
    told = found.place.told.parent.parent / "budget.txt"
    if not told.exists():
        return
    budget_bytes, peak_bytes = int(told.read_text()), found.life.told[0].get("peak_bytes")
    if peak_bytes is not None and peak_bytes > budget_bytes:
        yield f"the peak of {peak_bytes:,} bytes is above the budget of {budget_bytes:,}"


def _has_run_out(found: Found) -> bool:
    return any(each.get("events") for life in found.lives for each in life.told)


def _differs(
    where: str,
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    tolerance: float,
) -> Iterator[str]:
    """Name the first entry that differs."""
    if found.keys() != wanted.keys():
        yield f"{where}: there are other entries: {sorted(found.keys() ^ wanted.keys())[:5]}"
        return
    for name, value in wanted.items():
        other = found[name]
        if tolerance and name.endswith("random"):
            continue
        if (value.shape, value.dtype) != (other.shape, other.dtype):
            yield f"{where}: {name} has another shape or type"
            return
        same = value.contiguous().view(-1).view(torch.uint8) if value.dim() else value.view(1)
        same_other = other.contiguous().view(-1).view(torch.uint8) if other.dim() else other.view(1)
        if torch.equal(same, same_other) or (value.dim() == 0 and _both_nan(value, other)):
            continue
        off = _relative(other, value)
        if off > tolerance:
            yield f"{where}: {name} is off by {off:.3g}"
            return


def _both_nan(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.isnan() and other.isnan())


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    off = (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(
        _NOTHING
    )
    return float(off) if off.isfinite() else math.inf


def _files(found: Found) -> Iterator[str]:
    """Files are old or new, and nothing half-written stays after an error."""
    place, life = found.place, found.life
    if place.plan.read_bytes() not in found.plans:
        yield "the plan file is neither the old nor the new one"
    try:
        Plan.load(place.plan)
    except MemfitError as error:
        yield f"the plan file cannot be read: {error}"
    cleans = not any(f.how in _KILLS | _CANNOT_CLEAN or f.kind == OF_RANK for f in life.faults)
    if cleans and life.number == 0:
        for path in place.work.rglob("*.part"):
            yield f"{path.relative_to(place.work)} is left behind"
    is_cut = any(f.how in _KILLS | _CANNOT_CLEAN for each in found.lives for f in each.faults)
    if life.is_done and found.story.saves == "shards" and not is_cut:
        saves = [path.name for path in place.shards.glob("step-*")]
        if len(saves) != 1:
            yield f"there are {len(saves)} saves at the end: {saves}"


def _journal(found: Found) -> Iterator[str]:
    """The journal can be read at any time, and has every step once a run is done."""
    if not found.story.has_journal:
        return
    for rank in range(found.story.num_ranks):
        folder = rank_folder(found.place.journal, rank)
        if not holds_journal(folder):
            continue
        try:
            journal = read_journal(folder)
        except MemfitError as error:
            yield f"the journal of rank {rank} cannot be read: {error}"
            continue
        steps = [record.step for record in journal.steps]
        loses = any(
            f.kind == OF_FILES and f.how not in _KILLS | {Blow.SHORT}
            for life in found.lives
            for f in life.faults
        )
        if found.life.is_done and not loses and steps != [*range(1, found.story.num_steps + 1)]:
            yield f"the journal of rank {rank} has the steps {steps}"
