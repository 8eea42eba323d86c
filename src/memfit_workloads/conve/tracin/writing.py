"""Writes what was found: each file whole or not at all, and all of them after they are made."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from memfit.errors import DataError, UsageError
from memfit.files import write_atomically
from memfit.reports.influence_page import (
    InfluencePage,
    InfluenceRow,
    InfluenceSubject,
    InfluenceTable,
    check_can_render,
    influence_html,
)

from .findings import COLUMNS, Finding, Findings, Influence, NamedTriple
from .labels import Part
from .settings import OutputFiles

_SHOWN_TESTS, _SHOWN_TRIPLES = 5, 3
_MOST_ROWS, _MOST_SUBJECTS, _MOST_TAILS = 50, 200, 8
_TESTS = """\
Each block is one statement that the model was asked about. Below it are the statements of the \
training data that taught the model most about it.
Those in favour helped the model to get it right; those against made it harder. Bars compare the \
statements of one table. Statements that the model took as one are listed together.
A statement against is not wrong for that: it may be true and teach that something else is the \
answer. One that is against many true statements is worth a look.
Scores add up what each statement did at the moments of training that were kept. They say what the \
model learned from, not what is true.
""".splitlines()
_OWN = """\
These are statements of the training data that the model had to learn most on their own: few \
others pointed to them. Wrong statements often stand high here, and so do rare true ones.
Read from the top, and check each against its source.
""".splitlines()


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


def page_of(findings: Findings) -> str:
    """Render the page of results."""
    about = findings.about
    epochs = [str(each["epoch"]) for each in about["checkpoints"]]
    facts = [
        ("Training triples", f"{about['num_train']:,}"),
        ("Test triples", f"{about['num_test']:,}"),
        ("Weights after epoch", ", ".join(epochs)),
        ("What a triple's loss is", about["loss_in_words"]),
    ]
    if findings.own:
        del facts[1]
    subjects = [_subject(each) for each in findings.by_test[:_MOST_SUBJECTS]]
    if findings.own:
        subjects.append(_own_subject(findings.own))
    left = len(findings.by_test) - _MOST_SUBJECTS
    footer = f"Trained on {about['train']}. Lines count the triples of that file from 1."
    if left > 0:
        footer += f" {left} more test triples are left out here; JSON and CSV have them."
    page = InfluencePage(
        title="Triples worth checking" if findings.own else "What the model learned it from",
        facts=facts,
        reading=_OWN if findings.own else _TESTS,
        subjects=subjects,
        footer=footer,
    )
    return influence_html(page)


def _statement(triple: NamedTriple) -> str:
    """Write a triple as a statement."""
    return f"{triple.head.label} — {triple.relation.label} → {triple.tail.label}"


def _subject(finding: Finding) -> InfluenceSubject:
    test = finding.test
    tables = [
        InfluenceTable(
            heading="In favour, most helpful first",
            rows=_rows(finding.helpful, test),
            empty="No training triple raised it.",
            tone="planned",
        ),
        InfluenceTable(
            heading="Against, most harmful first",
            rows=_rows(finding.harmful, test),
            empty="No training triple among those kept lowered it.",
            tone="over",
        ),
    ]
    return InfluenceSubject(
        name=_statement(test), kind=f"test line {test.index + 1}", tables=tables
    )


def _own_subject(own: Sequence[Influence]) -> InfluenceSubject:
    table = InfluenceTable(
        heading="Highest self-influence first",
        rows=_rows(own, None),
        empty="There are no training triples.",
        tone="planned",
        shared="",
    )
    return InfluenceSubject(name="Training triples", kind="", tables=[table])


def _rows(found: Sequence[Influence], test: NamedTriple | None) -> list[InfluenceRow]:
    """Write a row for each triple, and one for those that share head, relation and score."""
    rows = []
    for _, same in groupby(found, key=_of_one_row):
        each, *others = same
        name = _statement(each.train)
        if others:
            tails = [other.train.tail.label for other in others]
            more = len(tails) - _MOST_TAILS
            name += "".join(f", {tail}" for tail in tails[:_MOST_TAILS])
            name += f" and {more} more" if more > 0 else ""
        rows.append(
            InfluenceRow(
                name=name,
                shared="" if test is None else _shared(each.train, test),
                score=each.score,
                line=each.train.index + 1,
            )
        )
    return rows[:_MOST_ROWS]


def _of_one_row(found: Influence) -> tuple[float, Part, Part]:
    return found.score, found.train.head, found.train.relation


def _shared(train: NamedTriple, test: NamedTriple) -> str:
    """Say which entities and relations two triples have in common."""
    if (train.head, train.relation, train.tail) == (test.head, test.relation, test.tail):
        return "the same triple"
    pairs = {
        "relation": train.relation == test.relation,
        "head": train.head == test.head,
        "tail": train.tail == test.tail,
        "head as tail": train.tail == test.head,
        "tail as head": train.head == test.tail,
    }
    return ", ".join(name for name, is_shared in pairs.items() if is_shared)
