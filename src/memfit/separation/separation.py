"""Finds out whether a job's step can be run in pieces of its batch, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from memfit.analysis.alignment import RecordingsDifferError
from memfit.analysis.effects import Effects
from memfit.analysis.flow import Axis, Flow, Kind
from memfit.analysis.judgement import judge, judge_effects
from memfit.analysis.loops import NotRolledError, loop_in, roll
from memfit.analysis.separability import (
    PROVED,
    Culprit,
    Separability,
    left_to_trial,
    not_known,
    refuted,
    worst_of,
)
from memfit.analysis.use import Given, Sizes
from memfit.analysis.walk import follow
from memfit.errors import MemfitError
from memfit.job import Job
from memfit.separation.effects import find_effects
from memfit.separation.findings import Findings
from memfit.separation.recorded_step import RecordedStep, record_step, unread_names
from memfit.separation.recording_scope import undisturbed
from memfit.separation.representations import find_representations, rows_are_apart
from memfit.separation.wording import (
    ALONE,
    ENDS_INSIDE,
    HOOKED,
    LOOP,
    NUMBERS,
    ODD,
    OTHER_STATE,
    differs,
    fails_on_parts,
    not_recorded,
)
from memfit.session.batches import BatchLayout
from memfit.virtual.tensors import ValuesNeededError

_PAIRING = frozenset({"slice", "select", "view", "unsafe_view", "reshape", "reshape_alias"})
"""Operators that take pairs of neighbours apart."""
_SMALL_SIZES = (2, 3)
"""Sizes that are looked at besides those that are asked for: thresholds on the batch size."""
_MANY_CALLS = 5000
"""Steps of more operators are looked at in the sizes that are asked for alone."""


class Separation:
    """Say for each micro-batch size whether pieces of the batch keep the results; found once.

    Forward, loss and backward are recorded on fake tensors at the batch size, at the size of a
    micro-batch, of the last one, and of two or three samples, and compared.

    Args:
        job: whose step.
        layout: of its batches.
        inside: a context for all recordings, such as one that takes a plan off a living model.
    """

    def __init__(
        self,
        job: Job,
        layout: BatchLayout,
        *,
        inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.job, self.layout = job, layout
        self._inside = inside
        self._recordings: dict[int, RecordedStep | MemfitError] = {}
        self._followed: dict[tuple[int, bool], Separability] = {}
        self._judged_sizes: dict[tuple[int, bool], Separability] = {}
        self.settled: dict[tuple[object, ...], Separability] = {}
        """What trials on a real batch have shown of pieces that could not be followed."""
        self._others: dict[int, Separation] = {}
        self._is_disguised: bool | None = None
        self._effects: Effects | None = None
        self._representations: tuple[str, ...] | None = None
        self._of_rows: dict[str, Separability] = {}
        self._assumed_size: int | None = None

    @contextmanager
    def assuming(self, micro_batch_size: int) -> Iterator[None]:
        """Take micro-batches of a size as proved inside, while a copy of this looks into them."""
        self._assumed_size = micro_batch_size
        try:
            yield
        finally:
            self._assumed_size = None

    def of(self, micro_batch_size: int, *, given_statistics: bool = False) -> Separability:
        """Return whether micro-batches of a size keep the results.

        Args:
            micro_batch_size: of all but perhaps the last.
            given_statistics: whether batch normalisation takes its statistics as given, as
                batchnorm-replay has it.
        """
        if micro_batch_size == self._assumed_size:
            return PROVED
        key = micro_batch_size, given_statistics
        if (settled := self.settled.get(key)) is not None:
            return settled
        if self._inside is not nullcontext:
            self._recordings.clear()  # what lives may be other objects than when it was recorded
            return self._found(micro_batch_size, given_statistics)
        if key not in self._judged_sizes:
            self._judged_sizes[key] = self._found(micro_batch_size, given_statistics)
        return self._judged_sizes[key]

    def findings(self) -> Findings:
        """Return what has been found out so far."""
        return Findings(
            judged=self._judged_sizes,
            settled=self.settled,
            of_rows=self._of_rows,
            representations=self._representations,
            effects=self._effects,
        )

    def learn(self, found: Findings) -> None:
        """Take over what a copy of this one has found out."""
        self._judged_sizes |= found.judged
        self.settled |= found.settled
        self._of_rows |= found.of_rows
        self._representations = self._representations or found.representations
        self._effects = self._effects or found.effects

    def representations(self) -> tuple[str, ...]:
        """Name the outermost modules whose rows do not depend on one another; found once."""
        if self._representations is None:
            with self._inside():
                self._representations = find_representations(
                    self.job, self.layout, self._judged_rows
                )
        return self._representations

    def of_rows(self, module: str) -> Separability:
        """Return whether the rows that a module is called with stay apart in it.

        Args:
            module: its name, ``""`` for the model itself.
        """
        if module in self._of_rows:
            return self._of_rows[module]
        with self._inside():
            return self._judged_rows(module)

    def _judged_rows(self, module: str) -> Separability:
        if module not in self._of_rows:
            self._of_rows[module] = rows_are_apart(self.job, self.layout, module)
        return self._of_rows[module]

    def at_batch_size(self, batch_size: int) -> Separation:
        """Return the same for batches of another size, such as the last one of an epoch."""
        if batch_size == self.job.batch_size:
            return self
        if batch_size not in self._others:
            job = replace(self.job, batch_size=batch_size)
            self._others[batch_size] = Separation(job, self.layout, inside=self._inside)
        return self._others[batch_size]

    def _found(self, micro_batch_size: int, given_statistics: bool) -> Separability:
        whole = self.job.batch_size
        if micro_batch_size >= whole:
            return PROVED
        for leaf, place in enumerate(self.layout.dims):
            if place is not None and place.is_of_numbers:
                return refuted(NUMBERS.format(self.layout.name_of(leaf)))
        if isinstance(self._recording(whole), MemfitError):
            return not_known(not_recorded(self._recording(whole)))
        refuting = (
            self._refuted_multiple(micro_batch_size, given_statistics)
            if self._is_long()
            else self._small_size()
        )
        wanted = dict.fromkeys((refuting, micro_batch_size, whole % micro_batch_size))
        found: list[Separability] = []
        for num_samples in filter(None, wanted):
            if num_samples == 1 and given_statistics:
                num_samples = 2  # noqa: PLW2901 - one sample has no statistics to be recorded with
            found.append(self._at(num_samples, given_statistics))
            if found[-1].is_refuted:
                break  # a few samples refute every size, and need not be looked at again
        return left_to_trial(worst_of(found), getattr(self.job.loss, "counted_leaf", None))

    def _is_long(self) -> bool:
        """Return whether recording the step takes seconds, so that each size more is dear."""
        found = self._recording(self.job.batch_size)
        return not isinstance(found, MemfitError) and len(found.dataflow.calls) > _MANY_CALLS

    def _refuted_multiple(self, micro_batch_size: int, given_statistics: bool) -> int | None:
        """Return a size whose samples meet; they would not if smaller pieces were apart."""
        return next(
            (
                size
                for (size, given), found in self._followed.items()
                if given is given_statistics
                and found.is_refuted
                and found.culprit is not None
                and size % micro_batch_size == 0
            ),
            None,
        )

    def _small_size(self) -> int | None:
        """Return a size of a few samples at which the step runs."""
        whole = self.job.batch_size
        return next((n for n in _SMALL_SIZES if n < whole and self._runs(n)), None)

    def _runs(self, num_samples: int) -> bool:
        return not isinstance(self._recording(num_samples), MemfitError)

    def _at(self, num_samples: int, given_statistics: bool) -> Separability:
        key = (num_samples, given_statistics)
        if key not in self._followed:
            self._followed[key] = self._compared(num_samples, given_statistics)
        return self._followed[key]

    def _compared(self, num_samples: int, given_statistics: bool) -> Separability:
        whole, part = self._recording(self.job.batch_size), self._recording(num_samples)
        assert not isinstance(whole, MemfitError)
        if isinstance(part, MemfitError):
            return refuted(fails_on_parts(num_samples, part))
        if len(whole.begins) != len(part.begins):
            return not_known(OTHER_STATE.format(num_samples))
        given = Given(statistics=whole.batch_norms if given_statistics else frozenset())
        found = self._judged(whole, part, given)
        if found.is_proved:
            return found
        # As a mean over labels does, code may count those that are not to be ignored.
        others = [self._judged(whole, part, replace(given, all_labels_count=True))]
        if found.culprit is not None and found.culprit.operator in _PAIRING:
            others.append(self._of_pairs(whole, part, given))
        return next((each for each in others if each.is_proved), found)

    def _of_pairs(self, whole: RecordedStep, part: RecordedStep, given: Given) -> Separability:
        """Take two neighbours for one sample, as losses over pairs of views do."""
        if whole.num_samples % 2 or part.num_samples % 2:
            return not_known(ODD)
        try:
            return self._followed_through(whole, part, given, group=2)
        except RecordingsDifferError:
            return not_known(ODD)

    def _judged(self, whole: RecordedStep, part: RecordedStep, given: Given) -> Separability:
        """Follow a step recorded at two sizes, and judge it."""
        try:
            return self._followed_through(whole, part, given)
        except RecordingsDifferError as error:
            # torch takes other ways for one sample, which need not mean anything
            if part.num_samples == 1:
                return not_known(ALONE.format(error.culprit.place()), error.culprit)
            loop = self._loop(whole, part)
            if loop is None:
                return refuted(differs(part.num_samples, error.culprit.place()), error.culprit)
        try:
            whole, part = _rolled(whole), _rolled(part)
            return self._followed_through(whole, part, given)
        except (NotRolledError, RecordingsDifferError):
            return not_known(LOOP.format(loop.place()), loop)

    def _loop(self, whole: RecordedStep, part: RecordedStep) -> Culprit | None:
        """Find a loop over the samples."""
        third = self._recording(next(n for n in _SMALL_SIZES if n != part.num_samples))
        if isinstance(third, MemfitError) or whole.num_samples <= part.num_samples:
            return None
        return loop_in(
            (whole.dataflow, part.dataflow),
            (whole.num_samples, part.num_samples),
            (third.dataflow, third.num_samples),
        )

    def _followed_through(
        self, whole: RecordedStep, part: RecordedStep, given: Given, *, group: int = 1
    ) -> Separability:
        sizes = Sizes(whole.num_samples // group, part.num_samples // group)
        known: dict[int, Flow | None] = dict.fromkeys(whole.begins)
        known.update(self._batch_flows(whole, part, group))
        followed = follow(
            (whole.dataflow, part.dataflow), sizes, known, whole.lasting, given=given
        )  # fmt: skip
        if not followed.flows.keys() >= {*whole.ends.numbers(), *whole.bound.values()}:
            return not_known(ENDS_INSIDE)
        found = judge(followed, whole.ends, part.ends, sizes)
        if found.is_proved and whole.hooked:
            return not_known(HOOKED.format(whole.hooked))
        if found.is_proved:
            bound = {name: followed.flows[number] for name, number in whole.bound.items()}
            return judge_effects(found, self.effects(), bound, self._unread(bound, whole, part))
        return found

    def _unread(
        self, bound: Mapping[str, Flow], whole: RecordedStep, part: RecordedStep
    ) -> set[str]:
        """List the attributes that a step sets to what depends on the batch, and does not read.

        Only if it sets nothing else: what it moves from one name to another may be read steps
        later.
        """
        names = {name for name, flow in bound.items() if flow.kind is not Kind.FREE}
        writes = {each.full_name for each in self.effects().writes if not each.is_tensor}
        if not names or not writes | whole.set_names | part.set_names <= names:
            return set()
        sizes = whole.num_samples, part.num_samples
        for size, before in (sizes, sizes[::-1]):
            first, later = self._recording(size), self._recorded(size, after=before)
            if isinstance(first, MemfitError) or isinstance(later, MemfitError):
                return set()
            names &= unread_names(names, first, later)
        return names

    def effects(self) -> Effects:
        """Return what every step changes besides gradients and optimizer states; found once.

        Raises:
            RecordingError: if the step cannot be recorded.
            JobFunctionError: if one of the job's functions fails.
        """
        if self._effects is None:
            with self._inside(), undisturbed():
                disguised = self._is_disguised is not False
                self._effects = find_effects(self.job, self.layout, disguised=disguised)
        return self._effects

    def _batch_flows(
        self, whole: RecordedStep, part: RecordedStep, group: int
    ) -> Iterator[tuple[int, Flow]]:
        """Say where the batch's tensors hold samples, or groups of neighbours."""
        for index, (number, place) in enumerate(zip(whole.leaves, self.layout.dims, strict=True)):
            if number is None:
                continue
            num_dims = len(whole.dataflow.shapes[number].sizes)
            axes: list[Axis | None] = [None] * num_dims
            kind = Kind.FREE
            if place is not None:
                axes[place.dim] = Axis(outer=1, inner=place.per_sample * group)
                kind = Kind.EACH
            if not self._is_laid_out(axes, (whole, part), index, group):
                continue
            sources = frozenset([index])
            yield number, Flow(kind=kind, axes=tuple(axes), sources=sources)

    def _is_laid_out(
        self,
        axes: list[Axis | None],
        steps: tuple[RecordedStep, RecordedStep],
        index: int,
        group: int,
    ) -> bool:
        """Return whether only the dimension of a leaf's samples follows the batch size."""
        whole, part = steps
        numbers = whole.leaves[index], part.leaves[index]
        if numbers[0] is None or numbers[1] is None:
            return False
        extents = whole.dataflow.shapes[numbers[0]].sizes
        other = part.dataflow.shapes[numbers[1]].sizes
        return len(extents) == len(other) and all(
            (one, two)
            == (axis.extent(whole.num_samples // group), axis.extent(part.num_samples // group))
            if axis
            else one == two
            for axis, one, two in zip(axes, extents, other, strict=True)
        )

    def _recording(self, num_samples: int) -> RecordedStep | MemfitError:
        if num_samples not in self._recordings:
            self._recordings[num_samples] = self._recorded(num_samples)
        return self._recordings[num_samples]

    def _recorded(self, num_samples: int, after: int | None = None) -> RecordedStep | MemfitError:
        """Record a step at a batch size, or say why it cannot be."""
        ways = (True, False) if self._is_disguised is None else (self._is_disguised,)
        error: MemfitError | None = None
        for disguised in ways:
            try:
                with self._inside(), undisturbed():
                    found = record_step(
                        self.job, self.layout, num_samples, disguised=disguised, after=after
                    )
            except ValuesNeededError as problem:
                error = error or problem
                continue
            except MemfitError as problem:
                return problem
            except Exception as problem:  # noqa: BLE001 - whatever the job's code may raise
                return MemfitError(f"{type(problem).__name__}: {problem}")
            self._is_disguised = disguised
            return found
        assert error is not None, "there is at least one way"
        return error


def _rolled(recorded: RecordedStep) -> RecordedStep:
    """Keep of loops over the samples what is done to the first one."""
    return replace(recorded, dataflow=roll(recorded.dataflow, recorded.num_samples))
