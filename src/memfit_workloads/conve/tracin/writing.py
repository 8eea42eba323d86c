"""Writes what was found: each file whole or not at all, and all of them after they are made."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from memfit.errors import DataError, UsageError
from memfit.files import write_atomically
from memfit.reports.influence_page import check_can_render

from .findings import COLUMNS, Findings, Influence, NamedTriple
from .page import page_of
from .settings import OutputFiles

_SHOWN_TESTS, _SHOWN_TRIPLES = 5, 3


def check_writable(files: OutputFiles) -> None:
    """Refuse outputs that could not be written, before anything is computed.

    Raises:
        UsageError: if one is a folder, or two are one file.
        MissingExtraError: if a page cannot be made.
    """
    paths = files.each()
    for path in paths:
        if path.is_dir():
            raise UsageError(f"{path} is a folder; needed is the name of a file to write.")
    if len({path.absolute() for path in paths}) < len(paths):
        msg = "Two of --output, --csv-output and --page are one file; give another."
        raise UsageError(msg)
    if files.page is not None:
        check_can_render()


def write(findings: Findings, files: OutputFiles) -> list[Path]:
    """Write all that was asked for, and return the paths.

    Raises:
        DataError: if a file cannot be written; that file is as it was before.
    """
    made = dict(_contents(findings, files))
    for path, content in made.items():
        try:
            write_atomically(path, content)
        except OSError as error:
            reason = (
                f"it cannot be written ({error.strerror}); what was there before is whole. Make "
                "room or give another place; the same command goes on from its progress."
            )
            raise DataError(str(path), reason) from None
    return list(made)


def shown_lines(findings: Findings) -> Iterator[str]:
    """Yield what the terminal shows: the most extreme triples of the first test triples."""
    for finding in findings.by_test[:_SHOWN_TESTS]:
        yield f"test {finding.test.index}: {_words(finding.test)}"
        yield from _lines("helpful", finding.helpful)
        yield from _lines("harmful", finding.harmful)
    left = len(findings.by_test) - _SHOWN_TESTS
    if left > 0:
        yield f"... and {left} more test triples; --output, --csv-output and --page have all."
    if findings.own:
        yield "Highest self-influence, which wrong triples often have:"
        yield from _lines("", findings.own[: 3 * _SHOWN_TRIPLES])


def _lines(kind: str, found: Sequence[Influence]) -> Iterator[str]:
    for each in found[:_SHOWN_TRIPLES] if kind else found:
        yield f"  {kind:<7} {each.score:+.3e}  {_words(each.train)}"


def _words(triple: NamedTriple) -> str:
    return f"{triple.head.label} | {triple.relation.label} | {triple.tail.label}"


def _contents(findings: Findings, files: OutputFiles) -> Iterator[tuple[Path, str]]:
    """Make the content of each file."""
    if files.output is not None:
        yield files.output, _json_of(findings)
    if files.csv_output is not None:
        yield files.csv_output, _csv_of(findings)
    if files.page is not None:
        yield files.page, page_of(findings)
    if not files.output_per_triple:
        return
    for place, finding in enumerate(findings.by_test):
        own = findings.of_test(place)
        for path, made in ((files.output, _json_of), (files.csv_output, _csv_of)):
            if path is not None:
                name = f"{path.stem}_test_{finding.test.index}{path.suffix}"
                yield path.with_name(name), made(own)


def _json_of(findings: Findings) -> str:
    return json.dumps(findings.as_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def _csv_of(findings: Findings) -> str:
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(COLUMNS)
    rows.writerows(findings.rows())
    return written.getvalue()
