"""Clips to train on, to validate on and to test on, from manifests."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .manifest import Record, read_manifest
from .record_fields import INFRARED
from .recorded import RecordedClips, check_files, refuse_shared
from .settings import DataSettings
from .sizes import TridentSizes

PARTS = TRAIN, VALID, TEST = ("train", "valid", "test")
_HELD_OUT_FRACTION = 0.15
"""Of the manifest, for each part that has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedParts:
    """Clips by part, and what there is to say of them."""

    clips: Mapping[str, RecordedClips]
    notes: tuple[str, ...]
    identity: str
    """The same for the same records in the same parts, and for no others."""


def open_parts(data: DataSettings, sizes: TridentSizes) -> RecordedParts:
    """Read manifests, check every record and its files, and part what has to be parted.

    Raises:
        DataError: that names the first record that cannot serve.
        MissingExtraError: for videos without PyAV.
    """
    assert data.jsonl is not None, "else clips are generated"
    manifests = {TRAIN: data.jsonl, VALID: data.valid_jsonl, TEST: data.test_jsonl}
    records = {
        part: read_manifest(path, data.video_root or path.parent, sizes.num_classes)
        for part, path in manifests.items()
        if path is not None
    }
    for found in records.values():
        check_files(found, sizes)
    refuse_shared(record for found in records.values() for record in found)
    notes = list(_notes(records, data.jsonl))
    missing = [part for part in PARTS if part not in records]
    if missing:
        records |= part_records(records[TRAIN], missing, data.data_seed)
        numbers = ", ".join(f"{len(records[part])} {part}" for part in PARTS)
        notes.append(
            f"{data.jsonl} is parted by --data-seed {data.data_seed}, each outcome alike: "
            f"{numbers}."
        )
    said = [f"{part} {record.digest}" for part in PARTS for record in records[part]]
    return RecordedParts(
        clips={part: RecordedClips(sizes=sizes, records=records[part]) for part in PARTS},
        notes=tuple(notes),
        identity=f"records {hashlib.sha256(' '.join(said).encode()).hexdigest()[:16]}",
    )


def part_records(
    records: Sequence[Record], held_out: Sequence[str], seed: int
) -> dict[str, list[Record]]:
    """Draw records for each part that is held out, as many of each outcome; train has the rest.

    An outcome of at least three records is in every part.
    """
    draw = np.random.default_rng(seed)
    outcomes: dict[tuple[float, float], list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        outcomes[record.event, record.severe].append(number)
    chosen: dict[str, list[int]] = {part: [] for part in (TRAIN, *held_out)}
    for outcome in sorted(outcomes):
        order = draw.permutation(outcomes[outcome]).tolist()
        share = int(_HELD_OUT_FRACTION * len(order) + 0.5)
        share = max(share, 1) if len(order) > len(held_out) else share
        for part in held_out:
            chosen[part] += order[:share]
            order = order[share:]
        chosen[TRAIN] += order
    return {part: [records[number] for number in sorted(rows)] for part, rows in chosen.items()}


def _notes(records: Mapping[str, Sequence[Record]], path: Path) -> list[str]:
    """Say what is missing in records, and what is in them for nobody."""
    every = [record for found in records.values() for record in found]
    notes = []
    num_dark = sum(INFRARED not in record.files for record in every)
    if num_dark:
        notes.append(f"{num_dark} of {len(every)} records have no {INFRARED}: their infrared is 0.")
    num_prompts = sum(record.prompt is not None for record in every)
    if num_prompts:
        notes.append(f"{num_prompts} records have a prompt; it is kept, and no branch reads it.")
    unused = Counter(key for record in every for key in record.unused)
    if unused:
        shown = ", ".join(sorted(unused)[:6])
        notes.append(f"{path}: keys that mean nothing here are passed over: {shown}.")
    return notes
