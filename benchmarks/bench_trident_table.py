"""What the document of TRIDENT-Net claims of its five variants, and what memfit finds.

Every row is predicted at the document's size on its card, and run at a small size on this CPU.
The same figures are written into the package, where `memfit train trident --table` reads them.

Run: python benchmarks/bench_trident_table.py     (about a quarter of an hour on one core)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date

import torch
from results_file import save_result

import memfit
from memfit_workloads.trident.benchmark_table.figures import RowFigures, compute
from memfit_workloads.trident.benchmark_table.findings import findings_of
from memfit_workloads.trident.benchmark_table.show import Origin, Table


def main() -> None:
    """Compute the table, saying what is computed, and keep it."""
    begin_seconds = time.perf_counter()

    def say(doing: str) -> None:
        print(f"{time.perf_counter() - begin_seconds:4.0f} s  {doing}", flush=True)

    keep(compute(say, lambda _: None))


def keep(rows: Sequence[RowFigures]) -> None:
    """Write the figures as a result, and as the package's own.

    Raises:
        RuntimeError: if a row is not known; nothing is written then.
    """
    missing = [row.name for row in rows if row.card is None or row.cpu is None]
    findings = findings_of(rows)
    if missing or findings is None:
        msg = f"Not computed: {', '.join(missing)}."
        raise RuntimeError(msg)
    origin = Origin(
        date=date.today().isoformat(),
        memfit=memfit.__version__,
        torch=torch.__version__,
        num_threads=torch.get_num_threads(),
    )
    table = Table(origin=origin, rows=rows)
    table.save()
    save_result("trident_table", {**table.to_json(), "findings": asdict(findings)})


if __name__ == "__main__":
    main()
