"""What the page of results shows of triples, for a person who knows the graph."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from memfit.reports.influence_page import (
    InfluencePage,
    InfluenceRow,
    InfluenceSubject,
    InfluenceTable,
    influence_html,
)

from .findings import Finding, Findings, Influence, NamedTriple
from .labels import Part

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


def statement(triple: NamedTriple) -> str:
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
    return InfluenceSubject(name=statement(test), kind=f"test line {test.index + 1}", tables=tables)


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
        name = statement(each.train)
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
