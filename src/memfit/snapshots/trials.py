"""Weighs replays under several settings against what was recorded, and against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memfit.allocator.settings import AllocatorSettings
from memfit.units import format_bytes

from .history import TAKEN, History
from .picture import Picture
from .result import Agreement, Outcome
from .survival import Moment, Replayer, Trial

_SERVES_TOO = (
    "The replay under the recorded settings serves the request too, so it sees less than happened."
)
_FAILS_EARLIER = (
    "The replay under the recorded settings fails before the moment already, so it is stricter "
    "than what happened."
)
_NEEDS_FRACTION = (
    "It acts only together with torch.cuda.set_per_process_memory_fraction; taken is one that "
    "leaves the same limit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What trials are held against."""

    history: History
    replayer: Replayer
    recorded_moment: Moment
    """With the limit that there was."""
    moment: Moment
    """With the limit that is asked about, often the same."""
    picture: Picture
    num_entries: int
    """Up to the moment."""
    has_start: bool
    """Whether the segments before the first entry are known."""


class Trials:
    """Replays a situation under the recorded settings first, then under others."""

    def __init__(self, situation: Situation) -> None:
        self._situation = situation
        self._settings = situation.history.record.settings
        self._recorded = self._under_recorded_settings(situation.recorded_moment)
        self.agreement = self._agreement()
        """How far the replay under the recorded settings does what was recorded."""

    @property
    def is_lenient(self) -> bool:
        """Return whether the replay serves what was refused."""
        return self._situation.moment.request_bytes is not None and self._recorded.is_served

    @property
    def is_strict(self) -> bool:
        """Return whether the replay refuses what was served."""
        return self._recorded.failed_allocation is not None

    def outcomes(self, tried: Mapping[str, AllocatorSettings]) -> Iterator[Outcome]:
        """Yield the outcome under the recorded settings, then under each that differs."""
        recorded_text = self._situation.history.record.settings_text
        seen = {_identity(self._settings)}
        trial = self._recorded
        if self._situation.moment != self._situation.recorded_moment:
            trial = self._under_recorded_settings(self._situation.moment)
        yield self._outcome(recorded_text, [trial], is_recorded=True)
        for text, settings in tried.items():
            if _identity(settings) in seen:
                continue
            seen.add(_identity(settings))
            trials = [
                self._situation.replayer.run(settings, self._situation.moment, is_packed=is_packed)
                for is_packed in self._starts()
            ]
            yield self._outcome(text, trials, is_recorded=False, settings=settings)

    def _under_recorded_settings(self, moment: Moment) -> Trial:
        situation = self._situation
        return situation.replayer.run(self._settings, moment, is_packed=not situation.has_start)

    def _agreement(self) -> Agreement:
        """Compare the replay under the recorded settings with the record."""
        situation = self._situation
        entries = situation.history.entries[: situation.num_entries]
        recorded = [each.num_bytes for each in entries if each.action in TAKEN]
        simulated = [size for action, size in self._recorded.device_calls if action in TAKEN]
        num_equal = next(
            (
                i
                for i, pair in enumerate(zip(recorded, simulated, strict=False))
                if len({*pair}) > 1
            ),
            min(len(recorded), len(simulated)),
        )
        peak_bytes = situation.picture.peak_reserved_bytes
        is_reproduced = not self.is_lenient and not self.is_strict
        if situation.moment.request_bytes is None:
            is_reproduced &= peak_bytes == self._recorded.peak_reserved_bytes
        return Agreement(
            is_reproduced=is_reproduced,
            recorded_peak_reserved_bytes=peak_bytes,
            simulated_peak_reserved_bytes=self._recorded.peak_reserved_bytes,
            num_recorded_segments=len(recorded),
            num_equal_segments=num_equal,
        )

    def _starts(self) -> tuple[bool, ...]:
        """Say from which starts to replay under settings that were not in force.

        How the earlier blocks would have lain is not known: as recorded, if the settings had been
        changed right then, or one behind the other, at best.
        """
        if not self._situation.has_start:
            return (True,)
        return (False, True) if self._situation.history.earlier else (False,)

    def _outcome(
        self,
        text: str,
        trials: Sequence[Trial],
        *,
        is_recorded: bool,
        settings: AllocatorSettings | None = None,
    ) -> Outcome:
        survives, reason = self._verdict(trials, is_recorded=is_recorded)
        reductions = [trial.least_reduction_bytes for trial in trials]
        reduction_bytes = None
        if survives is False and None not in reductions:
            reduction_bytes = max(each for each in reductions if each is not None)
        needs = ""
        if settings is not None and settings.garbage_collection_threshold:
            needs = _NEEDS_FRACTION
        failed = next((each for each in trials if each.failed_request_bytes is not None), None)
        return Outcome(
            settings=text,
            is_recorded=is_recorded,
            survives=survives,
            least_reduction_bytes=0 if survives else reduction_bytes,
            peak_allocated_bytes=trials[0].peak_allocated_bytes,
            peak_reserved_bytes=trials[0].peak_reserved_bytes,
            failed_request_bytes=None if failed is None else failed.failed_request_bytes,
            is_guess=self._is_guess(is_recorded=is_recorded),
            reason=reason,
            needs=needs,
        )

    def _is_guess(self, *, is_recorded: bool) -> bool:
        agreement = self.agreement
        is_met = agreement.num_equal_segments == agreement.num_recorded_segments
        if not is_met or not agreement.is_reproduced:
            return True
        return bool(self._situation.history.earlier) and not is_recorded

    def _verdict(self, trials: Sequence[Trial], *, is_recorded: bool) -> tuple[bool | None, str]:
        """Say whether a replay survives, and why that is not known."""
        situation = self._situation
        if situation.moment.limit_bytes is None:
            return None, ""
        if situation.picture.problem:
            return None, f"The history cannot be followed: {situation.picture.problem}."
        served = [trial.is_served for trial in trials]
        if len(set(served)) > 1:
            known = "as recorded" if served[0] else "one behind the other"
            other = "one behind the other" if served[0] else "as recorded"
            return None, (
                f"Served if the blocks from before the history lay {known}, refused if they lay "
                f"{other}."
            )
        is_as_it_was = situation.moment == situation.recorded_moment
        if is_recorded and is_as_it_was and situation.moment.request_bytes is not None:
            return False, ""
        if served[0] and self.is_lenient:
            return None, _SERVES_TOO
        if not served[0] and self.is_strict and situation.moment.request_bytes is not None:
            return None, _FAILS_EARLIER
        return served[0], "" if served[0] else _early(trials)


def _early(trials: Sequence[Trial]) -> str:
    sizes = [each.failed_request_bytes for each in trials if each.failed_request_bytes is not None]
    if not sizes:
        return ""
    return f"A request of {format_bytes(sizes[0])} before the moment would have failed already."


def _identity(settings: AllocatorSettings) -> tuple[object, ...]:
    """Return what distinguishes settings, however their divisions were written."""
    return (
        settings.expandable_segments,
        settings.max_split_size_bytes,
        settings.large_segment_bytes,
        settings.garbage_collection_threshold,
        tuple(max(each, 1) for each in settings.divisions()),
        settings.max_non_split_rounding_bytes,
    )
