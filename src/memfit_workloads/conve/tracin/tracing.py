"""Traces predictions of ConvE back to training triples: reads, scans, and writes what was found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .checkpoints import check_graph, find_checkpoints
from .labels import Labels
from .progress import kept_folder, watched
from .questions import read_question
from .scans import Scans
from .settings import TracinSettings
from .writing import check_writable, shown_lines, write

if TYPE_CHECKING:
    from rich.console import Console


def trace(settings: TracinSettings, console: Console) -> dict[str, Any]:
    """Trace as the settings say, and write what was asked for.

    Raises:
        MemfitError: if something that was given cannot be used; no result is written then.
    """
    for note in settings.notes:
        console.print(note, soft_wrap=True, markup=False)
    check_writable(settings.files)
    checkpoints = find_checkpoints(settings)
    question = read_question(settings, console)
    check_graph(checkpoints[0], question.graph, question.files.train)
    labels = Labels.of(question.graph, settings)
    scans = Scans.of(settings, question, checkpoints)
    console.print(scans.sentence(), soft_wrap=True, markup=False)
    predicted = scans.predict()
    console.print(predicted.sentence(), soft_wrap=True, markup=False)
    about = {**scans.about(), **predicted.as_json()}
    if settings.dry_run:
        return about
    with kept_folder(settings, scans.definition()) as folder, watched(console, folder) as listener:
        findings = scans.find(labels, folder, listener)
        findings = replace(findings, about={**about, **findings.about})
        written = write(findings, settings.files)
    own = settings.files.each()
    lines = [*shown_lines(findings), *(f"Wrote {path}" for path in own)]
    if len(written) > len(own):
        lines.append(f"and {len(written) - len(own)} files of single test triples beside them")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    return {**findings.as_json(), "files": [str(path) for path in written]}
