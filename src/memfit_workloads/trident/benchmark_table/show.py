"""``--table`` on a console: recorded, at once, or computed here row by row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.table import Table as Grid
from rich.text import Text

import memfit
from memfit.devices.spec import CPU, CUDA
from memfit.errors import DataError
from memfit.files import write_atomically
from memfit.journal.plain_text import parsed_json
from memfit.reports.terminal import amount, dashed, grid, section, word, yes_or_no
from memfit.units import GIB, MIB
from memfit_workloads.trident.sizes import DOCUMENT, TridentSizes

from .figures import DEVICE, RowFigures, compute
from .findings import findings_of, sentences
from .rows import BASELINE, CPU_SIZES, DOCUMENT_ROWS

if TYPE_CHECKING:
    from rich.console import Console


_WIDTH = 100
PATH = Path(__file__).parent / "datasets" / "table.json"
"""Written by benchmarks/bench_trident_table.py."""


def table(console: Console, *, is_live: bool) -> dict[str, Any]:
    """Show the table, and give what ``--json`` ends with.

    Raises:
        DataError: if the recorded figures cannot be read.
        KeyboardInterrupt: after Ctrl-C, with the rows shown that were known.
    """
    if is_live:
        found = Table(origin=_here(), rows=_computed(console))
    else:
        found = recorded_table()
        console.print(_page(found.rows, _remark(found.origin)))
    findings = findings_of(found.rows)
    return {
        "workload": "trident",
        **found.to_json(),
        "device": DEVICE,
        "document_sizes": DOCUMENT.to_json(),
        "cpu_sizes": CPU_SIZES.to_json(),
        "plain_peak_bytes": None if findings is None else findings.peak_bytes,
        "findings": None if findings is None else asdict(findings),
        "sentences": list(sentences(found.rows)),
    }


def _computed(console: Console) -> Sequence[RowFigures]:
    """Compute the rows, and show each as soon as it is known.

    On what is no terminal, lines say what is computed, and the table follows at the end.
    """
    shown: list[RowFigures] = []
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:

        def begin(doing: str) -> None:
            if console.is_terminal:
                live.update(_page(shown, doing), refresh=True)
            else:
                console.print(Text(doing))

        def show(rows: Sequence[RowFigures]) -> None:
            shown[:] = rows
            live.update(_page(rows), refresh=console.is_terminal)

        return compute(begin, show)


def _here() -> Origin:
    """Return what computes the figures now."""
    return Origin(
        date=date.today().isoformat(),
        memfit=memfit.__version__,
        torch=torch.__version__,
        num_threads=torch.get_num_threads(),
    )


def _remark(origin: Origin) -> str:
    return (
        f"Recorded on {origin.date} with memfit {origin.memfit} and torch {origin.torch}, "
        f"{origin.num_threads} thread(s); --table live computes it here, in some minutes."
    )


def _page(rows: Sequence[RowFigures], remark: str = "") -> RenderableType:
    """Put tables and sentences together."""
    cpu = f"A quarter of every width, one sample of {_shape(CPU_SIZES)}, on {CPU}"
    parts = [
        section(
            f"One sample of {_shape(DOCUMENT)}, predicted for {DEVICE} (GiB; claims: GB)",
            Group(_card_table(rows), _reasons(rows, CUDA)),
        ),
        section(f"{cpu} (MiB)", Group(_cpu_table(rows), _reasons(rows, CPU))),
        section("What follows", dashed(Text(each) for each in sentences(rows))),
    ]
    if not any(row.cpu or CPU in row.reasons for row in rows):
        del parts[1:]
    if remark:
        parts.append(Group("", Text(remark, style="dim")))
    return Constrain(Group(*parts), width=_WIDTH)


def _shape(sizes: TridentSizes) -> str:
    return f"{sizes.num_frames} frames of {sizes.height} x {sizes.width}"


def _card_table(rows: Sequence[RowFigures]) -> Grid:
    columns = ("claim", "peak", "likely", "process", "fits", "claim", "speed")
    shown = grid(word(""), *map(amount, columns))
    seconds = _seconds_of_baseline(rows)
    for row in rows:
        claims = ("", "") if row.claim is None else (row.claim.peak, f"{row.claim.speed:.1f} x")
        card = row.card
        if card is None:
            shown.add_row(Text(row.title), claims[0], style="dim")
            _part(shown, row)
            continue
        shown.add_row(
            Text(row.title),
            claims[0],
            f"{card.peak_allocated_bytes / GIB:.2f}",
            f"{card.low_bytes / GIB:.0f}-{card.high_bytes / GIB:.0f}",
            f"{card.process_bytes / GIB:.1f}",
            yes_or_no(card.fits),
            claims[1],
            "" if seconds is None else f"{seconds / card.sample_seconds:.2f} x",
        )
        _part(shown, row)
    return shown


def _cpu_table(rows: Sequence[RowFigures]) -> Grid:
    shown = grid(word(""), *map(amount, ("predicted", "measured", "difference")))
    for row in rows:
        cpu = row.cpu
        if cpu is None:
            shown.add_row(Text(row.title), style="dim")
            _part(shown, row)
            continue
        shown.add_row(
            Text(row.title),
            f"{cpu.predicted_peak_bytes / MIB:.1f}",
            f"{cpu.peak_allocated_bytes / MIB:.1f}",
            f"{100 * cpu.error_fraction:+.2f} %",
        )
        _part(shown, row)
    return shown


def _reasons(rows: Sequence[RowFigures], kind: str) -> RenderableType:
    """Say why rows are not known; beside the table, since reasons are longer than a row."""
    return dashed(Text(f"{row.title}: {row.reasons[kind]}") for row in rows if kind in row.reasons)


def _part(shown: Grid, row: RowFigures) -> None:
    """Leave a line between the document's rows and the others."""
    if row.name == DOCUMENT_ROWS[-1].name:
        shown.add_row("")


def _seconds_of_baseline(rows: Sequence[RowFigures]) -> float | None:
    baseline = next((row for row in rows if row.name == BASELINE), None)
    return None if baseline is None or baseline.card is None else baseline.card.sample_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """When and with what the figures were computed."""

    date: str
    memfit: str
    torch: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows, as far as they are known, with their origin."""

    origin: Origin
    rows: Sequence[RowFigures]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        origin = self.origin
        return {
            "date": origin.date,
            "memfit": origin.memfit,
            "torch": origin.torch,
            "num_threads": origin.num_threads,
            "rows": [row.to_json() for row in self.rows],
        }

    def save(self, path: Path = PATH) -> None:
        """Write the table."""
        write_atomically(path, json.dumps(self.to_json(), indent=1) + "\n")


def recorded_table(path: Path = PATH) -> Table:
    """Read the table that comes with memfit.

    Raises:
        DataError: if it is not there, or is something else.
    """
    try:
        content = parsed_json(path.read_text("utf-8"))
        origin = Origin(**{name: content[name] for name in Origin.__dataclass_fields__})
        return Table(origin=origin, rows=[RowFigures.from_json(row) for row in content["rows"]])
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}); --table live computes the table here."
        raise DataError(str(path), reason) from None
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it is no table of figures ({error}); --table live computes the table here."
        raise DataError(str(path), reason) from None
