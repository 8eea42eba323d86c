"""The tree of NAICS codes: paths, relations between two codes, and distances. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memfit.errors import DataError

NUM_LEVELS = 5
"""Sector, subsector, industry group, NAICS industry, national industry: 2 to 6 digits."""
UNRELATED = 15
OTHER_SECTOR = 9.0
"""The distance of codes of different sectors, one more than the longest path inside of one."""
LINEAL_DISCOUNT = 0.5

_JOINED = {
    **dict.fromkeys(("31", "32", "33"), "31-33"),
    **dict.fromkeys(("44", "45"), "44-45"),
    **dict.fromkeys(("48", "49"), "48-49"),
}
JOINED_TITLES = {
    "31-33": "Manufacturing",
    "44-45": "Retail Trade",
    "48-49": "Transportation and Warehousing",
}

_RELATIONS = {
    (0, 1): 1,  # child
    (1, 1): 2,  # sibling
    (0, 2): 3,  # grandchild
    (0, 3): 4,  # great-grandchild
    (1, 2): 5,  # nephew or niece
    (0, 4): 6,  # great-great-grandchild
    (2, 2): 7,  # cousin
    (1, 3): 8,  # grand-nephew or grand-niece
    (1, 4): 9,  # great-grand-nephew or great-grand-niece
    (2, 3): 10,  # cousin once removed
    (2, 4): 11,  # cousin twice removed
    (3, 3): 12,  # second cousin
    (3, 4): 13,  # second cousin once removed
    (4, 4): 14,  # third cousin
}
"""By the steps up to the nearest common ancestor, the fewer first."""


class Tree(NamedTuple):
    """Codes in the order of the tree, with all that is known of two of them."""

    codes: tuple[str, ...]
    levels: np.ndarray
    """2 for a sector to 6."""
    paths: np.ndarray
    """(N, 5): the number of the ancestor at each level, -1 - own number below the code itself."""
    distances: np.ndarray
    relations: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)


def sector_of(code: str) -> str:
    """Return the sector of a code; 31 to 33, 44 to 45 and 48 to 49 are one each."""
    return code if "-" in code else _JOINED.get(code[:2], code[:2])


def subsector_of(code: str) -> str | None:
    """Return the three digits of a code; None for a sector."""
    return None if level_of(code) == 2 else code[:3]


def level_of(code: str) -> int:
    """Return the number of digits, 2 for the joined sectors."""
    return 2 if "-" in code else len(code)


def path_of(code: str) -> list[str]:
    """Return the ancestors of a code from its sector on, and the code itself."""
    if level_of(code) == 2:
        return [code]
    return [sector_of(code), *(code[:digits] for digits in range(3, len(code) + 1))]


def make_tree(codes: Sequence[str]) -> Tree:
    """Lay out the tree of some codes, all ancestors among them.

    Raises:
        DataError: if the parent of a code is missing.
    """
    ordered = tuple(sorted(codes, key=path_of))
    number = {code: index for index, code in enumerate(ordered)}
    paths = np.empty((len(ordered), NUM_LEVELS), dtype=np.int64)
    for index, code in enumerate(ordered):
        path = path_of(code)
        missing = [each for each in path if each not in number]
        if missing:
            reason = f"code {code} has no {missing[0]} above it. Give all codes of the tree."
            raise DataError("the NAICS tree", reason)
        # What lies below a code is nobody's: no two codes agree there.
        own = [number[each] for each in path]
        paths[index] = own + [-1 - index] * (NUM_LEVELS - len(own))
    levels = np.array([level_of(code) for code in ordered])
    return Tree(ordered, levels, paths, *_pairs(paths, levels))


def _pairs(paths: np.ndarray, levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return distances and relations of all pairs."""
    shared = (paths[:, None] == paths[None]).sum(-1)
    depth = levels - 1
    up, down = depth[:, None] - shared, depth[None] - shared
    fewer, more = np.minimum(up, down), np.maximum(up, down)
    distances = (fewer + more).astype(np.float64)
    distances -= LINEAL_DISCOUNT * ((fewer == 0) & (more > 0))
    distances[shared == 0] = OTHER_SECTOR
    np.fill_diagonal(distances, 0.0)  # a code shares with itself even what lies below it
    relations = np.zeros(shared.shape, dtype=np.int64)
    for (low, high), relation in _RELATIONS.items():
        relations[(fewer == low) & (more == high) & (shared > 0)] = relation
    relations[shared == 0] = UNRELATED
    return distances, relations


def hold_out(
    codes: Sequence[str], fraction: float, random_seed: int
) -> tuple[list[str], list[str]]:
    """Split codes into those to train on and those held out, whole subsectors at a time.

    Of each sector at least one subsector stays on the training side, and sectors themselves do.
    """
    subsectors = sorted({sub for code in codes if (sub := subsector_of(code))})
    sizes = dict.fromkeys(subsectors, 0)
    left = dict.fromkeys(map(sector_of, subsectors), 0)
    for code in codes:
        if sub := subsector_of(code):
            sizes[sub] += 1
    for sub in subsectors:
        left[sector_of(sub)] += 1
    np.random.default_rng(random_seed).shuffle(subsectors)
    wanted, held = fraction * sum(sizes.values()), set[str]()
    for sub in subsectors:
        if sum(sizes[each] for each in held) >= wanted:
            break
        if left[sector_of(sub)] > 1:
            left[sector_of(sub)] -= 1
            held.add(sub)
    train = [code for code in codes if subsector_of(code) not in held]
    return train, [code for code in codes if subsector_of(code) in held]
