"""Finds the device that people mean: ``RTX 3090``, ``3090``, ``tesla t4``, ``4090 laptop``.

A name is read as words. One that leaves open which variant is meant, of other memory or another
speed, is never decided here: the variants are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

_LEFT_OUT = frozenset(
    (
        *("nvidia", "geforce", "tesla", "rtx", "gtx", "amd", "radeon", "instinct", "rx"),
        *("gpu", "graphics", "card", "tensor", "core", "generation", "edition", "workstation"),
        *("blackwell", "lovelace"),
    )
)
"""Words that tell no two cards apart."""
_SAME = {
    **dict.fromkeys(("mobile", "notebook", "m"), "laptop"),
    **dict.fromkeys(("sxm2", "sxm3", "sxm4", "sxm5", "sxm6"), "sxm"),
    "s": "super",
}
_VARIANTS = frozenset(("laptop", "pcie", "nvl", "sxm"))
"""Words that tell variants of one card apart, beside its memory."""
_MEMORY = re.compile(r"\d+gb")
_SPACED_MEMORY = re.compile(r"\b(\d+)\s*g(?:i?b)?\b")
_MAX_Q = re.compile(r"\bmax[\s-]?q\b")
_TITAN_RTX = re.compile(r"\btitan[\s-]?rtx\b")
"""Of the Titans it is one, and ``RTX`` is what tells it from the others."""
_GLUED = re.compile(r"(rtx|gtx|rx|geforce|radeon|tesla|quadro)(?=[a-z]?\d)")
_MODIFIERS = r"ti|super|xtx|xt|gre|laptop|mobile|ada|d|m|s"
_MODIFIED = re.compile(rf"(\d{{4}})((?:{_MODIFIERS})+)")

_SERIES = (
    ("GeForce", ("NVIDIA GeForce", "NVIDIA TITAN")),
    ("NVIDIA's workstations", ("NVIDIA RTX", "NVIDIA Quadro")),
    ("NVIDIA's data centres", ("NVIDIA",)),
    ("Radeon", ("AMD Radeon",)),
    ("AMD Instinct", ("AMD",)),
    ("Processor", ("",)),
)
"""Series of devices, each with how the titles in it begin; the first that fits counts."""
_NOT_COVERED = {
    r"(apple )?m[1-9]( ?(pro|max|ultra))?|apple.*|mps|metal|mac(book|mini|studio)?( .*)?": (
        "Apple's GPUs are not covered: they share the system's memory, under an allocator of torch "
        "that memfit has no rules for. `--device cpu --budget 24GiB`, with the memory that you "
        "want to give it, counts the same tensors, without what MPS adds"
    ),
    r"(nvidia )?(gb10|dgx spark|jetson.*|orin.*|agx.*)|(amd )?(strix.*|8060s|ryzen.*)": (
        "It shares the system's memory, which memfit has no rules for. Name a card of the same "
        "generation and give the memory that it may take: `--device rtx-pro-6000 --budget 90GiB`"
    ),
    r"arc.*|battlemage|xpu|gaudi.*|habana.*|intel.*": (
        "memfit has no rules for Intel's GPUs and accelerators. `--device cpu --budget 14GiB` "
        "counts the same tensors, without what their libraries add"
    ),
    r"((google|cloud) )?tpu.*|trainium.*|inferentia.*|trn\d|inf\d": (
        "memfit follows PyTorch on CUDA cards and on the CPU, not XLA. `--device cpu` counts the "
        "tensors of a step in eager PyTorch"
    ),
    r"(cuda|gpu)(:\d+)?": (
        "That is any card, and a prediction is for one. Name it: `memfit doctor` shows what is "
        "in this machine"
    ),
}
"""What the catalogue leaves out on purpose: how it is asked for, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What a name means: one device, or several that it leaves open."""

    name: str | None = None
    variants: tuple[str, ...] = ()


def find(asked: str, names: Collection[str], other_names: Callable[[str], Iterable[str]]) -> Match:
    """Find what a name means.

    Args:
        asked: what was typed.
        names: those of the catalogue.
        other_names: gives what else a device is called: its title, its names in the driver.
    """
    words = words_of(asked)
    if not words:
        return Match()
    by_name: Mapping[str, frozenset[str]] = {name: words_of(name) for name in names}
    exact = [name for name, own in by_name.items() if own == words]
    if len(exact) == 1:
        return Match(name=exact[0])
    extra = {
        name: own - words
        for name, own in by_name.items()
        if words <= own | frozenset().union(*map(words_of, other_names(name)))
    }
    for is_enough in (_is_whole, _lacks_a_variant):
        found = sorted(name for name, lacking in extra.items() if is_enough(lacking))
        if len(found) == 1:
            return Match(name=found[0])
        if found:
            return Match(variants=tuple(found))
    return Match(variants=tuple(sorted(extra)))


def by_series(titles: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Sort devices into series, each in the order in which people count: a2 before a10.

    Args:
        titles: what each device is called, by its name.
    """
    found: dict[str, list[str]] = {series: [] for series, _ in _SERIES}
    for name in sorted(titles, key=_in_counting_order):
        found[next(key for key, begin in _SERIES if titles[name].startswith(begin))].append(name)
    return {series: tuple(members) for series, members in found.items() if members}


def why_not_covered(asked: str) -> str | None:
    """Say why what is asked for is left out on purpose; None for a name that is merely unknown."""
    text = " ".join(re.split(r"[^a-z0-9:]+", asked.lower())).strip()
    found = (why for pattern, why in _NOT_COVERED.items() if re.fullmatch(pattern, text))
    return next(found, None)


@cache
def words_of(name: str) -> frozenset[str]:
    """Return the words of a name that tell cards apart."""
    text = _SPACED_MEMORY.sub(r"\1gb", name.lower())
    text = _TITAN_RTX.sub("titanrtx", _MAX_Q.sub("maxq", text))
    text = _GLUED.sub(r"\1 ", text)
    found: set[str] = set()
    for word in re.split(r"[^a-z0-9]+", text):
        modified = _MODIFIED.fullmatch(word)
        if modified is None:
            found.add(word)
        else:
            found.update((modified[1], *re.findall(_MODIFIERS, modified[2])))
    return frozenset(_SAME.get(word, word) for word in found if word) - _LEFT_OUT


def _in_counting_order(name: str) -> list[tuple[int, str]]:
    """Return a sorting key with whole numbers in it."""
    parts = re.findall(r"\d+|\D+", name)
    return [(int(part), "") if part.isdigit() else (0, part) for part in parts]


def _is_whole(lacking: frozenset[str]) -> bool:
    return not lacking


def _lacks_a_variant(lacking: frozenset[str]) -> bool:
    return all(word in _VARIANTS or _MEMORY.fullmatch(word) for word in lacking)
