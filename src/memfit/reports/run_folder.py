"""Write the report of a run into its folder: a page and a picture."""

from __future__ import annotations

from pathlib import Path

from memfit.files import write_atomically

from .contents import RunReport
from .html import report_html, timeline_pictures
from .plots import png_bytes


def write_report(folder: Path, report: RunReport) -> tuple[Path, Path]:
    """Write ``report.html`` and ``timeline.png`` into a folder, and give their paths.

    Both are rendered before either is written, so that a failure leaves no half of a report.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.
    """
    page = report_html(report)
    picture = png_bytes(timeline_pictures(report)[-1])
    folder.mkdir(parents=True, exist_ok=True)
    page_path, picture_path = folder / "report.html", folder / "timeline.png"
    write_atomically(picture_path, picture)
    write_atomically(page_path, page.encode("utf-8"))
    return page_path, picture_path
