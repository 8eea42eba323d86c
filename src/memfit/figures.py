"""What a step takes, as data: predictions, measurements, and the timeline behind both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

BOUNDED_FIGURES = {
    "allocated": "peak_allocated_bytes",
    "reserved": "peak_reserved_bytes",
    "process": "process_bytes",
}
"""What a budget may bound, and the field that holds it."""


class Certainty(StrEnum):
    """Say how a figure is known."""

    EXACT = "exact"
    TABLE = "table"
    GUESS = "guess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One part of a predicted peak, with how it is known and from where."""

    name: str
    num_bytes: int
    certainty: Certainty
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One block that lives at the peak: its bytes and where it comes from.

    ``source_line`` is the line of code behind it, such as ``models/decoder.py:31``, where known;
    ``phase`` is the part of the step that made it, ``setup`` where it is older than the step.
    """

    num_bytes: int
    category: str
    module: str
    operator: str
    source_line: str = ""
    phase: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where a predicted figure lies in all likelihood (19 times out of 20 on measured rows)."""

    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was answered at a line of code, and whether the size of a tensor came of it."""

    source_line: str
    operator: str
    given: str
    decides_sizes: bool = False
    num_times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Allocated bytes over one step, by category.

    ``allocated_bytes[i]`` is the total after event ``i``; ``by_category[name][i]`` its parts;
    ``phases`` are ``(first event, phase name)`` pairs in order. ``places[i]`` is where event ``i``
    lies among the events of the step, in a timeline that was thinned or laid along another one;
    empty where each event follows the one before.
    """

    allocated_bytes: Sequence[int]
    by_category: Mapping[str, Sequence[int]]
    phases: Sequence[tuple[int, str]]
    places: Sequence[float] = ()

    def axis(self) -> Sequence[float]:
        """Return the place of every event."""
        return self.places or range(len(self.allocated_bytes))

    @classmethod
    def of(
        cls,
        at_start: Mapping[str, int],
        changes: Iterable[tuple[str, int]],
        phases: Sequence[tuple[int, str]],
    ) -> Self:
        """Add up changes to what each category has at the start, of a category and bytes each."""
        current = dict(at_start)
        total = sum(current.values())
        totals, parts = [total], {name: [num_bytes] for name, num_bytes in current.items()}
        for changed, num_bytes in changes:
            current[changed] += num_bytes
            total += num_bytes
            totals.append(total)
            for name, part in parts.items():
                part.append(current[name])
        return cls(allocated_bytes=totals, by_category=parts, phases=phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one step would take on a device, under a plan, without running it."""

    device: str
    batch_size: int | None
    """The effective batch; None where a bare step was recorded, which does not tell."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int
    first_step_peak_bytes: int
    step_seconds: float
    by_category: Mapping[str, int]
    by_module: Mapping[str, int]
    strategies: Sequence[str]
    numerics: str
    certainty: Certainty
    ranks: int = 1
    """How many train together, each on a device of its own."""
    rank: int = 0
    """The one of them that all figures are of."""
    terms: Sequence[Term] = ()
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    """By figure: ``allocated``, ``reserved`` and ``process``; empty where all is exact."""
    fragmentation_fraction: float = 0.0
    """The part of the reserved bytes that lies unused when they are at their highest."""
    smallest_memory_bytes: int | None = None
    """The least memory in which the step survives, with cached memory given back under pressure;
    None where that was not looked for."""
    largest: Sequence[Holder] = ()
    host_bytes: int = 0
    """What lies in the host's memory instead of on the device, at its highest."""
    disk_bytes: int = 0
    """What lies on disk instead of on the device, at its highest."""
    budget_bytes: int | None = None
    budget_of: str = "allocated"
    fits: bool | None = None
    num_flops: int = 0
    record_seconds: float = 0.0
    notes: Sequence[str] = ()
    """What the job's owner may not have meant, a sentence each."""
    modules_in_evaluation: Sequence[str] = ()
    """The outermost modules that the step calls in evaluation mode; dropout and batch
    normalisation then act otherwise than in training."""
    answers: Sequence[Answer] = ()
    """Values that the step's code asked for and nobody knows; where a size rests on one,
    ``intervals`` reach from evenly spread choices to uneven ones."""
    timeline: Timeline | None = field(default=None, repr=False)

    def bounded_bytes(self, budget_of: str | None = None) -> int:
        """Return the figure that a budget bounds: ``allocated``, ``reserved`` or ``process``."""
        num_bytes: int = getattr(self, BOUNDED_FIGURES[budget_of or self.budget_of])
        return num_bytes

    def bounded_parts(self) -> dict[str, int]:
        """Split the figure that the budget bounds: tensors by category, and what is beside them."""
        parts = dict(self.by_category)
        if self.budget_of != "allocated":
            parts["cached and unused"] = self.peak_reserved_bytes - self.peak_allocated_bytes
        if self.budget_of == "process":
            parts["context and libraries"] = self.process_bytes - self.peak_reserved_bytes
        return parts

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, without the timeline."""
        return without_timeline(asdict(self))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` gives; names that this version does not know are left out.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or malformed.
        """
        known = {each.name for each in fields(cls)} - {"timeline"}
        values = {name: value for name, value in content.items() if name in known}
        for name in ("strategies", "notes", "modules_in_evaluation"):
            values[name] = tuple(values.get(name) or ())
        values["certainty"] = Certainty(values["certainty"])
        values["terms"] = tuple(
            Term(**{**term, "certainty": Certainty(term["certainty"])})
            for term in values.get("terms") or ()
        )
        values["largest"] = tuple(Holder(**holder) for holder in values.get("largest") or ())
        values["answers"] = tuple(Answer(**each) for each in values.get("answers") or ())
        values["intervals"] = {
            name: Interval(**interval) for name, interval in (values.get("intervals") or {}).items()
        }
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one step really took on this machine, from the allocator's own counters."""

    device: str
    batch_size: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    process_bytes: int
    first_step_peak_bytes: int
    step_seconds: float
    by_category: Mapping[str, int]
    strategies: Sequence[str]
    numerics: str
    predicted_peak_bytes: int | None = None
    notes: Sequence[str] = ()
    """What the job's owner may not have meant, a sentence each."""
    modules_in_evaluation: Sequence[str] = ()
    """The outermost modules that the step called in evaluation mode."""
    timeline: Timeline | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values, without the timeline."""
        return without_timeline(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredPlan:
    """One plan that the planner looked at: what it would take, and what became of it."""

    strategies: tuple[str, ...]
    numerics: str
    peak_bytes: int
    """The peak that the budget bounds."""
    step_seconds: float
    fits: bool
    chosen: bool
    reason: str
    """Why the plan was chosen or turned down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsideredPlacement:
    """One way to share a step among ranks that the planner looked at, and what became of it."""

    ranks: int
    parallel: str
    """The strategy by which ranks share the model; empty for one rank, or where none may."""
    strategies: tuple[str, ...]
    peak_bytes: int | None
    """Of one rank, the peak that the budget bounds, or the smallest reached where none fits."""
    step_seconds: float | None
    device_seconds: float | None
    """Ranks times seconds of a step: what the cheapest placement has least of."""
    fits: bool
    chosen: bool
    reason: str
    """Why it does not fit, or was not planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierPlan:
    """A plan that an earlier call has recorded."""

    strategies: tuple[str, ...]
    peak_bytes: int
    """The peak that the budget bounds."""
    step_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSoFar:
    """The fastest plan that fits of those recorded so far, while planning goes on."""

    strategies: tuple[str, ...]
    peak_bytes: int
    """The peak that the budget bounds."""
    step_seconds: float
    plain_step_seconds: float
    """The estimated time of the step as it is, or with what is required alone."""
    num_recorded: int
    num_left: int
    """How many combinations are waiting that may be faster, by their estimates."""
    elapsed_seconds: float
    """Since planning began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """One trade of memory against time: the peak that the budget bounds, and the step's seconds."""

    strategies: tuple[str, ...]
    peak_bytes: int
    step_seconds: float
    is_recorded: bool
    """Whether the step was recorded so; otherwise both figures are estimates."""
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximation:
    """The chosen plan with a strategy that changes results and was not allowed."""

    allow: str
    """Its name, which ``--allow`` takes."""
    strategies: tuple[str, ...]
    """All of them; what excludes it has been left out."""
    peak_bytes: int
    """The peak that the budget bounds."""
    step_seconds: float


class RefusalKind(StrEnum):
    """Say what kept a strategy out of a plan."""

    NOT_ALLOWED = "not-allowed"
    """It changes the results."""
    UNPROVED = "unproved"
    """Nobody could follow whether it keeps them."""
    NO_DISK = "no-disk"
    FORBIDDEN = "forbidden"
    UNSUITED = "unsuited"
    """It cannot act on such a job, or there is something better."""
    FAILED = "failed"
    """It did not apply when it was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A strategy that was left out of a plan, and why."""

    kind: RefusalKind
    strategy: str
    """Its name, with settings where others of it were taken."""
    sentence: str

    @property
    def option(self) -> str:
        """Return the option of ``memfit plan`` that would admit it; empty where none would."""
        options = {
            RefusalKind.NOT_ALLOWED: f"--allow {self.strategy}",
            RefusalKind.UNPROVED: "--allow unproved",
            RefusalKind.NO_DISK: "--disk SIZE",
        }
        return options.get(self.kind, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """How many bytes a strategy can take off the plain step's peak allocated at all."""

    strategy: str
    most_bytes: int
    """What its strongest setting takes off; a bound on that where it was not recorded."""
    is_recorded: bool
    """Whether the step was recorded with each of its settings alone."""
    state: str
    """``used``, ``not needed``, or why it was left out."""


class Topic(StrEnum):
    """Name what a piece of advice is about."""

    EXPANDABLE_SEGMENTS = "expandable-segments"
    OPTIMIZER_TEMPORARIES = "optimizer-temporaries"
    SAVED_ACTIVATIONS = "saved-activations"
    GUESSED_TERM = "guessed-term"
    BYTES_PER_SAMPLE = "bytes-per-sample"
    MICRO_BATCH = "micro-batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that would change the answer.

    ``num_bytes`` is what it is worth: bytes saved for expandable segments and the optimizer, bytes
    held for saved activations and guessed terms, and bytes per sample for the batch.
    ``part_fraction`` is its part of the figure it belongs to.
    """

    topic: Topic
    num_bytes: int
    part_fraction: float
    subject: str = ""
    """The guessed term, or the micro-batch size that fits."""


def without_timeline(fields: dict[str, Any]) -> dict[str, Any]:
    """Drop the timeline, which is for pictures."""
    fields.pop("timeline", None)
    return fields
