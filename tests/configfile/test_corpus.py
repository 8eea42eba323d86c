"""Every file of the corpus: only what is meant changes, and undo gives every byte back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.configfile.corpus_cases import CASES, CORPUS, Case
from tests.configfile.independent_parsers import values_of

from memfit.configfile.applying import apply_plan
from memfit.configfile.changes import Wishes
from memfit.configfile.transaction import undo_last

BOM = b"\xef\xbb\xbf"


@pytest.fixture
def apply_case(folder):
    """Return a function that applies the plan to copies of a case's files."""

    def run(case: Case, *, write: bool):
        names = [name for name in (case.file, case.companion) if name]
        for name in names:
            shutil.copy(CORPUS / name, Path(name).name)
        mapping = None
        if case.mapping:
            mapping = Path("mapping.toml" if "=" in case.mapping else "mapping.yaml")
            mapping.write_text(case.mapping)
        files = [Path(Path(name).name) for name in names]
        return apply_plan(Path("plan.yaml"), files, Wishes(), mapping, write=write)

    return run


def test_every_file_of_the_corpus_has_a_case():
    files = {file.relative_to(CORPUS).as_posix() for file in CORPUS.rglob("*") if file.is_file()}

    assert files == {case.file for case in CASES}
    assert len(files) >= 60
    contents = [(CORPUS / file).read_bytes() for file in files]
    assert sum(b"\r\n" in content for content in contents) >= 8
    assert sum(content.startswith(BOM) for content in contents) >= 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_only_what_is_meant_changes_and_undo_gives_every_byte_back(case, apply_case, tmp_path):
    original = (CORPUS / case.file).read_bytes()
    file = tmp_path / Path(case.file).name
    before = values_of(file, original)

    apply_case(case, write=True)

    written = file.read_bytes()
    after = values_of(file, written)
    differing = {key: value for key, value in after.items() if same(before, key, value) is False}
    expected = {key: value for key, value in case.changes.items() if not same(before, key, value)}
    assert differing == expected
    assert before.keys() - after.keys() == set()
    assert unchanged_lines(original, written)
    assert written.startswith(BOM) == original.startswith(BOM)

    undo_last(tmp_path)

    assert file.read_bytes() == original
    assert not list(tmp_path.glob("*backup*"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_a_dry_run_changes_nothing_and_a_second_apply_has_nothing_to_do(case, apply_case, tmp_path):
    original = (CORPUS / case.file).read_bytes()
    apply_case(case, write=False)
    assert (tmp_path / Path(case.file).name).read_bytes() == original
    assert not (tmp_path / ".memfit").exists()

    first = apply_case(case, write=True)
    configs = [each.document.path for each in first.changes.files] or [Path(Path(case.file).name)]
    written = {path: path.read_bytes() for path in configs}
    names = [name for name in (case.file, case.companion) if name]
    mapping = next(iter(Path().glob("mapping.*")), None)
    again = apply_plan(
        Path("plan.yaml"), [Path(Path(name).name) for name in names], Wishes(), mapping, write=True
    )

    assert again.changes.files == ()
    assert again.record is None
    assert {path: path.read_bytes() for path in configs} == written


def same(values: dict, key: str, value: object) -> bool:
    return key in values and values[key] == value and type(values[key]) is type(value)


def unchanged_lines(before: bytes, after: bytes) -> bool:
    """Return whether every line but a few is there as it was, in order, ended as it was."""
    lines, left = after.splitlines(keepends=True), list(before.splitlines(keepends=True))
    kept = 0
    for line in lines:
        if line in left:
            left = left[left.index(line) + 1 :]
            kept += 1
    ends = {line[len(line.rstrip(b"\r\n")) :] for line in lines[:-1]}
    return kept >= len(before.splitlines()) - 5 and len(ends) <= 1
