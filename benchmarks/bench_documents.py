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
from results_file import save_result

_DOCUMENTS = {each.workload: each for each in (WPO_SGM, TRIDENT, CONVE)}


def main() -> None:
    """Type the documents that are named, or all, and keep what came of each line."""
    for name in sys.argv[1:] or _DOCUMENTS:
        rows = _typed(_DOCUMENTS[name])
        save_result(
            f"documents_{name.replace('-', '_')}",
            {
                "num_lines": len(rows),
                "num_done": sum(row["exit_code"] == 0 for row in rows),
                "rows": rows,
            },
        )


def _typed(document: Document) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as shared:
        if document.is_one_folder:
            document.prepare(Path(shared))
        for number, line in enumerate(document.lines, 1):
            outcome = _outcome(document, line, Path(shared))
            print(f"{number}/{len(document.lines)} exit {outcome.exit_code}: {line.document}")
            print(f"    {outcome.said}", flush=True)
            rows.append(asdict(outcome))
    return rows


def _outcome(document: Document, line: Line, shared: Path) -> Outcome:
    if document.is_one_folder:
        outcome = type_line(line, shared)
    else:
        with tempfile.TemporaryDirectory() as folder:
            document.prepare(Path(folder))
            outcome = type_line(line, Path(folder))
    # Where this copy of memfit lies is nobody's concern.
    here = f"{_root()}/"
    return replace(
        outcome, typed=outcome.typed.replace(here, ""), said=outcome.said.replace(here, "")
    )


def _root() -> Path:
    return Path(__file__).parent.parent


if __name__ == "__main__":
    main()
