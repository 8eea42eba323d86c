"""What every command of the workloads' documents gives, typed with memfit's names.

Each is typed in a new folder, which has the files that the document takes for granted. A line that
cannot do what it says has to end with one line that says why.

Run: python benchmarks/bench_documents.py [WORKLOAD ...]     (up to half an hour each)
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from documents.conve import CONVE
from documents.lines import Document, Line, Outcome, type_line
from documents.trident import TRIDENT
from documents.wpo_sgm import WPO_SGM
from results_file import load_result, write_result

_DOCUMENTS = {each.workload: each for each in (WPO_SGM, TRIDENT, CONVE)}


def main() -> None:
    """Type the documents that are named, or all, and keep what came of each line.

    What was typed already is not typed again, unless ``--again`` is given.
    """
    names = [word for word in sys.argv[1:] if word != "--again"]
    for name in names or _DOCUMENTS:
        _type(_DOCUMENTS[name], f"documents_{name.replace('-', '_')}")


def _type(document: Document, result: str) -> None:
    """Type one document, and write after each line what is known."""
    known = {} if "--again" in sys.argv else _known(result)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as shared:
        if document.is_one_folder:
            document.prepare(Path(shared))
        for number, line in enumerate(document.lines, 1):
            row = known.get(_without_place(line.typed))
            if row is None:
                row = asdict(_outcome(document, line, Path(shared)))
                print(f"{number}/{len(document.lines)} exit {row['exit_code']}: {line.document}")
                print(f"    {row['said']}", flush=True)
            rows.append(row)
            num_done = sum(each["exit_code"] == 0 for each in rows)
            figures = {"num_in_document": len(document.lines), "num_lines": len(rows)}
            write_result(result, {**figures, "num_done": num_done, "rows": rows})


def _known(result: str) -> dict[str, dict[str, Any]]:
    """Return what an earlier run that was stopped has found, by what was typed."""
    try:
        return {row["typed"]: row for row in load_result(result)["rows"]}
    except FileNotFoundError:
        return {}


def _without_place(text: str) -> str:
    """Leave out where this copy of memfit lies, which is nobody's concern."""
    return text.replace(f"{Path(__file__).parent.parent}/", "")


def _outcome(document: Document, line: Line, shared: Path) -> Outcome:
    if document.is_one_folder:
        outcome = type_line(line, shared)
    else:
        with tempfile.TemporaryDirectory() as folder:
            document.prepare(Path(folder))
            outcome = type_line(line, Path(folder))
    typed, said = _without_place(outcome.typed), _without_place(outcome.said)
    return replace(outcome, typed=typed, said=said)


if __name__ == "__main__":
    main()
