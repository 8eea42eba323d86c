"""Where a run's clips come from: made by a seed, or listed in a manifest.

Clips to train on, to validate on and to test on never share a clip.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.errors import UsageError

from .clips import Clips
from .footage import open_footage
from .generated import GeneratedClips
from .parts import PARTS, open_parts
from .settings import REAL, DataSettings
from .sizes import TridentSizes

_SEEDS_PER_RUN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """Clips for each purpose."""

    train: Clips
    valid: Clips
    test: Clips
    identity: str
    """What a continuation has to find again."""
    notes: tuple[str, ...] = ()
    """What there is to say of them before training."""


def open_clips(settings: DataSettings, sizes: TridentSizes) -> Splits:
    """Open the clips that the settings name.

    Raises:
        DataError: if a record or a file cannot serve.
        MissingExtraError: without a package that the clips need.
        UsageError: if there is no event, or nothing else, among the clips of a purpose.
    """
    splits = _generated(settings, sizes) if settings.jsonl is None else _recorded(settings, sizes)
    # Nothing can be learned from clips, or told by them, that are all alike.
    for name in ("train", "valid", "test"):
        events = getattr(splits, name).events()
        if len(set(events)) < 2:
            msg = (
                f"Of the {len(events)} clips of the {name} part, {int(sum(events))} are events; "
                "needed are some that are and some that are not. Give more clips, or others."
            )
            raise UsageError(msg)
    return splits


def _recorded(settings: DataSettings, sizes: TridentSizes) -> Splits:
    """Open the clips of manifests."""
    parts = open_parts(settings, sizes)
    return Splits(**parts.clips, identity=parts.identity, notes=parts.notes)


def _generated(settings: DataSettings, sizes: TridentSizes) -> Splits:
    """Make clips of three seeds that no other ``--data-seed`` has."""
    numbers = (settings.num_clips, settings.num_valid_clips, settings.num_test_clips)
    is_real = settings.backgrounds == REAL
    footage = open_footage(sizes, PARTS) if is_real else dict.fromkeys(PARTS)
    clips: dict[str, Clips] = {
        part: GeneratedClips(
            sizes=sizes,
            num_clips=number,
            seed=_SEEDS_PER_RUN * settings.data_seed + place,
            footage=footage[part],
        )
        for place, (part, number) in enumerate(zip(PARTS, numbers, strict=True))
    }
    identity = f"generated on {settings.backgrounds} backgrounds"
    return Splits(**clips, identity=identity)  # type: ignore[arg-type]  # notes are no clips
