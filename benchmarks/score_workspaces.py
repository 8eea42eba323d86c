"""Scores what memfit says of cuDNN's workspaces against convolutions that ran on a card.

Run: PYTHONPATH=src python benchmarks/score_workspaces.py        (seconds; no GPU is needed)
Writes benchmarks/results/workspaces.json and docs/accuracy.md. The recordings are those of
`record_workspaces.py`; the rules were drawn from the ones for development.
"""

from __future__ import annotations

from accuracy.report import write_page
from accuracy.workspaces import FILES, near_shares
from results_file import load_result, write_result


def main() -> None:
    """Score every recording, and keep what earlier rules came to."""
    before = load_result("workspaces").get("before", {})
    parts = {part: near_shares(part) for part in FILES}
    write_result("workspaces", {"parts": parts, "before": before})
    write_page()


if __name__ == "__main__":
    main()
